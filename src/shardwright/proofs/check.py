"""Prove of a Program that every message finds its other ends and that nobody waits for ever.

Devices run their own instructions in index order. Sends do not block; a receive waits for its send,
a collective for all devices of its group, clipping for all devices. This is stricter than the
runtime, which starts messages early and waits late: what passes here cannot deadlock there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.core.program import LOCAL, Kind, Program

WAITING = (Kind.MESSAGE, Kind.RECEIVE, Kind.CLIP)
MOST_NAMED = 8  # devices whose place an error spells out
# Devices that go through their instructions together.
Party = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stop:
    """Where a party waits, at one of its instructions: for all ``members``, which are numbers of
    parties, to come to the same ``meeting``, or for them, the senders, to be past instruction
    ``sent``."""

    instruction: int
    members: tuple[int, ...]
    meeting: int = -1
    sent: int = -1


def check(program: Program) -> None:
    """Raise ValueError where a message has no other end, comes out of order, or cannot complete.

    Linear in instructions times lists of devices that belong to the same meshes; in instructions
    times devices where those do not show it.
    """
    _check_transfers(program)
    _check_order_of_links(program)
    _check_progress(program)


def _transfers(program: Program, kind: Kind) -> dict[tuple[int, int], int]:
    """Return by (message, microbatch) the instruction that sends or receives it, in order."""
    found: dict[tuple[int, int], int] = {}
    for index in np.flatnonzero(program.kind == kind).tolist():
        key = (int(program.item[index]), int(program.microbatch[index]))
        if key in found:
            raise ValueError(
                f"{program.describe(index)} is there twice, at {found[key]} and {index}"
            )
        found[key] = index
    return found


def _check_transfers(program: Program) -> None:
    sends, receives = _transfers(program, Kind.SEND), _transfers(program, Kind.RECEIVE)
    for key in sends.keys() ^ receives.keys():
        index = sends.get(key, receives.get(key, -1))
        raise ValueError(f"{program.describe(index)} has no other end")
    for (item, _), send in sends.items():
        message = program.messages[item]
        receive = receives[item, int(program.microbatch[send])]
        ends = (int(program.group[send]), int(program.group[receive]))
        if ends != (message.mesh, message.destination):
            raise ValueError(
                f"{program.describe(send)} goes from mesh {ends[0]} to {ends[1]} instead of from "
                f"{message.mesh} to {message.destination}"
            )


def _check_order_of_links(program: Program) -> None:
    """Some backends know no tags: what is sent first on a link must be received first."""
    orders: dict[Kind, dict[tuple[int, int], list[tuple[int, int]]]] = {}
    for kind in (Kind.SEND, Kind.RECEIVE):
        order = orders.setdefault(kind, {})
        for item, microbatch in _transfers(program, kind):
            message = program.messages[item]
            order.setdefault((message.mesh, message.destination), []).append((item, microbatch))
    for link, sent in orders[Kind.SEND].items():
        received = orders[Kind.RECEIVE][link]
        for first, second in zip(sent, received, strict=True):
            if first != second:
                raise ValueError(
                    f"from mesh {link[0]} to {link[1]}, message {first[0]} of microbatch {first[1]} "
                    f"is sent when message {second[0]} of microbatch {second[1]} is awaited"
                )


def _check_progress(program: Program) -> None:
    """Run the devices with counters instead of tensors.

    At first those of the same meshes together, waiting for all that a mesh's other devices wait
    for: if they come to the end, so does each by itself. If not, each is asked by itself.
    """
    if not stuck(program, crews(program)):
        return
    waiting = stuck(program, tuple((device,) for device in program.strategy.devices))
    if waiting:
        named = [
            f"device {party[0]} in {program.describe(instruction)}"
            for party, instruction in waiting[:MOST_NAMED]
        ]
        raise ValueError(f"nobody can go on: {'; '.join(named)}")


def crews(program: Program) -> tuple[Party, ...]:
    """Return the devices by the meshes they belong to."""
    meshes: dict[int, list[int]] = {}
    for number, mesh in enumerate(program.meshes):
        for device in mesh.devices:
            meshes.setdefault(device, []).append(number)
    parties: dict[tuple[int, ...], list[int]] = {}
    for device, numbers in meshes.items():
        parties.setdefault(tuple(numbers), []).append(device)
    return tuple(map(tuple, parties.values()))


def stuck(program: Program, parties: tuple[Party, ...]) -> list[tuple[Party, int]]:
    """Return the parties that never come to the end, and the instructions where they wait.

    The devices of a party are in the same meshes; with several to a party it waits for all that any
    device of the mesh waits for.
    """
    sends = _transfers(program, Kind.SEND)
    home = {device: number for number, party in enumerate(parties) for device in party}
    walks = [_stops(program, party, len(parties), home, sends) for party in parties]
    waiting = [next(walk, None) for walk in walks]
    has_moved = True
    while has_moved:
        has_moved = sum(_moves(one, walks, waiting) for one in range(len(parties))) > 0
    ends = zip(parties, waiting, strict=True)
    return [(party, stop.instruction) for party, stop in ends if stop is not None]


def _moves(number: int, walks: Sequence[Iterator[_Stop]], waiting: list[_Stop | None]) -> bool:
    """Let a party go on as far as it can; return whether it could."""
    has_moved = False
    while (stop := waiting[number]) is not None and _is_over(stop, waiting):
        for member in (number,) if stop.sent >= 0 else stop.members:
            waiting[member] = next(walks[member], None)
        has_moved = True
    return has_moved


def _is_over(stop: _Stop, waiting: Sequence[_Stop | None]) -> bool:
    others = [waiting[member] for member in stop.members]
    if stop.sent >= 0:
        return all(other is None or other.instruction > stop.sent for other in others)
    return all(other is not None and other.meeting == stop.meeting for other in others)


def _stops(
    program: Program,
    party: Party,
    num_parties: int,
    home: Mapping[int, int],
    sends: Mapping[tuple[int, int], int],
) -> Iterator[_Stop]:
    """Return where a party waits for others, in its order; ``home`` is each device's party."""
    mine = [party[0] in mesh.devices for mesh in program.meshes]
    is_alone = num_parties == len(home)
    peers: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}

    def homes(devices: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({home[device] for device in devices}))

    num_clips = 0
    waits = np.isin(program.kind, WAITING) & np.array(mine)[program.group]
    for index in np.flatnonzero(waits).tolist():
        group, kind = int(program.group[index]), int(program.kind[index])
        if kind == Kind.CLIP:
            num_clips += 1
            if num_clips > 1 and program.strategy.pipeline.is_flushed:
                continue  # a device's first serves all of its meshes
            yield _Stop(index, homes(_clipping(program, group)), meeting=-1 - num_clips)
            continue
        item = int(program.item[index])
        message = program.messages[item]
        if kind == Kind.RECEIVE:
            sent = sends[item, int(program.microbatch[index])]
            if is_alone:
                senders = homes(_senders(program, item, party[0]))
            else:
                senders = homes(program.meshes[message.mesh].devices)
            yield _Stop(index, senders, sent=sent)
        elif message.primitive not in LOCAL:
            mesh, key = program.meshes[group], (group, message.axes)
            if key not in peers:
                peers[key] = homes(mesh.peers(party[0], message.axes) if is_alone else mesh.devices)
            yield _Stop(index, peers[key], meeting=index)


def _clipping(program: Program, mesh: int) -> tuple[int, ...]:
    """Return the devices that look at their gradients together where one of a mesh does: all, but stages that are
    never flushed do so each alone."""
    strategy = program.strategy
    return strategy.devices if strategy.pipeline.is_flushed else strategy.meshes[mesh].devices


def _senders(program: Program, item: int, device: int) -> set[int]:
    """Return which other devices send a device something of a transfer."""
    pieces = [piece for of_item in program.pieces(item) for piece in of_item]
    return {piece.source for piece in pieces if piece.destination == device} - {device}
