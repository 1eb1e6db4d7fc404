"""Blocks that are alike are lowered once: what that did is done again for others, in their numbers.

What lowering a block does follows from how it stands (``standing``): its operators' configs, its
parameters, and what it finds of tensors from outside. A record of it is moved to a block that stands alike
by two lists of values, two of meshes, and an offset for what was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from shardwright.core.program import Call, Kind, Message, Segment, Value
from shardwright.planner.lower.alike import Alike
from shardwright.planner.lower.builder import Finished, ProgramBuilder, Step
from shardwright.planner.lower.finish import finish
from shardwright.planner.lower.parameters import FirstKey, Use, UseKey
from shardwright.planner.lower.records import Record, news
from shardwright.planner.lower.stage import Entry, Held, Holdings, Stage
from shardwright.planner.lower.standing import Lowers, Standing
from shardwright.planner.remember import KEPT

NOTHING: Holdings = ({}, {}, {})
RUNS = (Kind.FORWARD, Kind.RECOMPUTE)


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
        segments = self._append(record)
        entries = [(list[Entry](), list[Entry]()) for _ in stages]
        blocks, leaves = [stage.block for stage in stages], [NOTHING] * len(stages)
        for one, other in self.meshes.items():
            prologue, forward = record.entries[one]
            entries[other] = list(map(self.entry, prologue)), list(map(self.entry, forward))
            blocks[other] = self.block(record.blocks[one])
            leaves[other] = self.holdings(record.leaves[one])
        uses, first_uses = self.uses(record)
        return Record(
            rests_on=record.rests_on,
            entries=tuple(entries),
            segments=segments,
            pending=self.pairs(record.pending),
            blocks=tuple(blocks),
            leaves=tuple(leaves),
            uses=uses,
            first_uses=first_uses,
            taken=dict.fromkeys(self.all(record.taken)),
            turned=self.pairs(record.turned),
            external=frozenset(self.all(record.external)),
            lasting=self.all(record.lasting),
            cuts={self.tensors[tensor]: dim for tensor, dim in record.cuts.items()},
            known={},
            made=frozenset(self.all(record.made)),
        )

    def _append(self, record: Record) -> tuple[tuple[int, Segment], ...]:
        """Append to the builder what a block makes; return its segments."""
        builder = self.builder
        values, _, messages = map(slice, self.old.first, self.old.last)
        builder.append_like(
            values, list(map(self.made, builder.values[values])), self.all(builder.roots[values])
        )
        segments = tuple([(i + self.segments, self.segment(one)) for i, one in record.segments])
        builder.segments += [one for _, one in segments]
        builder.messages += map(self.message, builder.messages[messages])
        return segments

    def pairs(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Return pairs of values."""
        return tuple([(self.value(one), self.value(other)) for one, other in pairs])

    def uses(self, record: Record) -> tuple[dict[UseKey, Use], dict[FirstKey, Use]]:
        """Return parameters as meshes use them, by their keys."""
        moved = {id(use): self.use(use) for use in record.uses.values()}
        meshes, tensors = self.meshes, self.tensors
        return (
            {
                (meshes[key[0]], tensors[key[1]], key[2], key[3]): moved[id(use)]
                for key, use in record.uses.items()
            },
            {
                (meshes[mesh], tensors[tensor], layout): moved[id(use)]
                for (mesh, tensor, layout), use in record.first_uses.items()
            },
        )


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
        rests_on = standing.said(lowering)
        known = self._known.setdefault(block.kind, [])
        for record, other in known:
            if record.rests_on == rests_on:
                found = self._move(other, standing).record(record, lowering.stages)
                lowering.repeat(found)
                like = other.block.number
                break
        else:
            leaves, stages = block.around.leaves, lowering.stages
            held = [stage.holdings(leaves) for stage in stages]
            found = lowering.record(leaves, rests_on, act)
            found = replace(found, leaves=tuple(map(news, found.leaves, held)))
            standing.last, like = builder.counts(), block.number
            known.insert(0, (found, standing))
            del known[KEPT:]  # of the ways in which blocks of this kind stand
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
