"""The table of workers that the exact planner may give a stage.

A mixture is some of the workers of each kind; a crew a mixture that works together in one way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwright.layerwise.problem import Crew, PipelineProblem, all_reduce

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Crews:
    """All mixtures by mixed-radix index, (0, ..., 0) is 0 and all workers the last, and all crews.

    The index of a difference of mixtures is the difference of indices. ``unit`` is the compute
    seconds (of the profiled device) that a stage of the crew takes on while it is busy for one
    second, ``collective`` and ``message`` the seconds of an all-reduce of one byte
    among the shards of a replica, and of one byte of weights among the replicas, ``capacity`` the most that any stages of the mixture can: the bound that prunes. The
    crews of a mixture's parts are ``part[part_offset[m] : part_offset[m + 1]]``.
    """

    crews: tuple[Crew, ...]
    vectors: Ints
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


def tabulate_crews(problem: PipelineProblem) -> Crews:
    """Build the table of mixtures, of the crews that each can make, and of each mixture's parts."""
    kinds = problem.workers
    vectors = np.array(list(np.ndindex(*(kind.count + 1 for kind in kinds))), dtype=np.int64)
    crews: list[Crew] = []
    offset = [0]
    for vector in vectors:
        crews += _ways(problem, tuple(map(int, vector)))
        offset.append(len(crews))
    uses = np.array([crew.workers for crew in crews]) > 0
    shards = np.array([crew.shards for crew in crews], dtype=np.int64)
    replicas = np.array([crew.replicas for crew in crews], dtype=np.int64)
    speed = np.where(uses, [kind.speed for kind in kinds], np.inf).min(axis=1)
    rounds = -(-problem.microbatches // replicas) if problem.microbatches else 1 / replicas
    unit = speed * shards / rounds
    best = np.array([unit[a:b].max(initial=0.0) for a, b in pairwise(offset)])
    capacity, starts = np.zeros(len(vectors)), np.array(offset)
    parts: list[Ints] = [np.zeros(0, dtype=np.int64)]
    for whole in range(1, len(vectors)):
        inside = np.nonzero((vectors[1 : whole + 1] <= vectors[whole]).all(axis=1))[0] + 1
        capacity[whole] = (best[inside] + capacity[whole - inside]).max()
        parts.append(_ranges(starts[inside], starts[inside + 1]))
    return Crews(
        crews=tuple(crews),
        vectors=vectors,
        workers=vectors.sum(axis=1),
        capacity=capacity,
        part_offset=np.cumsum([0, *map(len, parts)], dtype=np.int64),
        part=np.concatenate(parts),
        mixture=np.repeat(np.arange(len(vectors)), np.diff(offset)),
        shards=shards,
        replicas=replicas,
        splits=np.array([crew.splits_weights for crew in crews], dtype=np.bool_),
        speed=speed,
        memory=np.where(uses, [kind.memory_bytes for kind in kinds], np.inf).min(axis=1),
        unit=unit,
        collective=np.array([all_reduce(problem, crew.shards, 1.0) for crew in crews]),
        message=np.array([all_reduce(problem, c.replicas, 1.0) / c.shards for c in crews]),
    )


def _ranges(starts: Ints, stops: Ints) -> Ints:
    """Return all of range(start, stop) one after the other."""
    sizes = stops - starts
    first = starts - np.cumsum(sizes) + sizes
    return np.arange(int(sizes.sum()), dtype=np.int64) + np.repeat(first, sizes)


def _ways(problem: PipelineProblem, workers: tuple[int, ...]) -> Iterator[Crew]:
    """Yield the ways in which workers may work together.

    Splitting weights saves memory and nothing else, so it is left out where memory is unlimited.
    """
    count = sum(workers)
    is_limited = any(kind.memory_bytes < math.inf for kind in problem.workers)
    for shards in range(1, min(count, problem.shards) + 1):
        if count % shards:
            continue
        yield Crew(workers, shards)
        if is_limited and shards < count <= problem.shards:
            yield Crew(workers, shards, splits_weights=True)
