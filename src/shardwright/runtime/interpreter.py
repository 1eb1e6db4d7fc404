"""Compile one rank's instructions into a flat list of closures.

Everything that can be decided before training is decided here: which slot every operand lies in, where a
message must be complete, after which instruction a value is dropped (its last use here; what a recomputation
writes again is dropped again). A step then only walks the list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.joining import runs, together
from shardwright.core.program import BACKWARD_KINDS, LOCAL, SEGMENT_KINDS, Kind, Program
from shardwright.runtime import halos, messages, pairing
from shardwright.runtime.again import Again, Run
from shardwright.runtime.backward import backward, made_by
from shardwright.runtime.capture import Captured
from shardwright.runtime.deferral import Aside
from shardwright.runtime.engine import edge_of
from shardwright.runtime.messages import Exchange, Groups, Item
from shardwright.runtime.parameters import Parameters, taken
from shardwright.runtime.randomness import Clock
from shardwright.runtime.saved_tensors import look_up_saved, stand_in
from shardwright.runtime.segment import (
    Mode,
    Site,
    build_segment,
    running_statistics,
    writes_buffers,
)
from shardwright.runtime.store import DTYPES, Store
from shardwright.runtime.tape import Tape
from shardwright.runtime.transfers import Receive, Routes, Send, lasting
from shardwright.runtime.transforms import transformed
from shardwright.runtime.waiting import Action, Waiting
from shardwright.runtime.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One rank: its device in the Program, where it stands on each of its meshes, what it holds."""

    captured: Captured
    program: Program
    device: int
    rank_of: Mapping[int, int]
    sites: Mapping[int, Site]
    store: Store
    parameters: Parameters
    world: World
    groups: Groups
    clock: Clock


@dataclass(frozen=True, slots=True)
class Touch:
    """What an instruction does to the slots of this rank."""

    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a rank runs: (instruction, action) in order, and the exchanges by instruction."""

    actions: tuple[tuple[int, Action], ...]
    exchanges: Mapping[int, Exchange]


# Makes the action of a CLIP, an UPDATE or a version, given which instance of the values it works on.
Special = Callable[[int, int], Action]
Slots = Callable[[Sequence[int]], tuple[int, ...]]  # of values
_NOTHING: Mapping[int, Tensor] = {}


class Compiler:
    """Compiles instruction lists for one machine, for training or for evaluation."""

    def __init__(self, machine: Machine, special: Special, *, training: bool) -> None:
        self.machine = machine
        self.program = machine.program
        self.special = special
        self.training = training
        self.draws = False  # whether something compiled draws random numbers
        self._modules: dict[tuple[int, bool, bool], fx.GraphModule] = {}
        self._aside: dict[int, Aside] = {}  # by segment
        self._joined = {index for run in runs(machine.program) for index in run[1:]}
        self._together = together(machine.program)
        # By segment and instance, the tape that its backward goes by, and its place there.
        self._tapes: dict[tuple[int, int], tuple[Tape, int]] = {}
        self._again = Again(machine.captured, machine.program, machine.parameters.leaf)
        self._mailbox: dict[int, Tensor] = {}
        self._turn: int | None = None  # of a pipeline that is never flushed
        self._sent: dict[int, Send] = {}  # the last of each message, there
        self._routes = Routes(
            program=machine.program,
            device=machine.device,
            rank_of=machine.rank_of,
            groups=machine.groups,
        )
        self._statistics = {} if training else self._running_statistics()

    def _running_statistics(self) -> dict[int, Tensor]:
        """Return the running values that evaluation uses in place of statistics of the batch."""
        held = {
            self.program.values[index].tensor: leaf
            for index, leaf in self.machine.parameters.leaf.items()
            if self.program.values[index].role == "buffer"
        }
        known = running_statistics(self.machine.captured)
        return {tensor: held[buffer] for tensor, buffer in known.items() if buffer in held}

    # -- laying out ----------------------------------------------------------------------------

    def compile(self, indices: Sequence[int], keep: frozenset[int]) -> Compiled:
        """Compile instructions in order; the slots in ``keep`` survive the step."""
        touches = [self.touch(index) for index in indices]
        return self._laid_out(indices, touches, self._drops(touches, keep))

    def compile_turns(self, indices: Sequence[int], keep: frozenset[int]) -> list[Compiled]:
        """Compile the periods of a pipeline that is never flushed: as many as minibatches are under way."""
        program, ring = self.program, self.program.under_way
        order = sorted(range(len(indices)), key=lambda place: program.shift_of(indices[place]))
        touches = list[list[Touch]]()
        for self._turn in range(ring):
            touches.append([self.touch(index) for index in indices])
        drops: list[list[list[int]]] = [[[] for _ in indices] for _ in range(ring)]
        for instance in range(ring):  # one minibatch on its way through the periods
            turns = [(instance + program.shift_of(indices[place])) % ring for place in order]
            moments = list(zip(turns, order, strict=True))
            ends = self._drops([touches[turn][place] for turn, place in moments], keep)
            for (turn, place), dropped in zip(moments, ends, strict=True):
                drops[turn][place] = dropped
        found = list[Compiled]()
        for turn in range(ring):
            self._turn = turn
            found.append(self._laid_out(indices, touches[turn], drops[turn]))
        return found

    def instance(self, index: int) -> int:
        """Return which instance of its values an instruction works on: its microbatch's, of its minibatch."""
        own = int(self.program.microbatch[index])
        if self._turn is None:
            return own
        place = (self._turn - self.program.shift_of(index)) % self.program.under_way
        return place * self.program.strategy.pipeline.num_microbatches + max(own, 0)

    def let_go(self) -> None:
        """Wait until all that was sent has arrived."""
        for exchange in self._sent.values():
            exchange.complete()
        self._sent.clear()

    def _laid_out(
        self, indices: Sequence[int], touches: Sequence[Touch], drops: Sequence[list[int]]
    ) -> Compiled:
        on_host = self.machine.store.device.type == "cpu"
        waiting = Waiting(self.program, indices, on_host=on_host, sends=self._turn is None)
        actions = waiting.actions
        for index, touch, dropped in zip(indices, touches, drops, strict=True):
            waiting.come_to(index)
            for slot in (*touch.reads, *touch.writes, *touch.adds):
                waiting.need(slot)
            kind = Kind(int(self.program.kind[index]))
            if kind in SEGMENT_KINDS:
                waiting.give_way(index)
                actions += self._computed(kind, index)
            elif kind == Kind.TRANSFORM:
                actions.append((index, self._transform(index)))
            elif kind in (Kind.MESSAGE, Kind.SEND, Kind.RECEIVE):
                exchange = self._exchange(kind, index)
                if isinstance(exchange, Send) and self._turn is not None:
                    actions.append((index, self._sending(index, exchange)))
                else:
                    waiting.issue(index, exchange, (*touch.writes, *touch.adds))
            else:
                actions.append((index, self.special(index, self.instance(index))))
            for slot in dropped:
                waiting.need(slot)
            if dropped:
                actions.append((index, self._drop(dropped)))
        waiting.finish()
        return Compiled(tuple(actions), waiting.exchanges)

    def _transform(self, index: int) -> Action:
        transform, machine = self.program.transforms[int(self.program.item[index])], self.machine
        if transform.name in ("version", "buffer"):
            return self.special(index, self.instance(index))
        return transformed(transform, machine.store, machine.parameters, self.instance(index))

    def _sending(self, index: int, exchange: Send) -> Action:
        """Send in a period; by then the other end has asked for what was sent in the one before."""
        item, sent = int(self.program.item[index]), self._sent

        def send() -> None:
            if before := sent.get(item):
                before.complete()
            sent[item] = exchange
            exchange.issue()

        return send

    def _drops(self, touches: Sequence[Touch], keep: frozenset[int]) -> list[list[int]]:
        """Return the slots to drop after each instruction: no use before they are made anew."""
        drops: list[list[int]] = [[] for _ in touches]
        dead_after: dict[int, bool] = {}
        for place in reversed(range(len(touches))):
            touch = touches[place]
            for slot in dict.fromkeys((*touch.reads, *touch.writes, *touch.adds)):
                if dead_after.get(slot, True) and slot not in keep:
                    drops[place].append(slot)
                dead_after[slot] = slot in touch.writes and slot not in touch.reads
        return drops

    def touch(self, index: int) -> Touch:
        """Return the slots that an instruction reads, makes, and adds to."""
        program = self.program
        kind, item = Kind(int(program.kind[index])), int(program.item[index])
        slots = self._slots(self.instance(index))
        values = program.values
        if kind in (Kind.FORWARD, Kind.RECOMPUTE):
            segment = program.segments[item]
            return Touch(slots(segment.inputs), slots(segment.outputs))
        if kind == Kind.WEIGHT_GRADIENT:
            segment = program.segments[item]
            return Touch(
                slots(segment.deferred_values),
                (),
                slots(made_by(segment, self.machine.store, kind)),
            )
        if kind in BACKWARD_KINDS:
            segment = program.segments[item]
            incoming = [values[value].gradient for value in segment.outputs]
            made = made_by(segment, self.machine.store, kind)
            gathered = [v for v in segment.inputs if values[v].role in ("parameter", "version")]
            return Touch(slots((*gathered, *incoming, *segment.rematerialised)), (), slots(made))
        if kind in (Kind.MESSAGE, Kind.SEND, Kind.RECEIVE):
            message = program.messages[item]
            reads = () if kind == Kind.RECEIVE else slots(message.sources)
            return self._made(reads, () if kind == Kind.SEND else message.results, slots)
        if kind == Kind.TRANSFORM:
            transform = program.transforms[item]
            return self._made(slots(transform.reads), transform.writes, slots)
        masters = taken(program, self.machine.parameters, index)
        held = slots([master.value for master in masters])
        gradients = slots([master.gradient for master in masters])
        return Touch((*held, *gradients), held if kind == Kind.UPDATE else ())

    def _made(self, reads: tuple[int, ...], results: Sequence[int], slots: Slots) -> Touch:
        """Return what is touched by what reads slots and makes values, adding to gradients."""
        values = self.program.values
        adds = [value for value in results if values[value].role == "gradient"]
        fresh = [value for value in results if values[value].role != "gradient"]
        return Touch(reads, slots(fresh), slots(adds))

    def _slots(self, microbatch: int) -> Slots:
        store = self.machine.store
        return lambda values: tuple(
            dict.fromkeys(store.slot(value, microbatch) for value in values if value >= 0)
        )

    def _drop(self, slots: Sequence[int]) -> Action:
        store, parameters = self.machine.store, self.machine.parameters
        gathered = {
            store.slot(root, 0): root for root in parameters.raw if parameters.is_gathered(root)
        }
        released = [gathered[slot] for slot in slots if slot in gathered]
        cleared, data = [slot for slot in slots if slot not in gathered], store.data

        def drop() -> None:
            for slot in cleared:
                data[slot] = None
            for root in released:
                parameters.release(root)

        return drop

    # -- computing -----------------------------------------------------------------------------

    def _computed(self, kind: Kind, index: int) -> list[tuple[int, Action]]:
        """Return the action of a segment, none for a backward that one before runs with its own."""
        return [] if index in self._joined else [(index, self._compute(kind, index))]

    def _compute(self, kind: Kind, index: int) -> Action:
        item, instance = int(self.program.item[index]), self.instance(index)
        segment = self.program.segments[item]
        if kind in BACKWARD_KINDS:
            aside, (tape, _) = self._aside.setdefault(item, Aside()), self._tape(item, instance)
            return backward(kind, segment, self.machine.store, tape, aside)
        again = kind == Kind.RECOMPUTE
        keeps_graph = self.training and segment.has_backward and segment.recomputed == again
        writes = not again and writes_buffers(self.machine.captured, segment)
        module = self._module(item, writes=writes, keeps_graph=keeps_graph)
        run = self._forward(index, module, self._tape(item, instance) if keeps_graph else None)
        return run if not self.training else self._again.both(run, segment, (item, instance), again)

    def _tape(self, item: int, instance: int) -> tuple[Tape, int]:
        """Return the tape that the backward of a segment goes by, and its place there."""
        key = item, instance
        if key not in self._tapes:
            items, machine = self._together.get(item, (item,)), self.machine
            segments = [self.program.segments[one] for one in items]
            tape = Tape(segments, machine.store, machine.parameters.leaf, instance)
            self._tapes |= {(one, instance): (tape, place) for place, one in enumerate(items)}
        return self._tapes[key]

    def _module(self, item: int, *, writes: bool, keeps_graph: bool) -> fx.GraphModule:
        splits = keeps_graph and self.program.strategy.pipeline.splits_backward
        key = item, writes, splits
        if key not in self._modules:
            segment = self.program.segments[item]
            aside = self._aside.setdefault(item, Aside()) if splits else None
            self._modules[key] = build_segment(
                self.machine.captured,
                self.program,
                segment,
                self.machine.sites[segment.mesh],
                Mode(self.training, writes, self._statistics, aside),
            )
        return self._modules[key]

    def _forward(self, index: int, module: fx.GraphModule, taped: tuple[Tape, int] | None) -> Run:
        """Run the segment of an instruction; where it is ``taped`` its graph goes there.
        What is returned takes tensors, by place, instead of lasting ones."""
        shift, microbatch = self.program.shift_of(index), int(self.program.microbatch[index])
        segment = self.program.segments[int(self.program.item[index])]
        machine, values, instance = self.machine, self.program.values, self.instance(index)
        data, run, clock = machine.store.data, module.forward, machine.clock
        source = machine.sites[segment.mesh].source
        fixed: list[Any] = [machine.parameters.leaf.get(value) for value in segment.inputs]
        read = [
            (place, machine.store.slot(value, instance))
            for place, value in enumerate(segment.inputs)
            if fixed[place] is None
        ]
        rematerialised = [machine.store.slot(value, instance) for value in segment.rematerialised]
        handed = taped[0].tracks[taped[1]].handed if taped else ()
        results = [
            (machine.store.slot(value, instance), place in handed)
            for place, value in enumerate(segment.outputs)
        ]
        trained = [at for at, value in enumerate(segment.outputs) if values[value].gradient >= 0]
        is_random = any(node.target == "randomness" for node in module.graph.nodes)
        self.draws |= is_random
        roots = {machine.store.root(value) for value in segment.inputs}
        gathered = {
            machine.parameters.raw[root].untyped_storage()._cdata
            for root in roots
            if machine.parameters.is_gathered(root)
        }

        def forward(instead: Mapping[int, Tensor] = _NOTHING) -> None:
            arguments = fixed.copy()
            for place, tensor in instead.items():
                arguments[place] = tensor
            for place, slot in read:
                arguments[place] = data[slot]
            if is_random:
                source.stand_at(clock.minibatch(shift), microbatch)
            if taped is None:
                outputs = run(*arguments)
            else:
                tape, number = taped
                track, leaves = tape.tracks[number], tape.leaves
                with torch.enable_grad(), look_up_saved(data, rematerialised):
                    for place, leaf, is_first in track.activations:
                        before = None if is_first else leaves[leaf]
                        leaves[leaf], arguments[place] = stand_in(arguments[place], before)
                    outputs = run(*arguments)
                    tape.edges[slice(*track.edges)] = [edge_of(outputs[at]) for at in trained]
            for (slot, is_handed), result in zip(results, outputs, strict=True):
                data[slot] = result if is_handed else result.detach()
            if gathered:
                _keep_apart(data, [slot for slot, _ in results], gathered)

        def drawing(instead: Mapping[int, Tensor] = _NOTHING) -> None:
            with source.alone():
                forward(instead)

        return drawing if is_random else forward

    # -- messages ------------------------------------------------------------------------------

    def _exchange(self, kind: Kind, index: int) -> Exchange:
        program, machine = self.program, self.machine
        item, instance = int(program.item[index]), self.instance(index)
        message = program.messages[item]
        items = [self._item(message, number, instance) for number in range(len(message.sources))]
        if kind in (Kind.SEND, Kind.RECEIVE):
            torch_device = next(iter(machine.sites.values())).device
            if kind == Kind.SEND:
                items = lasting(items, message, program, machine.parameters)
                return Send(items, self._routes.sending(item, instance), self._mailbox)
            route = self._routes.receiving(item, instance)
            return Receive(items, route, self._mailbox, torch_device)
        site = machine.sites[message.mesh]
        if message.primitive in LOCAL:
            pieces = messages.piece_of(
                message,
                site.mesh,
                site.coordinate,
                program.strategy.pipeline.num_microbatches,
                int(program.microbatch[index]),
            )
            return messages.Local(items, *pieces)
        if message.primitive in halos.EXCHANGES:
            return halos.exchange(self._routes, items, item, instance)
        if message.pairs:
            return pairing.exchange(self._routes, items, item, instance)
        group, order = machine.groups.among(site.mesh, machine.device, message.axes)
        return messages.COLLECTIVES[message.primitive](items, group, order)

    def _item(self, message: Any, number: int, microbatch: int) -> Item:
        program, store, parameters = self.program, self.machine.store, self.machine.parameters
        source, result = message.sources[number], message.results[number]
        root, origin = store.root(result), store.root(source)
        lasting = parameters.is_lasting(root)
        return Item(
            read=self._reader(origin, source, microbatch),
            write=parameters.writer(root) if lasting else store.writer(result, microbatch),
            target=(lambda: parameters.memory(root)) if lasting else None,
            shape=program.values[source].shape,
            result_shape=program.values[result].shape,
            dims=message.dims[number],
            dtype=DTYPES[message.dtype or program.values[result].dtype],
        )

    def _reader(self, origin: int, source: int, microbatch: int) -> Callable[[], Tensor]:
        parameters = self.machine.parameters
        raw = parameters.raw.get(origin)
        if raw is None:
            return self.machine.store.reader(source, microbatch)
        # A gathered parameter may give back its memory while its message is still under way.
        return raw.clone if parameters.is_gathered(origin) else lambda: raw


def _keep_apart(data: list[Tensor | None], slots: Sequence[int], released: set[int]) -> None:
    """Copy what is a view of a parameter whose memory is given back before its last reader."""
    for slot in slots:
        held = data[slot]
        if held is not None and held.untyped_storage()._cdata in released:
            with torch.enable_grad():  # of what is handed over
                data[slot] = held.clone(memory_format=torch.contiguous_format)
