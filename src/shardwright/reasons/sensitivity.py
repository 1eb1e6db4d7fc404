"""Per decision of a plan the runner-up: the best plan that decides otherwise, and what it costs.

Within the plan's arrangement every choice has its price from one pass of min-marginals, at the price
that memory has there (the slope of the hull), so a runner-up that saves memory is credited for it. The
dearest and the nearest are simulated. Other arrangements are solved anew, and simulated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.explanation import Decision
from shardwright.core.strategy import Strategy
from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.model.context import Context
from shardwright.planner.model.problem import Problem
from shardwright.planner.search.candidates import Candidate, likely_weights
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.steering import CANDIDATES
from shardwright.planner.solve.frontier import TOLERANCE, hull, slope
from shardwright.planner.solve.network import Minima
from shardwright.reasons.decode import Decoded
from shardwright.reasons.factors import Factor, FactorGraph, factor_graph
from shardwright.reasons.marginals import min_marginals
from shardwright.reasons.neighbours import judged_like

# Operators without parameters are listed if their own work is this share of all, parameters if all
# of one sort have this share of the largest one's elements.
HEAVY, LARGE = 0.02, 1 / 16
LEVEL_NAMES = ("kept whole", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, no reshard after forward")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Priced:
    """A plan's place in the additive model with all its choices priced.

    ``byte_seconds`` is what a byte per device is worth. ``graph`` leaves splits and layouts open and
    keeps the plan's modes, ``fixed`` keeps the splits and leaves layouts and modes open;
    ``of_splits`` and ``of_rest`` are their min-marginals.
    """

    standing: Decoded
    strategy: Strategy
    byte_seconds: float
    graph: FactorGraph
    fixed: FactorGraph
    of_splits: tuple[NDArray[np.float64], ...]
    of_rest: tuple[NDArray[np.float64], ...]


def price_choices(place: Decoded, strategy: Strategy, peak_bytes: float, limit: float) -> Priced:
    """Price every choice of a plan whose simulated peak is ``peak_bytes``, within ``limit``.

    The additive model's memory is shifted by what it is off the simulated peak. Raises InputError
    where the graph is too wide.
    """
    problem = place.problem
    graph = factor_graph(problem, likely_weights(problem, place.arrangement))
    own = graph.restrict(place.allowed).elimination().solve(np.array([(1.0, 1e-18)]))
    price = byte_price(graph, limit - (peak_bytes - float(own.bytes[0])))
    splits = set(problem.config_of.values())
    modes = set(problem.mode_of.values())
    # Of equal assignments the one nearest to the plan: each other choice counts as much as rounding may.
    every = set(place.choices)
    graph = _charged(graph, place, every, TOLERANCE * float(own.seconds[0]))
    bent = _charged(graph, place, modes, math.inf)
    fixed = _charged(graph, place, splits, math.inf)
    return Priced(
        standing=place,
        strategy=strategy,
        byte_seconds=price,
        graph=bent,
        fixed=fixed,
        of_splits=min_marginals(bent, price),
        of_rest=min_marginals(fixed, price),
    )


def _charged(graph: FactorGraph, place: Decoded, variables: set[int], fee: float) -> FactorGraph:
    """Charge for every choice of some variables that is not the plan's; infinitely much forbids it."""
    fees: list[Factor] = []
    for variable in sorted(variables & place.choices.keys()):
        seconds = np.full(graph.sizes[variable], fee)
        seconds[place.choices[variable]] = 0.0
        fees.append(Factor((variable,), seconds, np.zeros(graph.sizes[variable])))
    return FactorGraph(graph.sizes, (*graph.factors, *fees))


def byte_price(graph: FactorGraph, room: float) -> float:
    """Return the seconds that a byte is worth at ``room`` bytes: the slope of the hull there."""
    curve = hull(graph.elimination(), CANDIDATES // 2, room)
    if len(curve.points) > 1 and room < curve.points[-1].bytes:
        return slope(*curve.points[-2:])
    return curve.price(room)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Choice:
    """A variable with its name, its chosen value and the runner-up's, and in which graph that is
    priced. ``added`` is seconds plus the worth of bytes."""

    variable: int
    what: str
    count: int
    chosen: int
    other: int
    added: float
    graph: FactorGraph
    write: Callable[[int], str]

    @property
    def line(self) -> tuple[str, str, str]:
        """What a reader sees of it, layers of one sort alike."""
        what = re.sub(r"\d+", "*", self.what) if self.count > 1 else self.what
        return what, self.write(self.chosen), self.write(self.other)


def sensitivity(pool: Pool, prices: Priced, count: int) -> tuple[Decision, ...]:
    """Return the decisions within the arrangement, the nearest runner-up first; of ``count`` of
    them the runner-up is simulated."""
    groups: dict[tuple[str, str, str], list[_Choice]] = {}
    for one in sorted(
        _choices(pool.context, prices), key=lambda one: (abs(one.added), one.variable)
    ):
        groups.setdefault(one.line, []).append(one)
    decisions: list[Decision] = []
    for number, (line, group) in enumerate(groups.items()):
        one = group[0]
        rival, mine = (_solve(prices, one, value) for value in (one.other, one.chosen))
        decision = Decision(
            what=line[0],
            count=sum(each.count for each in group),
            chosen=line[1],
            runner_up=line[2],
            added_seconds=float(rival.seconds[0] - mine.seconds[0]),
            added_bytes=float(rival.bytes[0] - mine.bytes[0]),
        )
        evaluation = None
        if number < count:
            evaluation = _simulated(pool, prices, tuple(rival.assignments[0].tolist()))
        if evaluation is not None:
            decision = replace(
                decision, step_seconds=evaluation.seconds, peak_bytes=evaluation.bytes
            )
        decisions.append(decision)
    return tuple(decisions)


def _choices(context: Context, prices: Priced) -> Iterator[_Choice]:
    """Yield every decision worth a line with its runner-up."""
    problem, ties, graph = prices.standing.problem, context.facts.ties, context.graph
    for root in _anchors(context, problem):
        operator = graph.operators[root]
        yield from _against(
            prices, problem.config_of[root], f"split of {operator.module or operator.name}",
            ties.times(root),
            lambda value, root=root: dims_text(problem, problem.domains[root][value]),
        )  # fmt: skip
    largest = max((graph.tensors[tensor].numel for tensor in problem.level_of), default=0)
    for tensor, variable in problem.level_of.items():
        spec = graph.tensors[tensor]
        times = ties.times(graph.consumers[tensor][0])
        if times * spec.numel >= LARGE * largest:
            yield from _against(
                prices, variable, f"layout of {spec.name}", times, LEVEL_NAMES.__getitem__
            )
    for lead, variable in problem.mode_of.items():
        operator = graph.operators[ties.ranges[lead][0]]
        yield from _against(
            prices, variable, f"activations of {_block_name(operator.module) or f'block {lead}'}",
            len(ties.classes[lead]), lambda value: problem.modes[value].name,
        )  # fmt: skip


def _block_name(module: str) -> str:
    """Return the module up to its number: the block that repeats."""
    found = re.match(r".*?\d+", module)
    return found.group(0) if found else module


def _against(
    prices: Priced, variable: int, what: str, count: int, write: Callable[[int], str]
) -> Iterator[_Choice]:
    """Yield a decision with its cheapest other choice, if there is one."""
    is_split = variable in prices.standing.problem.config_of.values()
    chosen = prices.standing.choices.get(variable)
    costs = (prices.of_splits if is_split else prices.of_rest)[variable].copy()
    if chosen is None or not math.isfinite(costs[chosen]):
        return
    own, costs[chosen] = float(costs[chosen]), math.inf
    other = int(costs.argmin())
    if math.isfinite(costs[other]):
        yield _Choice(
            variable=variable, what=what, count=count, chosen=chosen, other=other,
            added=float(costs[other]) - own, write=write,
            graph=prices.graph if is_split else prices.fixed,
        )  # fmt: skip


def _anchors(context: Context, problem: Problem) -> list[int]:
    """Return the operators that have parameters or much work."""
    graph, ties, prices = context.graph, context.facts.ties, context.prices
    return [
        root
        for root in problem.roots
        if ties.times(root) * prices.serial_work[root] >= HEAVY * prices.serial_seconds
        or any(graph.tensors[t].role == "parameter" for t in graph.operators[root].inputs)
    ]


def dims_text(problem: Problem, dims: tuple[str, ...]) -> str:
    """Write a config as people read it: ``b over data (2), n over tensor (4)``, or ``whole``."""
    mesh = problem.mesh
    pieces = [
        f"{'partial sums' if dim == '+' else dim} over {axis} ({size})"
        for axis, size, dim in zip(mesh.axes, mesh.sizes, dims, strict=True)
        if dim and size > 1
    ]
    return ", ".join(pieces) or "whole"


def _solve(prices: Priced, one: _Choice, value: int) -> Minima:
    """Return the best assignment with one choice given."""
    allowed = [np.arange(size) for size in one.graph.sizes]
    allowed[one.variable] = np.array([value])
    solver = one.graph.restrict(allowed).elimination()
    solved = solver.solve(np.array([(1.0, prices.byte_seconds)]))
    solved.assignments[:, one.variable] = value
    return solved


def _simulated(pool: Pool, prices: Priced, assignment: tuple[int, ...]) -> Evaluation | None:
    """Simulate an assignment of all blocks under the stages of the plan, gradients merged as its."""
    place = prices.standing
    candidate = Candidate(
        arrangement=place.arrangement,
        problem=place.problem,
        assignments=(assignment,) * len(place.problem.context.facts.ties.ranges),
        starts=place.starts,
        seconds=math.nan,
        least_seconds=math.nan,
        bytes=math.nan,
    )
    return judged_like(pool, prices.strategy, candidate)
