"""Ranks that share cores: on how many they compute, and how long their messages wait for one meanwhile."""

from __future__ import annotations

import time
from typing import cast

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from shardwright.runtime.profile.beneath import Chunk, Exchange, note_end, seen_by_all

# How often all ranks compute, in so many pieces of about so many seconds, to see how much of a core each has. Of a
# core to itself a rank gets all but what interrupts and other programs take.
CROWDED_ROUNDS = 16
PIECES, PIECE_SECONDS = 64, 5e-4
CROWDED = 1.15
# A message is begun so often, beneath computation that outlasts it: of so many seconds of a thread, and as many times as
# long as the message takes alone.
CROWDING_ROUNDS, CROWDING_SECONDS, CROWDING_TIMES = 12, 0.02, 2
# What has come nowhere in a crowd is taken to go at this pace.
LEAST_PACE = 0.02


def shared_cores(offset: float) -> float:
    """Return on how many cores all ranks compute: as many as there are ranks where each has one. ``offset`` is what is
    added to this rank's clock to have the first's."""
    chunk, world = Chunk(), cast(ProcessGroup, dist.group.WORLD)
    times = chunk.times(PIECE_SECONDS, world)
    mine: list[list[tuple[float, float]]] = []
    for _ in range(CROWDED_ROUNDS):
        dist.barrier()
        marks = [(time.perf_counter() + offset, time.thread_time())]
        for _ in range(PIECES):
            chunk.run(times)
            marks.append((time.perf_counter() + offset, time.thread_time()))
        mine.append(marks)
    seen = seen_by_all(mine, world).numpy()
    took, own = np.moveaxis(seen[:, :, -1] - seen[:, :, 0], -1, 0)
    if np.median((took / own).mean(axis=0)) < CROWDED:
        return float(world.size())
    return cores_of(*np.moveaxis(seen, -1, 0))


def cores_of(moments: NDArray[np.float64], own: NDArray[np.float64]) -> float:
    """Return on how many cores ranks compute, from moments between pieces of computation (ranks, rounds, pieces) and the
    time that their threads had computed by then.

    What all of them do while every one computes, whoever had a core meanwhile, is what the cores do in that time.
    """
    begin, end = moments[:, :, 0].max(axis=0), moments[:, :, -1].min(axis=0)
    if not (end > begin).any():  # all of them never did
        begin, end = moments[:, :, 0].min(axis=0), moments[:, :, -1].max(axis=0)
    done = [
        np.diff(np.interp((begin[turn], end[turn]), moments[rank, turn], own[rank, turn]))
        for turn in np.flatnonzero(end > begin)
        for rank in range(len(moments))
    ]
    return float(np.sum(done) / np.sum(np.maximum(end - begin, 0.0)))


def wait_in_crowd(exchange: Exchange, alone: float, group: ProcessGroup, offset: float) -> float:
    """Return by how many seconds a message, which takes ``alone`` by itself, takes longer while all ranks compute that
    share cores; a collective call, of all groups at once. ``offset``: see ``shared_cores``."""
    chunk = Chunk()
    times = chunk.times(CROWDING_SECONDS + CROWDING_TIMES * alone, group)
    exchange.run()
    mine: list[tuple[float, float, float]] = []
    for _ in range(CROWDING_ROUNDS):
        dist.barrier(group)
        chunk.run(max(1, times // 4))  # ranks do not begin together in a step either
        begin, ended = time.perf_counter(), list[float]()
        pending = exchange.start()
        note_end(pending, 0.0, ended)
        chunk.run(times)
        computed = time.perf_counter()
        for one in pending:
            one.wait()
        ended = ended or [time.perf_counter()]
        mine.append((begin + offset, computed + offset, max(ended) + offset))
    begin, computed, ended = np.moveaxis(seen_by_all(mine, group).numpy(), -1, 0)
    return waited(alone, begin.max(axis=0), computed.max(axis=0), ended.max(axis=0))


def waited(
    alone: float,
    begin: NDArray[np.float64],
    computed: NDArray[np.float64],
    ended: NDArray[np.float64],
) -> float:
    """Return by how many seconds a message takes longer beneath computation, from when, in each round, its last rank had
    begun it, all had ``computed``, and it ended: what was left of it when all had computed took as long as alone."""
    beneath = np.minimum(computed, ended) - begin
    some = beneath > 0
    done = alone - np.maximum(ended - np.maximum(computed, begin), 0.0)
    if not some.any():  # nobody computed any more when the last came
        return 0.0
    pace = max(float(done[some].sum() / beneath[some].sum()), LEAST_PACE)
    return max(alone / pace - alone, 0.0)
