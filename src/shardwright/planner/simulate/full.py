"""The simulator's kernels, compiled by Numba on first use and cached on disk.

Import this module late: importing Numba takes longer than planning a small model.
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.compiled import compiled, inner
from shardwright.core.program import ResourceClass
from shardwright.planner.simulate.columns import ALIKE, Ways

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Times = tuple[Floats, Floats, Ints]
COMPUTE, LINK = int(ResourceClass.COMPUTE), int(ResourceClass.LINK)

# What a resource does. It has run queue entries begin..place-1 and runs instruction ``running``
# (-1: none) of so many ``seconds`` with the work ``remaining`` at time ``since``, done at rate 1/``stretch``
# (-1: not settled yet). ``after`` links the busy resources of a group; ``is_far``: its messages go between
# hosts; ``wait``: by how much each takes longer while ranks crowd on cores. One record for each, and small
# functions without branches, because Numba counts who holds an array handed to any other, which
# costs more than the work itself.
QUEUE = np.dtype(
    [
        ("begin", np.int64),
        ("place", np.int64),
        ("stop", np.int64),
        ("running", np.int64),
        ("after", np.int64),
        ("seconds", np.float64),
        ("remaining", np.float64),
        ("since", np.float64),
        ("stretch", np.float64),
        ("finish", np.float64),
        ("wait", np.float64),
        ("sort", np.int8),
        ("is_far", np.bool_),
    ],
    align=True,
)
Queues = Any  # an array of QUEUE


class Wiring(NamedTuple):
    """The columns of a Program which say in what order instructions run."""

    resource: NDArray[np.int32]
    group: NDArray[np.int32]
    offset: Ints
    predecessor: NDArray[np.int32]


class Followers(NamedTuple):
    """Instructions by the predecessor they wait for, and how many each waits for still."""

    offset: Ints
    follower: Ints
    waiting: Ints


@compiled
def relax(wiring: Wiring, seconds: Floats, num_resources: int) -> Times:
    """Return start, end and cause of each instruction when nothing slows anything down.

    The cause is what an instruction waited for longest: the one before it in its queue or, if that
    ended earlier, its first predecessor among those that ended last; -1 if it waited for nothing.
    """
    count = len(seconds)
    start, end = np.zeros(count), np.zeros(count)
    cause = np.full(count, -1, dtype=np.int64)
    last = np.full(num_resources, -1, dtype=np.int64)
    for index in range(count):
        time, latest = latest_end(wiring, end, last[wiring.resource[index]], index)
        start[index], cause[index] = time, latest
        end[index] = time + seconds[index]
        last[wiring.resource[index]] = index
    return start, end, cause


class Progress(NamedTuple):
    """A simulation under way: all that decides how it goes on.

    ``entries`` are the resources' queues one after another, ``first`` the head of each group's busy
    resources, ``due`` when the earliest of those finishes, ``tree`` a tournament of groups by that.
    """

    queues: Queues
    entries: Ints
    first: Ints
    due: Floats
    tree: Ints
    followers: Followers
    start: Floats
    end: Floats
    cause: Ints


def share(
    wiring: Wiring,
    seconds: Floats,
    classes: NDArray[np.int8],
    ranks: Ints,
    slowdown: float,
    cores: float = np.inf,
    ways: Ways = ALIKE,
) -> Times:
    """Return start, end and cause of each instruction under processor sharing.

    ``ranks`` is how many devices each group has. While a group computes and communicates at once, what
    does either advances at rate 1/slowdown, and all else at 1; meshes of the same devices are one group.
    While more ranks compute than there are ``cores``, all of them get equal shares of these, and a message that takes
    s seconds goes at the rate of one that takes s and what its resource waits for a core; messages that
    a group sends between hosts at once get equal shares of its uplinks. Completions at
    one instant come before starts, and starts before rates are settled, so that nothing depends on the
    order of queues.
    """
    progress = _beginning(wiring, classes, len(ranks))
    if ways.far is not None:
        progress.queues["is_far"] = ways.far
    if ways.waits is not None:
        progress.queues["wait"] = ways.waits
    _play(wiring, seconds, progress, slowdown, ranks, cores)
    return progress.start, progress.end, progress.cause


def _beginning(wiring: Wiring, classes: NDArray[np.int8], num_groups: int) -> Progress:
    """Return a simulation at its beginning."""
    count, num_resources = len(wiring.resource), len(classes)
    leaves = 1 << max(0, num_groups - 1).bit_length()
    entry_offset, entries = _sorted_by(
        wiring.resource, np.arange(count, dtype=np.int64), num_resources
    )
    queues = np.zeros(num_resources, dtype=QUEUE)
    queues["begin"] = queues["place"] = entry_offset[:-1]
    queues["stop"] = entry_offset[1:]
    queues["sort"] = classes
    queues["running"] = -1
    queues["finish"] = np.inf
    return Progress(
        queues=queues,
        entries=entries,
        first=np.full(num_groups, -1, dtype=np.int64),
        due=np.full(leaves, np.inf),
        tree=_tournament(leaves),
        followers=_followers(wiring),
        start=np.zeros(count),
        end=np.zeros(count),
        cause=np.full(count, -1, dtype=np.int64),
    )


@compiled
def _play(
    wiring: Wiring,
    seconds: Floats,
    progress: Progress,
    slowdown: float,
    ranks: Ints,
    cores: float,
) -> None:
    """Go from completion to completion until nothing is left to do, changing ``progress``."""
    queues, entries, first, due, tree, followers, start, end, cause = progress
    now, crowd = 0.0, 1.0
    are_short = ranks.sum() > cores
    pending, changed = _all(len(queues)), _none(len(due))
    while now < np.inf:
        while due[tree[1]] <= now:
            group = tree[1]
            _set_due(due, tree, group, np.inf)
            _add(changed, group)
            resource, first[group] = first[group], -1
            while resource >= 0:
                queue = queues[resource]
                after = queue.after
                if queue.finish > now:
                    _link(queue, first, resource, group)
                else:
                    index = queue.running
                    end[index] = now
                    queue.running = -1
                    queue.place += 1
                    _add(pending, resource)
                    for entry in range(followers.offset[index], followers.offset[index + 1]):
                        other = followers.follower[entry]
                        followers.waiting[other] -= 1
                        if followers.waiting[other] == 0:
                            _add(pending, wiring.resource[other])
                resource = after
        while pending.size[0] > 0:
            resource = _pop(pending)
            queue = queues[resource]
            if queue.running >= 0 or queue.place == queue.stop:
                continue
            index = entries[queue.place]
            if followers.waiting[index] == 0:
                group = wiring.group[index]
                before = entries[queue.place - 1] if queue.place > queue.begin else -1
                start[index], cause[index] = now, latest_end(wiring, end, before, index)[1]
                _begin(queue, index, seconds[index], now)
                _link(queue, first, resource, group)
                _add(changed, group)
                if seconds[index] == 0:
                    queue.finish = now
                    _set_due(due, tree, group, now)
        if due[tree[1]] > now:
            if are_short:
                was, crowd = crowd, _crowding(queues, first, ranks, cores)
                if crowd != was:
                    for group in range(len(ranks)):
                        _add(changed, group)
            while changed.size[0] > 0:
                group = _pop(changed)
                _set_due(due, tree, group, _settle(queues, first[group], now, slowdown, crowd))
            now = due[tree[1]]


class Some(NamedTuple):
    """Some of the numbers below ``len(holds)``: the first ``size[0]`` of ``members``."""

    members: Ints
    size: Ints
    holds: NDArray[np.bool_]


@inner
def _none(limit: int) -> Some:
    return Some(np.empty(limit + 1, np.int64), np.zeros(1, np.int64), np.zeros(limit, np.bool_))


@inner
def _all(limit: int) -> Some:
    return Some(np.arange(limit + 1), np.full(1, limit, np.int64), np.ones(limit, np.bool_))


@inner
def _add(some: Some, number: int) -> None:
    some.members[some.size[0]] = number
    some.size[0] += not some.holds[number]
    some.holds[number] = True


@inner
def _pop(some: Some) -> int:
    some.size[0] -= 1
    number = some.members[some.size[0]]
    some.holds[number] = False
    return number


@inner
def latest_end(wiring: Wiring, end: Floats, before: int, index: int) -> tuple[float, int]:
    """Return the latest end among what an instruction waits for, and the first that has it."""
    latest = before
    time = end[before] if before >= 0 else 0.0
    for entry in range(wiring.offset[index], wiring.offset[index + 1]):
        other = wiring.predecessor[entry]
        if latest < 0 or end[other] > time:
            latest, time = other, end[other]
    return time, latest


@compiled
def _sorted_by(keys: NDArray[np.int32], values: Ints, num_keys: int) -> tuple[Ints, Ints]:
    """Return where each key's values begin, and the values by ascending key, stably."""
    offset = np.zeros(num_keys + 1, dtype=np.int64)
    for key in keys:
        offset[key + 1] += 1
    for key in range(num_keys):
        offset[key + 1] += offset[key]
    free = offset[:-1].copy()
    order = np.empty(len(keys), dtype=np.int64)
    for entry in range(len(keys)):
        order[free[keys[entry]]] = values[entry]
        free[keys[entry]] += 1
    return offset, order


@compiled
def _followers(wiring: Wiring) -> Followers:
    """Turn predecessors around."""
    count = len(wiring.resource)
    waiting = np.empty(count, dtype=np.int64)
    owners = np.empty(len(wiring.predecessor), dtype=np.int64)
    for index in range(count):
        owners[wiring.offset[index] : wiring.offset[index + 1]] = index
        waiting[index] = wiring.offset[index + 1] - wiring.offset[index]
    offset, follower = _sorted_by(wiring.predecessor, owners, count)
    return Followers(offset, follower, waiting)


@compiled
def _tournament(leaves: int) -> Ints:
    """Return a tournament tree over equals.

    Node 1 holds the group that is due first, node i the winner of nodes 2i and 2i+1; the last
    ``leaves`` nodes are the groups. Of equals the lower index wins.
    """
    tree = np.zeros(2 * leaves, dtype=np.int64)
    for leaf in range(leaves):
        tree[leaves + leaf] = leaf
    for node in range(leaves - 1, 0, -1):
        tree[node] = tree[2 * node]
    return tree


@inner
def _set_due(due: Floats, tree: Ints, group: int, time: float) -> None:
    """Note when the first of a group finishes, and replay its matches in the tournament."""
    due[group] = time
    node = (group + len(due)) // 2
    while node >= 1:
        left, right = tree[2 * node], tree[2 * node + 1]
        winner = left if due[left] <= due[right] else right
        if winner == tree[node] != group:
            break
        tree[node] = winner
        node //= 2


@inner
def _begin(queue: Any, index: int, seconds: float, now: float) -> None:
    """Start an instruction; settling its rate will tell when it ends."""
    queue.running = index
    queue.seconds = queue.remaining = seconds
    queue.since = now
    queue.stretch = -1.0
    queue.finish = np.inf


@inner
def _link(queue: Any, first: Ints, resource: int, group: int) -> None:
    """Add a resource to the busy ones of its group."""
    queue.after = first[group]
    first[group] = resource


@inner
def _crowding(queues: Queues, first: Ints, ranks: Ints, cores: float) -> float:
    """Return how many ranks compute for each core, 1 where all have one."""
    computing = 0
    for group in range(len(ranks)):
        resource = first[group]
        while resource >= 0:
            if queues[resource].sort == COMPUTE:
                computing += ranks[group]
                break
            resource = queues[resource].after
    return max(1.0, computing / cores)


@inner
def _settle(queues: Queues, first: int, now: float, slowdown: float, crowd: float) -> float:
    """Give every running instruction of a group the rate that its mix of work, the messages that share its
    uplinks, and how many ranks share the cores (``crowd``), allow.

    Returns when the first of them finishes; infinity where none runs.
    """
    some_compute, some_communicate, num_far = False, False, 0
    resource = first
    while resource >= 0:
        some_compute |= queues[resource].sort == COMPUTE
        some_communicate |= queues[resource].sort == LINK
        num_far += queues[resource].is_far
        resource = queues[resource].after
    shared = slowdown if some_compute and some_communicate else 1.0
    earliest = np.inf
    resource = first
    while resource >= 0:
        queue = queues[resource]
        stretch = _stretch(queue, shared, crowd, num_far)
        if stretch != queue.stretch:
            done = (now - queue.since) / queue.stretch
            queue.remaining = max(0.0, queue.remaining - done)
            queue.since = now
            queue.stretch = stretch
            queue.finish = now + queue.remaining * stretch
        earliest = min(earliest, queue.finish)
        resource = queue.after
    return earliest


@inner
def _stretch(queue: Any, shared: float, crowd: float, num_far: int) -> float:
    """Return how many times as long a resource takes as alone."""
    stretch = shared if queue.sort <= LINK else 1.0
    if queue.sort == COMPUTE:
        stretch *= crowd
    elif crowd > 1.0 and queue.seconds > 0.0:
        stretch *= 1.0 + queue.wait / queue.seconds
    if queue.is_far:
        stretch *= num_far
    return stretch
