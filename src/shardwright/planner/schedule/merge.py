"""Which gradients travel together: merging neighbours of the backward order into buckets.

Gradients become ready one after another and share one channel, first in first out. A bucket leaves
when its last gradient is ready and the channel is free. Everything is in backward order: index 0 is
ready first. Costs may be any function of bytes: a measured table as well as a straight line. Where a
backend has several messages under way, one that waits for others (``queued``) takes less than one that finds the
channel free: its latency is hidden beneath these.
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


def merge_gradients(
    ready_seconds: Sequence[float],
    sizes_bytes: Sequence[float],
    cost: Cost,
    method: MergeMethod = "optimal",
    *,
    queued: Cost | None = None,
) -> Buckets:
    """Return buckets of consecutive gradient indices, in the order in which they are sent.

    ``cost`` gives the seconds of messages, each from its bytes, ``queued`` (the optimal plan heeds it) what those
    take that wait for the one before. A gradient counts as ready no earlier than those before it. Methods:

    * ``optimal``: the earliest possible finish of the last message, exactly, for any cost; of
      equally good plans one with long last buckets (fewer messages);
    * ``mgwfbp``: the merge rule of MG-WFBP, for comparison; not optimal (see ``_merge_by_rule``);
    * ``wfbp``: every gradient alone; ``single``: all in one.
    """
    ready, sizes = _checked(ready_seconds, sizes_bytes)
    count = len(sizes)
    if method == "optimal":
        return _merge_optimally(ready, sizes, cost, queued or cost)
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
) -> float:
    """Return when the last bucket has been sent; see ``merge_gradients``."""
    ready, sizes = _checked(ready_seconds, sizes_bytes)
    free = 0.0
    for bucket in buckets:
        size = sum(sizes[bucket[0] : bucket[-1] + 1])
        behind = _alone(queued or cost, size)
        free = max(free + behind, ready[bucket[-1]] + _alone(cost, size))
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


def _merge_optimally(ready: list[float], sizes: list[float], cost: Cost, queued: Cost) -> Buckets:
    """Find the earliest finish by dynamic programming.

    F(j) = min over i < j of max(F(i) + Q(S_j - S_i), R(j) + T(S_j - S_i)) for the first j gradients, F(0) = 0,
    S prefix bytes, Q the cost of messages that wait. Finishing earlier never hurts what follows, so one number per
    prefix is enough. O(L^2) steps.
    """
    count = len(sizes)
    prefix = np.concatenate([[0.0], np.cumsum(sizes)])
    finish = np.zeros(count + 1)
    first = [0] * (count + 1)
    for j in range(1, count + 1):
        spans = prefix[j] - prefix[:j]
        ends = np.maximum(finish[:j] + queued(spans), ready[j - 1] + cost(spans))
        first[j] = int(np.argmin(ends))
        finish[j] = ends[first[j]]
    buckets: list[tuple[int, ...]] = []
    stop = count
    while stop > 0:
        buckets.append(tuple(range(first[stop], stop)))
        stop = first[stop]
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
