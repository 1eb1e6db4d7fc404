"""Algorithms of layers under a bound of memory: a multiple-choice knapsack, solved with its whole frontier.

Minimise the sum of seconds where each layer has one algorithm and workspaces fit: all together (``sum``), or the
largest of them where a workspace is free after use (``max``). After each layer the points that another beats in
both are dropped, which loses no optimum of any bound: exact, and every bound is answered at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.core.algorithms import AlgorithmChoice, AlgorithmTable, LayerAlgorithms, Workspace
from shardwright.errors import InputError

# Points of a frontier: half a gigabyte of them.
MOST_POINTS = 2**22


def frontier(layers: Sequence[LayerAlgorithms], workspace: Workspace = "sum") -> Frontier:
    """Return all choices that no other beats in both seconds and bytes. Raises InputError where they are too many."""
    return _largest(layers) if workspace == "max" else _added(layers)


class Frontier:
    """Choices by ascending bytes, and so descending seconds; which algorithms they are is looked up when asked."""

    def __init__(self, memory: Sequence[int], seconds: Sequence[float], back: list[Step]) -> None:
        self.memory, self.seconds, self._back = memory, seconds, back

    def __len__(self) -> int:
        return len(self.memory)

    def choice(self, place: int) -> AlgorithmChoice:
        """Return one of them with its algorithms."""
        at, found = place, list[int]()
        for before, algorithm in reversed(self._back):
            found.append(int(algorithm[at]))
            at = int(before[at])
        return AlgorithmChoice(
            seconds=float(self.seconds[place]),
            bytes=int(self.memory[place]),
            algorithms=tuple(reversed(found)),
        )

    def best(self, bound: float) -> AlgorithmChoice | None:
        """Return the fastest within so many bytes, the smallest of those; None where none fits."""
        place = bisect_right(self.memory, bound)
        return self.choice(place - 1) if place else None


# Of each point after a layer: its place before, and the algorithm of the layer.
Step = tuple[NDArray[np.int64], NDArray[np.int64]]


def _added(layers: Sequence[LayerAlgorithms]) -> Frontier:
    memory, seconds = np.zeros(1, dtype=np.int64), np.zeros(1)
    back: list[Step] = []
    for layer in layers:
        sizes = np.array([one.bytes for one in layer.algorithms], dtype=np.int64)
        times = np.array([one.seconds for one in layer.algorithms])
        if len(memory) * len(sizes) > MOST_POINTS:
            raise InputError(
                f"so many different sizes make too many choices to keep ({len(memory):,} before layer "
                f"{layer.name[:60]!r}); round the bytes of the table up, to whole MiB for example"
            )
        every, spent = np.add.outer(memory, sizes).ravel(), np.add.outer(seconds, times).ravel()
        kept = _undominated(every, spent)
        back.append((kept // len(sizes), kept % len(sizes)))
        memory, seconds = every[kept], spent[kept]
    return Frontier(memory.tolist(), seconds.tolist(), back)


def _largest(layers: Sequence[LayerAlgorithms]) -> Frontier:
    """Return the frontier where only the largest workspace counts: every layer takes its fastest that fits."""
    bounds = _bounds(layers)
    picks = [[_fastest(layer, bound) for layer in layers] for bound in bounds]
    spent = [
        sum(layer.algorithms[pick].seconds for layer, pick in zip(layers, row, strict=True))
        for row in picks
    ]
    kept = _undominated(np.array(bounds, dtype=np.int64), np.array(spent))
    places = np.arange(len(kept))
    back: list[Step] = [
        (places, np.array([picks[place][number] for place in kept]))
        for number in range(len(layers))
    ]
    return Frontier([bounds[i] for i in kept], [spent[i] for i in kept], back)


def _bounds(layers: Sequence[LayerAlgorithms]) -> list[int]:
    """Return the sizes of workspaces with which every layer has one that fits."""
    floor = max((min(one.bytes for one in layer.algorithms) for layer in layers), default=0)
    sizes = {one.bytes for layer in layers for one in layer.algorithms}
    return sorted({floor} | {size for size in sizes if size >= floor})


def _fastest(layer: LayerAlgorithms, bound: int) -> int:
    fits = [place for place, one in enumerate(layer.algorithms) if one.bytes <= bound]
    return min(
        fits, key=lambda place: (layer.algorithms[place].seconds, layer.algorithms[place].bytes)
    )


def _undominated(memory: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the places of the points that no other beats, by ascending bytes."""
    order = np.lexsort((seconds, memory))
    best = np.minimum.accumulate(seconds[order])
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = seconds[order][1:] < best[:-1]
    return order[keep]


def best_batch(
    found: Sequence[tuple[AlgorithmTable, AlgorithmChoice | None]], tolerance: float
) -> AlgorithmTable | None:
    """Return the smallest batch whose samples per second are within a share of the best: statistical efficiency
    falls as batches grow. None where none fits."""
    speeds = [
        (one, one.batch / fit.seconds if fit.seconds else np.inf) for one, fit in found if fit
    ]
    most = max((speed for _, speed in speeds), default=0.0)
    enough = [one for one, speed in speeds if speed >= most * (1 - tolerance)]
    return min(enough, key=lambda one: one.batch, default=None)
