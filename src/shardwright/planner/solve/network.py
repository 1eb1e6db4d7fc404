"""A network of decisions with several kinds of cost, prepared for repeated exact minimisation under any
weighting of them.

By bucket elimination; where its tables would be too large, between certified bounds (``core``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.remember import KEPT
from shardwright.planner.solve.buckets import Floats, Ints, Scope, num_cells, strides
from shardwright.planner.solve.buckets import plan as planned
from shardwright.planner.solve.core import Core
from shardwright.planner.solve.exchange import Exchange
from shardwright.planner.solve.tables import merged


@dataclass(frozen=True, eq=False)
class Minima:
    """Per mix of the kinds: the least cost, its choices, and their cost in every kind, or in seconds and bytes.

    In a network too wide to eliminate ``values`` are bounds, which the choices need not reach.
    """

    values: Floats
    assignments: NDArray[np.int32]
    totals: Floats

    @property
    def seconds(self) -> Floats:
        """The first cost of every choice."""
        return self.totals[:, 0]

    @property
    def bytes(self) -> Floats:
        """The second one, where there are two."""
        return self.totals[:, 1]

    def seen(self, views: Floats) -> Minima:
        """Return the same with kinds added up, in every row of views by its weights."""
        infinite = np.isinf(self.seconds)
        totals = np.where(infinite[:, None], 0.0, self.totals) @ views.T
        totals[infinite, 0] = np.inf
        return replace(self, totals=totals)


class Network:
    """Variables and tables, whose dominated choices are dropped, with a planned elimination.

    The preparation is exact for every mix with no negative part; solving changes nothing. Kind 0 is
    infinite where choices are forbidden, the others are finite.
    """

    def __init__(self, sizes: Sequence[int], tables: Sequence[tuple[Scope, Floats]]) -> None:
        whole = merged(tables)
        self._allowed = undominated(sizes, whole)
        kept = merged(_restricted(sizes, table, self._allowed) for table in whole)
        self._sizes = tuple(map(len, self._allowed))
        self._spelling = np.concatenate([*self._allowed, np.zeros(0)]).astype(np.int32)
        self._begin = np.cumsum([0, *self._sizes])[:-1]
        self._columns, self._base = flat(kept)
        self._is_forbidden = np.isinf(self._columns[0])
        self._forbidden = np.flatnonzero(self._is_forbidden)
        self._columns[0, self._forbidden] = 0.0
        self._scopes = [scope for scope, _ in kept]
        self._places = Places(self._sizes, self._scopes, self._base)
        self._fixed = [int(self._base[n]) for n, scope in enumerate(self._scopes) if not scope]
        self._plan = planned(self._sizes, tuple(self._scopes))
        # What was found of mixes: several views of a network have some in common.
        self._known: dict[bytes, tuple[float, NDArray[np.int32]]] = {}

    @property
    def is_wide(self) -> bool:
        """Whether minima are only bracketed: some table of the elimination would be too large."""
        return self._plan is None

    @cached_property
    def _core(self) -> Core:
        return Core(self._sizes, self._scopes)

    def solve(self, mixes: Floats, stopped: Callable[[], bool] = lambda: False) -> Minima:
        """Minimise ``sum(mixes[i] * kinds)`` for every i, exactly unless the network is wide, and then no better
        than is known once ``stopped``.

        Ties go to the lower choice of the variable eliminated later, so the answer is
        deterministic. Raises InputError where a wide network has no choice that is known to be
        allowed.
        """
        picks = np.zeros((len(mixes), len(self._sizes)), np.int32)
        values = np.zeros(len(mixes))
        base, plan = self._columns.shape[1], self._plan
        cells = np.empty(base + (plan.num_messages if plan else 0))
        for row, mix in enumerate(mixes):
            if (known := self._known.get(mix.tobytes())) is not None:
                values[row], picks[row] = known
                continue
            np.dot(mix, self._columns, out=cells[:base])
            cells[self._forbidden] = np.inf
            if plan is None:
                found = self._core.minimise(self._shaped(cells), stopped)
                picks[row], values[row] = found.picks, found.bound
            else:
                values[row] = cells[self._fixed].sum() + plan.minimise(cells, picks[row])
            self._known[mix.tobytes()] = float(values[row]), picks[row]
        return Minima(values, self._spelled_out(picks), self._totals(picks))

    def exchanges(self, views: Floats) -> Exchange:
        """Return exchanges of choices that make the first view small and keep the second within limits."""
        seconds, memory = views @ self._columns
        seconds[self._forbidden] = np.inf
        return Exchange(self._sizes, self._scopes, self._shaped(seconds), self._shaped(memory))

    def exchange(
        self, exchanges: Exchange, assignment: Sequence[int], limit: float
    ) -> Minima | None:
        """Return a choice near another one within a limit; None if exchanges lead nowhere."""
        picks = [np.searchsorted(*pair) for pair in zip(self._allowed, assignment, strict=True)]
        found = exchanges.within(np.array(picks, np.int64), limit)
        if found is None:
            return None
        chosen = found[None].astype(np.int32)
        return Minima(exchanges.costs(found)[:1], self._spelled_out(chosen), self._totals(chosen))

    def _shaped(self, cells: Floats) -> list[Floats]:
        return [
            cells[self._base[n] : self._base[n + 1]].reshape([self._sizes[v] for v in scope])
            for n, scope in enumerate(self._scopes)
        ]

    def _totals(self, picks: NDArray[np.int32]) -> Floats:
        """Return the cost of choices in every kind, infinite in kind 0 where they are forbidden."""
        places = self._places.of(picks)
        totals = self._columns[:, places].sum(axis=2).T
        totals[self._is_forbidden[places].any(axis=1), 0] = np.inf
        return totals

    def _spelled_out(self, picks: NDArray[np.int32]) -> NDArray[np.int32]:
        return self._spelling[self._begin + picks]


class Elimination:
    """A network seen as two costs, each a sum of its kinds with weights of their own.

    Many such views share one network, which was prepared once for all of them.
    """

    def __init__(self, network: Network, seconds: Floats, memory: Floats) -> None:
        self._network = network
        self._views = np.stack([seconds, memory])

    def solve(self, weights: Floats, stopped: Callable[[], bool] = lambda: False) -> Minima:
        """Minimise ``weights[i, 0] * seconds + weights[i, 1] * bytes`` for every i; see ``Network.solve``."""
        return self._network.solve(weights @ self._views, stopped).seen(self._views)

    def exchange(self, assignment: tuple[int, ...], limit: float) -> Minima | None:
        """Return a choice within a limit of bytes, reached from another by changing one variable at a
        time; ``values`` are its seconds. None if none is.
        """
        found = self._network.exchange(self._exchanges, assignment, limit)
        return None if found is None else found.seen(self._views)

    @cached_property
    def _exchanges(self) -> Exchange:
        return self._network.exchanges(self._views)


class Places:
    """Where the cells of choices lie in tables one after another."""

    def __init__(self, sizes: Sequence[int], scopes: Sequence[Scope], base: Ints) -> None:
        moves = [strides([sizes[v] for v in scope]) if scope else [] for scope in scopes]
        lengths = [len(scope) for scope in scopes]
        self._base = base[: len(scopes)]
        self._several = np.flatnonzero(lengths)
        self._variables = np.array([v for scope in scopes for v in scope], np.int64)
        self._moves = np.array([move for several in moves for move in several], np.int64)
        self._begin = np.cumsum([0, *lengths])[self._several]

    def of(self, picks: NDArray[np.int32]) -> Ints:
        """Return the cell of every table, a row per choice."""
        places = np.tile(self._base, (len(picks), 1))
        steps = picks[:, self._variables] * self._moves
        places[:, self._several] += np.add.reduceat(steps, self._begin, axis=1)
        return places


# -- preparation -----------------------------------------------------------------------------------


def flat(tables: Sequence[tuple[Scope, Floats]]) -> tuple[Floats, Ints]:
    """Lay tables one after another; also return where each begins."""
    lengths = [math.prod(columns.shape[1:]) for _, columns in tables]
    kinds = len(tables[0][1]) if tables else 2
    parts = [columns.reshape(kinds, -1) for _, columns in tables]
    base = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return np.concatenate(parts, axis=1) if parts else np.zeros((kinds, 0)), base


def undominated(
    sizes: Sequence[int], tables: Sequence[tuple[Scope, Floats]]
) -> list[NDArray[np.intp]]:
    """Return, per variable, the choices that some mix may need.

    A choice goes when another is nowhere worse in any kind whatever the neighbours choose (of
    equals the first stays), and repeats until nothing goes.
    """
    from shardwright.planner.solve.kernels import prune

    columns, _ = flat(tables)
    first, rows = _touching(tuple(sizes), tuple([scope for scope, _ in tables]))
    start = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    kept = np.concatenate([np.arange(size) for size in sizes] or [np.zeros(0, np.int64)])
    if len(kept):
        prune(columns, first, rows, (kept, start))
    found: list[NDArray[np.intp]] = []
    for variable in range(len(sizes)):
        mine = kept[start[variable] : start[variable + 1]]
        is_touched = first[variable] < first[variable + 1]
        found.append(mine[mine >= 0] if is_touched else mine[:1])
    return found


@lru_cache(maxsize=KEPT)
def _touching(sizes: tuple[int, ...], scopes: tuple[Scope, ...]) -> tuple[Ints, tuple[Ints, ...]]:
    """Return where every variable's tables are listed, and these as ``kernels.prune`` takes them."""
    moves = [strides([sizes[v] for v in scope]) for scope in scopes]
    base = [0, *accumulate([num_cells(sizes, scope) for scope in scopes])]
    mentions = [
        (variable, number, axis)
        for number, scope in enumerate(scopes)
        for axis, variable in enumerate(scope)
    ]
    begin: list[int] = [0]
    low: list[int] = []
    steps: list[int] = []
    near: list[int] = []
    near_strides: list[int] = []
    for _, number, axis in sorted(mentions):
        low.append(base[number])
        steps.append(moves[number][axis])
        for found, row in ((near, scopes[number]), (near_strides, moves[number])):
            found += [*row[:axis], *row[axis + 1 :]]
        begin.append(len(near))
    count = np.bincount([variable for variable, *_ in mentions], minlength=len(sizes))
    rows = tuple(np.array(row, np.int64) for row in (low, steps, begin, near, near_strides))
    return np.concatenate(([0], np.cumsum(count))).astype(np.int64), rows


def _restricted(
    sizes: Sequence[int], table: tuple[Scope, Floats], allowed: Sequence[NDArray[np.intp]]
) -> tuple[Scope, Floats]:
    """Keep the allowed choices; variables with one choice left are no longer in the scope."""
    scope, columns = table
    for axis, variable in enumerate(scope):
        if len(allowed[variable]) < sizes[variable]:
            columns = columns.take(allowed[variable], axis=axis + 1)
    kept = tuple(v for v in scope if len(allowed[v]) > 1)
    shape = (len(columns), *(len(allowed[v]) for v in kept))
    return kept, np.ascontiguousarray(columns).reshape(shape)
