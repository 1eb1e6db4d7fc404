"""One level of PipeDream's recursion, compiled by Numba on first use.

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
