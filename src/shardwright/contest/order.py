"""The orders of nodes, in which messages visit them, and of a node's strategies, in which moves do.

Nodes are in that of time, where the given one is worse.

Sequential message passing converges along chains of the order, so nodes that touch should be near
each other in it. A file's order mostly is that of a program; one whose nodes were shuffled is not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwright.compiled import compiled
from shardwright.planner.solve.wide.dual import Dual
from shardwright.planner.solve.wide.net import links
from shardwright.planner.solve.wide.problem import Floats, Ints, WideProblem


def order_of(problem: WideProblem) -> Ints | None:
    """Return the nodes in a better order for messages, or None where theirs is good enough."""
    ends = problem.ends
    if not len(ends):
        return None
    known = (problem.begin < problem.end) & (problem.begin > 0)
    when = np.where(known, problem.begin, -1).astype(float)
    _date(when, ends, *links(problem.num_nodes, ends))
    order = np.lexsort((problem.end, when))
    place = _places(order)
    given = np.abs(np.diff(ends, axis=1)).sum()
    timely = np.abs(np.diff(place[ends], axis=1)).sum()
    return order if given > timely else None


@compiled
def _date(when: Floats, ends: Ints, start: Ints, around: Ints) -> None:
    """Let nodes that are alive from the start or never (-1) belong just before the first of what is
    nearest to them along edges and has a time."""
    count, place = 0, 0
    queue = np.empty(len(when), dtype=np.int64)
    steps = np.full(len(when), -1)
    for node in range(len(when)):
        if when[node] >= 0:
            queue[count], steps[node] = node, 0
            count += 1
    while place < count:
        node = queue[place]
        place += 1
        before = max(when[node] - 0.5, 0.0)
        for link in range(start[node], start[node + 1]):
            edge = around[link]
            other = ends[edge, 0] + ends[edge, 1] - node
            if steps[other] < 0:
                queue[count], steps[other], when[other] = other, steps[node] + 1, before
                count += 1
            elif steps[other] == steps[node] + 1:
                when[other] = min(when[other], before)


def reordered(problem: WideProblem, order: Ints) -> WideProblem:
    """Return the problem whose node ``i`` is node ``order[i]`` of the given one."""
    place = _places(order)
    sizes = problem.sizes[order]
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = np.arange(int(first[-1])) + np.repeat(problem.first[:-1][order] - first[:-1], sizes)
    return replace(
        problem,
        first=first,
        cost=problem.cost[rows],
        usage=problem.usage[rows],
        begin=problem.begin[order],
        end=problem.end[order],
        ends=place[problem.ends],
    )


def by_slack(dual: Dual) -> tuple[Ints, Ints]:
    """Return the strategies of every node by what taking one raises the bound at least, and where
    each of those stands among all of all nodes."""
    order = np.lexsort((dual.slack, dual.node))
    rank = np.empty(len(order), dtype=np.int64)
    rank[np.argsort(dual.slack[order], kind="stable")] = np.arange(len(order))
    return order, rank


def relaid(problem: WideProblem, order: Ints) -> WideProblem:
    """Return the problem with the strategies of every node in another order, which is listed node by
    node. Every edge gets a table of its own."""
    lengths = problem.sizes[problem.ends].prod(axis=1)
    table = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cells = np.empty(int(table[-1]))
    _fill(problem.first, order, problem.ends, (problem.table, problem.cells), (table, cells))
    return replace(
        problem,
        cost=problem.cost[order],
        usage=problem.usage[order],
        table=table[:-1],
        cells=cells,
    )


@compiled
def _fill(
    first: Ints, order: Ints, ends: Ints, old: tuple[Ints, Floats], new: tuple[Ints, Floats]
) -> None:
    """Write every edge's cells in the order of its ends' strategies."""
    for edge in range(len(ends)):
        one, two = first[ends[edge, 0]], first[ends[edge, 1]]
        width = first[ends[edge, 1] + 1] - two
        begin, place = old[0][edge], new[0][edge]
        for s in range(one, first[ends[edge, 0] + 1]):
            row = begin + (order[s] - one) * width
            for t in range(two, two + width):
                new[1][place] = old[1][row + order[t] - two]
                place += 1


def _places(order: Ints) -> Ints:
    """Return where every node stands in an order."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return place
