"""A wide problem as kernels want it: finite costs, edges by node, each in index order."""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.compiled import compiled, inner
from shardwright.planner.solve.wide.problem import Floats, Ints, WideProblem

# Stands for "forbidden" where sums must stay exact: far above any cost, far below 2**53.
BIG = 1e15
# Cells that are looked at in some milliseconds: in a round of moves, in a sweep over the edges left open of what
# branching is tried for, and comparing a node's strategies, of which else only the forbidden ones go.
WORK = 2_000_000
# So many tries before something else is done: sweeps in which messages settle, bounds in a row that are each next to
# nothing better, steps that have grown without a better bound, rounds that gain next to nothing, prices that a move may
# raise, looks for a full time and for a node that lives then, nodes passed and edges for each node of a region, turns
# of bounding and searching.
FEW = 8
# What is less than this share off is next to nothing off: a bound from the one before, memory from its limit.
NEAR = 0.01


class Net(NamedTuple):
    """The columns of ``WideProblem`` with ``ends[e, 0] < ends[e, 1]`` and at most one edge a pair.

    The edges of node ``i`` are ``around[start[i]:start[i + 1]]``. What edge ``e`` tells its end
    ``side`` begins at ``into[e, side]``, one number per strategy of that end. ``rank`` says how many
    strategies of all nodes are likelier to be in a good choice than each; a node's own are in that
    order. It is empty where nothing is known.
    """

    first: Ints
    cost: Floats
    usage: Floats
    begin: Ints
    end: Ints
    ends: Ints
    table: Ints
    cells: Floats
    start: Ints
    around: Ints
    into: Ints
    rank: Ints


@compiled
def links(num_nodes: int, ends: Ints) -> tuple[Ints, Ints]:
    """Return where every node's edges start, and the edges."""
    start = np.zeros(num_nodes + 1, dtype=np.int64)
    for edge in range(len(ends)):
        start[ends[edge, 0] + 1] += 1
        start[ends[edge, 1] + 1] += 1
    for node in range(num_nodes):
        start[node + 1] += start[node]
    place = start[:-1].copy()
    found = np.empty(2 * len(ends), dtype=np.int64)
    for edge in range(len(ends)):
        for side in range(2):
            node = ends[edge, side]
            found[place[node]] = edge
            place[node] += 1
    return start, found


@inner
def row_of(net: Net, edge: int, node: int, s: int) -> tuple[int, int, int, int]:
    """Return, for an edge and a strategy of one end: the other end, how many strategies it has,
    where its costs begin in ``cells``, and the step between them."""
    if net.ends[edge, 0] == node:
        other = net.ends[edge, 1]
        count = net.first[other + 1] - net.first[other]
        return other, count, net.table[edge] + s * count, 1
    other = net.ends[edge, 0]
    count = net.first[other + 1] - net.first[other]
    return other, count, net.table[edge] + s, net.first[node + 1] - net.first[node]


def net_of(problem: WideProblem, rank: Ints | None = None, *, capped: bool = True) -> Net:
    """Return the kernels' view of a problem whose edges are in order, one a pair; what is not ``capped``
    is the problem's own, infinite where it is forbidden."""
    sizes = problem.sizes
    start, around = links(problem.num_nodes, problem.ends)
    told = np.concatenate([[0], np.cumsum(sizes[problem.ends].ravel())])
    return Net(
        first=problem.first,
        cost=np.minimum(problem.cost, BIG) if capped else problem.cost,
        usage=problem.usage,
        begin=problem.begin,
        end=problem.end,
        ends=problem.ends,
        table=problem.table,
        cells=np.minimum(problem.cells, BIG) if capped else problem.cells,
        start=start,
        around=around,
        into=told[:-1].reshape(-1, 2),
        rank=np.zeros(0, dtype=np.int64) if rank is None else rank,
    )
