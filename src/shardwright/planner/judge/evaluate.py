"""The judge: what the simulator says about a strategy, and the gradient buckets it suggests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shardwright.core.compression import ROUNDS
from shardwright.core.plan import Objective
from shardwright.core.program import Kind, Message, Program
from shardwright.core.strategy import GradientSync, Strategy
from shardwright.core.timeline import Timeline
from shardwright.planner.cost.burden import Burden, is_measured, message_burden
from shardwright.planner.cost.feed import Feeding, input_costs
from shardwright.planner.cost.price import InstructionCosts, Prices
from shardwright.planner.judge.lost import lost_share
from shardwright.planner.judge.ties import Doubts, doubts_of, half_width
from shardwright.planner.lower import lower
from shardwright.planner.lower.expand import Irregular, expand
from shardwright.planner.model.context import Context
from shardwright.planner.schedule.merge import Buckets, Cost, Held, Sizes, merge_gradients
from shardwright.planner.simulate import on_shared_cores, period, simulate_on, with_input

# Merging is for what starting messages comes to, as a share of a step.
WORTHWHILE = 1e-3
# Of more gradients the best buckets take too long: time grows with the square.
MOST_GRADIENTS = 2000


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Evaluation:
    """A strategy with its simulated objective.

    ``half_width`` is that of the predicted step, ``doubts`` say where it may come from, ``stage_bytes`` are the peaks per stage, ``least_seconds`` is its additive cost with every
    hideable message hidden (NaN for a strategy which did not come from the additive model).
    ``feeding``: what brings its input beneath a step, none where that is never waited for. ``synced``: seconds
    that gradients travel on the critical chain: no other time to send them gains more.
    """

    strategy: Strategy
    objective: Objective
    half_width: float
    doubts: Doubts
    stage_bytes: tuple[float, ...]
    sources: tuple[tuple[str, float], ...]
    least_seconds: float
    feeding: tuple[Feeding, ...] = ()
    synced: float = math.inf

    @property
    def bytes(self) -> float:
        """Peak bytes on the fullest device."""
        return self.objective.peak_bytes

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return self.objective.step_seconds


# Lowers and prices a strategy.
Pricer = Callable[[Strategy], tuple[Program, Prices]]
# Judges a strategy, given the least seconds known of it; returns its Program and timeline too.
Run = Callable[[Strategy, float], tuple[Program, Timeline, Evaluation]]


def evaluate(
    context: Context,
    strategy: Strategy,
    least_seconds: float = float("nan"),
    pricer: Pricer | None = None,
) -> Evaluation:
    """Lower, price and simulate a strategy as it stands, by ``pricer`` as ``priced`` does."""
    return evaluate_program(context, *priced(context, strategy, pricer), least_seconds)[1]


def evaluate_closely(
    context: Context, strategy: Strategy, *, runs_ahead: bool = False
) -> tuple[Prices, Timeline, Evaluation]:
    """Judge a strategy as ``evaluate`` does; return its prices and timeline too.

    With ``runs_ahead`` its seconds are those from one step to the next, see ``simulate.period``.
    """
    program, prices = priced(context, strategy)
    timeline, evaluation = evaluate_program(context, program, prices, math.nan)
    if runs_ahead:
        objective = replace(evaluation.objective, step_seconds=period(program, timeline))
        evaluation = replace(evaluation, objective=objective)
    return prices, timeline, evaluation


def priced(
    context: Context, strategy: Strategy, pricer: Pricer | None = None
) -> tuple[Program, Prices]:
    """Return a strategy's Program and what its instructions cost; of equal blocks only some are lowered.

    Where that is not possible, ``pricer`` does it, if given, unless the graph is deep: of equal blocks
    on several meshes lowering makes more than what is known of other strategies.
    """
    found = _priced_folded(context, strategy)
    if found is None and pricer is not None and not context.facts.folder.is_long:
        found = pricer(strategy)
    return found or _priced_whole(context, strategy)


def _priced_whole(context: Context, strategy: Strategy) -> tuple[Program, Prices]:
    program = lower(context.graph, strategy, ground=context.facts.ground)
    return program, InstructionCosts(context.graph, context.prices.shards).price(program)


def _priced_folded(context: Context, strategy: Strategy) -> tuple[Program, Prices] | None:
    """Return the same from some of the equal blocks; None where the strategy treats too few alike."""
    folded = context.facts.folder.fold(strategy) if context.facts.folder.is_long else None
    if folded is None:
        return None
    try:
        whole = expand(folded, strategy)
    except Irregular:
        return None
    costs = InstructionCosts(whole.graph, context.prices.shards)
    return whole.program, costs.price(whole.program, whole.masters)


def merge(context: Context, evaluation: Evaluation, evaluator: Run | None = None) -> Evaluation:
    """Merge gradients into the buckets that finish first, given when each is ready; keep the
    better.

    The gradients' ready times come from simulating the strategy with every gradient alone, by
    ``evaluator`` if given. In deep graphs those of each block travel together first: then equal
    blocks are still treated alike, and where starting a message a block is not felt, that is all.
    What messages take from ranks that compute, where that is known, puts off what is ready later.
    """
    if waits_little(context, evaluation):
        return evaluation
    evaluator = evaluator or partial(run, context)
    parameters, pipeline = evaluation.strategy.parameters, evaluation.strategy.pipeline
    if pipeline.num_microbatches > 1:
        # Of those sent with every microbatch merging would hold all back.
        count = sum(one.sync == "step" for one in parameters)
        if count * context.starting < WORTHWHILE * evaluation.seconds:
            return evaluation
    if context.facts.folder.is_long:
        evaluation = _by_blocks(context, evaluation)
        if not starts_are_felt(context, evaluation) or len(parameters) > MOST_GRADIENTS:
            return evaluation
    bare = replace(evaluation.strategy.gradient_sync, method="wfbp", buckets=())
    alone = replace(evaluation.strategy, gradient_sync=bare)
    program, timeline, _ = evaluator(alone, evaluation.least_seconds)
    buckets = _buckets(context, program, timeline)
    if max(map(len, buckets), default=1) == 1:
        return evaluation
    sync = replace(bare, method="optimal", buckets=buckets)
    merged = evaluator(replace(alone, gradient_sync=sync), evaluation.least_seconds)[2]
    return min(evaluation, merged, key=lambda one: one.seconds)


def starts_are_felt(context: Context, evaluation: Evaluation) -> bool:
    """Whether a step takes longer for starting one message a block."""
    starts = len(context.facts.spreader.buckets) * context.starting
    return starts >= WORTHWHILE * evaluation.seconds


def waits_little(context: Context, evaluation: Evaluation) -> bool:
    """Whether a step waits so little for gradients that sending them at other times gains next to nothing.
    Not known where messages also take something from ranks that compute. What they travel bounds the gain:
    twice what is worthwhile, since the last of them travels whenever it is sent."""
    return (
        not is_measured(context.table) and evaluation.synced < 2 * WORTHWHILE * evaluation.seconds
    )


def _by_blocks(context: Context, evaluation: Evaluation) -> Evaluation:
    """Let the gradients of each block travel together; keep the better."""
    strategy = by_blocks(context, evaluation.strategy)
    if evaluation.strategy.gradient_sync == strategy.gradient_sync:
        return evaluation
    merged = evaluate(context, strategy, evaluation.least_seconds)
    return min(evaluation, merged, key=lambda one: one.seconds)


def by_blocks(context: Context, strategy: Strategy) -> Strategy:
    """Return a strategy with the gradients of each block travelling together."""
    sync = replace(strategy.gradient_sync, method="block", buckets=context.facts.spreader.buckets)
    return replace(strategy, gradient_sync=sync)


def run(
    context: Context, strategy: Strategy, least_seconds: float
) -> tuple[Program, Timeline, Evaluation]:
    """Judge a strategy, and return its Program and timeline too."""
    program, prices = _priced_whole(context, strategy)
    timeline, evaluation = evaluate_program(context, program, prices, least_seconds)
    return program, timeline, evaluation


def evaluate_program(
    context: Context,
    program: Program,
    prices: Prices,
    least_seconds: float,
) -> tuple[Timeline, Evaluation]:
    """Simulate a strategy that is lowered and priced."""
    timeline = simulate_on(context.cluster, context.table, program, prices.seconds)
    feeding = input_costs(program, context.graph, context.facts.samples, context.cluster)
    timeline, feeding = on_shared_cores(program, timeline, feeding, context.cluster)
    timeline = with_input(program, timeline, feeding)
    fixed = context.table.overhead_map.get("process_bytes", 0.0)
    peaks = tuple(peak + fixed for peak in timeline.peak_bytes)
    objective = Objective(
        step_seconds=timeline.step_seconds,
        peak_bytes=max(peaks),
        dollars=context.cluster.dollars_per_second(program.strategy.devices)
        * timeline.step_seconds,
        staleness=program.strategy.staleness,
        lost=lost_share(program, context.graph),
    )
    return timeline, Evaluation(
        strategy=program.strategy,
        objective=objective,
        half_width=half_width(prices, timeline),
        doubts=doubts_of(program, prices, timeline),
        stage_bytes=peaks,
        sources=prices.by_source(),
        least_seconds=least_seconds,
        feeding=feeding,
        synced=_synced(program, timeline),
    )


def _synced(program: Program, timeline: Timeline) -> float:
    """Return the seconds of the critical chain in which gradients travel, or are made shorter for that."""
    chain = np.fromiter(timeline.critical, dtype=np.int64)
    found = 0.0
    for kind, items in ((Kind.MESSAGE, program.messages), (Kind.TRANSFORM, program.transforms)):
        some = chain[program.kind[chain] == kind]
        numbers: list[int] = program.item[some].tolist()
        syncs = np.array([items[one].purpose == "synchronise" for one in numbers], dtype=np.bool_)
        mine = some[syncs]
        found += float((timeline.end[mine] - timeline.start[mine]).sum())
    return found / timeline.laps


# When each gradient became ready, and its bytes.
Entries = dict[int, tuple[float, float]]


def sent_alone(program: Program, timeline: Timeline) -> list[tuple[Message, Entries]]:
    """Return, by mesh and kind of message, such a message, and the gradients that may travel with others."""
    channels: dict[tuple[object, ...], tuple[Message, Entries]] = {}
    sent, sync = np.flatnonzero(program.kind == Kind.MESSAGE), program.strategy.gradient_sync
    last = dict(zip(program.item[sent].tolist(), sent.tolist(), strict=True))
    for item, message in enumerate(program.messages):
        if message.purpose != "synchronise" or item not in last or len(message.sources) != 1:
            continue
        source = program.values[message.sources[0]]
        if source.role != "gradient" or message.destination >= 0 or not message.axes:
            continue
        if source.scope == "microbatch" and program.strategy.pipeline.num_microbatches > 1:
            continue  # merging would hold gradients of every microbatch back
        key = (message.mesh, message.axes, message.primitive, source.scope, source.dtype)
        ready = _ready(program, timeline, last[item])
        # A parameter that is used in two layouts has two gradients: they travel in one bucket.
        _, entries = channels.setdefault(key, (message, {}))
        known, size = entries.get(source.tensor, (0.0, 0.0))
        ready = _joined(sync.of(source.tensor), known, ready)
        entries[source.tensor] = ready, size + message.bytes
    return list(channels.values())


def _joined(sync: GradientSync, known: float, ready: float) -> float:
    """Return when a gradient is ready that has another message: of several that follow each other, the first."""
    return known if known and sync.compressor in ROUNDS else max(known, ready)


def _buckets(context: Context, program: Program, timeline: Timeline) -> Buckets:
    """Merge, per mesh and kind of message, the gradients in the order they became ready."""
    buckets: list[tuple[int, ...]] = []
    taken: set[int] = set()
    for message, entries in sent_alone(program, timeline):
        fresh = sorted(
            (ready, tensor, size)
            for tensor, (ready, size) in entries.items()
            if tensor not in taken
        )
        if not fresh:
            continue
        taken.update(tensor for _, tensor, _ in fresh)
        ready, _, sizes = np.array(fresh, dtype=np.float64).T
        held = _held(context, program, message, ready, sizes)
        # What messages sent before held is among the ready times of gradients sent alone.
        stood = held[0] * np.arange(len(sizes)) + held[1] * (np.cumsum(sizes) - sizes)
        merged = merge_gradients(
            np.maximum(ready - stood, 0.0).tolist(),
            sizes.tolist(),
            message_cost(context, program, message),
            held=held,
        )
        buckets += [tuple(fresh[position][1] for position in bucket) for bucket in merged]
    return tuple(buckets)


def _held(context: Context, program: Program, message: Message, ready: Sizes, sizes: Sizes) -> Held:
    """Return what such a message takes from what computes, as a line through the smallest and all of them; what
    the backend's threads steal as far as there is computation left to steal from when a gradient is ready."""
    small, large = float(sizes.min()), float(sizes.sum())
    few, all_bytes = (burden_of(context, program, message, size) for size in (small, large))
    beneath = (ready[-1] - ready) / few.hiding if few.hiding else np.ones_like(ready)
    served = float(np.minimum(beneath, 1.0).mean())
    low, high = (one.held + served * one.stolen for one in (few, all_bytes))
    slope = max(high - low, 0.0) / (large - small) if large > small else 0.0
    return max(low - slope * small, 0.0), slope


def _ready(program: Program, timeline: Timeline, index: int) -> float:
    begin, stop = int(program.offset[index]), int(program.offset[index + 1])
    before: NDArray[np.int32] = program.predecessor[begin:stop]
    return float(timeline.end[before].max(initial=0.0))


def burden_of(context: Context, program: Program, message: Message, num_bytes: float) -> Burden:
    """Return what such a message of so many bytes costs ranks that compute."""
    wires = context.prices.wires(program.meshes[message.mesh])
    devices = wires.groups(message.axes)[0][0]
    return message_burden(message.primitive, num_bytes, devices, context.cluster, context.table)


def message_cost(
    context: Context, program: Program, message: Message, *, with_held: bool = True
) -> Cost:
    """Return the seconds of merged messages by their bytes; merged items are also copied. What they hold from the
    thread that computes is among them unless the caller counts it there.

    Read off between powers of two, since merging asks for the cost of every pair of gradients.
    """
    mesh = program.meshes[message.mesh]
    wires = context.prices.wires(mesh)
    # Seconds of no bytes, and per byte, by powers of two, once these were asked for.
    lines = np.full((2, np.finfo(np.float64).maxexp), np.nan)
    # Of pairs, which follow each other in rounds, so many bytes are those of all rounds.
    rounds = (math.prod([mesh.sizes[axis] for axis in message.axes]) - 1).bit_length()

    def exactly(power: int) -> float:
        if message.pairs:
            seconds = rounds * wires.paired(message.axes, message.pairs, 2**power // rounds)
        else:
            seconds = wires.slowest(message.primitive, message.axes, 2**power)
        held = burden_of(context, program, message, 2**power).held
        return seconds + context.prices.message_seconds + with_held * held

    def cost(num_bytes: Sizes) -> Sizes:
        powers = np.frexp(np.maximum(num_bytes, 1.0))[1] - 1
        for power in set(powers[np.isnan(lines[0, powers])].tolist()):
            low, high = exactly(power), exactly(power + 1)
            lines[:, power] = 2 * low - high, (high - low) / 2**power
        constant, slope = lines[:, powers]
        return constant + slope * num_bytes

    return cost
