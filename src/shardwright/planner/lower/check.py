"""Prove of a Program that every message finds its other ends and that nobody waits for ever.

Devices run their own instructions in index order. Sends do not block; a receive waits for its send,
a collective for all devices of its group, clipping for all devices. This is stricter than the
runtime, which starts messages early and waits late: what passes here cannot deadlock there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwright.core.program import Kind, Program

LOCAL = ("slice", "copy")
WAITING = (Kind.MESSAGE, Kind.RECEIVE, Kind.CLIP)
MOST_NAMED = 8  # devices whose place an error spells out


@dataclass(frozen=True, slots=True)
class _Stop:
    """Where a device waits, at one of its instructions: for all ``members`` to come to the same
    ``meeting``, or for the members, the senders, to be past instruction ``sent``."""

    instruction: int
    members: tuple[int, ...]
    meeting: int = -1
    sent: int = -1


def check(program: Program) -> None:
    """Raise ValueError where a message has no other end, comes out of order, or cannot complete.

    Linear in instructions times devices.
    """
    _check_transfers(program)
    _check_order_of_links(program)
    _check_progress(program)


def _transfers(program: Program, kind: Kind) -> dict[tuple[int, int], int]:
    """Return by (message, microbatch) the instruction that sends or receives it."""
    found: dict[tuple[int, int], int] = {}
    for index in range(program.num_instructions):
        if program.kind[index] == kind:
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
        for (item, microbatch), _ in sorted(
            _transfers(program, kind).items(), key=lambda entry: entry[1]
        ):
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
    """Run every device with counters instead of tensors."""
    devices = program.strategy.devices
    sends = _transfers(program, Kind.SEND)
    walks = {device: _stops(program, device, sends) for device in devices}
    waiting = {device: next(walk, None) for device, walk in walks.items()}
    has_moved = True
    while has_moved:
        has_moved = False
        for device in devices:
            while (stop := waiting[device]) is not None and _is_over(stop, waiting):
                for member in (device,) if stop.sent >= 0 else stop.members:
                    waiting[member] = next(walks[member], None)
                has_moved = True
    stuck = [
        f"device {device} in {program.describe(stop.instruction)}"
        for device, stop in waiting.items()
        if stop is not None
    ]
    if stuck:
        raise ValueError(f"nobody can go on: {'; '.join(stuck[:MOST_NAMED])}")


def _is_over(stop: _Stop, waiting: Mapping[int, _Stop | None]) -> bool:
    others = [waiting[member] for member in stop.members]
    if stop.sent >= 0:
        return all(other is None or other.instruction > stop.sent for other in others)
    return all(other is not None and other.meeting == stop.meeting for other in others)


def _stops(program: Program, device: int, sends: Mapping[tuple[int, int], int]) -> Iterator[_Stop]:
    """Return where a device waits for others, in its order."""
    mine = {index for index, mesh in enumerate(program.meshes) if device in mesh.devices}
    peers: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    num_clips = 0
    for index in range(program.num_instructions):
        group, kind = int(program.group[index]), int(program.kind[index])
        if group not in mine or kind not in WAITING:
            continue
        if kind == Kind.CLIP:
            num_clips += 1
            yield _Stop(index, program.strategy.devices, meeting=-1 - num_clips)
            continue
        item = int(program.item[index])
        message = program.messages[item]
        if kind == Kind.RECEIVE:
            pieces = [piece for of_item in program.pieces(item) for piece in of_item]
            senders = {piece.source for piece in pieces if piece.destination == device} - {device}
            sent = sends[item, int(program.microbatch[index])]
            yield _Stop(index, tuple(sorted(senders)), sent=sent)
        elif message.primitive not in LOCAL:
            key = (group, message.axes)
            if key not in peers:
                peers[key] = program.meshes[group].peers(device, message.axes)
            yield _Stop(index, peers[key], meeting=index)
