"""Lay templates out for every microbatch in the schedule's order: the columns of the Program.

A template is compiled once per stage; each microbatch is then a shifted copy, made with NumPy, so
that a Program of 100,000 instructions costs little more than its distinct templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Kind, Program
from shardwright.planner.lower.draft import Draft, Step
from shardwright.planner.lower.lifetimes import (
    Lifetimes,
    backward_lifetimes,
    base_bytes,
    forward_lifetimes,
    free_at_update,
    once_lifetimes,
)
from shardwright.planner.lower.template import (
    COMPUTES,
    MOVES,
    RUNS_SEGMENT,
    SENDS,
    Facts,
    Ints,
    Template,
)
from shardwright.planner.lower.waits import NAMES, Waits
from shardwright.planner.schedule.pipeline import global_order, pipeline_order

_PREVIOUS = "previous compute"


@dataclass(slots=True)
class Steps:
    """The five lists of steps of one stage."""

    prologue: list[Step]
    forward: list[Step]
    backward: list[Step]
    exchange: list[Step]
    epilogue: list[Step]


@dataclass(frozen=True, slots=True)
class Templates:
    """The templates of one stage. ``middle`` is the backward of all microbatches but the last;
    ``sends`` and ``receives`` follow the last."""

    prologue: Template
    forward: Template
    middle: Template
    last: Template
    sends: Template
    receives: Template
    epilogue: Template

    @classmethod
    def of(cls, draft: Draft, steps: Steps) -> Templates:
        """Look at the steps of a draft whose segments are finished."""
        several = draft.strategy.pipeline.num_microbatches > 1
        last = Template.of(draft, steps.backward)
        middle = [step for step in steps.backward if not step.last_only]
        is_same = not several or len(middle) == len(last)
        return cls(
            prologue=Template.of(draft, steps.prologue),
            forward=Template.of(draft, steps.forward),
            middle=last if is_same else Template.of(draft, middle),
            last=last,
            sends=Template.of(draft, [s for s in steps.exchange if s.kind is Kind.SEND]),
            receives=Template.of(draft, [s for s in steps.exchange if s.kind is Kind.RECEIVE]),
            epilogue=Template.of(draft, steps.epilogue),
        )


@dataclass(slots=True)
class _Compiled:
    """A template as arrays; predecessors as (instance name, position) references."""

    stage: int
    kind: NDArray[np.int8]
    item: NDArray[np.int32]
    resource: NDArray[np.int32]
    last_compute: int
    lifetimes: Lifetimes
    places: Ints
    references: dict[tuple[str, int], Ints]
    targets: Ints

    @classmethod
    def empty(cls, stage: int, lifetimes: Lifetimes) -> _Compiled:
        """Return a template without steps."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(
            stage=stage,
            kind=nothing.astype(np.int8),
            item=nothing.astype(np.int32),
            resource=nothing.astype(np.int32),
            last_compute=-1,
            lifetimes=lifetimes,
            places=nothing,
            references={},
            targets=nothing,
        )


class _Layout:
    """Appends instances of templates and remembers where each began."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.resources: dict[str, int] = {}
        self.size = 0
        self.begin: dict[tuple[str, int, int], int] = {}
        self.previous = [-1] * len(draft.strategy.meshes)
        self.parts: list[tuple[_Compiled, int, Ints, Ints]] = []
        self.predecessors: list[tuple[Ints, Ints]] = []

    def resource(self, name: str) -> int:
        return self.resources.setdefault(name, len(self.resources))

    def append(self, name: str, compiled: _Compiled, microbatch: int, *, before: int = 0) -> None:
        """Append an instance, which adds to the gradients of so many microbatches ``before``."""
        base, stage, lifetimes = self.size, compiled.stage, compiled.lifetimes
        self.begin[name, stage, microbatch] = base
        targets = compiled.targets.copy()
        for (instance, other), chosen in compiled.references.items():
            targets[chosen] += self._base(instance, other, microbatch, base, stage)
        allocated = lifetimes.allocated
        temporary = lifetimes.temporary
        if before:
            temporary = lifetimes.second if before == 1 else lifetimes.onward
        elif len(lifetimes.first):
            allocated = allocated + lifetimes.first
        keep = targets >= 0
        self.predecessors.append((compiled.places[keep] + base, targets[keep]))
        self.parts.append((compiled, microbatch, allocated, temporary))
        self.size += len(compiled.kind)
        if compiled.last_compute >= 0:
            self.previous[stage] = base + compiled.last_compute

    def _base(self, instance: str, other: int, microbatch: int, base: int, stage: int) -> int:
        if instance == "self":
            return base
        if instance == _PREVIOUS:
            return self.previous[stage]
        if instance == "last":
            return self.begin["backward", other, self._last_microbatch(other)]
        if instance in ("prologue", "exchange"):
            return self.begin[instance, other, -1]
        return self.begin[instance, other, microbatch]

    def _last_microbatch(self, stage: int) -> int:
        return max(
            (m for name, s, m in self.begin if name == "backward" and s == stage),
            key=lambda m: self.begin["backward", stage, m],
        )


def assemble(
    draft: Draft, templates: Sequence[Templates], loss: int, facts: Facts | None = None
) -> Program:
    """Return the Program of every stage's templates; instruction order is topological and each stage's own order.

    ``facts`` of the values, where these are not all in the draft.
    """
    count = len(draft.strategy.meshes)
    layout = _Layout(draft)
    compiler = _Compiler(draft, facts or Facts.of(draft), templates, layout)
    compiled = [compiler.stage(stage) for stage in range(count)]
    for stage in range(count):
        layout.append("prologue", compiled[stage]["prologue"], -1)
    pipeline = draft.strategy.pipeline
    orders = pipeline_order(pipeline.schedule, count, pipeline.num_microbatches)
    left = [pipeline.num_microbatches] * count
    for stage, phase, microbatch in global_order(orders):
        if phase == "F":
            layout.append("forward", compiled[stage]["forward"], microbatch)
            continue
        before = pipeline.num_microbatches - left[stage]
        left[stage] -= 1
        template = compiled[stage]["last backward" if left[stage] == 0 else "backward"]
        layout.append("backward", template, microbatch, before=before)
    for name in ("send", "receive", "epilogue"):
        for stage in range(count):
            layout.append("exchange" if name == "send" else name, compiled[stage][name], -1)
    return _program(draft, layout, loss)


class _Compiler:
    """Adds to templates what they wait for and when values live."""

    def __init__(
        self, draft: Draft, facts: Facts, templates: Sequence[Templates], layout: _Layout
    ) -> None:
        self.draft = draft
        self.facts = facts
        self.templates = templates
        self.layout = layout
        self.names = list(draft.resources)
        self.senders: dict[tuple[str, int], tuple[str, int, int]] = {}
        for stage, one in enumerate(templates if len(templates) > 1 else ()):
            self._note_senders("forward", stage, one.forward)
            self._note_senders("prologue", stage, one.prologue)
            # Every schedule runs backward by ascending microbatch, so stages agree on the last.
            self._note_senders("last backward", stage, one.last)
            self._note_senders("backward", stage, one.middle)
            self._note_senders("exchange", stage, one.sends)

    def _note_senders(self, name: str, stage: int, template: Template) -> None:
        for place in np.flatnonzero(template.kind == Kind.SEND).tolist():
            item = int(template.item[place])
            self.senders[name, item] = (name.removeprefix("last "), stage, place)

    def stage(self, stage: int) -> dict[str, _Compiled]:
        """Compile all templates of one stage."""
        draft, facts, own = self.draft, self.facts, self.templates[stage]
        waits, result = Waits(facts), dict[str, _Compiled]()

        def add(name: str, template: Template, lifetimes: Lifetimes, known: Waits) -> None:
            result[name] = self._compile(name, stage, template, lifetimes, known)

        nothing = np.zeros(0, dtype=np.int64)
        lifetimes = once_lifetimes(facts, own.prologue, nothing, ends_step=False)
        add("prologue", own.prologue, lifetimes, waits)
        lifetimes, alive = forward_lifetimes(draft, facts, own.forward, own.last)
        add("forward", own.forward, lifetimes, waits)
        if draft.strategy.pipeline.num_microbatches > 1:
            lifetimes = backward_lifetimes(draft, facts, own.middle, alive)
            add("backward", own.middle, lifetimes, waits.copy())
        add("last backward", own.last, backward_lifetimes(draft, facts, own.last, alive), waits)
        for name, template in (("send", own.sends), ("receive", own.receives)):
            lifetimes = once_lifetimes(facts, template, own.last.written, ends_step=True)
            add(name, template, lifetimes, waits)
        before = np.concatenate([own.last.written, own.receives.written])
        lifetimes = once_lifetimes(facts, own.epilogue, before, ends_step=True)
        others = (own.sends, own.receives, own.epilogue)
        free_at_update(draft, facts, stage, lifetimes, (own.prologue, own.last, others))
        add("epilogue", own.epilogue, lifetimes, waits)
        return result

    def _compile(
        self, name: str, stage: int, template: Template, lifetimes: Lifetimes, waits: Waits
    ) -> _Compiled:
        count = len(template)
        if not count:
            return _Compiled.empty(stage, lifetimes)
        places, writers, targets = waits.of(name, template)
        references: dict[tuple[str, int], Ints] = {}
        for writer in np.flatnonzero(np.bincount(writers)).tolist():
            own = NAMES[writer] == name
            instance = "self" if own else NAMES[writer].removesuffix(" backward")
            references[instance, stage] = np.flatnonzero(writers == writer)
        turns = np.arange(count)
        computes = COMPUTES[template.kind]
        before = np.maximum.accumulate(np.where(computes, turns, -1))
        sending = np.flatnonzero(SENDS[template.kind])
        arrivals = np.flatnonzero(template.kind == Kind.RECEIVE)
        source = "exchange" if name == "receive" else name
        senders = [self.senders[source, item] for item in template.item[arrivals].tolist()]
        behind = before[sending] >= 0
        joined = len(places)
        first = joined + int(behind.sum())
        more = [(("self", stage), joined + np.arange(first - joined))]
        more.append(((_PREVIOUS, stage), first + np.arange(len(sending) - (first - joined))))
        for number, (instance, other, _) in enumerate(senders):
            more.append(((instance, other), np.array([joined + len(sending) + number])))
        for key, rows in more:
            if len(rows):
                references[key] = np.concatenate([references.get(key, rows[:0]), rows])
        idle = sending[~behind]
        arrived = np.array([place for _, _, place in senders], dtype=np.int64)
        return _Compiled(
            stage=stage,
            kind=template.kind,
            item=template.item.astype(np.int32),
            resource=self._resources(template),
            last_compute=int(before[-1]),
            lifetimes=lifetimes,
            places=np.concatenate([places, sending[behind], idle, arrivals]),
            references=references,
            targets=np.concatenate([targets, before[sending[behind]], 0 * idle, arrived]),
        )

    def _resources(self, template: Template) -> NDArray[np.int32]:
        """Number resources in the order in which the Program meets them."""
        table = np.zeros(len(self.names), dtype=np.int32)
        met: list[int] = template.resource.tolist()
        for known in dict.fromkeys(met):
            table[known] = self.layout.resource(self.names[known])
        return table[template.resource]


def _turns(
    draft: Draft, kind: NDArray[np.int8], group: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (later, earlier) pairs that let meshes which share devices compute in index order.

    A device runs its instructions one after another, whichever of its meshes they belong to.
    """
    devices = [set(mesh.devices) for mesh in draft.strategy.meshes]
    sharing = [
        [other for other, theirs in enumerate(devices) if other != mesh and mine & theirs]
        for mesh, mine in enumerate(devices)
    ]
    pairs: list[tuple[int, int]] = []
    if any(sharing):
        last = [-1] * len(devices)
        for index in np.flatnonzero(COMPUTES[kind]):
            mesh = int(group[index])
            pairs += [(int(index), last[other]) for other in sharing[mesh] if last[other] >= 0]
            last[mesh] = int(index)
    columns = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def _program(draft: Draft, layout: _Layout, loss: int) -> Program:
    parts = layout.parts
    kind = np.concatenate([part.kind for part, _, _, _ in parts])
    group = _repeat(parts, [part.stage for part, _, _, _ in parts])
    waits = [*layout.predecessors, _turns(draft, kind, group)]
    rows = np.concatenate([places for places, _ in waits])
    targets = np.concatenate([targets for _, targets in waits])
    offset, ordered = _by_row(rows, targets, layout.size)
    free_offset, free_value = _frees(layout)
    item = np.concatenate([part.item for part, _, _, _ in parts])
    segments = draft.segment_order()
    number = np.zeros(len(draft.segments), dtype=np.int32)
    number[segments] = np.arange(len(segments))
    runs, moves = RUNS_SEGMENT[kind], MOVES[kind]
    item[runs] = number[item[runs]]
    is_used = np.zeros(len(draft.messages), dtype=np.bool_)
    is_used[item[moves]] = True
    item[moves] = (np.cumsum(is_used) - 1)[item[moves]]
    messages: list[int] = np.flatnonzero(is_used).tolist()
    return Program(
        strategy=draft.strategy,
        values=tuple(draft.values),
        segments=tuple([draft.segments[index] for index in segments]),
        messages=tuple([draft.messages[index] for index in messages]),
        loss=loss,
        outputs=draft.outputs,
        kind=kind,
        group=group,
        item=item,
        microbatch=_repeat(parts, [microbatch for _, microbatch, _, _ in parts]),
        resource=np.concatenate([part.resource for part, _, _, _ in parts]),
        resource_names=tuple(layout.resources),
        offset=offset,
        predecessor=ordered.astype(np.int32),
        free_offset=free_offset,
        free_value=free_value.astype(np.int32),
        allocated=np.concatenate([allocated for _, _, allocated, _ in parts]),
        freed=np.concatenate([part.lifetimes.freed for part, _, _, _ in parts]),
        temporary=np.concatenate([temporary for _, _, _, temporary in parts]),
        base_bytes=tuple(base_bytes(draft, mesh) for mesh in range(len(draft.strategy.meshes))),
    )


def _by_row(rows: Ints, columns: Ints, size: int) -> tuple[Ints, Ints]:
    """Return where each row begins, and the columns row by row, ascending."""
    ordered = np.sort(rows * size + columns)
    offset = np.searchsorted(ordered, size * np.arange(size + 1))
    return offset.astype(np.int64), ordered % max(size, 1)


def _frees(layout: _Layout) -> tuple[Ints, Ints]:
    """Return where what each instruction frees begins, and what all of them free."""
    found = [part.lifetimes for part, _, _, _ in layout.parts]
    lengths = np.array([len(part.kind) for part, _, _, _ in layout.parts], dtype=np.int64)
    counts = np.array([len(one.free_place) for one in found], dtype=np.int64)
    places = np.concatenate([one.free_place for one in found])
    places += np.repeat(np.cumsum(lengths) - lengths, counts)
    order = np.argsort(places, kind="stable")
    offset = np.zeros(layout.size + 1, dtype=np.int64)
    np.cumsum(np.bincount(places, minlength=layout.size), out=offset[1:])
    return offset, np.concatenate([one.free_value for one in found])[order]


def _repeat(
    parts: Sequence[tuple[_Compiled, int, Ints, Ints]],
    numbers: Sequence[int],
) -> NDArray[np.int32]:
    lengths = [len(part.kind) for part, _, _, _ in parts]
    return np.repeat(np.array(numbers, dtype=np.int32), lengths)
