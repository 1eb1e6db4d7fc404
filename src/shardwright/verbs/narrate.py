"""From a plan to what a report tells of it: program, prediction, half-width, operators.

Pure, and without torch: the planner's rooms in a row. What runs and what is measured is the
business of ``api``.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Plan
from shardwright.core.program import Call, Program, Segment
from shardwright.core.strategy import Strategy
from shardwright.core.timeline import Timeline
from shardwright.device import surroundings
from shardwright.operators.splitting import find_samples
from shardwright.operators.splitting.iteration import PLUS
from shardwright.planner.cost import Prices, Rates, operator_costs, price
from shardwright.planner.cost.feed import WORDS, input_costs
from shardwright.planner.judge.ties import half_width
from shardwright.planner.lower import lower
from shardwright.planner.search import PLAIN_MICROBATCHES, Context, Survey, evaluate_closely
from shardwright.planner.simulate import on_shared_cores, simulate_on, with_input
from shardwright.planner.space import Seed, seed_strategy
from shardwright.planner.space.seeds import data_dims
from shardwright.report.story import OperatorRow, PlanStory, split_text

Shape = tuple[int, ...]
Shard = tuple[int, tuple[Shape, ...], tuple[Shape, ...]]


def tell(plan: Plan, graph: OperatorGraph, cluster: Cluster, table: CostTable) -> PlanStory:
    """Lower, price and simulate one plan. Raises ValueError where it is not legal for the graph."""
    graph = graph.run_on(cluster.backend)
    program, prices, timeline = _simulated(plan, graph, cluster, table)
    rates = Rates(
        cluster=cluster,
        table=table,
        device=plan.strategy.devices[0],
        precision=plan.strategy.precision,
    )
    fixed = table.overhead_map.get("process_bytes", 0.0)
    feeding = input_costs(program, graph, find_samples(graph), cluster)
    timeline, feeding = on_shared_cores(program, timeline, feeding, cluster)
    timeline = replace(with_input(program, timeline, feeding), moved=prices.moved)
    return PlanStory(
        plan=plan,
        program=program,
        feeding=tuple((one.resource, WORDS[one.kind][1], one.seconds) for one in feeding),
        predicted=with_process(timeline, fixed),
        process_bytes=fixed,
        beside=_beside(program, graph, cluster, int(np.argmax(timeline.peak_bytes))),
        spread_seconds=half_width(prices, timeline),
        operators=operator_rows(program, graph, rates),
        axes=axis_words(plan.strategy, graph),
    )


def axis_words(strategy: Strategy, graph: OperatorGraph) -> tuple[tuple[str, ...], ...]:
    """Say of every axis of every mesh what operators split over it: its name says what it was meant for."""
    samples = find_samples(graph)
    iterations = samples.iterations
    by_samples = data_dims(graph, samples, iterations)
    uses: list[list[set[str]]] = [[set() for _ in mesh.axes] for mesh in strategy.meshes]
    for index, config in enumerate(strategy.configs):
        words = {PLUS: "", by_samples[index]: "samples", "": ""}
        for position in samples.weights(graph, index):
            words = dict.fromkeys(iterations[index].inputs[position], "weights") | words
        for found, name in zip(uses[config.mesh], config.dims, strict=True):
            found.add(words.get(name, "activations"))
    return tuple(tuple(map(_use_words, of_mesh)) for of_mesh in uses)


def _use_words(found: set[str]) -> str:
    return ", ".join(sorted(found - {""}, reverse=True)) or "nothing split"


def _beside(
    program: Program, graph: OperatorGraph, cluster: Cluster, mesh: int
) -> tuple[tuple[str, float], ...]:
    """Name what a GPU's driver sees besides the tensors of a stage; nothing on CPUs."""
    if cluster.has_cpus:
        return ()
    found = surroundings(program, graph, cluster, mesh)
    return (
        ("allocator's slack", float(found.slack)),
        ("NCCL's buffers", float(found.communicators)),
        ("context and kernels", float(found.context)),
    )


def _simulated(
    plan: Plan, graph: OperatorGraph, cluster: Cluster, table: CostTable
) -> tuple[Program, Prices, Timeline]:
    program = lower(graph, plan.strategy)
    prices = price(program, graph, cluster, table)
    return program, prices, simulate_on(cluster, table, program, prices.seconds)


def with_process(timeline: Timeline, process_bytes: float) -> Timeline:
    """Add what an empty process occupies to the memory of every device."""
    return replace(
        timeline,
        memory=tuple(rows + np.array([0.0, process_bytes]) for rows in timeline.memory),
        peak_bytes=tuple(peak + process_bytes for peak in timeline.peak_bytes),
    )


def operator_rows(program: Program, graph: OperatorGraph, rates: Rates) -> tuple[OperatorRow, ...]:
    """Return one row per operator and stage, with its split and what its shard costs."""
    rows: list[OperatorRow] = []
    for segment in dict.fromkeys(program.segments):
        rows += [_row(program, graph, rates, segment, call) for call in segment.calls]
    return tuple(rows)


def _row(
    program: Program, graph: OperatorGraph, rates: Rates, segment: Segment, call: Call
) -> OperatorRow:
    operator, mesh = graph.operators[call.operator], program.meshes[segment.mesh]
    inputs = tuple(program.values[value].shape for value in call.operands)
    forward, backward = (
        operator_costs(graph, call.operator, (inputs, call.result_shapes), rates)[phase]
        for phase in ("forward", "backward")
    )
    return OperatorRow(
        name=operator.module or operator.name,
        kind=operator.kind,
        stage=segment.mesh,
        split=split_text(mesh.axes, mesh.sizes, call.dims),
        shape="x".join(map(str, call.result_shapes[0])) if call.result_shapes else "",
        forward_seconds=forward.seconds,
        backward_seconds=backward.seconds if segment.has_backward else 0.0,
        source=forward.source,
    )


def spread_of(plan: Plan, context: Context, last: Survey | None) -> float:
    """Return the half-width of a plan's step time: as measured, else as predicted, which the ``last`` search may know."""
    if plan.measured:
        return plan.measured.spread_seconds
    if last and last.context.table is context.table:
        return last.weighed(plan.strategy).half_width
    return evaluate_closely(context, plan.strategy)[2].half_width


def run_of(strategy: Strategy, graph: OperatorGraph) -> tuple[Shard, ...]:
    """List what a strategy runs, in order: (operator, local input shapes, output shapes)."""
    program = lower(graph, strategy)
    return tuple(
        (call.operator, tuple(program.values[v].shape for v in call.operands), call.result_shapes)
        for segment in program.segments
        for call in segment.calls
    )


def plain_strategies(graph: OperatorGraph, devices: int) -> tuple[Strategy, ...]:
    """Return data, tensor and pipeline parallelism on all devices, as far as they are legal.

    What these run is worth measuring before the first search: models alone could keep them from
    ever being looked at, and what users already have is what plans are compared with.
    """
    found: list[Strategy] = []
    for degrees in (
        *(Seed(data=devices, num_microbatches=count) for count in PLAIN_MICROBATCHES),
        Seed(tensor=devices),
        Seed(stages=devices, num_microbatches=2 * devices),
    ):
        with contextlib.suppress(ValueError):
            strategy = seed_strategy(graph, degrees)
            lower(graph, strategy)  # refuses what this graph cannot run
            found.append(strategy)
    return tuple(found)
