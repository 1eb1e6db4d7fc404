"""Contest problems whose planted answer is the optimum, with the proof of that hidden in the costs.

Reduced costs are at least 0, and 0 for the planted choice. Memory has prices at some times, which the
planted choice fills to the last byte, and every edge gives a part of its cost to its ends. Whatever is
legal then costs at least what the planted choice does, by weak duality.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwright.files.iopddl import FORBIDDEN
from tests.planner.solve.wide.families import Builder, Instance, Ints, Random

# Shape of the graph: how many nodes, strategies of each.
SHAPES = {
    "tree": (3000, 8), "grid": (900, 8), "skips": (2000, 8), "hubs": (1500, 12),
    "cliques": (600, 8), "components": (4000, 8),
}  # fmt: skip
ZEROS = {"sharp": 0.0, "flat": 0.6}  # the share of other choices that are as good, at least alone


def certified(shape: str, kind: str, seed: int, scale: float = 1.0) -> Instance:
    """Return a problem of a shape and a kind. Even seeds are for tuning, odd ones for reporting."""
    rng = np.random.default_rng([list(SHAPES).index(shape), list(ZEROS).index(kind), seed])
    typical, ways = SHAPES[shape]
    count = max(8, int(typical * scale * rng.uniform(0.7, 1.3)))
    times = max(4, count // 4)
    made = Builder(f"{shape}, {kind}", rng, 0.0)
    ends = list(_edges(shape, count, rng))
    planted: list[int] = rng.integers(ways, size=count).tolist()
    costs = [_reduced(rng, (ways,), (way,), ZEROS[kind]) for way in planted]
    tables: list[Ints] = []
    for one, two in ends:
        table = _reduced(rng, (ways, ways), (planted[one], planted[two]), ZEROS[kind])
        is_out = rng.random((ways, ways)) < 0.15
        is_out[planted[one], planted[two]] = False
        given = [(_size(rng) * rng.random(ways)).astype(np.int64) for _ in range(2)]
        costs[one], costs[two] = costs[one] + given[0], costs[two] + given[1]
        table = table - given[0][:, None] - given[1][None, :]
        tables.append(np.where(is_out, FORBIDDEN, table - table.min()))
    price = np.where(rng.random(times) < 0.2, rng.integers(1, 4, times), 0)
    used = np.zeros(times, dtype=np.int64)
    for node, (cost, way) in enumerate(zip(costs, planted, strict=True)):
        life = int(rng.choice([2, 10, times], p=[0.6, 0.3, 0.1]))
        begin = node * times // count if life < times else 0
        end = min(times, begin + life)
        usage = np.maximum(1, _size(rng) / 2.0 ** rng.integers(0, 5, ways)).astype(np.int64)
        used[begin:end] += usage[way]
        cost = cost - int(price[begin:end].sum()) * usage
        made.node(cost - cost.min(), usage, begin, end, way)
    for (one, two), table in zip(ends, tables, strict=True):
        made.edge(one, two, table)
    for time in np.flatnonzero((price > 0) & (used < used.max())).tolist():
        made.node(np.zeros(1, np.int64), np.array([used.max() - used[time]]), time, time + 1, 0)
    return made.finish(f"{shape}, {kind}")


def _size(rng: Random) -> int:
    return 10 + int(rng.lognormal(11, 1.5))


def _reduced(rng: Random, shape: tuple[int, ...], planted: tuple[int, ...], zeros: float) -> Ints:
    """Return costs of which the planted one is 0 and so is a share of the others."""
    costs = (_size(rng) * rng.random(shape) * (rng.random(shape) >= zeros)).astype(np.int64)
    costs[planted] = 0
    return costs


def _edges(shape: str, count: int, rng: Random) -> Iterator[tuple[int, int]]:
    """Yield the edges of a graph."""
    side, size = int(count**0.5), {"cliques": 12, "components": 4}.get(shape, count)
    for node in range(1, count):
        if shape == "tree":
            yield int(rng.integers(max(0, node - 40), node)), node
        elif shape == "grid":
            yield from [(node - 1, node)] if node % side else []
            yield from [(node - side, node)] if node >= side else []
        elif shape in ("skips", "hubs"):
            yield node - 1, node
            if node > 6 and (shape == "hubs" or rng.random() < 0.3):
                yield int(rng.integers(6 if shape == "hubs" else node - 1)), node
        else:
            block = node - node % size
            yield from [(other, node) for other in range(block, node)]
            if shape == "cliques" and node == block:
                yield node - 1, node
