"""Contest problems beyond the published ones: variations of given ones, and families with planted answers.

Everything is a pure function of a seed. A planted problem is built around a choice that is allowed
and keeps the limit; its cost is an upper bound of the optimum, so a solver that finds none, or only
dearer ones, is measured against something real. Where nothing else is said the structure is that of
tensors that are split in one of several ways: most edges want equal strategies at both ends, and
memory falls as cost rises.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.files.iopddl import FORBIDDEN, ContestProblem

Ints = NDArray[np.int64]
Random = np.random.Generator


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """A problem, the family it is of, and the cost of an answer known to be legal (None: unknown)."""

    family: str
    problem: ContestProblem
    known: int | None


class Builder:
    """Nodes and edges one by one, and a planted strategy per node."""

    def __init__(self, name: str, rng: Random, thrift: float = 0.9) -> None:
        self.name, self.rng, self.thrift = name, rng, thrift
        self.costs: list[Ints] = []
        self.usages: list[Ints] = []
        self.intervals: list[tuple[int, int]] = []
        self.planted: list[int] = []
        self.ends: list[tuple[int, int]] = []
        self.tables: list[Ints] = []

    def node(self, cost: Ints, usage: Ints, begin: int, end: int, planted: int) -> int:
        """Add a node alive during ``[begin, end)``; return its number. With a probability of
        ``thrift`` the planted strategy is made the one of least usage, so that the limit is tight."""
        cost, usage = np.array(cost, dtype=np.int64), np.array(usage, dtype=np.int64)
        if self.rng.random() < self.thrift:
            pair = [planted, int(usage.argmin())]
            cost[pair], usage[pair] = cost[pair[::-1]], usage[pair[::-1]]
        self.costs.append(cost)
        self.usages.append(usage)
        self.intervals.append((begin, end))
        self.planted.append(planted)
        return len(self.costs) - 1

    def edge(self, one: int, two: int, table: Ints) -> None:
        """Add an edge; the planted pair is never forbidden."""
        table = np.array(table, dtype=np.int64)
        place = self.planted[one], self.planted[two]
        if table[place] >= FORBIDDEN:
            table[place] = int(table[table < FORBIDDEN].min(initial=FORBIDDEN - 1) % 1000)
        self.ends.append((one, two))
        self.tables.append(table)

    def finish(self, family: str, room: float = 0.0) -> Instance:
        """Set the limit to the planted peak plus a share of what is between it and the largest."""
        sizes = [len(cost) for cost in self.costs]
        lengths = [table.size for table in self.tables]
        problem = ContestProblem(
            name=self.name,
            first=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            cost=np.concatenate(self.costs),
            usage=np.concatenate(self.usages),
            intervals=np.array(self.intervals, dtype=np.int64).reshape(-1, 2),
            ends=np.array(self.ends, dtype=np.int64).reshape(-1, 2),
            table=np.concatenate([[0], np.cumsum(lengths)])[: len(lengths)].astype(np.int64),
            cells=np.concatenate([np.zeros(0, np.int64), *(t.ravel() for t in self.tables)]),
            limit=None,
        )
        peak = problem.peak(self.planted)
        problem = replace(problem, limit=int(peak * (1 + room)))
        return Instance(family=family, problem=problem, known=problem.evaluate(self.planted))


def _tensor(rng: Random, ways: int, scale: float = 1.0) -> tuple[Ints, Ints]:
    """Return costs and usages of a tensor split in ``ways`` ways: what uses less costs more."""
    size = float(rng.lognormal(12, 1.5)) * scale
    parts = 2.0 ** rng.integers(0, 5, ways)
    usage = np.maximum(1, size / parts).astype(np.int64)
    work = size * (1 - 1 / parts) * rng.uniform(0.0, 2.0, ways) * (rng.random(ways) < 0.4)
    return work.astype(np.int64), usage


def _reshard(rng: Random, rows: int, columns: int, forbidden: float) -> Ints:
    """Return an edge's table: nothing for the same way, else a price, or forbidden."""
    size = float(rng.lognormal(12, 1.5))
    table = (size * rng.integers(1, 8, (rows, columns))).astype(np.int64)
    table[rng.random((rows, columns)) < forbidden] = FORBIDDEN
    table[np.arange(min(rows, columns)), np.arange(min(rows, columns))] = 0
    return table


def _equal(rows: int, columns: int) -> Ints:
    """Return the table that allows equal strategies only."""
    table = np.full((rows, columns), FORBIDDEN, dtype=np.int64)
    table[np.arange(min(rows, columns)), np.arange(min(rows, columns))] = 0
    return table


def _layered(
    rng: Random, name: str, layers: int, width: int, ways: int, forbidden: float, experts: int = 0
) -> Builder:
    """Blocks one after another, forward then backward: weights live all the time, activations
    from a block's forward to its backward, the rest for two steps. Blocks have a way of their own in
    the planted answer, which changes now and then."""
    made = Builder(name, rng)
    times = 4 * layers * width + 4
    forward: list[int] = []
    spine = -1
    way = int(rng.integers(ways))
    time = 0
    for layer in range(2 * layers):
        is_back = layer >= layers
        if rng.random() < 0.15:
            way = int(rng.integers(ways))
        heads: list[int] = []
        for branch in range(max(1, experts)):
            before = spine
            for place in range(width):
                time += 1
                cost, usage = _tensor(rng, ways, 0.2)
                end = time + 2
                if not is_back and place == width - 1:
                    end = min(times, 4 * layers * width - time)
                node = made.node(cost, usage, time, max(end, time + 1), way)
                if place % 3 == 0:
                    cost, usage = _tensor(rng, ways)
                    weight = made.node(cost, usage, 0, times, way)
                    made.edge(weight, node, _reshard(rng, ways, ways, forbidden))
                if before >= 0:
                    table = _equal(ways, ways) if rng.random() < 0.5 else None
                    if table is None or made.planted[before] != way:
                        table = _reshard(rng, ways, ways, forbidden)
                    made.edge(before, node, table)
                before = node
                if place == width - 1 and not is_back:
                    forward.append(node)
                if place == width // 2 and is_back and forward and branch == 0:
                    made.edge(forward.pop(), node, _reshard(rng, ways, ways, forbidden))
            heads.append(before)
        if experts:
            time += 1
            cost, usage = _tensor(rng, ways, 0.2)
            spine = made.node(cost, usage, time, time + 3, way)
            for head in heads:
                made.edge(head, spine, _reshard(rng, ways, ways, forbidden))
        else:
            spine = heads[0]
        if len(forward) > 3 and not is_back and rng.random() < 0.3:
            made.edge(forward[-3], spine, _reshard(rng, ways, ways, forbidden))
    return made


def chain(rng: Random) -> Instance:
    """Long chains of blocks, many edges that allow equal ways only."""
    made = _layered(rng, "chain", int(rng.integers(150, 250)), 9, 8, 0.1)
    return made.finish("chain", float(rng.uniform(0, 0.05)))


def experts(rng: Random) -> Instance:
    """Mixtures of experts: parallel branches joined again."""
    made = _layered(rng, "experts", int(rng.integers(8, 16)), 6, 9, 0.15, int(rng.integers(8, 16)))
    return made.finish("experts", float(rng.uniform(0, 0.05)))


def residual(rng: Random) -> Instance:
    """Deep residual graphs: every node also reads one a few steps, or very many, before it."""
    made = Builder("residual", rng)
    count, ways = int(rng.integers(3000, 5000)), 6
    way = 0
    for time in range(count):
        if rng.random() < 0.03:
            way = int(rng.integers(ways))
        cost, usage = _tensor(rng, ways)
        life = int(rng.choice([2, 10, 300], p=[0.6, 0.3, 0.1]))
        node = made.node(cost, usage, time, time + life, way)
        for back in (1, int(rng.integers(2, 9)), int(rng.integers(9, 400))):
            if back <= node and (back < 9 or rng.random() < 0.1):
                made.edge(node - back, node, _reshard(rng, ways, ways, 0.1))
    return made.finish("residual", float(rng.uniform(0, 0.03)))


def fan_out(rng: Random) -> Instance:
    """A few nodes that thousands touch."""
    made = Builder("fan-out", rng)
    hubs = [made.node(*_tensor(rng, 12), 0, 2000, int(rng.integers(12))) for _ in range(5)]
    for time in range(1, int(rng.integers(1500, 2000))):
        way = made.planted[int(rng.choice(hubs))]
        cost, usage = _tensor(rng, 12, 0.1)
        node = made.node(cost, usage, time, time + 5, way)
        for hub in rng.choice(hubs, 2, replace=False):
            made.edge(int(hub), node, _reshard(rng, 12, 12, 0.2))
        if time > 1 and rng.random() < 0.5:
            made.edge(node - 1, node, _reshard(rng, 12, 12, 0.2))
    return made.finish("fan-out", float(rng.uniform(0, 0.02)))


def dense(rng: Random) -> Instance:
    """Small graphs with an edge between a third of all pairs, costs without structure."""
    made = Builder("dense", rng)
    count, ways = int(rng.integers(40, 60)), 8
    for _ in range(count):
        cost, usage = rng.integers(0, 10**6, ways), rng.integers(1, 10**5, ways)
        begin = int(rng.integers(0, 20))
        made.node(cost, usage, begin, begin + int(rng.integers(1, 30)), int(cost.argmin()))
    for one in range(count):
        for two in range(one + 1, count):
            if rng.random() < 0.35:
                table = rng.integers(0, 10**6, (ways, ways))
                table[rng.random((ways, ways)) < 0.1] = FORBIDDEN
                table[made.planted[one], made.planted[two]] = rng.integers(0, 10**5)
                made.edge(one, two, table)
    return made.finish("dense")


def knapsack(rng: Random) -> Instance:
    """Everything alive at once and the limit used to the last byte by the planted answer; usages
    have no common measure and the strategies of least usage exclude each other."""
    made = Builder("knapsack", rng, 0.0)
    count, ways = int(rng.integers(150, 300)), 6
    for node in range(count):
        usage = np.sort(rng.integers(10**4, 10**7, ways))
        cost = (np.linspace(2.0, 0.2, ways) * rng.integers(10**3, 10**6, ways)).astype(np.int64)
        planted = int(rng.integers(1, 3))
        made.node(cost, usage, 0, int(rng.integers(3, 8)), planted)
        for other in rng.integers(0, node, 2) if node else ():
            table = rng.integers(0, 10**5, (ways, ways))
            table[0, : int(rng.integers(1, 4))] = FORBIDDEN
            table[: int(rng.integers(1, 4)), 0] = FORBIDDEN
            made.edge(int(other), node, table)
    return made.finish("knapsack")


def constrained(rng: Random) -> Instance:
    """A quarter to a half of all pairs forbidden at random: what is legal is hard to find."""
    made = Builder("constrained", rng)
    count, ways = int(rng.integers(800, 1500)), 7
    share = float(rng.uniform(0.3, 0.42))
    for time in range(count):
        cost, usage = _tensor(rng, ways)
        made.node(cost, usage, time, time + int(rng.integers(1, 60)), int(rng.integers(ways)))
    for node in range(1, count):
        for _ in range(2):
            other = int(rng.integers(max(0, node - 50), node))
            table = rng.integers(0, 10**6, (ways, ways))
            table[rng.random((ways, ways)) < share] = FORBIDDEN
            made.edge(other, node, table)
    return made.finish("constrained")


def many_ways(rng: Random) -> Instance:
    """Hundreds of strategies per node."""
    made = Builder("many-ways", rng)
    count = int(rng.integers(100, 160))
    sizes = [int(rng.integers(100, 300)) for _ in range(count)]
    for time, ways in enumerate(sizes):
        cost, usage = _tensor(rng, ways)
        made.node(cost, usage, time, time + int(rng.integers(2, 30)), int(rng.integers(ways)))
        for back in (1, int(rng.integers(2, 6))):
            if back <= time:
                table = _reshard(rng, sizes[time - back], ways, 0.3)
                made.edge(time - back, time, table)
    return made.finish("many-ways", float(rng.uniform(0, 0.05)))


def plateau(rng: Random) -> Instance:
    """Nearly everything costs nothing: few costs say where to go."""
    made = Builder("plateau", rng, 0.0)
    count, ways = int(rng.integers(2000, 3000)), 8
    for time in range(count):
        _, usage = _tensor(rng, ways)
        cost = np.where(rng.random(ways) < 0.02, 10**6, 0)
        cost[int(usage.argmax())] = 0
        planted = int(np.argsort(usage)[1])
        node = made.node(cost, usage, time, time + int(rng.integers(2, 90)), planted)
        for back in {1, int(rng.integers(1, 60))}:
            if back <= node:
                table = np.where(rng.random((ways, ways)) < 0.2, FORBIDDEN, 0)
                table[rng.random((ways, ways)) < 0.1] = 10**5
                made.edge(node - back, node, table)
    return made.finish("plateau")


def magnitudes(rng: Random) -> Instance:
    """Costs over twelve orders of magnitude, and now and then one of 10^17."""
    made = Builder("magnitudes", rng)
    count, ways = int(rng.integers(1000, 2000)), 6

    def drawn(shape: tuple[int, ...]) -> Ints:
        values = (10.0 ** rng.uniform(0, 12, shape)).astype(np.int64)
        values[rng.random(shape) < 0.02] = 10**17 + 7
        return values

    for time in range(count):
        cost = drawn((ways,))
        _, usage = _tensor(rng, ways)
        planted = int(rng.integers(ways))
        node = made.node(cost, usage, time, time + int(rng.integers(2, 40)), planted)
        made.costs[node][planted] %= 10**9
        for back in {1, int(rng.integers(1, 30))}:
            if back <= node:
                table = drawn((ways, ways))
                table[made.planted[node - back], planted] %= 10**9
                made.edge(node - back, node, table)
    return made.finish("magnitudes", 0.01)


def single(rng: Random) -> Instance:
    """Very many nodes, most with one strategy."""
    made = Builder("single", rng)
    count = int(rng.integers(15_000, 25_000))
    for time in range(count):
        ways = 1 if rng.random() < 0.8 else 8
        cost, usage = _tensor(rng, ways)
        node = made.node(
            cost, usage, time, time + int(rng.integers(1, 30)), int(rng.integers(ways))
        )
        for back in {1, int(rng.integers(1, 200))}:
            if back <= node:
                table = _reshard(rng, len(made.costs[node - back]), ways, 0.1)
                made.edge(node - back, node, table)
    return made.finish("single", 0.01)


def parallel(rng: Random) -> Instance:
    """Many edges between the same two nodes, in both directions, and components that only share
    the memory."""
    made = Builder("parallel", rng)
    ways = 7
    for _ in range(int(rng.integers(150, 250))):
        start = int(rng.integers(0, 100))
        nodes = [
            made.node(*_tensor(rng, ways), start + i, start + i + 20, int(rng.integers(ways)))
            for i in range(int(rng.integers(4, 12)))
        ]
        for one, two in itertools.pairwise(nodes):
            for _ in range(int(rng.integers(1, 4))):
                pair = (one, two) if rng.random() < 0.5 else (two, one)
                made.edge(*pair, _reshard(rng, ways, ways, 0.15))
    return made.finish("parallel")


def grid(rng: Random) -> Instance:
    """A wide grid: the bound of trees is loose, tables of elimination are large."""
    made = Builder("grid", rng)
    rows, columns, ways = int(rng.integers(20, 30)), 40, 5
    for place in range(rows * columns):
        cost, usage = _tensor(rng, ways)
        begin = place // columns * 3
        made.node(cost, usage, begin, begin + 4, int(rng.integers(ways)))
        if place % columns:
            made.edge(place - 1, place, rng.integers(0, 10**6, (ways, ways)))
        if place >= columns:
            made.edge(place - columns, place, rng.integers(0, 10**6, (ways, ways)))
    return made.finish("grid")


FAMILIES: dict[str, Callable[[Random], Instance]] = {
    "chain": chain, "experts": experts, "residual": residual, "fan-out": fan_out, "dense": dense,
    "knapsack": knapsack, "constrained": constrained, "many-ways": many_ways, "plateau": plateau,
    "magnitudes": magnitudes, "single": single, "parallel": parallel, "grid": grid,
}  # fmt: skip


def planted(family: str, seed: int) -> Instance:
    """Return the family's problem of a seed. Even seeds are for tuning, odd ones for reporting."""
    place = list(FAMILIES).index(family)
    return FAMILIES[family](np.random.default_rng([place, seed]))


def scaled(problem: ContestProblem, factor: float) -> ContestProblem:
    """Return the problem with its limit times a factor."""
    assert problem.limit is not None
    return replace(problem, limit=int(problem.limit * factor))


def dropped(problem: ContestProblem, share: float, seed: int) -> ContestProblem:
    """Return the problem without a share of the strategies; of least usage each node keeps one."""
    rng = np.random.default_rng(seed)
    keep = rng.random(len(problem.cost)) >= share
    for a, b in zip(problem.first[:-1].tolist(), problem.first[1:].tolist(), strict=True):
        keep[a + int(problem.usage[a:b].argmin())] = True
    parts = [keep[a:b] for a, b in zip(problem.first[:-1], problem.first[1:], strict=True)]
    cut: dict[tuple[int, bytes, bytes], int] = {}
    pool: list[Ints] = []
    size = 0
    table = np.zeros(len(problem.table), dtype=np.int64)
    for edge, ((one, two), start) in enumerate(
        zip(problem.ends.tolist(), problem.table.tolist(), strict=True)
    ):
        key = (start, parts[one].tobytes(), parts[two].tobytes())
        if key not in cut:
            rows, columns = len(parts[one]), len(parts[two])
            whole = problem.cells[start : start + rows * columns].reshape(rows, columns)
            pool.append(whole[np.ix_(parts[one], parts[two])].ravel())
            cut[key] = size
            size += len(pool[-1])
        table[edge] = cut[key]
    sizes = np.add.reduceat(keep, problem.first[:-1])
    return replace(
        problem,
        first=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        cost=problem.cost[keep],
        usage=problem.usage[keep],
        table=table,
        cells=np.concatenate(pool),
    )


def forbidden(problem: ContestProblem, share: float, seed: int) -> ContestProblem:
    """Return the problem with a further share of the pairs that cost something forbidden; of every
    row and column of a table the cheapest pair stays."""
    rng = np.random.default_rng(seed)
    sizes = np.diff(problem.first)
    keep = rng.random(len(problem.cells)) >= share
    tables = {
        (int(start), int(sizes[one]), int(sizes[two]))
        for (one, two), start in zip(problem.ends, problem.table, strict=True)
    }
    for start, rows, columns in sorted(tables):
        part = slice(start, start + rows * columns)
        whole, kept = problem.cells[part].reshape(rows, columns), keep[part].reshape(rows, columns)
        kept[np.arange(rows), whole.argmin(axis=1)] = True
        kept[whole.argmin(axis=0), np.arange(columns)] = True
    return replace(problem, cells=np.where(keep, problem.cells, FORBIDDEN))


def shuffled(problem: ContestProblem, seed: int) -> ContestProblem:
    """Return the same problem with nodes, strategies' edges and the ends of edges in another order."""
    rng = np.random.default_rng(seed)
    count = len(problem.intervals)
    order = rng.permutation(count)
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    sizes = np.diff(problem.first)
    starts: list[int] = problem.first.tolist()
    rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order.tolist()])
    edges = rng.permutation(len(problem.ends))
    return replace(
        problem,
        name="shuffled",
        first=np.concatenate([[0], np.cumsum(sizes[order])]).astype(np.int64),
        cost=problem.cost[rows],
        usage=problem.usage[rows],
        intervals=problem.intervals[order],
        ends=place[problem.ends[edges]],
        table=problem.table[edges],
    )


def variation(problem: ContestProblem, letter: str, kind: str, amount: float) -> Instance:
    """Return a given problem varied: its limit scaled, strategies dropped, pairs forbidden, or all
    its orders shuffled."""
    family = f"{letter} {kind} {amount:g}"
    if kind == "limit":
        return Instance(family=family, problem=scaled(problem, amount), known=None)
    if kind == "drop":
        return Instance(family=family, problem=dropped(problem, amount, 1), known=None)
    if kind == "forbid":
        return Instance(family=family, problem=forbidden(problem, amount, 1), known=None)
    return Instance(family=family, problem=shuffled(problem, 1), known=None)
