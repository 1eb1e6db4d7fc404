"""From one step to the next: three steps in a row, run by a few lines of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from shardwright.core.cluster import Link
from shardwright.core.costs import CostTable
from shardwright.core.decoder import Decoder
from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Kind, Program
from shardwright.core.strategy import Strategy
from shardwright.files.clusterfile import parse_cluster
from shardwright.planner.cost import price
from shardwright.planner.lower import lower
from shardwright.planner.search import Context, Training, as_strategy, evaluate_closely
from shardwright.planner.simulate import period, simulate
from shardwright.planner.space import Seed
from shardwright.runtime.capture.decoder import capture_decoder

pytestmark = pytest.mark.torch

SHAPE = Decoder(
    layers=6, hidden=1024, heads=8, kv_heads=8, head_size=128, ffn=4096, vocab=8192, seq=1024,
    tied=False, positions=True,
)  # fmt: skip
SEEDS = [
    Seed(data=8, zero=1), Seed(data=8, zero=1, num_microbatches=2), Seed(data=4, tensor=2, zero=1),
    Seed(data=8), Seed(data=8, zero=3),
]  # fmt: skip


def returns(program: Program) -> list[int]:
    """Return the messages of parameters behind the update."""
    update = int(np.flatnonzero(program.kind == Kind.UPDATE)[0])
    return [
        index
        for index in range(update + 1, program.num_instructions)
        if program.kind[index] == Kind.MESSAGE
        and program.messages[program.item[index]].purpose == "parameter"
    ]


def ends_of_steps(program: Program, seconds: np.ndarray, steps: int = 3) -> list[float]:
    """Return when each step but for its returns is over: what reads a parameter waits for it, and a
    step's other instructions for all others of the step before."""
    late = set(returns(program))
    bringing = {v: i for i in late for v in program.messages[program.item[i]].results}
    waits: list[list[int]] = [
        list(program.predecessor[program.offset[i] : program.offset[i + 1]])
        for i in range(program.num_instructions)
    ]
    over, brought, found = 0.0, dict.fromkeys(late, 0.0), list[float]()
    free = dict.fromkeys(range(len(program.resource_names)), 0.0)
    for _ in range(steps):
        ends = [0.0] * program.num_instructions
        links = dict.fromkeys(free, over)
        for index in range(program.num_instructions):
            begin = max([links[program.resource[index]], *(ends[i] for i in waits[index])])
            if program.kind[index] == Kind.FORWARD:
                inputs = program.segments[program.item[index]].inputs
                read = [
                    v if program.values[v].alias < 0 else program.values[v].alias for v in inputs
                ]
                begin = max([begin, *(brought[bringing[v]] for v in read if v in bringing)])
            ends[index] = links[program.resource[index]] = begin + seconds[index]
        over = max(end for index, end in enumerate(ends) if index not in late)
        brought = {index: ends[index] for index in late}
        found.append(over)
    return found


@cache
def decoder(layers: int) -> OperatorGraph:
    return capture_decoder(replace(SHAPE, layers=layers), 16, "bfloat16")


def lowered(seed: Seed, gigabits: float, layers: int = 6) -> tuple[Context, Strategy]:
    cluster = parse_cluster("2x4xA100")
    wire = Link(latency=5e-6, bandwidth=gigabits * 1e9 / 8)
    switches = [one if one.link is None else replace(one, link=wire) for one in cluster.switches]
    cluster = replace(cluster, switches=tuple(switches))
    training = Training(precision="bfloat16", recompute="none")
    context = Context.of(decoder(layers), cluster, CostTable(), training)
    return context, as_strategy(context, seed)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
@pytest.mark.parametrize("gigabits", [20, 100, 800])
def test_a_step_begins_while_parameters_of_the_one_before_arrive(
    seed: Seed, gigabits: float
) -> None:
    context, strategy = lowered(seed, gigabits)
    program = lower(context.graph, strategy)
    seconds = price(program, context.graph, context.cluster, context.table).seconds
    timeline = simulate(program, seconds)
    found = period(program, timeline)
    first, second, third = ends_of_steps(program, seconds)
    assert found == pytest.approx(third - second, rel=1e-6)
    if seed.zero == 1:
        assert found < timeline.step_seconds
    else:  # nothing is gathered behind the update
        assert found == pytest.approx(timeline.step_seconds) == pytest.approx(first)


def test_layers_that_were_left_out_have_their_turns() -> None:
    """The judge lowers some of equal layers only; its period is that of all of them."""
    context, strategy = lowered(SEEDS[0], 100, layers=24)
    program = lower(context.graph, strategy)
    seconds = price(program, context.graph, context.cluster, context.table).seconds
    whole = period(program, simulate(program, seconds))
    judged = evaluate_closely(context, strategy, runs_ahead=True)[2].seconds
    assert judged == pytest.approx(whole, rel=1e-9)
    assert context.facts.folder.is_long
