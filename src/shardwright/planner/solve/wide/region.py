"""Exact optimum of a region of a net, everything around it held fixed, by bounded elimination.

Variables are eliminated in the order of the tables they make (min-weight, ties broken at random).
Where the next table would be too large, the variable with the most neighbours keeps its choice
instead, so the width stays bounded and the rest is still solved exactly (Dechter, Bucket
elimination, 1999; cutset conditioning).
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.compiled import compiled, inner
from shardwright.planner.solve.kernels import Picks, sum_out
from shardwright.planner.solve.wide.net import Net
from shardwright.planner.solve.wide.problem import Floats, Ints

MOST_AROUND = 32  # neighbours of a variable while eliminating; one with more keeps its choice
MOST_NODES = 4_000  # of a region, as wide as moves make sense; while nothing is legal, half as many
FREE, GONE, FIXED = range(3)


class Room(NamedTuple):
    """Scratch space for regions of up to ``len(node)`` nodes; columns by variable or by factor.

    Variable ``v`` is node ``node[v]``. A factor is a table in ``net.cells`` (``made`` is 0) or in
    ``cells`` (1), at ``offset``, over the variables ``scope[:width]`` with the strides ``stride``.
    The factors of a variable are a linked list: ``head[v]``, ``after[entry]``, ``item[entry]``.
    """

    node: Ints
    size: Ints  # how many strategies are looked at, the first ones
    state: Ints
    degree: Ints
    near: Ints
    head: Ints
    weight: Floats
    begin: Ints
    order: Ints
    answer: Ints
    width: Ints
    offset: Ints
    made: Ints
    scope: Ints
    stride: Ints
    after: Ints
    item: Ints
    cells: Floats
    picks: Picks
    key: Floats
    holder: Ints
    bench: tuple[Ints, Ints, Ints, Ints]  # the factors being summed, as ``sum_out`` takes them
    sizes: Ints  # of the neighbours, and a choice of theirs
    ends: Ints  # number of factors, list entries, cells, heap entries
    work: Ints  # cells looked at so far, which whoever counts sets to 0


def room_of(num_nodes: int, num_cells: int) -> Room:
    """Return scratch space for regions of up to that many nodes and table cells."""
    # A region has ``FEW`` edges a node and makes a factor of each node; every variable of a table doubles it at least.
    factors, widest = num_nodes * 12, int(np.log2(num_cells))
    return Room(
        node=np.zeros(num_nodes, dtype=np.int64),
        size=np.zeros(num_nodes, dtype=np.int64),
        state=np.zeros(num_nodes, dtype=np.int64),
        degree=np.zeros(num_nodes, dtype=np.int64),
        near=np.zeros((num_nodes, MOST_AROUND), dtype=np.int64),
        head=np.zeros(num_nodes, dtype=np.int64),
        weight=np.zeros(num_nodes),
        begin=np.zeros(num_nodes, dtype=np.int64),
        order=np.zeros(num_nodes, dtype=np.int64),
        answer=np.zeros(num_nodes, dtype=np.int64),
        width=np.zeros(factors, dtype=np.int64),
        offset=np.zeros(factors, dtype=np.int64),
        made=np.zeros(factors, dtype=np.int64),
        scope=np.zeros((factors, widest), dtype=np.int64),
        stride=np.zeros((factors, widest), dtype=np.int64),
        after=np.zeros(factors * 4, dtype=np.int64),
        item=np.zeros(factors * 4, dtype=np.int64),
        cells=np.zeros(num_cells),
        picks=np.zeros(num_cells, dtype=np.int16),
        key=np.zeros(num_nodes * 64),
        holder=np.zeros(num_nodes * 64, dtype=np.int64),
        bench=tuple(np.zeros(factors * size, np.int64) for size in (1, 1, 1, widest)),
        sizes=np.zeros((2, widest), dtype=np.int64),
        ends=np.zeros(4, dtype=np.int64),
        work=np.zeros(1, dtype=np.int64),
    )


@inner
def _push(room: Room, key: float, variable: int) -> None:
    """Put a variable into the heap."""
    place = room.ends[3]
    if place >= len(room.key):
        return
    room.ends[3] += 1
    while place > 0:
        above = (place - 1) // 2
        if room.key[above] <= key:
            break
        room.key[place], room.holder[place] = room.key[above], room.holder[above]
        place = above
    room.key[place], room.holder[place] = key, variable


@inner
def _pop(room: Room) -> tuple[float, int]:
    """Take the least key and its variable off the heap."""
    least, first = room.key[0], room.holder[0]
    room.ends[3] -= 1
    size = room.ends[3]
    key, variable = room.key[size], room.holder[size]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and room.key[below + 1] < room.key[below]:
            below += 1
        if room.key[below] >= key:
            break
        room.key[place], room.holder[place] = room.key[below], room.holder[below]
        place = below
    room.key[place], room.holder[place] = key, variable
    return least, first


@inner
def _weigh(room: Room, variable: int) -> None:
    """Note how large a table the elimination of a variable would need, and queue it."""
    weight = float(room.size[variable])
    for place in range(room.degree[variable]):
        weight *= room.size[room.near[variable, place]]
    room.weight[variable] = weight
    _push(room, weight, variable)


@inner
def _enlist(room: Room, variable: int, factor: int) -> None:
    entry = room.ends[1]
    room.ends[1] += 1
    room.item[entry] = factor
    room.after[entry] = room.head[variable]
    room.head[variable] = entry


@inner
def _is_near(room: Room, one: int, two: int) -> bool:
    for place in range(room.degree[one]):  # noqa: SIM110 - Numba has no generators
        if room.near[one, place] == two:
            return True
    return False


@inner
def _join(room: Room, one: int, two: int) -> None:
    """Make two variables neighbours."""
    room.near[one, room.degree[one]] = two
    room.near[two, room.degree[two]] = one
    room.degree[one] += 1
    room.degree[two] += 1


@inner
def _part(room: Room, one: int, two: int) -> None:
    """Make ``two`` no neighbour of ``one`` any more."""
    for place in range(room.degree[one]):
        if room.near[one, place] == two:
            room.degree[one] -= 1
            room.near[one, place] = room.near[one, room.degree[one]]
            return


@inner
def _enter(net: Net, room: Room, count: int, local: Ints) -> None:
    """Set up the variables and the factors of the edges inside the region."""
    room.ends[:] = 0
    for v in range(count):
        room.state[v] = FREE
        room.degree[v] = 0
        room.head[v] = -1
    for v in range(count):
        node = room.node[v]
        room.work[0] += room.size[v] * (1 + net.start[node + 1] - net.start[node])
        for link in range(net.start[node], net.start[node + 1]):
            edge = net.around[link]
            other = net.ends[edge, 1]
            if net.ends[edge, 0] != node or local[other] < 0:
                continue
            w = local[other]
            factor = room.ends[0]
            room.ends[0] += 1
            room.width[factor], room.made[factor] = 2, 0
            room.offset[factor] = net.table[edge]
            room.scope[factor, 0], room.scope[factor, 1] = v, w
            room.stride[factor, 0] = net.first[other + 1] - net.first[other]
            room.stride[factor, 1] = 1
            _enlist(room, v, factor)
            _enlist(room, w, factor)
            _join(room, v, w)
    for v in range(count):
        _weigh(room, v)


@inner
def _fix(net: Net, room: Room, values: Floats, v: int, choice: int) -> None:
    """Let a variable keep its choice: its factors lose one dimension."""
    room.state[v] = FIXED
    room.answer[v] = choice
    entry = room.head[v]
    while entry >= 0:
        factor = room.item[entry]
        entry = room.after[entry]
        width = room.width[factor]
        if width == 0:
            continue
        for place in range(width):
            if room.scope[factor, place] == v:
                room.offset[factor] += room.stride[factor, place] * choice
                room.scope[factor, place] = room.scope[factor, width - 1]
                room.stride[factor, place] = room.stride[factor, width - 1]
                break
        room.width[factor] = width - 1
        if width == 2:
            w, step, begin = room.scope[factor, 0], room.stride[factor, 0], room.offset[factor]
            room.width[factor] = 0
            base = net.first[room.node[w]]
            for s in range(room.size[w]):
                if room.made[factor]:
                    values[base + s] += room.cells[begin + s * step]
                else:
                    values[base + s] += net.cells[begin + s * step]
    for place in range(room.degree[v]):
        w = room.near[v, place]
        _part(room, w, v)
        _weigh(room, w)


@inner
def _sum_out(net: Net, room: Room, values: Floats, v: int, total: int, begin: int) -> None:
    """Minimise over ``v``: for all choices of its neighbours, in row-major order, the least sum of
    its values and factors into ``cells[begin:]`` and its choice into ``picks[begin:]``."""
    degree, base = room.degree[v], net.first[room.node[v]]
    pool, place, step, moves = room.bench
    num_used = 0
    entry = room.head[v]
    while entry >= 0:
        factor = room.item[entry]
        entry = room.after[entry]
        if room.width[factor] == 0:
            continue
        pool[num_used] = room.made[factor]
        place[num_used] = room.offset[factor]
        for digit in range(degree):
            moves[num_used * degree + digit] = 0
        for axis in range(room.width[factor]):
            w = room.scope[factor, axis]
            if w == v:
                step[num_used] = room.stride[factor, axis]
            else:
                for digit in range(degree):
                    if room.near[v, digit] == w:
                        moves[num_used * degree + digit] = room.stride[factor, axis]
        num_used += 1
        room.width[factor] = 0
    sizes, digits = room.sizes[0, :degree], room.sizes[1]
    for digit in range(degree):
        sizes[digit] = room.size[room.near[v, digit]]
    sum_out(
        (net.cells, room.cells), room.bench, num_used, values[base : base + room.size[v]],
        sizes, (room.cells[begin : begin + total], room.picks[begin : begin + total]), digits,
    )  # fmt: skip


@inner
def _eliminate(net: Net, room: Room, values: Floats, v: int) -> None:
    """Eliminate a variable: its neighbours get a common factor, or one neighbour new values."""
    degree = room.degree[v]
    total = 1
    for place in range(degree):
        total *= room.size[room.near[v, place]]
    begin = room.ends[2]
    _sum_out(net, room, values, v, total, begin)
    room.work[0] += total * room.size[v]
    room.ends[2] += total
    factor = room.ends[0]
    room.ends[0] += 1
    room.offset[factor], room.made[factor] = begin, 1
    room.begin[v] = begin
    step = total
    for place in range(degree):
        w = room.near[v, place]
        step //= room.size[w]
        room.scope[factor, place], room.stride[factor, place] = w, step
    room.width[factor] = degree if degree > 1 else 0  # with 0 nothing reads it
    room.state[v] = GONE
    if degree == 1:
        w = room.near[v, 0]
        base = net.first[room.node[w]]
        for s in range(total):
            values[base + s] += room.cells[begin + s]
    _take_out(room, v, factor)


@inner
def _take_out(room: Room, v: int, factor: int) -> None:
    """Make the neighbours of a variable each other's, with a factor in common where they are several."""
    degree = room.degree[v]
    for place in range(degree):
        _part(room, room.near[v, place], v)
    for place in range(degree):
        w = room.near[v, place]
        if degree > 1:
            _enlist(room, w, factor)
        for further in range(place + 1, degree):
            if not _is_near(room, w, room.near[v, further]):
                _join(room, w, room.near[v, further])
    for place in range(degree):
        _weigh(room, room.near[v, place])


@compiled
def solve_region(
    net: Net, room: Room, count: int, local: Ints, values: Floats, choice: Ints, most_cells: int
) -> int:
    """Find the best choices of the variables ``room.node[:count]`` into ``room.answer``.

    Of each, its first ``room.size`` strategies are looked at, the kept choice among them.
    ``local`` says which variable a node is (-1: none); ``values`` holds the nodes' costs with their
    surroundings and is used up. ``choice`` is what variables keep that cannot be eliminated with
    tables of ``most_cells``. Returns how many keep theirs.
    """
    _enter(net, room, count, local)
    num_gone = num_fixed = 0
    while room.ends[3]:
        weight, v = _pop(room)
        if room.state[v] != FREE or weight != room.weight[v]:
            continue
        crowded = _obstacle(room, v, weight, most_cells)
        if crowded >= 0:
            _fix(net, room, values, crowded, choice[room.node[crowded]])
            num_fixed += 1
        else:
            _eliminate(net, room, values, v)
            room.order[num_gone] = v
            num_gone += 1
    for v in range(count):  # the queue is bounded, so it may have lost some
        if room.state[v] == FREE:
            _fix(net, room, values, v, choice[room.node[v]])
            num_fixed += 1
    for place in range(num_gone - 1, -1, -1):
        v = room.order[place]
        cell = 0
        for digit in range(room.degree[v]):
            w = room.near[v, digit]
            cell = cell * room.size[w] + room.answer[w]
        room.answer[v] = room.picks[room.begin[v] + cell]
    return num_fixed


@inner
def _most_crowded(room: Room, v: int) -> int:
    """Return which of a variable and its neighbours has the most neighbours."""
    crowded = v
    for place in range(room.degree[v]):
        if room.degree[room.near[v, place]] > room.degree[crowded]:
            crowded = room.near[v, place]
    return crowded


@inner
def _obstacle(room: Room, v: int, weight: float, most_cells: int) -> int:
    """Return which variable has to keep its choice because ``v`` cannot be eliminated, or -1."""
    crowded = _most_crowded(room, v)
    if weight > most_cells or room.degree[v] >= room.scope.shape[1]:
        return crowded
    if (
        room.ends[2] + weight > len(room.cells)
        or room.ends[0] + 1 >= len(room.width)
        or room.ends[1] + room.scope.shape[1] >= len(room.item)
    ):
        return v
    if room.degree[crowded] + room.degree[v] > MOST_AROUND:
        return crowded
    return -1
