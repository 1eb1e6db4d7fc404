"""The core of a network that is too wide to eliminate, minimised between certified bounds.

Few-valued variables that touch very much (what a block makes again in backward) are tried value by
value: with them, messages say little. Of the rest, what makes no table over more than two others is
eliminated exactly. What is left then goes to the dual decomposition, a table over three variables as
a node that chooses for all of them and must agree with each; what the bound excludes is forbidden,
until what is left open can be eliminated after all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import InputError
from shardwright.planner.solve.buckets import MAX_CELLS, Floats, Scope, join, neighbours, plan
from shardwright.planner.solve.tables import Entry, eliminate, merged
from shardwright.planner.solve.wide.compact import compact
from shardwright.planner.solve.wide.descent import REGION_NODES, Descent, capped_cost
from shardwright.planner.solve.wide.dual import PATIENCE, SLIGHT, Dual
from shardwright.planner.solve.wide.net import BIG, FEW, net_of
from shardwright.planner.solve.wide.problem import Ints, WideProblem
from shardwright.planner.solve.wide.region import MOST_AROUND, room_of

# Hubs touch more others than a variable of a region may (``MOST_AROUND``), and have at most so many joint values.
MOST_VALUES = 16
# A variable is eliminated if that makes a table over so many others: messages go between two.
MAX_OTHERS = 2
# Costs become whole numbers of which the largest possible sum is about this.
RANGE = 2.0**42


@dataclass(frozen=True, slots=True)
class Bracketed:
    """A choice of every variable, and the bound that no choice's cost can be below."""

    picks: Ints
    bound: float


class Core:
    """A network's scopes, ready to be minimised for many costs of its tables."""

    def __init__(self, sizes: Sequence[int], scopes: Sequence[Scope]) -> None:
        self._sizes, self._whole = sizes, list(scopes)
        self._hubs = _hubs(sizes, scopes)
        self._scopes = [tuple(v for v in scope if v not in self._hubs) for scope in scopes]
        self._order: list[int] = []
        near = neighbours(len(sizes), self._scopes)
        pending = set[int]().union(*self._scopes)
        while simple := [v for v in sorted(pending) if self._is_simple(v, near[v])]:
            for variable in simple:
                if self._is_simple(variable, near[variable]):
                    pending.discard(variable)
                    self._order.append(variable)
                    join(near, variable)
        self._left = sorted(pending)

    def _is_simple(self, variable: int, others: set[int]) -> bool:
        cells = self._sizes[variable] * math.prod(self._sizes[v] for v in others)
        return len(others) <= MAX_OTHERS and cells <= MAX_CELLS

    def minimise(
        self, tables: Sequence[Floats], stopped: Callable[[], bool] = lambda: False
    ) -> Bracketed:
        """Choose cheaply, given the tables' costs (shaped by their scopes, infinite: forbidden).

        Where nothing is allowed the bound is infinite; raises InputError where that is unknown. Once ``stopped``
        the first choice found will do, and what it costs may be further from the bound.
        """
        best, bound, picks = math.inf, math.inf, np.zeros(len(self._sizes), np.int64)
        joint = itertools.product(*(range(self._sizes[hub]) for hub in self._hubs))
        parts = [(values, self._given(tables, values)) for values in joint]
        # What may be cheapest comes first: of what follows it need only be proved that it costs no less.
        for values, own in sorted(parts, key=lambda part: sum(map(_least, part[1]))):
            if math.isfinite(best) and stopped():
                bound = min(bound, sum(map(_least, tables)))
                break
            found = self._with_hubs(own, best, stopped)
            cost = sum(
                float(table[tuple(found.picks[v] for v in scope)])
                for table, scope in zip(own, self._scopes, strict=False)
            )
            bound = min(bound, found.bound)
            if cost < best:
                best, picks = cost, found.picks
                picks[list(self._hubs)] = values
        if math.isinf(best) and not math.isinf(bound):
            raise InputError(
                "no choice was found that is allowed in a graph too wide to search whole"
            )
        return Bracketed(picks, min(bound, best))

    def _given(self, tables: Sequence[Floats], values: tuple[int, ...]) -> list[Floats]:
        """Return what tables say where the hubs have these values."""
        fixed = dict(zip(self._hubs, values, strict=True))
        return [
            table[tuple(fixed.get(v, slice(None)) for v in scope)]
            for table, scope in zip(tables, self._whole, strict=True)
        ]

    def _with_hubs(
        self, tables: list[Floats], upper: float, stopped: Callable[[], bool]
    ) -> Bracketed:
        """Choose for all but the hubs; ``bound`` is none for what costs ``upper`` or more."""
        scoped = zip(self._scopes, tables, strict=True)
        buckets, left = eliminate(self._sizes, scoped, self._order)
        constant = sum(float(entry.table) for entry in left if not entry.scope)
        picks = np.zeros(len(self._sizes), np.int64)
        bound = constant + self._choose_rest(left, upper - constant, picks, stopped)
        for bucket in reversed(buckets):
            place = [slice(None) if v == bucket.variable else picks[v] for v in bucket.scope]
            picks[bucket.variable] = bucket.table[tuple(place)].argmin()
        return Bracketed(picks, bound)

    def _choose_rest(
        self, left: Sequence[Entry], upper: float, picks: Ints, stopped: Callable[[], bool]
    ) -> float:
        """Choose for the variables that are left; return the bound of their tables' cost."""
        if not self._left:
            return 0.0
        tables = dict(merged((entry.scope, entry.table) for entry in left if entry.scope))
        if not all(np.isfinite(table).any() for table in tables.values()):
            return math.inf
        whole, scale, shift = _whole(tables)
        problem = _wide(self._left, self._sizes, whole)
        choice, bound = minimise(problem, (upper - shift) * scale, stopped)
        picks[self._left] = choice[: len(self._left)]
        return bound / scale + shift


def _hubs(sizes: Sequence[int], scopes: Sequence[Scope]) -> tuple[int, ...]:
    near = neighbours(len(sizes), scopes)
    hubs: list[int] = []
    count = 1
    for variable in sorted(range(len(sizes)), key=lambda v: (-len(near[v]), v)):
        if len(near[variable]) > MOST_AROUND and 1 < sizes[variable] * count <= MOST_VALUES:
            hubs.append(variable)
            count *= sizes[variable]
    return tuple(sorted(hubs))


def _whole(tables: dict[Scope, Floats]) -> tuple[dict[Scope, Floats], float, float]:
    """Return tables as whole numbers of at least 0, as the dual decomposition takes them, with what these
    were multiplied by after what was taken off."""
    least = {scope: _least(table) for scope, table in tables.items()}
    tables = {scope: table - least[scope] for scope, table in tables.items()}
    most = sum(float(table[np.isfinite(table)].max(initial=0.0)) for table in tables.values())
    scale = RANGE / most if most > 0 else 1.0
    whole = {scope: np.floor(table * scale) for scope, table in tables.items()}
    return whole, scale, sum(least.values())


def _least(table: Floats) -> float:
    least = float(table.min(initial=math.inf))
    return least if least < math.inf else 0.0


def minimise(
    problem: WideProblem, upper: float, stopped: Callable[[], bool] = lambda: False
) -> tuple[Ints, float]:
    """Choose cheaply in a problem whose memory does not matter; return the choice and a bound.

    What costs ``upper`` or more need not be bounded. Costs are whole numbers. Once ``stopped`` a choice that is
    allowed is enough.
    """
    smaller = compact(problem)
    own, constant = smaller.problem, smaller.constant
    choice = np.zeros(own.num_nodes, np.int64)
    if not own.num_nodes:
        return smaller.expand(choice), constant
    net, dual = net_of(own), Dual(own, net_of(own))
    room = room_of(own.num_nodes, 8_000_000)
    best, limit = math.inf, upper - constant
    for turn in range(FEW):
        _advance(dual, min(best, limit), stopped if not turn else lambda: False)
        if dual.bound >= limit * (1 - SLIGHT):
            break
        *_, proposal = dual.propose(FEW)  # the one on which the messages have settled
        descent = Descent(own, net, room, proposal, turn)
        descent.round(0.0, REGION_NODES)
        best, choice = _cheaper(own, (best, choice), descent.choice.copy())
        least = min(best, limit)
        if dual.bound >= least * (1 - SLIGHT) or (best < BIG and stopped()):
            break
        exact = _open(own, dual.allowed & (own.cost < BIG))
        if exact is not None:
            best, choice = _cheaper(own, (best, choice), exact)
            dual.bound = min(best, limit)
            break
    return smaller.expand(choice), constant + min(dual.bound, best, limit)


def _cheaper(problem: WideProblem, known: tuple[float, Ints], choice: Ints) -> tuple[float, Ints]:
    """Return a choice behind its cost, if that is less than that of the one known."""
    cost = capped_cost(problem, choice)
    return (cost, choice) if cost < known[0] else known


def _advance(dual: Dual, least: float, stopped: Callable[[], bool]) -> None:
    """Raise a bound until its steps get smaller, or it is as good as the cost of what is known."""
    for _ in range(2 * PATIENCE):  # steps get smaller once
        if stopped() or dual.bound >= least * (1 - SLIGHT):
            break
        dual.advance(least if least < BIG else math.inf)


def _open(problem: WideProblem, allowed: NDArray[np.bool_]) -> Ints | None:
    """Return the cheapest of the allowed choices, or None if those still are too many."""
    options: list[Ints] = [
        np.flatnonzero(allowed[a:b]) for a, b in itertools.pairwise(problem.first.tolist())
    ]
    sizes = [len(one) for one in options]
    if not all(sizes):
        return None
    ends: list[list[int]] = problem.ends.tolist()
    scopes: list[Scope] = [*((node,) for node in range(problem.num_nodes)), *map(tuple, ends)]
    buckets = plan(tuple(sizes), tuple(scopes))
    if buckets is None:
        return None
    parts = [problem.cost[a + one] for a, one in zip(problem.first.tolist(), options, strict=False)]
    for (one, two), begin in zip(ends, problem.table.tolist(), strict=True):
        rows = begin + options[one][:, None] * int(problem.sizes[two])
        parts.append(problem.cells[rows + options[two]].ravel())
    picks = np.zeros(problem.num_nodes, np.int32)
    length = sum(map(len, parts))
    cells = np.empty(
        length + buckets.num_messages
    )  # many, which are only written where they are used
    np.concatenate(parts, out=cells[:length])
    buckets.minimise(cells, picks)
    return np.array([one[pick] for one, pick in zip(options, picks, strict=True)], np.int64)


def _agreeing(sizes: Sequence[int], table: Floats) -> list[Floats]:
    """Return, for each axis of a table, which choices of it go with which of the allowed cells: 0, others
    are infinite."""
    joint = np.argwhere(np.isfinite(table))
    return [
        np.where(joint[:, axis] == np.arange(size)[:, None], 0.0, np.inf)
        for axis, size in enumerate(sizes)
    ]


def _wide(left: Sequence[int], sizes: Sequence[int], tables: dict[Scope, Floats]) -> WideProblem:
    """Write tables as nodes and edges: variables first, then a node per table of more than two."""
    place = {variable: node for node, variable in enumerate(left)}
    costs = [np.zeros(sizes[variable]) for variable in left]
    edges: list[tuple[int, int, Floats]] = []
    for scope, table in tables.items():
        if len(scope) == 1:
            costs[place[scope[0]]] += table
        elif len(scope) == 2:
            edges.append((place[scope[0]], place[scope[1]], table))
        else:
            agreeing = _agreeing([sizes[v] for v in scope], table)
            pairs = zip(scope, agreeing, strict=True)
            edges += [(place[variable], len(costs), one) for variable, one in pairs]
            costs.append(table[np.isfinite(table)])
    return WideProblem.free(costs, edges)
