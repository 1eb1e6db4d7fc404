"""Seconds of gradient exchanges between equal workers, by algorithm: the closed forms of the literature.

``planner.cost.collective`` knows links of a cluster and what was measured on them, and takes the fastest form. These
are for traces of layers, where all that is known is a latency, a bandwidth and the number of workers.
Sources: Thakur et al., 2005 (ring, recursive doubling, halving and doubling), Shi et al., INFOCOM 2019,
table 1 (all as a + b x bytes), Shi et al., ICDCS 2019, table 1 (top-k, gTop-k).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Sizes = NDArray[np.float64]
KEPT_BYTES = 8  # of a value that is sent with its place


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Seconds of a message: ``latency`` and its bytes by ``bandwidth`` (B/s); adding up what came takes
    ``reduction`` seconds per byte."""

    latency: float
    bandwidth: float
    reduction: float = 0.0


def _log(workers: int) -> float:
    return math.log2(workers)


def _ring(n: int, wire: Wire) -> tuple[float, float]:
    part = (n - 1) / n
    return 2 * (n - 1) * wire.latency, 2 * part / wire.bandwidth + part * wire.reduction


def _tree(n: int, wire: Wire) -> tuple[float, float]:
    return 2 * wire.latency * _log(n), (2 / wire.bandwidth + wire.reduction) * _log(n)


def _recursive_doubling(n: int, wire: Wire) -> tuple[float, float]:
    return wire.latency * _log(n), (1 / wire.bandwidth + wire.reduction) * _log(n)


def _halving_doubling(n: int, wire: Wire) -> tuple[float, float]:
    part = (n - 1) / n
    return 2 * wire.latency * _log(n), 2 * part / wire.bandwidth + part * wire.reduction


def _double_tree(n: int, wire: Wire) -> tuple[float, float]:
    return 2 * wire.latency * _log(n), 1 / wire.bandwidth + wire.reduction


# Seconds of a message of no bytes, and per byte.
ALL_REDUCE: dict[str, Callable[[int, Wire], tuple[float, float]]] = {
    "ring": _ring,
    "tree": _tree,
    "recursive-doubling": _recursive_doubling,
    "halving-doubling": _halving_doubling,
    "double-tree": _double_tree,
}
AUTO = "auto"
# Every worker must send 2 (n - 1) / n of a tensor (Patarasuk, Yuan, 2009); the published form of double trees is
# less than that, so it is taken where it is asked for only.
POSSIBLE = ("ring", "tree", "recursive-doubling", "halving-doubling")


def all_reduces(workers: int, wire: Wire, algorithm: str = AUTO) -> Callable[[Sizes], Sizes]:
    """Return how long summing up tensors over all workers takes, each by its bytes; ``auto``: by the fastest of
    those that are ``POSSIBLE``."""
    names = POSSIBLE if algorithm == AUTO else (algorithm,)
    lines = [ALL_REDUCE[name](workers, wire) for name in names] if workers > 1 else [(0.0, 0.0)]

    def seconds(sizes: Sizes) -> Sizes:
        found = np.min([start + slope * sizes for start, slope in lines], axis=0)
        return np.where(sizes > 0, found, 0.0)

    return seconds


def all_reduce_seconds(num_bytes: float, workers: int, wire: Wire, algorithm: str = AUTO) -> float:
    """Return how long one of them takes."""
    return float(all_reduces(workers, wire, algorithm)(np.array(num_bytes)))


def top_k_seconds(num_kept: int, workers: int, wire: Wire) -> float:
    """Return how long gathering ``num_kept`` values of every worker takes, each with its place."""
    if workers < 2 or not num_kept:
        return 0.0
    return wire.latency * _log(workers) + KEPT_BYTES * num_kept * (workers - 1) / wire.bandwidth


def gtop_k_seconds(num_kept: int, workers: int, wire: Wire) -> float:
    """Return how long finding the ``num_kept`` largest of all workers' values takes, by a tree and back."""
    if workers < 2 or not num_kept:
        return 0.0
    return 2 * _log(workers) * (wire.latency + KEPT_BYTES * num_kept / wire.bandwidth)
