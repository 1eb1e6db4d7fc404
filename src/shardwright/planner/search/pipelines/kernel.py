"""The exact dynamic program over cuts and workers, compiled by Numba on first use.

Import this module late, as ``planner/simulate/full.py``.
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.compiled import numeric

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Table = tuple[Floats, Ints, Ints]

HIDDEN, EXPOSED, STREAMED = 0, 1, 2  # how transfers and compute share time
ASYNCHRONOUS, KEEPS_ALL, KEEPS_TWICE, KEEPS_PAIRS, KEEPS_FEW = 0, 1, 2, 3, 4  # microbatches held
SLACK = 1 + 1e-9  # prefix sums carry rounding; pruning must not cut what is equal


class Rules(NamedTuple):
    """The problem's scalars: the longest a pipeline may take, bytes per second, microbatches, how
    time and memory are counted, and the speed of the fastest worker."""

    limit: float
    bandwidth: float
    microbatches: int
    is_paper: bool
    overlap: int
    keeps: int
    fastest: float


class Columns(NamedTuple):
    """The columns of ``Cuts``."""

    forward: Floats
    backward: Floats
    activation: Floats
    parameter: Floats
    crossing: Floats
    offset: Ints
    larger: Ints


class Pools(NamedTuple):
    """The columns of ``Mixtures``."""

    replicas: Ints
    speed: Floats
    memory: Floats
    unit: Floats
    capacity: Floats
    part_offset: Ints
    part: Ints


class State(NamedTuple):
    """Tables of the dynamic program; ``first`` is the first cut whose rest a mixture can do."""

    work: Floats
    first: Ints
    best: Floats
    ends: Ints
    uses: Ints


@numeric
def _busy(
    rules: Rules, columns: Columns, start: int, stop: int, replicas: int, speed: float
) -> float:
    """``problem.busy_seconds``."""
    forward = (columns.forward[stop] - columns.forward[start]) / speed
    backward = (columns.backward[stop] - columns.backward[start]) / speed
    weights = columns.parameter[stop] - columns.parameter[start]
    send = max(columns.crossing[start], columns.crossing[stop]) / rules.bandwidth
    if rules.is_paper:
        message = 2 * (replicas - 1) * weights / rules.bandwidth
    else:
        message = 4 * (replicas - 1) * weights / (replicas * rules.bandwidth)
    if rules.microbatches == 0:
        if rules.is_paper:
            return max((forward + backward) / replicas, message / replicas, 2 * send)
        return max((forward + backward + message) / replicas, 2 * send / replicas)
    rounds = -(-rules.microbatches // replicas)
    if rules.overlap == EXPOSED:
        return rounds * (forward + backward + 2 * send) + message
    if rules.overlap == STREAMED:
        return rounds * (max(forward, send) + max(backward, send)) + message
    return max(rounds * (forward + backward) + message, rounds * 2 * send)


@numeric
def _bytes(
    rules: Rules, columns: Columns, start: int, stop: int, replicas: int, total: int
) -> float:
    """``problem.memory_bytes``."""
    weights = columns.parameter[stop] - columns.parameter[start]
    kept = columns.activation[stop] - columns.activation[start] + columns.crossing[start]
    warm_up = (total - 1) // replicas
    if rules.keeps == ASYNCHRONOUS:
        return (warm_up + 2) * weights + (warm_up + 1) * kept
    most = -(-rules.microbatches // replicas)
    if rules.keeps == KEEPS_ALL:
        held = most
    elif rules.keeps == KEEPS_PAIRS:
        held = min(most, 2 * (warm_up + 1))
    elif rules.keeps == KEEPS_TWICE:
        held = min(most, 2 * warm_up + 1)
    else:
        held = min(most, warm_up + 1)
    return 2 * weights + held * kept


@numeric
def _extend(
    rules: Rules, columns: Columns, pools: Pools, state: State, mixture: int, start: int, used: int
) -> None:
    """Try every stage from ``start`` on the workers ``used``."""
    left, total = mixture - used, pools.replicas[mixture]
    replicas, speed = pools.replicas[used], pools.speed[used]
    if _busy(rules, columns, start, start, replicas, speed) > rules.limit:
        return  # the input alone takes too long
    longest = state.work[start] + pools.unit[used] * rules.limit * SLACK
    low, end = columns.offset[start], columns.offset[start + 1]
    high = end
    while low < high:  # the first larger cut whose rest the workers left can do
        middle = (low + high) // 2
        if columns.larger[middle] < state.first[left]:
            low = middle + 1
        else:
            high = middle
    least = state.best[mixture, start]
    most = rules.limit
    if rules.microbatches:  # what is before takes its time for the first microbatch
        most = min(most, rules.limit * SLACK - state.work[start] / rules.fastest)
    for place in range(low, end):
        stop = columns.larger[place]
        if state.work[stop] > longest:
            break
        after = state.best[left, stop]
        if after >= least:
            continue
        value = max(after, _busy(rules, columns, start, stop, replicas, speed))
        if rules.microbatches:
            passing = (state.work[stop] - state.work[start]) / speed
            send = 2 * columns.crossing[stop] / rules.bandwidth
            value = max(value, passing + send + after)
        if value > most:
            continue
        if value >= least:
            continue
        if _bytes(rules, columns, start, stop, replicas, total) > pools.memory[used]:
            continue
        least = value
        state.best[mixture, start] = value
        state.ends[mixture, start] = stop
        state.uses[mixture, start] = used


@numeric
def solve(rules: Rules, columns: Columns, pools: Pools) -> Table:
    """Fill best[mixture, cut]: the fewest seconds in which exactly these workers do all layers
    outside the cut, if not above the limit.

    Also the cut at which the first such stage ends, and its mixture (-1: none). O(pairs of cuts *
    pairs of mixtures), less what the limit prunes: a pair (cut, mixture) is dropped when the layers
    outside exceed what the mixture can do within the limit, or those inside what the others can.
    """
    cuts, mixtures = len(columns.forward), len(pools.replicas)
    work = columns.forward + columns.backward
    rest = work[cuts - 1] - work
    room = pools.capacity * rules.limit * SLACK
    first = np.zeros(mixtures, dtype=np.int64)
    first[0] = cuts - 1
    for mixture in range(1, mixtures):
        while rest[first[mixture]] > room[mixture]:  # ends at the last cut, which leaves no rest
            first[mixture] += 1
    state = State(
        work,
        first,
        np.full((mixtures, cuts), np.inf),
        np.full((mixtures, cuts), -1, dtype=np.int64),
        np.full((mixtures, cuts), -1, dtype=np.int64),
    )
    state.best[0, cuts - 1] = 0.0
    for mixture in range(1, mixtures):
        others = mixtures - 1 - mixture
        for start in range(cuts - 2, first[mixture] - 1, -1):
            if work[start] > (room[others] if others else 0.0):
                continue
            for place in range(pools.part_offset[mixture], pools.part_offset[mixture + 1]):
                _extend(rules, columns, pools, state, mixture, start, pools.part[place])
    return state.best, state.ends, state.uses


class Level(NamedTuple):
    """Scalars of one level of PipeDream's recursion; ``inner`` divides the first stage's message,
    ``rows`` is 1 where only pipelines of the whole model are wanted."""

    units: int
    bandwidth: float
    inner: int
    rows: int
    is_paper: bool
    counts_transfers: bool
    may_idle: bool
    memory: float


@numeric
def _unit_seconds(level: Level, seconds: float, weights: float, replicas: int, inner: int) -> float:
    if level.is_paper:
        return max(seconds, 2 * (replicas - 1) * weights / level.bandwidth / inner) / replicas
    message = 4 * (replicas - 1) * weights / (level.bandwidth * replicas)
    return (seconds + message / inner) / replicas


@numeric
def pipeline_level(
    level: Level, seconds: Floats, inside: NDArray[np.bool_], parameter: Floats,
    activation: Floats, crossing: Floats,
) -> Table:  # fmt: skip
    """Fill A[i, j, m - 1] of ``pipedream``, the cut where the last stage begins (-1: all is one
    stage), and its replicas * (units + 1) + the units of the stages before it."""
    cuts = len(parameter)
    shape = (level.rows, cuts, level.units)
    best = np.full(shape, np.inf)
    split = np.full(shape, -1, dtype=np.int64)
    used = np.full(shape, -1, dtype=np.int64)
    for i in range(level.rows):
        for m in range(1, level.units + 1):
            for j in range(cuts):
                if not inside[i, j]:
                    continue
                _one_stage(level, seconds, (parameter, activation, crossing), (best, split, used),
                           (i, j, m))  # fmt: skip
                for k in range(i + 1, j):
                    if inside[i, k] and inside[k, j]:
                        _last_stage(level, seconds, (parameter, activation, crossing),
                                    (best, split, used), (i, k, j, m))  # fmt: skip
    return best, split, used


@numeric
def _one_stage(
    level: Level, seconds: Floats, columns: tuple[Floats, Floats, Floats], table: Table,
    place: tuple[int, int, int],
) -> None:  # fmt: skip
    """Everything between two cuts as one stage of ``m`` units, or what fewer units do as well."""
    i, j, m = place
    parameter, activation, _ = columns
    best, split, used = table
    weights = parameter[j] - parameter[i]
    stashed = -(-(level.units - m) // m) * (weights + activation[j] - activation[i])
    if not (level.memory < np.inf and stashed > level.memory):
        best[i, j, m - 1] = _unit_seconds(level, seconds[i, j], weights, m, level.inner)
        used[i, j, m - 1] = m * (level.units + 1)
    if level.may_idle and m > 1 and best[i, j, m - 2] <= best[i, j, m - 1]:
        best[i, j, m - 1] = best[i, j, m - 2]
        split[i, j, m - 1] = split[i, j, m - 2]
        used[i, j, m - 1] = used[i, j, m - 2]


@numeric
def _last_stage(
    level: Level, seconds: Floats, columns: tuple[Floats, Floats, Floats], table: Table,
    place: tuple[int, int, int, int],
) -> None:  # fmt: skip
    """Try the layers between k and j as the last stage, with every number of replicas."""
    i, k, j, m = place
    parameter, activation, crossing = columns
    best, split, used = table
    weights = parameter[j] - parameter[k]
    kept = weights + activation[j] - activation[k]
    for replicas in range(1, m):
        before = best[i, k, m - replicas - 1]
        if before >= best[i, j, m - 1]:
            continue
        if level.memory < np.inf and -(-(level.units - m) // replicas) * kept > level.memory:
            continue
        value = max(before, _unit_seconds(level, seconds[k, j], weights, replicas, 1))
        if level.counts_transfers:
            shares = 1 if level.is_paper else replicas
            value = max(value, 2 * max(crossing[k], crossing[j]) / (level.bandwidth * shares))
        if value < best[i, j, m - 1]:
            best[i, j, m - 1] = value
            split[i, j, m - 1] = k
            used[i, j, m - 1] = replicas * (level.units + 1) + m - replicas
