"""When a device waits for what it has sent off, and asks for what comes: where buffers of messages are given back, and taken.

The order is the host's, which is index order, not the clock's: a buffer lives from the instruction
that issues its message to the one that completes it, however fast the wire was. The runtime
completes exactly here, and the simulator counts bytes by it.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Kind, Message, Program

# Gradient reduce-scatters under way on hosts' own cores, in bytes of a mesh's largest.
UNDER_WAY = 2


def completions(
    program: Program, scatters: NDArray[np.bool_] | None = None, *, on_host: bool = False
) -> NDArray[np.int64]:
    """Return, per message, send or receive, the instruction just before which it is completed.

    The number of instructions stands for the end of the step. A message is completed by the first
    instruction of its mesh that waits for it; a reduce-scatter that synchronises gradients also in
    its turn (``scatter_turns``), so that buffers of whole gradients do not pile up until the update;
    and a send once something has come back that the receiver sent after it had received. By then
    everything before that instruction can have been run by all devices, so that waiting can neither
    deadlock nor, transport aside, take long. Entries of other instructions mean nothing. ``scatters``
    may say which messages are gradient reduce-scatters, to save looking at them; ``on_host``: whether
    devices are the host's own cores. O(n log n).
    """
    until = first_needs(program)
    for earlier, later in scatter_turns(program, scatters, on_host=on_host):
        until[earlier] = np.minimum(until[earlier], later)
    _complete_sends(program, until)
    return until


def first_needs(program: Program) -> NDArray[np.int64]:
    """Return, per message or receive, the first instruction of its mesh that waits for it; the
    number of instructions where none does."""
    count = program.num_instructions
    needs = np.full(count, count, dtype=np.int64)
    comes = (program.kind == Kind.MESSAGE) | (program.kind == Kind.RECEIVE)
    # Backwards, since of several that wait for one message the last written, the first, counts.
    waits = np.flatnonzero(comes[program.predecessor])[::-1]
    awaited = program.predecessor[waits]
    waiting = np.repeat(np.arange(count), np.diff(program.offset))[waits]
    mine = program.group[awaited] == program.group[waiting]
    needs[awaited[mine]] = waiting[mine]
    return needs


def asked_ahead(program: Program) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (instructions, receives that a rank on a CPU asks for just before them).

    A transfer begins when both ends have asked for it, so what is asked for where it is used hides behind nothing,
    and who has sent it may be computing by then, and hear of it late. What comes from the devices of a crew is
    therefore asked for, in the order in which they send it, before the instruction that needs what came from there
    just before, or what came before that where one instruction needs both; the first when the step begins. (On GPUs
    a receive that is asked for is a kernel that runs until then.) Not what stays on its device: that is there once
    it has been sent. O(n log n).
    """
    nothing = np.zeros(0, dtype=np.int64)
    if len(program.meshes) == 1:
        return nothing, nothing
    devices = [frozenset(mesh.devices) for mesh in program.meshes]
    crosses = [_crosses(program, message, devices) for message in program.messages]
    needs, crews = first_needs(program), connected(devices)
    runs = _run_by(program, devices)
    needed: dict[tuple[int, int], list[int]] = {}  # by crews: what needs receives so far, ascending
    last: dict[tuple[int, int], int] = {}  # by crews: no receive may be asked for before this
    found: list[tuple[int, int]] = []
    for index in np.flatnonzero(program.kind == Kind.RECEIVE).tolist():
        item, mesh = int(program.item[index]), int(program.group[index])
        ends = (crews[program.messages[item].mesh], crews[mesh])
        least, last[ends] = last.get(ends, 0), index + 1
        need, before = int(needs[index]), needed.setdefault(ends, [])
        if crosses[item] and program.microbatch[index] >= 0:
            earlier, own = bisect.bisect_left(before, need), runs[devices[mesh]]
            least = max(least, before[earlier - 1] if earlier else 0)
            place = int(own[np.searchsorted(own, min(least, index))])
            if place < index:
                last[ends] = place
                found.append((place, index))
        bisect.insort(before, need)
    places, coming = np.array(found, dtype=np.int64).reshape(-1, 2).T
    return places, coming


def _run_by(
    program: Program, devices: Sequence[frozenset[int]]
) -> dict[frozenset[int], NDArray[np.int64]]:
    """Return, by the devices of a mesh, what just these run, whichever of their meshes it is of."""
    numbers = {own: number for number, own in enumerate(dict.fromkeys(devices))}
    runs = np.array([numbers[own] for own in devices])[program.group]
    return {own: np.flatnonzero(runs == number) for own, number in numbers.items()}


def _crosses(program: Program, message: Message, devices: Sequence[frozenset[int]]) -> bool:
    """Whether a message brings something of a microbatch from other devices, into memory of its own."""
    return (
        message.destination >= 0
        and devices[message.mesh].isdisjoint(devices[message.destination])
        and all(program.values[one].role in ("activation", "gradient") for one in message.results)
    )


def connected(meshes: Sequence[Collection[int]]) -> list[int]:
    """Return for each mesh, given by its devices, the first of those that it shares devices with, directly or by
    others."""
    crews = list(range(len(meshes)))
    for number, mine in enumerate(map(set[int], meshes)):
        for other in range(number):
            if not mine.isdisjoint(meshes[other]) and crews[other] != crews[number]:
                joined = (crews[other], crews[number])
                crews = [min(joined) if crew in joined else crew for crew in crews]
    return crews


def sums_ahead(program: Program, *, on_host: bool) -> bool:
    """Whether stages send their part of the loss behind their last forward, so that none waits for it at its update.

    On hosts' own cores such a message holds nothing up. On GPUs it is a kernel that runs until all are there; and
    where a mesh has all devices its messages, which take the same way, come in another order there.
    """
    if not on_host:
        return False
    most = max(len(mesh.devices) for mesh in program.meshes)
    return most < len(program.strategy.devices)


def meets_at_end(program: Program, *, on_host: bool) -> bool:
    """Whether the devices of a step wait for each other at its end, so that all begin the next one together.

    They do not where what all have to know, the loss, is sent ahead (``sums_ahead``) and nothing else is asked of all:
    the norm of all gradients is, and so is whether they overflowed. Devices that only keep parameters have no forward to send
    the loss behind.
    """
    if not sums_ahead(program, on_host=on_host) or (program.kind == Kind.CLIP).any():
        return True
    return len(np.unique(program.group[program.kind == Kind.FORWARD])) < len(program.meshes)


def scatter_turns(
    program: Program, scatters: NDArray[np.bool_] | None = None, *, on_host: bool = False
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return, per mesh, (gradient reduce-scatters, the later ones that these are completed before).

    That is the next one. ``on_host``, where to complete is to stand still until the slowest rank has
    come as far, twice the bytes of the mesh's largest may be under way: there is the backward between
    them to catch up in.
    """
    if scatters is None:
        scatters = np.array([m.scatters_gradients for m in program.messages], dtype=np.bool_)
    if not scatters.any():
        return []
    found = np.flatnonzero(program.kind == Kind.MESSAGE)
    found = found[scatters[program.item[found]]]
    sizes = np.array([message.bytes for message in program.messages], dtype=np.int64)
    turns: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for mesh in range(len(program.meshes)):
        mine = found[program.group[found] == mesh]
        later: NDArray[np.int64] = np.arange(1, len(mine) + 1)
        if on_host and len(mine):
            size = sizes[program.item[mine]]
            total = np.cumsum(size)
            most = total - size + UNDER_WAY * int(size.max())
            full: NDArray[np.int64] = np.searchsorted(total, most, side="right")
            later = full
        some = np.flatnonzero(later < len(mine))
        turns.append((mine[some], mine[later[some]]))
    return turns


def _complete_sends(program: Program, until: NDArray[np.int64]) -> None:
    """Fill in sends: what comes back, by the two meshes that it travels between. Sends of no message
    (item -1, a Program made for its times alone) end with the step."""
    sends = np.flatnonzero((program.kind == Kind.SEND) & (program.item >= 0))
    if not len(sends):
        return
    received: dict[tuple[int, int], int] = {}
    for index in np.flatnonzero(program.kind == Kind.RECEIVE).tolist():
        received[int(program.item[index]), int(program.microbatch[index])] = index
    crossings: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index in sends.tolist():
        item = int(program.item[index])
        arrival = received.get((item, int(program.microbatch[index])))
        if arrival is not None:
            message = program.messages[item]
            ends = (message.mesh, message.destination)
            crossings.setdefault(ends, []).append((index, arrival))
    for (here, there), sent in crossings.items():
        back = np.array(crossings.get((there, here), ()), dtype=np.int64).reshape(-1, 2)
        # Of all that was sent back from some instruction on, what is needed first.
        first_need = np.minimum.accumulate(until[back[:, 1]][::-1])[::-1]
        pairs = np.array(sent, dtype=np.int64)
        after: NDArray[np.int64] = np.searchsorted(back[:, 0], pairs[:, 1], side="right")
        returns = after < len(back)
        until[pairs[returns, 0]] = first_need[after[returns]]
