"""Which part of a message's time is waiting for another rank, and which is sending.

A rank comes to a message when it issues it, and stands still for it when it needs the result. What
lies between standing still and the coming of the last rank that takes part is waiting; from then on
bytes can travel. What passes before a rank needs the result costs nothing and is neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.halo import neighbours
from shardwright.core.program import LOCAL, Kind, Message, Program
from shardwright.core.timeline import Timeline

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Seen:
    """What one rank noted, by instruction; NaN where there was nothing to note.

    ``start`` and ``end``: for messages when the rank came, and when the backend was done.
    ``asked``: when the rank stopped to wait for it. ``unpacking``: seconds it then took to write
    the result.
    """

    start: Floats
    end: Floats
    asked: Floats
    unpacking: Floats

    def shifted(self, seconds: float) -> Seen:
        """The same by a clock that is ahead."""
        return replace(
            self,
            start=self.start + seconds,
            end=self.end + seconds,
            asked=self.asked + seconds,
        )


def told(
    program: Program, seen: Mapping[int, Seen], step: Timeline, *, meets_at_update: bool
) -> Timeline:
    """Fill in the instructions of a measured step: the first device of each mesh speaks for it.

    ``seen`` is by device, on one clock. A transfer's time lies on its SEND, which ends when the
    receiver has everything, as in simulations. ``meets_at_update``: whether all ranks agree on the
    loss before they update.
    """
    start, end, begun = step.start.copy(), step.end.copy(), step.start.copy()
    waited = np.zeros_like(start)
    partners = _Partners(program, meets_at_update=meets_at_update)
    for number, mesh in enumerate(program.meshes):
        device = mesh.devices[0]
        own = seen[device]
        for index in np.flatnonzero(program.group == number).tolist():
            others = [(seen[other], place) for other, place in partners.of(index, device)]
            comes, done = float(own.start[index]), float(own.end[index])
            last = max([comes, *(float(other.start[place]) for other, place in others)])
            kind = Kind(int(program.kind[index]))
            if kind == Kind.SEND:
                done = max([done, *(float(other.end[place]) for other, place in others)])
            asked = comes if np.isnan(own.asked[index]) else float(own.asked[index])
            if others:
                waited[index] = max(0.0, min(last, done) - max(asked, comes))
            unpacking = float(np.nan_to_num(own.unpacking[index]))
            start[index], end[index] = comes, done + unpacking
            begun[index] = done if kind == Kind.RECEIVE else min(max(comes, last), done)
    return replace(step, start=start, end=end, begun=begun, waited=waited)


class _Partners:
    """Who else takes part in an instruction, and by which instruction of theirs."""

    def __init__(self, program: Program, *, meets_at_update: bool) -> None:
        self.program = program
        self._ends: dict[tuple[int, int, int], int] = {}
        self._pairs: dict[int, frozenset[tuple[int, int]]] = {}
        for kind in (Kind.SEND, Kind.RECEIVE):
            for index in np.flatnonzero(program.kind == kind).tolist():
                self._ends[kind, int(program.item[index]), int(program.microbatch[index])] = index
        self._closing = self._closing_places(meets_at_update)

    def _closing_places(self, meets_at_update: bool) -> dict[int, int]:
        """Return, per device, the instruction at which all ranks meet before they update."""
        program, kind = self.program, self.program.kind
        if (kind == Kind.CLIP).any():  # the first mesh's serves all meshes of a device
            found = np.flatnonzero(kind == Kind.CLIP)
            found = found[np.argsort(program.group[found], kind="stable")]
        elif meets_at_update:
            found = np.flatnonzero(kind == Kind.UPDATE)
            if len(program.meshes) > 1:  # the loss is known when all have run
                found = found[program.microbatch[found] < 0]
        else:
            return {}
        places: dict[int, int] = {}
        for index in found.tolist():
            for device in program.meshes[int(program.group[index])].devices:
                places.setdefault(device, index)
        return places

    def of(self, index: int, device: int) -> Iterator[tuple[int, int]]:
        """Yield (device, instruction) of all others that an instruction of a device meets."""
        match Kind(int(self.program.kind[index])):
            case Kind.CLIP | Kind.UPDATE:
                if self._closing.get(device) == index:
                    yield from (pair for pair in self._closing.items() if pair[0] != device)
            case Kind.SEND | Kind.RECEIVE as kind:
                yield from self._across(kind, index, device)
            case Kind.MESSAGE:
                message = self.program.messages[int(self.program.item[index])]
                if message.primitive not in LOCAL:
                    found = self._within(message, device)
                    yield from ((one, index) for one in found if one != device)
            case _:
                pass

    def _across(self, kind: Kind, index: int, device: int) -> Iterator[tuple[int, int]]:
        """Yield the devices at the other end of a transfer, and their instruction."""
        item, microbatch = int(self.program.item[index]), int(self.program.microbatch[index])
        other, mine = (Kind.RECEIVE, 0) if kind == Kind.SEND else (Kind.SEND, 1)
        place = self._ends.get((other, item, microbatch), -1)
        if place >= 0:
            for pair in self._pairs_of(item):
                if pair[mine] == device and pair[1 - mine] != device:
                    yield pair[1 - mine], place

    def _within(self, message: Message, device: int) -> tuple[int, ...]:
        """Return the devices that take part in a message of a mesh, and the one asked about."""
        mesh = self.program.meshes[message.mesh]
        if message.primitive in ("halo", "halo_sum"):
            return tuple(one for one in neighbours(mesh, device, message.axes) if one >= 0)
        found = mesh.peers(device, message.axes)
        if not message.pairs:
            return found
        here = found.index(device)
        return tuple({found[one] for pair in message.pairs if here in pair for one in pair})

    def _pairs_of(self, item: int) -> frozenset[tuple[int, int]]:
        """Return the (source, destination) devices of a transfer."""
        if item not in self._pairs:
            self._pairs[item] = frozenset(
                (piece.source, piece.destination)
                for pieces in self.program.pieces(item)
                for piece in pieces
            )
        return self._pairs[item]
