"""Make a wide problem smaller without losing a best solution.

Dominated and forbidden strategies go, nodes with one strategy left become costs of their neighbours,
nodes whose memory does not depend on their choice and that have at most two neighbours are
eliminated unless that makes a table larger than all given ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solve.buckets import MAX_CELLS
from shardwright.planner.solve.tables import joined
from shardwright.planner.solve.wide.net import net_of
from shardwright.planner.solve.wide.problem import Floats, Ints, WideProblem
from shardwright.planner.solve.wide.prune import prune


@dataclass(frozen=True, slots=True)
class Step:
    """An eliminated node: its best strategy by those of its neighbours."""

    node: int
    near: tuple[int, ...]
    best: NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, eq=False)
class Compact:
    """A smaller problem, what is spent in every case, and how to read its solutions.

    Node ``i`` of the smaller problem is ``nodes[i]`` of the original one, its strategies are
    ``strategies[first[i]:first[i + 1]]``. ``settled`` has what is decided already. ``is_impossible``
    says that forbidden strategies and pairs leave some node none.
    """

    problem: WideProblem
    constant: float
    nodes: Ints
    strategies: Ints
    settled: Ints
    steps: tuple[Step, ...]
    is_impossible: bool

    def expand(self, choice: Ints) -> Ints:
        """Return the original nodes' strategies for a solution of the smaller problem."""
        full = self.settled.copy()
        full[self.nodes] = self.strategies[self.problem.first[:-1] + choice]
        for step in reversed(self.steps):
            full[step.node] = step.best[tuple(full[list(step.near)])]
        return full


def compact(problem: WideProblem) -> Compact:
    """Return the problem, which has one edge per pair of nodes, the lower first, without what cannot matter. Exact."""
    work = _Work(problem)
    work.restrict()
    work.settle(range(work.count))
    work.eliminate()
    return work.finish()


class _Pool:
    """Tables one behind the other, equal ones once."""

    def __init__(self) -> None:
        self.parts: list[Floats] = []
        self._size = 0
        self._starts: dict[bytes, int] = {}
        self._known: dict[int, int] = {}  # by the table itself, which is quicker

    def start_of(self, table: Floats) -> int:
        """Return where a table, which must live on, begins."""
        if id(table) not in self._known:
            cells = table.ravel()
            key = cells.tobytes()
            if key not in self._starts:
                self._starts[key] = self._size
                self.parts.append(cells)
                self._size += table.size
            self._known[id(table)] = self._starts[key]
        return self._known[id(table)]


class _Work:
    """A problem while it shrinks: tables by node and neighbour, both ways."""

    def __init__(self, problem: WideProblem) -> None:
        self.problem = problem
        self.count = problem.num_nodes
        self.constant = 0.0
        self.base = problem.base.copy()
        self.settled = np.zeros(self.count, dtype=np.int64)
        self.steps: list[Step] = []
        self.gone = np.zeros(self.count, dtype=bool)
        self.largest = int(problem.sizes[problem.ends].prod(axis=1).max(initial=1))

    def restrict(self) -> None:
        """Drop strategies that no best solution needs, and lay the problem out node by node."""
        problem = self.problem
        keep = prune(net_of(problem, capped=False))
        self.is_impossible = not np.logical_or.reduceat(keep, problem.first[:-1]).all()
        if self.is_impossible:
            keep[:] = True  # nothing is allowed; then the least forbidden is looked for
        parts = [slice(a, b) for a, b in zip(problem.first[:-1], problem.first[1:], strict=True)]
        self.kept = [np.flatnonzero(keep[part]) for part in parts]
        self.cost = [problem.cost[part][keep[part]] for part in parts]
        self.usage = [problem.usage[part][keep[part]] for part in parts]
        patterns: dict[bytes, int] = {}
        pattern = [patterns.setdefault(keep[part].tobytes(), len(patterns)) for part in parts]
        cut: dict[tuple[int, int, int], Floats] = {}
        self.near: list[dict[int, Floats]] = [{} for _ in parts]
        ends: list[tuple[int, int]] = problem.ends.tolist()
        starts: list[int] = problem.table.tolist()
        for (one, two), start in zip(ends, starts, strict=True):
            key = (start, pattern[one], pattern[two])
            if key not in cut:
                cut[key] = self._cut(one, two, start)
            self.near[one][two] = cut[key]
            self.near[two][one] = cut[key].T

    def _cut(self, one: int, two: int, start: int) -> Floats:
        """Return the table of an edge with the strategies that are kept."""
        rows, columns = int(self.problem.sizes[one]), int(self.problem.sizes[two])
        table = self.problem.cells[start : start + rows * columns].reshape(rows, columns)
        if len(self.kept[one]) < rows or len(self.kept[two]) < columns:
            table = table[np.ix_(self.kept[one], self.kept[two])]
        return table

    def settle(self, nodes: Iterable[int]) -> None:
        """Turn nodes with one strategy into costs of their neighbours."""
        for node in nodes:
            usage = self.usage[node]
            if usage.min() == usage.max() and usage[0] and not self.gone[node]:
                self.base[self.problem.begin[node] : self.problem.end[node]] += usage[0]
                self.usage[node] = np.zeros(len(usage))
            if len(usage) > 1 or self.gone[node]:
                continue
            self.constant += float(self.cost[node][0])
            self.settled[node] = self.kept[node][0]
            self.gone[node] = True
            for other, table in self.near[node].items():
                self.cost[other] = self.cost[other] + table[0]
                del self.near[other][node]
            self.near[node] = {}

    def eliminate(self) -> None:
        """Eliminate nodes of constant usage with at most two neighbours, the fewest first."""
        pending = [n for n in range(self.count) if self._can_go(n)]
        while pending:
            node = pending.pop()
            if not self._can_go(node):
                continue
            near = tuple(self.near[node])
            total = self._around(node, near)
            least, best = total.min(axis=-1), self.kept[node][total.argmin(axis=-1)]
            self._forget(node, near, best)
            if not near:
                self.constant += float(least)
            elif len(near) == 1:
                self.cost[near[0]] = self.cost[near[0]] + least
            else:
                one, two = near
                table = self.near[one].get(two)
                table = least if table is None else table + least
                self.near[one][two], self.near[two][one] = table, table.T
            pending += [other for other in near if self._can_go(other)]

    def _around(self, node: int, near: tuple[int, ...]) -> Floats:
        """Return what a node and its edges cost, by its neighbours' strategies and, last, its own."""
        last = len(near)  # near nodes are the variables 0, 1 of the tables
        sizes = [len(self.cost[other]) for other in (*near, node)]
        parts = [((last,), self.cost[node])]
        parts += [((axis, last), self.near[other][node]) for axis, other in enumerate(near)]
        return joined(sizes, parts, tuple(range(last + 1)))

    def _can_go(self, node: int) -> bool:
        if self.gone[node] or len(self.near[node]) > 2 or self.usage[node].any():
            return False
        cells = math.prod(len(self.cost[other]) for other in self.near[node])
        return cells <= self.largest and cells * len(self.cost[node]) <= MAX_CELLS

    def _forget(self, node: int, near: tuple[int, ...], best: NDArray[np.intp]) -> None:
        """Remove a node, noting its best strategy by its neighbours' original strategies."""
        full = np.zeros([int(self.problem.sizes[other]) for other in near], dtype=np.intp)
        full[np.ix_(*(self.kept[other] for other in near))] = best
        self.steps.append(Step(node, near, full))
        self.gone[node] = True
        for other in near:
            del self.near[other][node]
        self.near[node] = {}

    def finish(self) -> Compact:
        """Return what is left, in columns."""
        nodes = np.flatnonzero(~self.gone)
        place = {int(node): index for index, node in enumerate(nodes)}
        pool = _Pool()
        ends: list[tuple[int, int]] = []
        tables: list[int] = []
        edges = [(n, other, t) for n in nodes.tolist() for other, t in self.near[n].items()]
        for node, other, table in edges:
            if node < other:
                ends.append((place[node], place[other]))
                tables.append(pool.start_of(table))
        sizes = [len(self.cost[node]) for node in nodes]
        first = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        smaller = WideProblem(
            first=first,
            cost=_joined([self.cost[node] for node in nodes]),
            usage=_joined([self.usage[node] for node in nodes]),
            begin=self.problem.begin[nodes],
            end=self.problem.end[nodes],
            ends=np.array(ends, dtype=np.int64).reshape(-1, 2),
            table=np.array(tables, dtype=np.int64),
            cells=_joined(pool.parts),
            limit=self.problem.limit,
            base=self.base,
        )
        return Compact(
            problem=smaller,
            constant=self.constant,
            nodes=nodes,
            strategies=np.concatenate([np.zeros(0, np.intp), *(self.kept[n] for n in nodes)]),
            settled=self.settled,
            steps=tuple(self.steps),
            is_impossible=self.is_impossible,
        )


def _joined(parts: list[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *parts])
