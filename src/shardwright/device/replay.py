"""What PyTorch's caching allocator reserves beyond the tensors of a Program: its slack.

The tensors of a step are taken and given back in the order of the Program, call by call within its
segments, by ``allocator.CachingAllocator``. Two steps are played: optimizers make their states at the
end of the first, in memory that activations had. In between alike microbatches are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.core.graph import OperatorGraph
from shardwright.core.program import BACKWARD_KINDS, STATES, Kind, Message, Program, Segment, Value
from shardwright.core.schedules import SCHEDULES, in_flight
from shardwright.device.allocator import Block, CachingAllocator, DeviceMemory
from shardwright.operators.keeping.backward import GradientStep, gradient_steps
from shardwright.operators.keeping.memory import SegmentMemory, Storages
from shardwright.planner.schedule import held, order_of

STEPS = 2


@dataclass(eq=False, slots=True)
class _Held:
    """A block, where it came from, and how many hold it."""

    block: Block
    allocator: CachingAllocator
    holders: int = 1

    def drop(self) -> None:
        self.holders -= 1
        if not self.holders:
            self.allocator.give(self.block)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What the calls of a segment do: storages made and last used by each, those that outputs lie
    in, and the gradients of its backward with those that its inputs end with."""

    segment: Segment
    storages: Storages
    made: tuple[tuple[int, ...], ...]
    last: tuple[tuple[int, ...], ...]
    backward: tuple[GradientStep, ...]
    ends: dict[int, int]


Key = tuple[int, int]  # value and microbatch, -1 for what belongs to the step


@dataclass(slots=True)
class _Device:
    """One device of a mesh. ``apart`` has what communication makes on a stream of its own."""

    program: Program
    graph: OperatorGraph
    main: CachingAllocator
    apart: CachingAllocator
    peak: int = 0  # of both
    pieces: dict[int, _Piece] = field(default_factory=dict[int, _Piece])
    held: dict[Key, list[_Held]] = field(default_factory=dict[Key, list[_Held]])
    saved: dict[Key, list[tuple[int, _Held]]] = field(
        default_factory=dict[Key, list[tuple[int, _Held]]]
    )

    def take(self, size: int, allocator: CachingAllocator | None = None) -> _Held:
        allocator = allocator or self.main
        held = _Held(allocator.take(size), allocator)
        apart = 0 if self.apart is self.main else self.apart.allocated
        self.peak = max(self.peak, self.main.allocated + apart)
        return held

    def pass_by(self, size: int, allocator: CachingAllocator | None = None) -> None:
        """Need memory for a moment."""
        if size > 0:
            self.take(size, allocator).drop()

    def run(self, index: int) -> None:
        """Play one instruction."""
        program = self.program
        kind, item = Kind(int(program.kind[index])), int(program.item[index])
        microbatch, late = int(program.microbatch[index]), list[int]()
        if kind in (Kind.FORWARD, Kind.RECOMPUTE):
            self._forward(item, microbatch, again=kind == Kind.RECOMPUTE)
        elif kind == Kind.WEIGHT_GRADIENT:
            self._weights(item, microbatch)
        elif kind in BACKWARD_KINDS:
            late = self._backward(item, microbatch, halves=kind == Kind.INPUT_GRADIENT)
        else:
            self._others(kind, index, microbatch)
        ends = slice(*program.free_offset[index : index + 2])
        for value in program.free_value[ends].tolist():
            if found := self.held.get(self._key(value, microbatch)):
                found.pop().drop()
        for value in late:
            self._keep(value, microbatch, self.take(program.values[value].bytes))

    def _others(self, kind: Kind, index: int, microbatch: int) -> None:
        """Play what computes no operators of the model."""
        program, item = self.program, int(self.program.item[index])
        if kind in (Kind.MESSAGE, Kind.RECEIVE, Kind.UPDATE, Kind.TRANSFORM):
            self.pass_by(int(program.temporary[index]))
        if kind in (Kind.MESSAGE, Kind.RECEIVE):
            self._arrive(program.messages[item], microbatch)
        elif kind == Kind.TRANSFORM:
            for value in program.transforms[item].writes:
                self._make(value, microbatch, self.main)

    def end(self) -> None:
        """Let go of what is left at the end of a step."""
        for found in self.held.values():
            for one in found:
                one.drop()
        self.held.clear()
        self.saved.clear()

    def _key(self, value: int, microbatch: int) -> Key:
        return value, microbatch if self.program.values[value].scope == "microbatch" else -1

    def _keep(self, value: int, microbatch: int, held: _Held) -> None:
        self.held.setdefault(self._key(value, microbatch), []).append(held)

    def _piece(self, item: int) -> _Piece:
        if item not in self.pieces:
            program = self.program
            segment, values = program.segments[item], program.values
            storages = SegmentMemory(self.graph, segment.calls, values, segment.inputs).storages
            made = [list[int]() for _ in segment.calls]
            last = [list[int]() for _ in segment.calls]
            for root, place in storages.made.items():
                made[place].append(root)
                last[storages.last[root]].append(root)
            ends = (segment.inputs, segment.outputs)
            backward, found = (), dict[int, int]()
            if segment.has_backward:
                backward, found = gradient_steps(self.graph, segment.calls, values, ends)
            self.pieces[item] = _Piece(
                segment, storages, tuple(map(tuple, made)), tuple(map(tuple, last)), backward, found
            )
        return self.pieces[item]

    def _forward(self, item: int, microbatch: int, *, again: bool) -> None:
        piece = self._piece(item)
        segment, storages = piece.segment, piece.storages
        keeps = segment.has_backward and segment.recomputed == again
        handed = {storages.root.get(value) for value in segment.outputs}
        live: dict[int, _Held] = {}
        saved: list[tuple[int, _Held]] = []
        for place in range(len(segment.calls)):
            extra = storages.extra[place]
            beside = [self.take(extra)] if extra else []
            for root in piece.made[place]:
                live[root] = self.take(storages.size[root])
                if keeps and root in storages.kept:
                    live[root].holders += 1
                    saved.append((storages.released[root], live[root]))
            self.pass_by(storages.workspace[place])
            if keeps:
                saved += [(place, one) for one in beside]
            else:
                _drop(beside)
            _drop([live[root] for root in piece.last[place] if root not in handed])
        self._hand_on(segment, storages, live, microbatch)
        if keeps:
            self.saved[item, microbatch] = saved

    def _hand_on(
        self, segment: Segment, storages: Storages, live: dict[int, _Held], microbatch: int
    ) -> None:
        """Keep what outputs lie in; its first holder is the first of them."""
        seen: set[int] = set()
        for value in segment.outputs:
            root = storages.root.get(value, value)
            if root in live:
                live[root].holders += root in seen
                seen.add(root)
                self._keep(value, microbatch, live[root])

    def _backward(self, item: int, microbatch: int, *, halves: bool) -> list[int]:
        """Play a backward; return the gradients that come to lie where what is now freed lay. Of two
        ``halves`` the first leaves what the other needs in one block."""
        piece = self._piece(item)
        alive, in_place = self._run_backward(piece, self.saved.pop((item, microbatch), []))
        late: list[int] = []
        for value, gradient, number in self._gradients(piece, halves=halves):
            if self.held.get(self._key(gradient, microbatch)):
                continue  # added to what is there
            if number in in_place:
                late.append(gradient)
                continue
            made = self.program.values[gradient]
            if number in alive and made.dtype == self.program.values[value].dtype:
                self._keep(gradient, microbatch, alive.pop(number))
            else:
                self._keep(gradient, microbatch, self.take(made.bytes))
        _drop(list(alive.values()))
        if halves:
            self.saved[item, microbatch] = [(0, self.take(piece.segment.deferred_bytes))]
        return late

    def _run_backward(
        self, piece: _Piece, kept: list[tuple[int, _Held]]
    ) -> tuple[dict[int, _Held], set[int]]:
        """Play the steps of a backward; return which gradients are there at its end, and which were made
        where what is freed lay."""
        saved: dict[int, list[_Held]] = {}
        for place, one in kept:
            saved.setdefault(place, []).append(one)
        alive: dict[int, _Held] = {}
        in_place: set[int] = set()
        for step in piece.backward:
            released = saved.pop(step.call, [])
            if step.workspace < 0:
                in_place.update(number for number, _ in step.made)
                _drop(released)
                released = []
            else:
                alive |= {number: self.take(size) for number, size in step.made if size}
            self.pass_by(step.workspace)
            _drop([alive.pop(number) for number in step.gone if number in alive])
            _drop(released)
        return alive, in_place

    def _gradients(self, piece: _Piece, *, halves: bool) -> Iterator[tuple[int, int, int]]:
        """Give a segment's inputs with the gradients that its backward makes, and their numbers there."""
        for value in piece.segment.inputs:
            gradient, number = self.program.values[value].gradient, piece.ends.get(value, -1)
            waits = halves and self.program.values[value].role == "parameter"
            if gradient >= 0 and number >= 0 and not waits:
                yield value, gradient, number

    def _weights(self, item: int, microbatch: int) -> None:
        for value in self.program.segments[item].inputs:
            one = self.program.values[value]
            if one.role == "parameter" and one.gradient >= 0:
                if self.held.get(self._key(one.gradient, microbatch)):
                    self.pass_by(one.bytes)
                else:
                    self._keep(one.gradient, microbatch, self.take(one.bytes))
        _drop([held for _, held in self.saved.pop((item, microbatch), [])])

    def _arrive(self, message: Message, microbatch: int) -> None:
        """Take memory for what a message makes; parameters are copied out of what arrives."""
        allocator = self.main
        if message.purpose == "synchronise":
            allocator = self.apart
        elif message.purpose == "parameter" and self.apart is not self.main:
            self.pass_by(message.bytes, self.apart)
        for value in message.results:
            self._make(value, microbatch, allocator)

    def _make(self, value: int, microbatch: int, allocator: CachingAllocator) -> None:
        """Take memory for a value, unless it is there."""
        one = self.program.values[value]
        stays = one.resident or one.role == "master"
        adds = one.role == "gradient" and self.held.get(self._key(value, microbatch))
        if not stays and not adds:
            self._keep(value, microbatch, self.take(one.bytes, allocator))


def _drop(found: Sequence[_Held]) -> None:
    for one in found:
        one.drop()


@dataclass(frozen=True, slots=True)
class Replayed:
    """The most bytes that the tensors of a mesh's devices take, and that are reserved for them;
    ``is_short``: the device has not enough for them."""

    allocated: int
    reserved: int
    is_short: bool = False


def replay(
    program: Program,
    graph: OperatorGraph,
    mesh: int,
    *,
    streams: bool = False,
    limit: float = math.inf,
) -> Replayed:
    """Play two steps of a mesh's devices, whose allocators have ``limit`` bytes.

    ``streams``: gathered parameters arrive, and reduced gradients lie, in memory of the streams that
    communicate, as with PyTorch's FSDP: blocks are reused on their own stream only.
    """
    memory = DeviceMemory(limit)
    main = CachingAllocator(memory)
    device = _Device(program, graph, main, CachingAllocator(memory) if streams else main)
    resting, states = _lasting(program, mesh)
    for size in resting:
        main.take(size)
    mine = np.flatnonzero((program.group == mesh) & _shown(program, mesh)).tolist()
    for step in range(STEPS):
        for index in mine:
            device.run(index)
            if step == 0 and program.kind[index] == Kind.UPDATE:
                for size in states:
                    main.take(size)
        device.end()
    reserved = sum(one.reserved for one in memory.allocators)
    return Replayed(device.peak, reserved, memory.is_short)


def _lasting(program: Program, mesh: int) -> tuple[list[int], list[int]]:
    """Return the sizes of parameters and masters, and of the optimizer's states."""
    lasting = [value for value in program.values if value.mesh == mesh and _lasts(value)]
    masters = [value for value in lasting if value.role == "master"]
    rest = [value for value in lasting if value.role != "master"]
    sizes = [value.bytes for value in _stepped(masters, rest)]
    states = sizes * program.strategy.optimizer_states
    return [value.bytes for value in masters + rest], states


def _stepped(masters: Sequence[Value], rest: Sequence[Value]) -> list[Value]:
    """Return what the optimizer keeps states of: masters, and parameters without."""
    apart = {value.tensor for value in masters}
    return [*masters, *[v for v in rest if v.role == "parameter" and v.tensor not in apart]]


def _lasts(value: Value) -> bool:
    is_held = value.role == "parameter" or value.role in STATES
    return value.role == "master" or (is_held and value.resident)


def _shown(program: Program, mesh: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which instructions are played: of many microbatches the first, as many as may be under
    way on a stage at once and two more, and the last."""
    pipeline, number = program.strategy.pipeline, program.microbatch
    behind, most = len(program.meshes) - 1 - mesh, pipeline.num_microbatches
    if SCHEDULES[pipeline.schedule].chunks:
        ahead = held(order_of(program.strategy))[mesh]
    else:
        ahead = in_flight(pipeline.schedule, behind, most)
    return (number < ahead + 2) | (number >= most - 2)
