"""Which gradients travel together: merging neighbours of the backward order into buckets.

Gradients become ready one after another and share one channel, first in first out. A bucket leaves
when its last gradient is ready and the channel is free. Everything is in backward order: index 0 is
ready first. Costs may be any function of bytes: a measured table as well as a straight line. Where a
backend has several messages under way, one that waits for others (``queued``) takes less than one that finds the
channel free: its latency is hidden beneath these. Where messages take something from what computes (``held``),
gradients behind them become ready later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

MergeMethod = Literal["optimal", "mgwfbp", "wfbp", "single"]
Sizes = NDArray[np.float64]
Cost = Callable[[Sizes], Sizes]
Buckets = tuple[tuple[int, ...], ...]
Held = tuple[float, float]
"""Seconds that a message takes from what computes: of its own, and per byte."""


def merge_gradients(
    ready_seconds: Sequence[float],
    sizes_bytes: Sequence[float],
    cost: Cost,
    method: MergeMethod = "optimal",
    *,
    queued: Cost | None = None,
    held: Held = (0.0, 0.0),
) -> Buckets:
    """Return buckets of consecutive gradient indices, in the order in which they are sent.

    ``cost`` gives the seconds of messages, each from its bytes. The optimal plan also heeds ``queued``, what those
    take that wait for the one before, and by how much each message puts off all gradients behind it (``held``). A
    gradient counts as ready no earlier than those before it. Methods:

    * ``optimal``: the earliest possible finish of the last message, exactly, for any cost; of
      equally good plans one with long last buckets (fewer messages);
    * ``mgwfbp``: the merge rule of MG-WFBP, for comparison; not optimal (see ``_merge_by_rule``);
    * ``wfbp``: every gradient alone; ``single``: all in one.
    """
    ready, sizes = _checked(ready_seconds, sizes_bytes)
    count = len(sizes)
    if method == "optimal":
        return _merge_optimally(ready, sizes, (cost, queued or cost), held)
    if method == "mgwfbp":
        return _merge_by_rule(ready, sizes, cost)
    if method == "wfbp":
        return tuple((index,) for index in range(count))
    if method == "single":
        return (tuple(range(count)),) if count else ()
    raise ValueError(
        f"merge method {method!r} is unknown; choose 'optimal', 'mgwfbp', 'wfbp' or 'single'"
    )


def finish_time(
    buckets: Buckets,
    ready_seconds: Sequence[float],
    sizes_bytes: Sequence[float],
    cost: Cost,
    *,
    queued: Cost | None = None,
    held: Held = (0.0, 0.0),
) -> float:
    """Return when the last bucket has been sent; see ``merge_gradients``."""
    ready, sizes = _checked(ready_seconds, sizes_bytes)
    free = late = 0.0
    for bucket in buckets:
        size = sum(sizes[bucket[0] : bucket[-1] + 1])
        behind = _alone(queued or cost, size)
        free = max(free + behind, ready[bucket[-1]] + late + _alone(cost, size))
        late += held[0] + held[1] * size
    return free


def _checked(
    ready_seconds: Sequence[float], sizes_bytes: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return ready times made non-decreasing, and sizes, or refuse what is neither."""
    if len(ready_seconds) != len(sizes_bytes):
        raise ValueError(
            f"each gradient needs a ready time and a size, but there are {len(ready_seconds)} "
            f"times and {len(sizes_bytes)} sizes"
        )
    if not all(value >= 0 for value in (*ready_seconds, *sizes_bytes)):
        raise ValueError("ready times and sizes of gradients must be 0 or more, and not NaN")
    ready = list(accumulate((float(value) for value in ready_seconds), max))
    return ready, [float(value) for value in sizes_bytes]


def _merge_optimally(
    ready: list[float], sizes: list[float], costs: tuple[Cost, Cost], held: Held
) -> Buckets:
    """Find the earliest finish by dynamic programming.

    F(m, j) = min over i < j of max(F(m - 1, i) + Q(S_j - S_i), R(j) + (m - 1) h + g S_i + T(S_j - S_i)) for the first
    j gradients in m messages, F(0, 0) = 0, S prefix bytes, Q the cost of messages that wait, h and g what each message
    holds. Finishing earlier and in fewer messages never hurts what follows: of a prefix, more messages are kept only
    where they finish earlier, and their number does not matter at all where h is none. O(L^2) steps for each number of
    messages kept.
    """
    count, (cost, queued), (each, per_byte) = len(sizes), costs, held
    prefix = np.concatenate([[0.0], np.cumsum(sizes)])
    more = 1 if each else 0  # the rows that a message leads on by
    finish = np.full((more * count + 1, count + 1), np.inf)
    finish[0, 0] = 0.0
    first = np.zeros(finish.shape, dtype=np.int64)
    kept = 1
    for j in range(1, count + 1):
        spans = prefix[j] - prefix[:j]
        late = ready[j - 1] + per_byte * prefix[:j] + each * np.arange(kept)[:, np.newaxis]
        ends = np.maximum(finish[:kept, :j] + queued(spans), late + cost(spans))
        opening = ends.argmin(axis=1)
        end = ends[np.arange(kept), opening]
        with_fewer = np.minimum.accumulate(np.concatenate([[np.inf], end[:-1]]))
        rows = slice(more, more + kept)
        finish[rows, j] = np.where(end < with_fewer, end, np.inf)
        first[rows, j] = opening
        kept = max(kept, more + int(np.flatnonzero(end < with_fewer)[-1]) + 1)
    buckets: list[tuple[int, ...]] = []
    stop, row = count, int(finish[:, count].argmin())
    while stop > 0:
        begin = int(first[row, stop])
        buckets.append(tuple(range(begin, stop)))
        stop, row = begin, row - more
    return tuple(reversed(buckets))


def _merge_by_rule(ready: list[float], sizes: list[float], cost: Cost) -> Buckets:
    """Merge a gradient into the next iff ready(next) - send_start < a (Shi, Chu, Li, INFOCOM 2019).

    ``send_start`` is when the open bucket could leave if closed now; ``a`` is the latency one
    message less would save. Each decision compares "send both" with "merge both" only and does not
    see what follows, so that the result can be worse than sending all alone or all at once.
    """
    latency = _latency(sizes, cost)
    buckets: list[tuple[int, ...]] = []
    bucket: list[int] = []
    free = 0.0
    for index, time in enumerate(ready):
        bucket.append(index)
        send_start = max(free, time)
        is_last = index == len(ready) - 1
        if is_last or ready[index + 1] - send_start >= latency:
            free = send_start + _alone(cost, sum(sizes[position] for position in bucket))
            buckets.append(tuple(bucket))
            bucket = []
    return tuple(buckets)


def _latency(sizes: list[float], cost: Cost) -> float:
    """Return ``a`` of the line a + b * bytes through the cost of the smallest gradient and of all.

    That is the cost extrapolated to no bytes: exact for a straight line, and asked only at sizes
    which can occur, since a measured cost knows nothing of empty messages. Never negative.
    """
    if not sizes:
        return 0.0
    small, large = min(sizes), sum(sizes)
    if small == large:
        return max(0.0, _alone(cost, small))
    slope = (_alone(cost, large) - _alone(cost, small)) / (large - small)
    return max(0.0, _alone(cost, small) - slope * small)


def _alone(cost: Cost, size: float) -> float:
    return float(cost(np.array([size]))[0])
