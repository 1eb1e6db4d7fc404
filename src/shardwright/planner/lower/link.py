"""Blocks that are alike are lowered once: what that did is done again for others, in their numbers.

What lowering a block does follows from how it stands (``standing``): its operators' configs, its
parameters, and what it finds of tensors from outside. Two blocks that stand alike have met, and then made,
the same values in the same order: so what one did is told of the other by two lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from shardwright.core.program import Call, Kind, Message, Segment
from shardwright.planner.lower.alike import Alike
from shardwright.planner.lower.builder import Extra, Finished, ProgramBuilder, Said, Step
from shardwright.planner.lower.finish import finish
from shardwright.planner.lower.parameters import Use
from shardwright.planner.lower.records import Record, news
from shardwright.planner.lower.stage import Entry, Held, Holdings
from shardwright.planner.lower.standing import Lowers, Standing
from shardwright.planner.remember import KEPT

RUNS = (Kind.FORWARD, Kind.RECOMPUTE)


class Move:
    """Says what of one block is what of another that stands alike."""

    def __init__(self, builder: ProgramBuilder, old: Standing, new: Standing) -> None:
        self.builder, self.old, self.new = builder, old, new
        self.values = {-1: -1, **dict(zip(old.values, new.values, strict=False))}
        self.meshes = {-1: -1, **dict(zip(old.meshes, new.meshes, strict=True))}
        self.tensors = dict(zip(old.block.tensors, new.block.tensors, strict=True))
        self.operators = new.block.around.start - old.block.around.start
        self.blocks = new.block.number - old.block.number
        links = {builder.links[one]: builder.links[other] for one, other in self.meshes.items()}
        self._links = {str(one): str(other) for one, other in links.items()}
        self._resources: dict[str, str] = {}
        self._segments, self._messages = {-1: -1}, dict[int, int]()

    def repeat(self, record: Record, lowering: Lowers) -> None:
        """Do for one block what a record says was done for the other."""
        builder, tensors, meshes = self.builder, self.tensors, self.meshes
        builder.cut_dim.update({tensors[tensor]: dim for tensor, dim in record.cuts.items()})
        builder.make_for(self.new.block.number)
        for value in islice(self.old.values, len(self.new.values), None):
            self.values[value] = self._make(value)
        for number, segment in record.segments:
            self._segments[number] = builder.add_segment(self._segment(segment))
        for number in sorted(_messages(record)):
            self._messages[number] = builder.add_message(self._message(builder.messages[number]))
        builder.make_for(None)
        for one, other in meshes.items():
            if other >= 0:
                stage, (prologue, forward) = lowering.stages[other], record.entries[one]
                stage.prologue += map(self._entry, prologue)
                stage.forward += map(self._entry, forward)
                stage.block = self._block(record.blocks[one])
                stage.resume(self._holdings(record.leaves[one]))
        moved = {id(use): self._use(use) for use in record.uses.values()}
        parameters = lowering.parameters
        for (mesh, tensor, *layouts), use in record.uses.items():
            parameters.uses[meshes[mesh], tensors[tensor], layouts[0], layouts[1]] = moved[id(use)]
        for (mesh, tensor, layout), use in record.first_uses.items():
            parameters.first_uses[meshes[mesh], tensors[tensor], layout] = moved[id(use)]
        parameters.pending.update(map(self._pair, record.pending))
        parameters.taken.update(dict.fromkeys(self.all(record.taken)))
        builder.turn(list(map(self._pair, record.turned)))
        builder.external.update(self.all(record.external))
        builder.lasting += self.all(record.lasting)

    def all(self, values: Iterable[int]) -> tuple[int, ...]:
        """Return several values."""
        known = self.values
        return tuple([known[value] for value in values])

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
            dict(map(self._pair, told.views.items())),
            {self.values[value]: size for value, size in told.stored.items()},
        )

    def _pair(self, pair: tuple[int, int]) -> tuple[int, int]:
        return self.values[pair[0]], self.values[pair[1]]

    def _block(self, number: int) -> int:
        return number + self.blocks if number >= 0 else number

    def _make(self, value: int) -> int:
        """Ask for a value as the other was asked for."""
        known, ((_, mesh, *_), extra) = self.values, self.builder.asked[value]
        ends = known[extra.get("gradient", -1)], known[extra.get("alias", -1)]
        return self.builder.ask_like((value, self.meshes[mesh], *ends), self._asked)

    def _asked(self, value: int, mesh: int, gradient: int, alias: int) -> tuple[Said, Extra]:
        """Return how to ask for a value that is like another, on a mesh, with these for its gradient and alias."""
        (tensor, _, layout, scope, role), extra = self.builder.asked[value]
        extra = extra.copy()
        if "gradient" in extra:
            extra["gradient"] = gradient
        if "alias" in extra:
            extra["alias"] = alias
        return (self.tensors[tensor], mesh, layout, scope, role), extra

    def _call(self, call: Call) -> Call:
        index = call.operator + self.operators
        ends = self.all(call.operands), self.all(call.results)
        return self.builder.once(
            ("call", index, call.dims, *ends), partial(self._called, call, index, *ends)
        )

    def _called(
        self, call: Call, index: int, operands: tuple[int, ...], results: tuple[int, ...]
    ) -> Call:
        return Call(
            operator=index,
            operands=operands,
            results=results,
            result_shapes=call.result_shapes,
            dims=call.dims,
            partial_axes=call.partial_axes,
            once=call.once,
            scale=call.scale,
            offset_dim=call.offset_dim,
            unpadded=call.unpadded,
        )

    def _segment(self, segment: Segment) -> Segment:
        return Segment(
            mesh=self.meshes[segment.mesh],
            block=self._block(segment.block),
            calls=tuple(map(self._call, segment.calls)),
            inputs=self.all(segment.inputs),
            outputs=self.all(segment.outputs),
            has_backward=segment.has_backward,
            recomputed=segment.recomputed,
        )

    def _message(self, message: Message) -> Message:
        return replace(
            message,
            mesh=self.meshes[message.mesh],
            sources=self.all(message.sources),
            results=self.all(message.results),
            destination=self.meshes[message.destination],
        )

    def _step(self, step: Step) -> Step:
        if step.resource not in self._resources:
            self._resources[step.resource] = self._resource(step.resource)
        items = self._segments if step.kind in RUNS else self._messages
        return Step(
            kind=step.kind,
            item=items[step.item],
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

    def _use(self, use: Use) -> Use:
        values = self.values
        mesh = self.meshes[use.mesh]
        return Use(self.tensors[use.tensor], mesh, values[use.value], values[use.source])

    def _entry(self, entry: Entry) -> Entry:
        adapts, sends, receives = (
            None if ends is None else self._pair(ends)
            for ends in (entry.adapts, entry.sends, entry.receives)
        )
        return Entry(
            block=self._block(entry.block),
            steps=list(map(self._step, entry.steps)),
            segment=self._segments[entry.segment],
            gathers=tuple(map(self._use, entry.gathers)),
            adapts=adapts,
            sends=sends,
            receives=receives,
        )

    def _holdings(self, holdings: Holdings) -> Holdings:
        held, entering, halos = holdings
        tensors, value = self.tensors, self.values
        return (
            {
                (tensors[tensor], scope): Held(
                    value[one.origin],
                    {pair: value[v] for pair, v in one.by_pair.items()},
                    {layout: value[v] for layout, v in one.by_layout.items()},
                )
                for (tensor, scope), one in held.items()
            },
            {
                (tensors[tensor], scope): {how: value[v] for how, v in one.items()}
                for (tensor, scope), one in entering.items()
            },
            {
                tensors[tensor]: {(value[of], how): value[v] for (of, how), v in one.items()}
                for tensor, one in halos.items()
            },
        )


def _messages(record: Record) -> set[int]:
    """Return the messages that a block sends."""
    entries = chain.from_iterable(chain.from_iterable(record.entries))
    steps = chain.from_iterable([entry.steps for entry in entries])
    return {step.item for step in steps if step.kind not in RUNS}


class Linker:
    """Lowers blocks, each as one before that stood alike, if there is one."""

    def __init__(self, builder: ProgramBuilder) -> None:
        self.builder = builder
        self._known: dict[int, list[tuple[object, Record, Standing]]] = {}
        # By segment: its place in its block, how that stands, and which stood so first.
        self._stood: dict[int, tuple[int, Standing, Standing]] = {}
        self._finished: dict[object, tuple[Finished, Standing]] = {}
        self._last: Move | None = None  # of segments of one block, which are finished in a row

    def lower(
        self,
        lowering: Lowers,
        block: Alike,
        rests_on: tuple[object, ...],
        act: Callable[[], None],
    ) -> Record:
        """Lower a block, by ``act`` if it stands like none before."""
        builder, leaves, stages = self.builder, block.around.leaves, lowering.stages
        standing = Standing(builder, block)
        said, known = standing.said(lowering), self._known.setdefault(block.kind, [])
        like, held = standing, list[Holdings]()
        for other, record, first in known:
            if other == said:
                act = partial(Move(builder, first, standing).repeat, record, lowering)
                like = first
                break
        else:
            held = [stage.holdings(leaves) for stage in stages]
        found = lowering.record(leaves, rests_on, act)
        standing.add(builder.made)
        if like is standing:
            fresh = replace(found, leaves=tuple(map(news, found.leaves, held)))
            known.insert(0, (said, fresh, standing))
            del known[KEPT:]  # of the ways in which blocks of this kind stand
        for place, number in enumerate(found.numbers):
            self._stood[number] = place, standing, like
        return found

    def finish(self, number: int) -> Finished:
        """Return a segment with only the outputs that somebody reads."""
        builder, segment = self.builder, self.builder.segments[number]
        outputs = tuple([value for value in segment.outputs if value in builder.external])
        told = (outputs, segment.rematerialised, segment.unused_in_backward)
        return builder.once(("finish", number, *told), partial(self._finish, number, *told))

    def _finish(self, number: int, *told: tuple[int, ...]) -> Finished:
        """Finish a segment, as one of another block if that is alike."""
        builder, segment = self.builder, self.builder.segments[number]
        if number not in self._stood:
            return finish(builder, segment, told[0])
        place, standing, like = self._stood[number]
        key = (like, place, *map(standing.local, told))
        if key not in self._finished:
            self._finished[key] = finish(builder, segment, told[0]), standing
            return self._finished[key][0]
        finished, other = self._finished[key]
        move = self._last
        if move is None or move.old is not other or move.new is not standing:
            move = self._last = Move(builder, other, standing)
        return move.finished(segment, finished)
