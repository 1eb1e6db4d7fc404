"""Blocks that are alike are lowered once: what that did is done again for others, in their numbers.

What lowering a block does follows from how it stands: its operators' configs, its parameters, and what
it finds of tensors from outside. That is read off in one order, values and meshes numbered as they are
met (``Standing``); where two blocks stand alike, what one met first is for the other what that met first,
and what one makes the other makes in the same order. So a record (``records``) is moved from one to the
other by two lists of values, two of meshes, and an offset for what was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Protocol

from shardwright.core.program import Call, Kind, Message, Segment, Value
from shardwright.planner.lower.alike import Alike
from shardwright.planner.lower.builder import Finished, ProgramBuilder, Step
from shardwright.planner.lower.finish import finish
from shardwright.planner.lower.parameters import Parameters, Use
from shardwright.planner.lower.pieces import Lowered
from shardwright.planner.lower.records import Record
from shardwright.planner.lower.stage import Entry, Held, Holdings, Stage
from shardwright.planner.space.configs import Placements

# So many ways in which blocks of one kind stand are remembered.
MOST_STANDINGS = 8
NOTHING: Holdings = ({}, {}, {})
RUNS = (Kind.FORWARD, Kind.RECOMPUTE)


class Standing:
    """How a block stands, and the values and meshes that it met, in order; ``first`` are the numbers that
    its first value, segment and message have, ``last`` those behind its last."""

    def __init__(self, builder: ProgramBuilder, block: Alike) -> None:
        self.builder, self.block = builder, block
        self.values: dict[int, int] = {}
        self.meshes: dict[int, int] = {}
        self.place = {tensor: at for at, tensor in enumerate(block.tensors)}
        self.first = self.last = builder.counts()
        self._facts: list[object] = []

    def said(
        self,
        stages: Sequence[Stage],
        placed: Sequence[Placements],
        where: Sequence[set[int]],
        parameters: Parameters,
    ) -> tuple[object, ...]:
        """Return all that lowering the block rests on, in no numbers but its own."""
        builder, block = self.builder, self.block
        around, strategy = block.around, builder.strategy
        start, stop = around.start, around.stop
        runs = {tuple(sorted(meshes)) for meshes in where[start:stop]}
        spots: object = [[self.mesh(m) for m in sorted(meshes)] for meshes in where[start:stop]]
        if len(runs) == 1:
            spots = [self.mesh(mesh) for mesh in next(iter(runs))]
        away = dict.fromkeys(mesh for run in runs for mesh in run)
        configs = strategy.configs[start:stop]
        homes = {config.mesh for config in configs}
        kept = [parameters.kept[tensor] for tensor in around.parameters]
        for one in kept:
            for value in (one.rest, one.master, one.reduced):
                if one.tensor in around.shared:
                    self.value(value)
                elif value >= 0:
                    self.values.setdefault(value, len(self.values))
        config_of = parameters.config_of
        found: list[object] = [
            spots,
            [config.dims for config in configs],
            [self.mesh(m) for m in homes]
            if len(homes) == 1
            else [self.mesh(c.mesh) for c in configs],
            [placed[index] for index in block.sampleless],
            [index - start for index in range(start, stop) if index in builder.recomputed],
            [index - start for index in range(start, stop) if index in builder.segment_starts],
            [config_of[tensor] for tensor in around.parameters],
            [parameters.is_often(one) for one in kept] if parameters.often else (),
            [self.mesh(one.mesh) for one in kept],
        ]
        found += [self._used(parameters, tensor) for tensor in around.shared]
        for tensor in around.finds:
            found.append(any(stage.has(tensor, "microbatch") for stage in stages))
            found.append(builder.cut_dim.get(tensor))
            on = [stages[mesh] for mesh in away]
            producer = builder.graph.tensors[tensor].producer
            if producer >= 0 and not all(map(methodcaller("holds", tensor), on)):
                # It is sent from its home, by the block that was the last one there.
                on = [*on, stages[strategy.configs[producer].mesh]]
                found.append(block.number - on[-1].block)
            found += [(self.mesh(stage.index), self._held(stage, tensor)) for stage in on]
        return *found, self._facts, self._met()

    def local(self, values: Iterable[int]) -> tuple[int, ...]:
        """Return values that the block has met or made by its own numbers."""
        first, count, known = self.first[0], len(self.values), self.values
        return tuple([v - first + count if v >= first else known[v] for v in values])

    def mesh(self, index: int) -> int:
        """Return the number of a mesh in the order in which they are met."""
        return self.meshes.setdefault(index, len(self.meshes))

    def value(self, index: int) -> int:
        """Return the number of a value likewise; what it is is noted when it is met."""
        if index < 0:
            return -1
        known = self.values.get(index)
        if known is None:
            known = self.values[index] = len(self.values)
            one = self.builder.values[index]
            self._facts.append(
                (
                    self.place.get(one.tensor, one.tensor), self.mesh(one.mesh), one.layout, one.shape,
                    one.dtype, one.scope, one.role, one.resident, one.halos,
                    self.value(one.gradient), self.value(one.alias),
                )
            )  # fmt: skip
        return known

    def _used(self, parameters: Parameters, tensor: int) -> object:
        """Return what other blocks have come to use a parameter as."""
        uses = [
            (self.mesh(mesh), layouts, self.value(use.value), self.value(use.source))
            for (mesh, used, *layouts), use in parameters.uses.items()
            if used == tensor
        ]
        return uses, parameters.kept[tensor].rest in parameters.taken

    def _held(self, stage: Stage, tensor: int) -> object:
        """Return what a mesh has come to hold of a tensor."""
        found: list[object] = []
        state = stage.state(tensor)
        for held in state[:2]:
            found.append(
                held
                and (
                    self.value(held.origin),
                    [(pair, self.value(one)) for pair, one in held.by_pair.items()],
                    [(layout, self.value(one)) for layout, one in held.by_layout.items()],
                )
            )
        for entering in state[2:4]:
            found.append([(how, self.value(one)) for how, one in (entering or {}).items()])
        halos = state[4] or {}
        found.append([(self.value(of), how, self.value(one)) for (of, how), one in halos.items()])
        return found

    def _met(self) -> object:
        """Return what of the meshes matters: their axes, and between them who shares devices and links.

        What travels between meshes of unlike sizes goes by their devices.
        """
        builder, met = self.builder, list(self.meshes)
        meshes = [builder.mesh(index) for index in met]
        shapes = [(mesh.axes, mesh.sizes) for mesh in meshes]
        links = [builder.links[index] for index in met]
        alike = [links.index(link) for link in links]
        devices = [mesh.devices for mesh in meshes]
        same = [devices.index(one) for one in devices]
        return shapes, alike, same, met if len({mesh.sizes for mesh in meshes}) > 1 else ()


class Move:
    """Says what of one block is what of another that stands alike."""

    def __init__(self, builder: ProgramBuilder, old: Standing, new: Standing) -> None:
        self.builder, self.old, self.new = builder, old, new
        self.values = dict(zip(old.values, new.values, strict=True))
        self.meshes = dict(zip(old.meshes, new.meshes, strict=True))
        self.tensors = dict(zip(old.block.tensors, new.block.tensors, strict=True))
        self.first = old.first[0]
        self.ahead, self.segments, self.messages = (
            other - one for one, other in zip(old.first, new.first, strict=True)
        )
        self.operators = new.block.around.start - old.block.around.start
        self.blocks = new.block.number - old.block.number
        links = {builder.links[one]: builder.links[other] for one, other in self.meshes.items()}
        self._links = {str(one): str(other) for one, other in links.items()}
        self._resources: dict[str, str] = {}

    def value(self, index: int) -> int:
        """Return a value: an offset further if the block made it."""
        if index >= self.first:
            return index + self.ahead
        return self.values[index] if index >= 0 else index

    def all(self, values: Iterable[int]) -> tuple[int, ...]:
        """Return several."""
        first, ahead, known = self.first, self.ahead, self.values
        return tuple([v + ahead if v >= first else known[v] if v >= 0 else v for v in values])

    def block(self, number: int) -> int:
        """Return a block's number, or -1."""
        return number + self.blocks if number >= 0 else number

    def made(self, value: Value) -> Value:
        """Return a value that a block makes."""
        return Value(
            tensor=self.tensors[value.tensor],
            mesh=self.meshes[value.mesh],
            layout=value.layout,
            shape=value.shape,
            dtype=value.dtype,
            scope=value.scope,
            role=value.role,
            gradient=self.value(value.gradient),
            alias=self.value(value.alias),
            resident=value.resident,
            halos=value.halos,
        )

    def call(self, call: Call) -> Call:
        """Return an operator with its local shapes."""
        return Call(
            operator=call.operator + self.operators,
            operands=self.all(call.operands),
            results=self.all(call.results),
            result_shapes=call.result_shapes,
            dims=call.dims,
            partial_axes=call.partial_axes,
            once=call.once,
            scale=call.scale,
            offset_dim=call.offset_dim,
            unpadded=call.unpadded,
        )

    def segment(self, segment: Segment) -> Segment:
        """Return a segment."""
        return replace(
            segment,
            mesh=self.meshes[segment.mesh],
            block=self.block(segment.block),
            calls=tuple(map(self.call, segment.calls)),
            inputs=self.all(segment.inputs),
            outputs=self.all(segment.outputs),
        )

    def finished(self, calls: Segment, told: Finished) -> Finished:
        """Return a finished segment, whose ``calls`` are moved already."""
        segment = told.segment
        return Finished(
            replace(
                segment,
                mesh=calls.mesh,
                block=calls.block,
                calls=calls.calls,
                inputs=calls.inputs,
                outputs=self.all(segment.outputs),
                rematerialised=self.all(segment.rematerialised),
                unused_in_backward=self.all(segment.unused_in_backward),
                deferred_values=self.all(segment.deferred_values),
            ),
            frozenset(self.all(told.saved)),
            {self.value(one): self.value(other) for one, other in told.views.items()},
        )

    def step(self, step: Step) -> Step:
        """Return a step."""
        if step.resource not in self._resources:
            self._resources[step.resource] = self._resource(step.resource)
        return Step(
            kind=step.kind,
            item=step.item + (self.segments if step.kind in RUNS else self.messages),
            resource=self._resources[step.resource],
            reads=self.all(step.reads),
            writes=self.all(step.writes),
            last_only=step.last_only,
        )

    def _resource(self, name: str) -> str:
        sort, _, rest = name.partition(":")
        if sort == "compute":
            return f"compute:{self.meshes[int(rest)]}"
        if sort == "link":
            link, _, axes = rest.partition(":")
            return f"link:{self._links[link]}:{axes}"
        return f"{sort}:{'-'.join(self._links[link] for link in rest.split('-'))}"

    def use(self, use: Use) -> Use:
        """Return a parameter as a mesh uses it."""
        source = self.value(use.source)
        return Use(self.tensors[use.tensor], self.meshes[use.mesh], self.value(use.value), source)

    def entry(self, entry: Entry) -> Entry:
        """Return a forward step."""
        adapts, sends, receives = (
            None if ends is None else (self.value(ends[0]), self.value(ends[1]))
            for ends in (entry.adapts, entry.sends, entry.receives)
        )
        return Entry(
            block=self.block(entry.block),
            steps=[self.step(step) for step in entry.steps],
            segment=entry.segment + self.segments if entry.segment >= 0 else -1,
            gathers=tuple([self.use(use) for use in entry.gathers]),
            adapts=adapts,
            sends=sends,
            receives=receives,
        )

    def holdings(self, holdings: Holdings) -> Holdings:
        """Return what a mesh has come to hold."""
        held, entering, halos = holdings
        tensors, value = self.tensors, self.value
        return (
            {
                (tensors[tensor], scope): Held(
                    value(one.origin),
                    {pair: value(v) for pair, v in one.by_pair.items()},
                    {layout: value(v) for layout, v in one.by_layout.items()},
                )
                for (tensor, scope), one in held.items()
            },
            {
                (tensors[tensor], scope): {how: value(v) for how, v in one.items()}
                for (tensor, scope), one in entering.items()
            },
            {
                tensors[tensor]: {(value(of), how): value(v) for (of, how), v in one.items()}
                for tensor, one in halos.items()
            },
        )

    def message(self, message: Message) -> Message:
        """Return a message."""
        return replace(
            message,
            mesh=self.meshes[message.mesh],
            sources=self.all(message.sources),
            results=self.all(message.results),
            destination=self.meshes[message.destination] if message.destination >= 0 else -1,
        )

    def record(self, record: Record, stages: Sequence[Stage]) -> Record:
        """Append to the builder what a block makes, and return all that lowering it does."""
        builder, value, first = self.builder, self.value, self.old.first
        builder.append_like(
            range(first[0], self.old.last[0]),
            [self.made(one) for one in builder.values[first[0] : self.old.last[0]]],
            [value(root) for root in builder.roots[first[0] : self.old.last[0]]],
        )
        segments = [(i + self.segments, self.segment(one)) for i, one in record.segments]
        builder.segments += [one for _, one in segments]
        builder.messages += map(self.message, builder.messages[first[2] : self.old.last[2]])
        lowered, meshes = record.lowered, self.meshes
        entries = [(list[Entry](), list[Entry]()) for _ in stages]
        blocks, leaves = [stage.block for stage in stages], list[Holdings](NOTHING for _ in stages)
        for one, other in meshes.items():
            prologue, forward = lowered.entries[one]
            entries[other] = [self.entry(e) for e in prologue], [self.entry(e) for e in forward]
            blocks[other] = self.block(record.blocks[one])
            leaves[other] = self.holdings(record.leaves[one])
        uses = {id(use): self.use(use) for use in record.uses.values()}
        return Record(
            rests_on=record.rests_on,
            lowered=Lowered(
                entries=tuple(entries),
                segments=tuple([index for index, _ in segments]),
                made=frozenset(self.all(lowered.made)),
                pending=tuple([(value(one), value(other)) for one, other in lowered.pending]),
                known={},
            ),
            blocks=tuple(blocks),
            opened=((),) * len(stages),
            segments=tuple(segments),
            leaves=tuple(leaves),
            uses={
                (meshes[key[0]], self.tensors[key[1]], *key[2:]): uses[id(use)]
                for key, use in record.uses.items()
            },
            first_uses={
                (meshes[key[0]], self.tensors[key[1]], key[2]): uses[id(use)]
                for key, use in record.first_uses.items()
            },
            taken=dict.fromkeys(self.all(record.taken)),
            turned=tuple([(value(one), value(other)) for one, other in record.turned]),
            external=frozenset(self.all(record.external)),
            lasting=self.all(record.lasting),
            cuts={self.tensors[tensor]: dim for tensor, dim in record.cuts.items()},
        )


class Lowers(Protocol):
    """What lowers blocks, and notes and repeats what that did."""

    builder: ProgramBuilder
    stages: list[Stage]
    placed: list[Placements]
    where: list[set[int]]
    parameters: Parameters

    def record(
        self, leaves: Sequence[int], rests_on: tuple[object, ...], act: Callable[[], None]
    ) -> Record:
        """Lower a block by ``act``, and note all that this did."""
        ...

    def repeat(self, record: Record) -> None:
        """Do what a record says."""
        ...


class Linker:
    """Lowers blocks of one strategy, each as one before that stood alike, if there is one."""

    def __init__(self, lowering: Lowers) -> None:
        self.lowering, self.builder = lowering, lowering.builder
        self._known: dict[int, list[tuple[Record, Standing]]] = {}
        self._stood: dict[int, tuple[int, Standing]] = {}  # by segment, and like which block
        self._finished: dict[object, tuple[Finished, Standing]] = {}
        self._moves: dict[tuple[int, int], Move] = {}

    def lower(self, block: Alike, act: Callable[[], None]) -> Record:
        """Lower a block, by ``act`` if it stands like none before."""
        lowering, builder = self.lowering, self.builder
        standing = Standing(builder, block)
        rests_on = standing.said(
            lowering.stages, lowering.placed, lowering.where, lowering.parameters
        )
        known = self._known.setdefault(block.kind, [])
        for record, other in known:
            if record.rests_on == rests_on:
                found = self._move(other, standing).record(record, lowering.stages)
                lowering.repeat(found)
                like = other.block.number
                break
        else:
            found = lowering.record(block.around.leaves, rests_on, act)
            standing.last, like = builder.counts(), block.number
            known.insert(0, (found, standing))
            del known[MOST_STANDINGS:]
        for index, _ in found.segments:
            self._stood[index] = like, standing
        return found

    def finish(self, number: int) -> Finished:
        """Finish a segment, as one of another block if that is alike."""
        builder = self.builder
        if number not in self._stood:
            return finish(builder, number)
        like, standing = self._stood[number]
        segment = builder.segments[number]
        outputs = [value for value in segment.outputs if value in builder.external]
        told = (outputs, segment.rematerialised, segment.unused_in_backward)
        key = (like, number - standing.first[1], *map(standing.local, told))
        if key not in self._finished:
            self._finished[key] = finish(builder, number), standing
            return self._finished[key][0]
        finished, other = self._finished[key]
        return self._move(other, standing).finished(segment, finished)

    def _move(self, old: Standing, new: Standing) -> Move:
        ends = old.block.number, new.block.number
        if ends not in self._moves:
            self._moves[ends] = Move(self.builder, old, new)
        return self._moves[ends]
