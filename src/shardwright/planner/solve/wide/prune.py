"""Strategies that no best solution needs: forbidden whatever the neighbours do, or dominated.

Strategy ``s`` is dominated by ``r`` of the same node when ``r`` uses no more memory and replacing
``s`` by ``r`` never costs more, whatever the neighbours choose: the own costs' difference plus, over
the edges, the largest difference of the two rows is at most 0 (Goldstein's criterion of dead-end
elimination). Exact: of every best solution one keeps all its strategies.
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.compiled import compiled, inner
from shardwright.planner.solve.wide.net import BIG, WORK, Net, row_of

Mask = NDArray[np.bool_]


@compiled
def prune(net: Net) -> Mask:
    """Return which strategies to keep; a node whose strategies are all forbidden keeps none. Costs need no
    cap: those from ``BIG`` on are only compared."""
    num_nodes = len(net.begin)
    keep = net.cost < BIG
    pending = np.ones(num_nodes, dtype=np.bool_)
    queue = np.arange(num_nodes)
    count = num_nodes
    while count:
        following = np.empty(num_nodes, dtype=np.int64)
        num_following = 0
        for place in range(count):
            pending[queue[place]] = False
        for place in range(count):
            node = queue[place]
            changed = _forbid(net, node, keep)
            changed |= _dominate(net, node, keep)
            if not changed:
                continue
            for link in range(net.start[node], net.start[node + 1]):
                edge = net.around[link]
                other = net.ends[edge, 0] + net.ends[edge, 1] - node
                if not pending[other]:
                    pending[other] = True
                    following[num_following] = other
                    num_following += 1
        queue, count = following, num_following
    return keep


@inner
def _forbid(net: Net, node: int, keep: Mask) -> bool:
    """Drop strategies for which some neighbour has no allowed strategy left."""
    changed = False
    begin, size = net.first[node], net.first[node + 1] - net.first[node]
    for s in range(size):
        if not keep[begin + s]:
            continue
        for link in range(net.start[node], net.start[node + 1]):
            other, count, cell, step = row_of(net, net.around[link], node, s)
            is_allowed = False
            for t in range(count):
                if keep[net.first[other] + t] and net.cells[cell + t * step] < BIG:
                    is_allowed = True
                    break
            if not is_allowed:
                keep[begin + s] = False
                changed = True
                break
    return changed


@inner
def _dominate(net: Net, node: int, keep: Mask) -> bool:
    """Drop dominated strategies."""
    begin, size = net.first[node], net.first[node + 1] - net.first[node]
    changed = False
    steps = 0
    for worse in range(size):
        if not keep[begin + worse] or steps > WORK:
            continue
        for better in range(size):
            if better == worse or not keep[begin + better]:
                continue
            if net.usage[begin + better] > net.usage[begin + worse]:
                continue
            steps += size
            if _excess(net, node, better, worse, keep) <= 0:
                keep[begin + worse] = False
                changed = True
                break
    return changed


@inner
def _excess(net: Net, node: int, better: int, worse: int, keep: Mask) -> float:
    """Return the most that ``better`` can cost more than ``worse``, stopping where it is clear."""
    excess = net.cost[net.first[node] + better] - net.cost[net.first[node] + worse]
    for link in range(net.start[node], net.start[node + 1]):
        other, count, one, step = row_of(net, net.around[link], node, better)
        _, _, two, _ = row_of(net, net.around[link], node, worse)
        largest = -np.inf
        for t in range(count):
            old = net.cells[two + t * step]
            if keep[net.first[other] + t] and old < BIG:
                new = net.cells[one + t * step]
                if new >= BIG:
                    return np.inf
                largest = max(largest, new - old)
        excess += largest
    return excess
