"""The simulator's kernels, compiled by Numba on first use and cached on disk.

Import this module late: importing Numba takes longer than planning a small model. ``plain`` says
the same in readable Python and is equal to the last bit.
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Column = NDArray[np.int32]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def _compiled(function: Kernel) -> Kernel:
    """Compile with Numba, whose decorator has no types of its own."""
    return cast(Kernel, cast(Any, numba).njit(cache=True)(function))


class Wiring(NamedTuple):
    """The columns of a Program which say in what order instructions run."""

    resource: Column
    group: Column
    offset: Ints
    predecessor: Column


class State(NamedTuple):
    """Where an event-driven simulation is.

    ``queue`` lists instructions by resource, ``follower`` by predecessor. ``waiting`` counts an
    instruction's unfinished predecessors. ``position`` is a resource's place in its queue and
    ``running`` its instruction (-1: none), with the work ``remaining`` at time ``since``, done at
    rate 1/``stretch`` (-1: not settled yet). ``tree`` is a tournament over ``finish``: node 1 holds
    the resource that finishes first, node i the winner of 2i and 2i+1. ``after`` and ``before``
    link the busy resources of a group, beginning with ``first``.
    """

    queue_offset: Ints
    queue: Ints
    follower_offset: Ints
    follower: Ints
    waiting: Ints
    position: Ints
    running: Ints
    remaining: Floats
    since: Floats
    stretch: Floats
    finish: Floats
    tree: Ints
    after: Ints
    before: Ints
    first: Ints
    is_changed: Bools


@_compiled
def relax(wiring: Wiring, seconds: Floats, num_resources: int) -> tuple[Floats, Floats, Ints]:
    """Compute start, end and cause in one pass; see ``plain.relax_plain``."""
    count = len(seconds)
    start, end = np.zeros(count), np.zeros(count)
    cause = np.full(count, -1, dtype=np.int64)
    last = np.full(num_resources, -1, dtype=np.int64)
    for index in range(count):
        time, latest = _latest(wiring, end, last[wiring.resource[index]], index)
        start[index], cause[index] = time, latest
        end[index] = time + seconds[index]
        last[wiring.resource[index]] = index
    return start, end, cause


@_compiled
def share(
    wiring: Wiring, seconds: Floats, computes: Bools, num_groups: int, slowdown: float
) -> tuple[Floats, Floats, Ints]:
    """Compute start, end and cause under processor sharing; see ``plain.share_plain``."""
    count, num_resources = len(seconds), len(computes)
    start, end = np.zeros(count), np.zeros(count)
    cause = np.full(count, -1, dtype=np.int64)
    state = _idle_state(wiring, num_resources, num_groups)
    pending, changed = list(range(num_resources)), [0]
    changed.clear()
    now = 0.0
    while True:
        while pending:
            resource = pending.pop()
            index = _startable(state, resource)
            if index >= 0:
                place = state.position[resource]
                before = state.queue[place - 1] if place > state.queue_offset[resource] else -1
                start[index], cause[index] = now, _latest(wiring, end, before, index)[1]
                _begin(state, resource, index, now, seconds[index])
                _link(state, resource, wiring.group[index], changed)
        if state.finish[state.tree[1]] > now:
            while changed:
                _settle(state, computes, changed.pop(), now, slowdown)
            now = state.finish[state.tree[1]]
            if now == np.inf:
                return start, end, cause
        while state.finish[state.tree[1]] <= now:
            resource = state.tree[1]
            index = state.running[resource]
            end[index] = now
            _unlink(state, resource, wiring.group[index], changed)
            _complete(state, wiring, resource, pending)


@_compiled
def _latest(wiring: Wiring, end: Floats, before: int, index: int) -> tuple[float, int]:
    """Return the latest end among what an instruction waits for, and the first that has it."""
    latest = before
    time = end[before] if before >= 0 else 0.0
    for entry in range(wiring.offset[index], wiring.offset[index + 1]):
        other = wiring.predecessor[entry]
        if latest < 0 or end[other] > time:
            latest, time = other, end[other]
    return time, latest


@_compiled
def _idle_state(wiring: Wiring, num_resources: int, num_groups: int) -> State:
    count, num_edges = len(wiring.resource), len(wiring.predecessor)
    followers = np.empty(num_edges, dtype=np.int64)
    waiting = np.empty(count, dtype=np.int64)
    for index in range(count):
        followers[wiring.offset[index] : wiring.offset[index + 1]] = index
        waiting[index] = wiring.offset[index + 1] - wiring.offset[index]
    queue_offset, queue = _sorted_by(wiring.resource, np.arange(count), num_resources)
    follower_offset, follower = _sorted_by(wiring.predecessor, followers, count)
    leaves = 1
    while leaves < num_resources:
        leaves *= 2
    tree = np.zeros(2 * leaves, dtype=np.int64)
    tree[leaves:] = np.arange(leaves)
    for node in range(leaves - 1, 0, -1):
        tree[node] = tree[2 * node]
    return State(
        queue_offset,
        queue,
        follower_offset,
        follower,
        waiting,
        queue_offset[:-1].copy(),
        np.full(num_resources, -1, dtype=np.int64),
        np.zeros(num_resources),
        np.zeros(num_resources),
        np.zeros(num_resources),
        np.full(leaves, np.inf),
        tree,
        np.full(num_resources, -1, dtype=np.int64),
        np.full(num_resources, -1, dtype=np.int64),
        np.full(num_groups, -1, dtype=np.int64),
        np.zeros(num_groups, dtype=np.bool_),
    )


@_compiled
def _sorted_by(keys: Column, values: Ints, num_keys: int) -> tuple[Ints, Ints]:
    """Return the values by ascending key, equal keys in order, and where each key's begin."""
    offset = np.zeros(num_keys + 1, dtype=np.int64)
    for key in keys:
        offset[key + 1] += 1
    offset = np.cumsum(offset)
    free = offset[:-1].copy()
    order = np.empty(len(keys), dtype=np.int64)
    for entry in range(len(keys)):
        order[free[keys[entry]]] = values[entry]
        free[keys[entry]] += 1
    return offset, order


@_compiled
def _startable(state: State, resource: int) -> int:
    """Return the instruction which a resource can start now, or -1."""
    place = state.position[resource]
    if state.running[resource] >= 0 or place == state.queue_offset[resource + 1]:
        return -1
    index = state.queue[place]
    return index if state.waiting[index] == 0 else -1


@_compiled
def _begin(state: State, resource: int, index: int, now: float, seconds: float) -> None:
    """Start an instruction. Unless it takes no time, settling its rate will tell when it ends."""
    state.running[resource] = index
    state.remaining[resource] = seconds
    state.since[resource] = now
    state.stretch[resource] = -1.0
    if seconds == 0:
        _set_finish(state, resource, now)


@_compiled
def _complete(state: State, wiring: Wiring, resource: int, pending: list[int]) -> None:
    """End what a resource runs, and list the resources that may have something to start now."""
    index = state.running[resource]
    state.running[resource] = -1
    state.position[resource] += 1
    _set_finish(state, resource, np.inf)
    pending.append(resource)
    for entry in range(state.follower_offset[index], state.follower_offset[index + 1]):
        follower = state.follower[entry]
        state.waiting[follower] -= 1
        if state.waiting[follower] == 0:
            pending.append(wiring.resource[follower])


@_compiled
def _set_finish(state: State, resource: int, time: float) -> None:
    """Note when a resource finishes, and replay its matches in the tournament."""
    finish, tree = state.finish, state.tree
    finish[resource] = time
    node = (resource + len(tree) // 2) // 2
    while node >= 1:
        left, right = tree[2 * node], tree[2 * node + 1]
        winner = left if finish[left] <= finish[right] else right
        if winner == tree[node] != resource:
            break
        tree[node] = winner
        node //= 2


@_compiled
def _link(state: State, resource: int, group: int, changed: list[int]) -> None:
    """Add a busy resource to its group."""
    head = state.first[group]
    state.after[resource], state.before[resource] = head, -1
    if head >= 0:
        state.before[head] = resource
    state.first[group] = resource
    if not state.is_changed[group]:
        state.is_changed[group] = True
        changed.append(group)


@_compiled
def _unlink(state: State, resource: int, group: int, changed: list[int]) -> None:
    """Take an idle resource out of its group."""
    before, after = state.before[resource], state.after[resource]
    if before >= 0:
        state.after[before] = after
    else:
        state.first[group] = after
    if after >= 0:
        state.before[after] = before
    if not state.is_changed[group]:
        state.is_changed[group] = True
        changed.append(group)


@_compiled
def _settle(state: State, computes: Bools, group: int, now: float, slowdown: float) -> None:
    """Give every running instruction of a group the rate that its mix of work allows."""
    state.is_changed[group] = False
    some_compute, some_communicate = False, False
    resource = state.first[group]
    while resource >= 0:
        some_compute |= computes[resource]
        some_communicate |= not computes[resource]
        resource = state.after[resource]
    stretch = slowdown if some_compute and some_communicate else 1.0
    resource = state.first[group]
    while resource >= 0:
        if stretch != state.stretch[resource]:
            done = (now - state.since[resource]) / state.stretch[resource]
            state.remaining[resource] = max(0.0, state.remaining[resource] - done)
            state.since[resource] = now
            state.stretch[resource] = stretch
            _set_finish(state, resource, now + state.remaining[resource] * stretch)
        resource = state.after[resource]
