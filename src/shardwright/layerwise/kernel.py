"""The exact dynamic program over cuts and workers, compiled by Numba on first use.

Import this module late, as ``planner/simulate/full.py``.
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.compiled import numeric

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Table = tuple[Floats, Ints, Ints]

# How transfers and compute share time, by ``core.schedules.Schedule.executes``.
HIDDEN, EXPOSED, STREAMED = 0, 1, 2
OVERLAPS = ("overlapped", "exposed", "streaming")
SLACK = 1 + 1e-9  # prefix sums carry rounding; pruning must not cut what is equal


# How many replicas a stage and those after it have, which says what is in flight: at most the
# workers, at least the fewest that the workers can make, or counted one by one.
AT_MOST, AT_LEAST, COUNTED = 0, 1, 2


class Rules(NamedTuple):
    """The problem's scalars: the longest a pipeline may take, bytes per second, microbatches, how
    time (``forgets_first``: the first stage sends for nothing), memory (``core.schedules``) and replicas are counted, the speed of the fastest replica, the most shards, and
    the most that one layer gathers and holds."""

    limit: float
    bandwidth: float
    microbatches: int
    is_paper: bool
    forgets_first: bool
    overlap: int
    flushes: bool
    per_stage: int
    at_end: int
    counting: int
    fastest: float
    shards: int
    most_gathered: float
    most_parameter: float


class Columns(NamedTuple):
    """The columns of ``Cuts``; a floor is the least of a column from a cut on."""

    forward: Floats
    backward: Floats
    activation: Floats
    parameter: Floats
    crossing: Floats
    gathered: Floats
    offset: Ints
    larger: Ints
    activation_floor: Floats
    parameter_floor: Floats
    gathered_floor: Floats


class Pools(NamedTuple):
    """The columns of ``Crews``."""

    workers: Ints
    capacity: Floats
    part_offset: Ints
    part: Ints
    mixture: Ints
    shards: Ints
    replicas: Ints
    splits: NDArray[np.bool_]
    speed: Floats
    memory: Floats
    unit: Floats
    collective: Floats
    message: Floats


class Crew(NamedTuple):
    """A row of ``Pools``; ``speed`` is that of a replica, ``rounds`` its microbatches."""

    shards: int
    replicas: int
    rounds: int
    splits: bool
    speed: float
    memory: float
    collective: float
    message: float


class Stage(NamedTuple):
    """What lies between two cuts: ``Columns`` of one minus the other, and the bytes that cross them."""

    forward: float
    backward: float
    weights: float
    kept: float
    gathered: float
    crossing: float


class State(NamedTuple):
    """Tables of the dynamic program; ``first`` is the first cut whose rest a mixture can do,
    ``most`` the seconds that are left from a cut on."""

    work: Floats
    first: Ints
    most: Floats
    best: Floats
    ends: Ints
    uses: Ints


@numeric
def _seconds(rules: Rules, crew: Crew, stage: Stage) -> tuple[float, float]:
    """``problem.busy_seconds``, and a microbatch's way through the stage."""
    replicas, message = crew.replicas, crew.message * stage.weights
    collective = 1.5 * crew.collective * stage.gathered
    if crew.splits:
        collective += 1.5 * message
        message = 0.0
    compute = (stage.forward + stage.backward) / crew.speed + collective
    send = stage.crossing / (crew.shards * rules.bandwidth)
    if rules.microbatches == 0:
        if rules.is_paper:
            return max(compute / replicas, message / replicas, 2 * send), compute
        return max((compute + message) / replicas, 2 * send / replicas), compute
    rounds = crew.rounds
    if rules.overlap == EXPOSED:
        return rounds * (compute + 2 * send) + message, compute
    if rules.overlap == STREAMED:
        forward = stage.forward / crew.speed + collective / 3
        busy = max(forward, send) + max(compute - forward, send)
        return rounds * busy + message, compute
    return max(rounds * compute + message, rounds * 2 * send), compute


@numeric
def _held(rules: Rules, replicas: int, total: int) -> int:
    """``problem.in_flight``."""
    held = rules.per_stage * ((total - 1) // replicas) + rules.at_end
    if rules.flushes:
        return min(held, -(-rules.microbatches // replicas))
    return held


@numeric
def _bytes(rules: Rules, crew: Crew, stage: Stage, total: int) -> float:
    """``problem.memory_bytes``."""
    held = _held(rules, crew.replicas, total)
    copies = 2.0 if rules.flushes else float(held + 1)
    whole = 0.0
    if crew.shards > 1:
        whole += min(stage.gathered, rules.most_gathered)
    if crew.splits:
        whole += min(stage.weights, rules.most_parameter) / crew.shards
        copies /= crew.replicas
    return (copies * stage.weights + held * stage.kept) / crew.shards + whole


@numeric
def _fitting(rules: Rules, columns: Columns, crew: Crew, start: int, total: int) -> int:
    """Return the place among the cuts that contain ``start`` from which on no stage fits."""
    low, high = columns.offset[start], columns.offset[start + 1]
    if crew.memory == np.inf:
        return high
    before = columns.activation[start] - columns.crossing[start]
    while low < high:
        middle = (low + high) // 2
        stop = columns.larger[middle]
        least = Stage(
            0.0,
            0.0,
            columns.parameter_floor[stop] - columns.parameter[start],
            columns.activation_floor[stop] - before,
            columns.gathered_floor[stop] - columns.gathered[start],
            0.0,
        )
        if _bytes(rules, crew, least, total) > crew.memory * SLACK:
            high = middle
        else:
            low = middle + 1
    return low


@numeric
def _extend(
    rules: Rules, columns: Columns, pools: Pools, state: State, mixture: int, start: int
) -> None:
    """Try every stage from ``start`` on every crew. One call for all crews: calls with whole tables
    as arguments are slow."""
    least, begun, incoming = np.inf, state.work[start], columns.crossing[start]
    for part in range(pools.part_offset[mixture], pools.part_offset[mixture + 1]):
        used = pools.part[part]
        left = mixture - pools.mixture[used]
        unit = pools.unit[used] * SLACK
        longest = begun + unit * min(rules.limit, least)
        if state.work[state.first[left]] > longest:
            continue  # what is left to the others is too much for them
        shards = pools.shards[used]
        crew = Crew(
            shards, pools.replicas[used], -(-rules.microbatches // pools.replicas[used]),
            pools.splits[used], pools.speed[used] * shards, pools.memory[used],
            pools.collective[used], pools.message[used],
        )  # fmt: skip
        if _seconds(rules, crew, Stage(0.0, 0.0, 0.0, 0.0, 0.0, incoming))[0] > rules.limit:
            continue  # the input alone takes too long
        total, behind = pools.workers[mixture], 0
        if rules.counting != AT_MOST:
            total = crew.replicas + -(-pools.workers[left] // rules.shards)
        if rules.counting == COUNTED:
            behind = pools.workers[left]
        low, end = columns.offset[start], columns.offset[start + 1]
        low += np.searchsorted(columns.larger[low:end], state.first[left])
        if crew.memory < np.inf:
            end = _fitting(rules, columns, crew, start, total)
        sending, pace = 2 / (shards * rules.bandwidth), 1 / crew.speed
        for place in range(low, end):
            stop = columns.larger[place]
            if state.work[stop] > longest:
                break
            after = state.best[left, stop, behind]
            if after >= least or after > rules.limit:
                continue
            if rules.microbatches and after + (state.work[stop] - begun) * pace > least * SLACK:
                continue  # on its way the first microbatch alone takes longer
            stage = Stage(
                columns.forward[stop] - columns.forward[start],
                columns.backward[stop] - columns.backward[start],
                columns.parameter[stop] - columns.parameter[start],
                columns.activation[stop] - columns.activation[start] + incoming,
                columns.gathered[stop] - columns.gathered[start],
                0.0
                if rules.forgets_first and start == 0
                else max(incoming, columns.crossing[stop]),
            )
            busy, passing = _seconds(rules, crew, stage)
            passing = passing + sending * columns.crossing[stop] if rules.microbatches else 0.0
            if rules.counting == COUNTED:
                _count(rules, crew, stage, state, (mixture, start, left, stop, used), busy, passing)
                continue
            value = max(after, busy, passing + after)
            if value >= least or value > state.most[start]:
                continue
            if _bytes(rules, crew, stage, total) > crew.memory:
                continue
            least = value
            longest = min(longest, begun + unit * least)  # no longer stage is faster
            state.best[mixture, start, 0] = value
            state.ends[mixture, start, 0] = stop
            state.uses[mixture, start, 0] = used


@numeric
def _count(
    rules: Rules, crew: Crew, stage: Stage, state: State, place: tuple[int, int, int, int, int],
    busy: float, passing: float,
) -> None:  # fmt: skip
    """Try a stage before every number of replicas behind it, fewest first."""
    mixture, start, left, stop, used = place
    before = np.inf
    for behind in range(1 if left else 0, state.best.shape[2] - crew.replicas):
        after = state.best[left, stop, behind]
        if after >= before:
            continue  # fewer replicas do as well
        before, lane = after, behind + crew.replicas
        value = max(after, busy, passing + after)
        if value > state.most[start] or value >= state.best[mixture, start, lane]:
            continue
        if _bytes(rules, crew, stage, lane) > crew.memory:
            return  # more of them, more is in flight
        state.best[mixture, start, lane] = value
        state.ends[mixture, start, lane] = stop
        state.uses[mixture, start, lane] = used


@numeric
def solve(rules: Rules, columns: Columns, pools: Pools, floor: Floats) -> Table:
    """Fill best[mixture, cut, lane]: the fewest seconds in which exactly these workers do all
    layers outside the cut, if not above the limit, in at most ``lane`` replicas (one lane only,
    number 0, where replicas are not counted). States whose ``floor`` is infinite are left out.

    Also the cut at which the first such stage ends, and its crew (-1: none). O(pairs of cuts *
    pairs of mixtures * ways * lanes), less what the limit prunes: a pair (cut, mixture) is dropped
    when the layers outside exceed what the mixture can do within the limit, or those inside what
    the others can.
    """
    cuts, mixtures = len(columns.forward), len(pools.workers)
    work = columns.forward + columns.backward
    rest = work[cuts - 1] - work
    room = pools.capacity * rules.limit * SLACK
    lanes = pools.workers[mixtures - 1] + 1 if rules.counting == COUNTED else 1
    first = np.zeros(mixtures, dtype=np.int64)
    first[0] = cuts - 1
    for mixture in range(1, mixtures):
        while rest[first[mixture]] > room[mixture]:  # ends at the last cut, which leaves no rest
            first[mixture] += 1
    most = np.full(cuts, rules.limit)
    if rules.microbatches:  # what is before takes its time for the first microbatch
        most = np.minimum(most, rules.limit * SLACK - work / rules.fastest)
    state = State(
        work,
        first,
        most,
        np.full((mixtures, cuts, lanes), np.inf),
        np.full((mixtures, cuts, lanes), -1, dtype=np.int64),
        np.full((mixtures, cuts, lanes), -1, dtype=np.int64),
    )
    state.best[0, cuts - 1] = 0.0
    for mixture in range(1, mixtures):
        others = mixtures - 1 - mixture
        for start in range(cuts - 2, first[mixture] - 1, -1):
            if work[start] > (room[others] if others else 0.0) or floor[mixture, start] == np.inf:
                continue
            _extend(rules, columns, pools, state, mixture, start)
            for lane in range(1, lanes):  # what fewer replicas do
                if state.best[mixture, start, lane - 1] <= state.best[mixture, start, lane]:
                    state.best[mixture, start, lane] = state.best[mixture, start, lane - 1]
                    state.ends[mixture, start, lane] = state.ends[mixture, start, lane - 1]
                    state.uses[mixture, start, lane] = state.uses[mixture, start, lane - 1]
    return state.best, state.ends, state.uses
