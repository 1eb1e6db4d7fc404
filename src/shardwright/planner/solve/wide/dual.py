"""Sequential tree-reweighted message passing with prices on memory: a certified lower bound.

Memory enters by Lagrange multipliers, one per time point; for given prices what remains is a
pairwise energy, whose dual (tree-reweighted) bound TRW-S raises monotonically (Kolmogorov,
Convergent Tree-reweighted Message Passing, PAMI 2006, figure 3). Prices move along averaged
subgradients with Polyak's step. Every bound on the way is valid, so the best one is kept.
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shardwright.compiled import compiled, inner
from shardwright.planner.solve.wide.net import FEW, NEAR, Net
from shardwright.planner.solve.wide.problem import Floats, Ints, WideProblem, profile

FIRST_STEP = 0.1  # of Polyak's
SLIGHT = 1e-4  # of Polyak's step, or of a cost: less gains nothing, and something else is tried or all is good enough
PATIENCE = 25  # sweeps without a better bound before steps get smaller, and at fixed prices before a choice is taken
KEPT = 0.7  # of the last direction in the next, and of steps that gain nothing


class Messages:
    """Messages over a net; the ``choice`` that a sweep forth leaves, and the ``slack`` of one back. Memory is
    counted in limits."""

    def __init__(self, problem: WideProblem, net: Net) -> None:
        self.problem, self.net = problem, net
        self.messages = np.zeros(int(problem.sizes[problem.ends].sum()))
        self.choice = np.zeros(problem.num_nodes, dtype=np.int64)
        self.slack = np.zeros(len(problem.cost))
        self.node = np.repeat(np.arange(problem.num_nodes), problem.sizes)
        self.room = max(problem.limit, 1.0)
        self._usage = problem.usage / self.room

    def pass_on(self, multipliers: Floats) -> tuple[float, float]:
        """Sweep forth and back at these prices of memory over time; return the bound of either."""
        prefix = np.concatenate([[0.0], np.cumsum(multipliers)])
        price = (prefix[self.net.end] - prefix[self.net.begin])[self.node]
        values = self.net.cost + price * self._usage
        spent = float(multipliers @ ((self.problem.limit - self.problem.base) / self.room))
        rows = (self.net, values, self.messages, self.choice, self.slack)
        return sweep(*rows, True) - spent, sweep(*rows, False) - spent


class Dual(Messages):
    """Messages and prices; ``advance`` makes them better, ``bound`` is the best bound so far."""

    def __init__(self, problem: WideProblem, net: Net) -> None:
        super().__init__(problem, net)
        self.allowed = problem.cost < np.inf
        self._ceiling = np.inf
        most = float(problem.cost[self.allowed].sum())
        most += len(problem.table) * problem.cells.max(initial=0.0, where=problem.cells < np.inf)
        self._lower_ceiling(most)  # finite costs add up to no more
        self.multipliers = np.zeros(len(problem.base))
        self.best_multipliers = self.multipliers
        self.bound = -np.inf
        self.target = np.inf
        self.num_sweeps = 0
        self.is_settled = False  # whether the steps have once become tiny
        self._direction = np.zeros(len(problem.base))
        self._step = FIRST_STEP
        self._stale = self._run = 0

    def restart(self, allowed: NDArray[np.bool_], messages: Floats, multipliers: Floats) -> None:
        """Start again with these strategies, from these messages and prices."""
        self.allowed = allowed.copy()
        self.net.cost[:] = np.where(allowed, self.problem.cost, self._ceiling)
        self.messages[:] = messages
        self.multipliers = self.best_multipliers = multipliers
        self.bound = -np.inf
        self.num_sweeps = FEW
        self._direction[:] = 0.0
        self._step, self._stale, self._run = FIRST_STEP, 0, 0

    def prices(self) -> Floats:
        """Return prefix sums over time of the price of a unit of usage, at the best bound."""
        return np.concatenate([[0.0], np.cumsum(self.best_multipliers)]) / self.room

    def advance(self, upper: float) -> None:
        """Sweep forth and back once and move the prices. ``upper`` is a known cost, or infinite."""
        if self.num_sweeps == FEW or upper < self.target:
            self._lower_ceiling(2 * upper if upper < np.inf else 64 * self.target)
        bound = self._sweep(self.multipliers, upper)
        self.num_sweeps += 1
        self.target = min(self.target, self._finite_cost(), upper)
        self._stale += 1
        self._note(bound)
        if self._stale >= (PATIENCE if self._step <= FIRST_STEP else FEW):
            self._shorten()
        elif self.num_sweeps >= FEW:
            self._move_prices(bound)

    def _note(self, bound: float) -> None:
        """Keep a bound if it is the best. Where the optimum without a limit is far below that with it, Polyak's steps are
        far too short: after bounds in a row each better by next to nothing they grow, by what they shrink by else,
        and are given up sooner."""
        is_slow = bound - self.bound < NEAR * abs(bound)
        self._run = self._run + 1 if bound > self.bound and is_slow else 0
        if bound > self.bound:
            self.bound, self.best_multipliers, self._stale = bound, self.multipliers, 0
            if self._run >= FEW:
                self._step /= KEPT

    def _shorten(self) -> None:
        """Go back to the best prices with shorter steps; where these are tiny, begin again."""
        self.multipliers, self._stale = self.best_multipliers, 0
        self._step *= KEPT
        if self._step < SLIGHT:
            self._step, self.is_settled = FIRST_STEP, True
        self._direction[:] = 0.0

    def propose(self, num_sweeps: int) -> Iterator[Ints]:
        """Yield choices at the best prices, while the messages settle on them."""
        for _ in range(num_sweeps):
            self.bound = max(self.bound, self._sweep(self.best_multipliers, np.inf))
            yield self.choice.copy()

    def _sweep(self, multipliers: Floats, upper: float) -> float:
        """Return the bound after a sweep forth and back; forbid what costs ``upper`` or more."""
        before, bound = self.pass_on(multipliers)
        if upper < np.inf:
            # Costs are whole, so a better solution costs at most upper - 1.
            self.allowed &= before + self.slack <= upper - 1 + tolerance(upper)
            self.net.cost[~self.allowed] = self._ceiling
        return bound

    def _lower_ceiling(self, ceiling: float) -> None:
        """Cap what is forbidden, so that sums stay exact; the bound stays one.

        While the ceiling is above the optimum, no bound is lost either: costs are not negative.
        """
        if ceiling < self._ceiling:
            self._ceiling = max(ceiling, 1.0)
            for values in (self.net.cost, self.net.cells, self.messages):
                np.minimum(values, self._ceiling, out=values)

    def _finite_cost(self) -> float:
        costs = self.problem.costs(self.choice)
        return max(float(costs[costs < np.inf].sum()), self.bound)

    def _move_prices(self, bound: float) -> None:
        """Polyak's step along the smoothed violation, prices staying at least 0."""
        used = profile(self.problem, self.problem.usage[self.problem.first[:-1] + self.choice])
        excess = (used - self.problem.limit) / self.room
        self._direction = KEPT * self._direction + (1 - KEPT) * excess
        moving = (self.multipliers > 0) | (self._direction > 0)
        direction = np.where(moving, self._direction, 0.0)
        length = float(direction @ direction)
        if length > 0:
            # Far below the best bound, the true difference would throw the prices even further.
            short = self.target - max(bound, 0.5 * self.bound)
            short = max(short, 1e-3 * abs(self.target))
            moved = self.multipliers + self._step * short / length * direction
            self.multipliers = np.maximum(0.0, moved)


def tolerance(cost: float) -> float:
    """Return what rounding may have done to a sum of costs."""
    return max(1e-3, abs(cost) * 1e-10)


@compiled
def sweep(
    net: Net, values: Floats, messages: Floats, choice: Ints, slack: Floats, forward: bool
) -> float:
    """Update all messages in index order or against it; return the bound of this direction.

    Going forward, also choose every node's strategy given those before it and the messages of
    those after it. Going back, note in ``slack`` how much the bound would rise at least, over that
    of the way forth, if a node took a strategy: its min-marginal is exact in all its chains.
    """
    widest = (net.first[1:] - net.first[:-1]).max()
    total, local, told = np.empty(widest), np.empty(widest), np.empty(widest)
    bound = 0.0
    for place in range(len(net.begin)):
        node = place if forward else len(net.begin) - 1 - place
        size = net.first[node + 1] - net.first[node]
        share = _gather(net, values, messages, choice, node, total, local)
        if forward:
            choice[node] = local[:size].argmin()
        low = total[:size].min()
        bound += low
        for s in range(size):
            if not forward:
                slack[net.first[node] + s] = total[s] - low
            total[s] = (total[s] - low) * share
        bound = _tell(net, messages, node, forward, (total, local, told), bound)
    return bound


@inner
def _gather(
    net: Net,
    values: Floats,
    messages: Floats,
    choice: Ints,
    node: int,
    total: Floats,
    local: Floats,
) -> float:
    """Sum up what a node is told: by all into ``total``, with the earlier ones' choices instead
    of their messages into ``local``; return the share of it that each chain gets."""
    begin, size = net.first[node], net.first[node + 1] - net.first[node]
    for s in range(size):
        total[s] = local[s] = values[begin + s]
    before = after = 0
    for link in range(net.start[node], net.start[node + 1]):
        edge = net.around[link]
        if net.ends[edge, 0] == node:
            after += 1
            told = net.into[edge, 0]
            for s in range(size):
                total[s] += messages[told + s]
                local[s] += messages[told + s]
        else:
            before += 1
            told = net.into[edge, 1]
            row = net.table[edge] + choice[net.ends[edge, 0]] * size
            for s in range(size):
                total[s] += messages[told + s]
                local[s] += net.cells[row + s]
    return 1.0 / max(1, before, after)


@inner
def _tell(
    net: Net, messages: Floats, node: int, forward: bool, rows: tuple[Floats, Floats, Floats],
    bound: float,
) -> float:  # fmt: skip
    """Send messages along the edges of a node that lead on; return the bound, which they raise."""
    total, local, told = rows
    size = net.first[node + 1] - net.first[node]
    side = 0 if forward else 1
    for link in range(net.start[node], net.start[node + 1]):
        edge = net.around[link]
        if net.ends[edge, side] != node:
            continue
        if forward:
            _tell_later(net, messages, edge, size, total, told)
        else:
            _tell_earlier(net, messages, edge, size, total, local, told)
        other, target = net.ends[edge, 1 - side], net.into[edge, 1 - side]
        width = net.first[other + 1] - net.first[other]
        low = told[:width].min()
        bound += low
        for t in range(width):
            messages[target + t] = told[t] - low
    return bound


@inner
def _tell_later(
    net: Net, messages: Floats, edge: int, size: int, total: Floats, told: Floats
) -> None:
    """Minimise over the first end of an edge, for every strategy of the second."""
    other = net.ends[edge, 1]
    width, mine = net.first[other + 1] - net.first[other], net.into[edge, 0]
    for t in range(width):
        told[t] = np.inf
    for s in range(size):
        value = total[s] - messages[mine + s]
        row = net.table[edge] + s * width
        for t in range(width):
            told[t] = min(told[t], value + net.cells[row + t])


@inner
def _tell_earlier(
    net: Net, messages: Floats, edge: int, size: int, total: Floats, local: Floats, told: Floats
) -> None:
    """Minimise over the second end of an edge, for every strategy of the first."""
    other = net.ends[edge, 0]
    mine = net.into[edge, 1]
    for s in range(size):
        local[s] = total[s] - messages[mine + s]
    for t in range(net.first[other + 1] - net.first[other]):
        row = net.table[edge] + t * size
        low = np.inf
        for s in range(size):
            low = min(low, local[s] + net.cells[row + s])
        told[t] = low
