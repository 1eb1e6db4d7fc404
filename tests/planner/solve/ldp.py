"""TensorOpt's linear dynamic program (FT-LDP, section 4.3 there), for comparison.

Along a chain of variables one front is kept per choice of the last variable; the next variable's fronts
are the unions of all, each moved by what the step costs. Where the graph is a chain it gives what
``gaps`` gives without a hull, in memory and time that grow with the fronts' lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.planner.solve.frontier import Point
from shardwright.reasons.factors import FactorGraph, Table
from tests.planner.solve.nonsupported import merge_scopes
from tests.planner.solve.pareto import Front, front, product, union, zero


@dataclass(frozen=True, slots=True)
class _Cell:
    """One choice of a variable: the fronts of the variable before with the step to this choice,
    the best of them, and that with this choice's own cost."""

    moved: tuple[Front, ...]
    before: Front
    known: Front


def chain_frontier(graph: FactorGraph) -> tuple[Point, ...]:
    """Return every non-dominated point of a chain, fastest first.

    Raises ValueError where a factor joins others than neighbouring variables.
    """
    own, between = _chain(graph)
    steps: list[list[_Cell]] = []
    for variable, size in enumerate(graph.sizes):
        cells: list[_Cell] = []
        for choice in range(size):
            here = front(own[variable][:, choice][None, :])
            moved: tuple[Front, ...] = ()
            if steps:
                edge = between[variable - 1][:, :, choice]
                moved = tuple(
                    product(cell.known, front(edge[:, last][None, :]))
                    for last, cell in enumerate(steps[-1])
                )
            before = union(moved) if moved else zero(2)
            cells.append(_Cell(moved, before, product(before, here)))
        steps.append(cells)
    ends = union([cell.known for cell in steps[-1]])
    return tuple(
        Point(seconds=float(costs[0]), bytes=float(costs[1]), assignment=_unrolled(steps, *link))
        for costs, link in zip(ends.costs, ends.links.tolist(), strict=True)
    )


def _unrolled(steps: list[list[_Cell]], choice: int, row: int) -> tuple[int, ...]:
    """Walk the back pointers from a point of the last variable to the first."""
    picks = [choice]
    for cells in reversed(steps[1:]):
        cell = cells[choice]
        choice, row = (int(link) for link in cell.before.links[cell.known.links[row, 0]])
        row = int(cell.moved[choice].links[row, 0])
        picks.append(choice)
    return tuple(reversed(picks))


def _chain(graph: FactorGraph) -> tuple[list[Table], list[Table]]:
    """Return (seconds, bytes) per variable, and per pair of neighbours."""
    own = [np.zeros((2, size)) for size in graph.sizes]
    between = [np.zeros((2, a, b)) for a, b in zip(graph.sizes, graph.sizes[1:], strict=False)]
    for factor in merge_scopes(graph).factors:
        costs = np.stack([factor.seconds, factor.bytes])
        if len(factor.scope) == 1:
            own[factor.scope[0]] = own[factor.scope[0]] + costs
        elif len(factor.scope) == 2 and factor.scope[1] == factor.scope[0] + 1:
            between[factor.scope[0]] = between[factor.scope[0]] + costs
        else:
            raise ValueError(f"a chain joins neighbours only, but one factor joins {factor.scope}")
    return own, between
