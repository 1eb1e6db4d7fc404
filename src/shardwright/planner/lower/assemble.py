"""Lay templates out for every microbatch in the schedule's order: the columns of the Program.

A template is compiled once per stage; each microbatch is then a shifted copy, made with NumPy, so
that a Program of 100,000 instructions costs little more than its distinct templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Kind, Program
from shardwright.planner.lower.draft import Draft, Step
from shardwright.planner.lower.lifetimes import (
    Lifetimes,
    backward_lifetimes,
    base_bytes,
    forward_lifetimes,
    once_lifetimes,
    writes_of,
)
from shardwright.planner.schedule.pipeline import global_order, pipeline_order

_COMPUTE = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.CLIP, Kind.UPDATE)
_SEGMENTS = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
_MESSAGES = (Kind.MESSAGE, Kind.SEND, Kind.RECEIVE)
_PREVIOUS = "previous compute"

Drafted = TypeVar("Drafted")


@dataclass(slots=True)
class Templates:
    """The five lists of steps of every stage."""

    prologue: list[list[Step]]
    forward: list[list[Step]]
    backward: list[list[Step]]
    exchange: list[list[Step]]
    epilogue: list[list[Step]]


@dataclass(slots=True)
class _Compiled:
    """A template as arrays; predecessors as (instance name, position) references."""

    stage: int
    kind: NDArray[np.int8]
    item: NDArray[np.int32]
    resource: NDArray[np.int32]
    last_compute: int
    lifetimes: Lifetimes
    allocated: NDArray[np.int64]
    freed: NDArray[np.int64]
    temporary: NDArray[np.int64]
    free_offset: NDArray[np.int64]
    free_value: NDArray[np.int32]
    places: NDArray[np.int64]
    references: dict[tuple[str, int], NDArray[np.int64]]
    targets: NDArray[np.int64]


class _Layout:
    """Appends instances of templates and remembers where each began."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.resources: dict[str, int] = {}
        self.size = 0
        self.begin: dict[tuple[str, int, int], int] = {}
        self.previous = [-1] * len(draft.strategy.meshes)
        self.parts: list[tuple[_Compiled, int, NDArray[np.int64], NDArray[np.int64]]] = []
        self.predecessors: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

    def resource(self, name: str) -> int:
        return self.resources.setdefault(name, len(self.resources))

    def append(
        self, name: str, compiled: _Compiled, microbatch: int, *, adds: bool = False
    ) -> None:
        """Append an instance; ``adds``: to the gradients of microbatches before."""
        base, stage, lifetimes = self.size, compiled.stage, compiled.lifetimes
        self.begin[name, stage, microbatch] = base
        targets = compiled.targets.copy()
        for (instance, other), chosen in compiled.references.items():
            targets[chosen] += self._base(instance, other, microbatch, base, stage)
        allocated, temporary = compiled.allocated, compiled.temporary
        if adds:
            temporary = np.array(lifetimes.later, dtype=np.int64)
        elif lifetimes.first:
            allocated = allocated + np.asarray(lifetimes.first)
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


def assemble(draft: Draft, templates: Templates, loss: int) -> Program:
    """Return the Program; instruction order is topological and each stage's own order."""
    count = len(draft.strategy.meshes)
    layout = _Layout(draft)
    compiler = _Compiler(draft, templates, layout)
    compiled = [compiler.stage(stage) for stage in range(count)]
    for stage in range(count):
        layout.append("prologue", compiled[stage]["prologue"], -1)
    pipeline = draft.strategy.pipeline
    orders = pipeline_order(pipeline.schedule, count, pipeline.num_microbatches)
    begun: set[int] = set()
    left = [pipeline.num_microbatches] * count
    for stage, phase, microbatch in global_order(orders):
        if phase == "F":
            layout.append("forward", compiled[stage]["forward"], microbatch)
            continue
        left[stage] -= 1
        template = compiled[stage]["last backward" if left[stage] == 0 else "backward"]
        layout.append("backward", template, microbatch, adds=stage in begun)
        begun.add(stage)
    for name in ("send", "receive", "epilogue"):
        for stage in range(count):
            layout.append("exchange" if name == "send" else name, compiled[stage][name], -1)
    return _program(draft, layout, loss)


def _without_last(steps: Sequence[Step]) -> list[Step]:
    return [step for step in steps if not step.last_only]


class _Compiler:
    """Turns lists of steps into arrays."""

    def __init__(self, draft: Draft, templates: Templates, layout: _Layout) -> None:
        self.draft = draft
        self.templates = templates
        self.layout = layout
        self.senders: dict[tuple[str, int], tuple[str, int, int]] = {}
        for name, lists in (("forward", templates.forward), ("prologue", templates.prologue)):
            self._note_senders(name, lists)
        # Every schedule runs backward by ascending microbatch, so stages agree on which is the last.
        self._note_senders("last backward", templates.backward)
        self._note_senders("backward", [_without_last(steps) for steps in templates.backward])
        sends = [[s for s in steps if s.kind is Kind.SEND] for steps in templates.exchange]
        self._note_senders("exchange", sends)

    def _note_senders(self, name: str, lists: Sequence[Sequence[Step]]) -> None:
        for stage, steps in enumerate(lists):
            for place, step in enumerate(steps):
                if step.kind is Kind.SEND:
                    self.senders[name, step.item] = (name.removeprefix("last "), stage, place)

    def stage(self, stage: int) -> dict[str, _Compiled]:
        """Compile all templates of one stage."""
        draft, all_steps = self.draft, self.templates
        prologue, forward = all_steps.prologue[stage], all_steps.forward[stage]
        last = all_steps.backward[stage]
        middle = _without_last(last)
        writers: dict[int, list[tuple[str, int]]] = {}
        result: dict[str, _Compiled] = {}
        lifetimes = once_lifetimes(draft, prologue, (), ends_step=False)
        result["prologue"] = self._compile("prologue", stage, prologue, lifetimes, writers)
        lifetimes, alive = forward_lifetimes(draft, forward, last)
        result["forward"] = self._compile("forward", stage, forward, lifetimes, writers)
        for name, steps in (("backward", middle), ("last backward", last)):
            known = {value: list(refs) for value, refs in writers.items()}
            lifetimes = backward_lifetimes(draft, steps, alive)
            result[name] = self._compile(name, stage, steps, lifetimes, known)
            if name == "last backward":
                writers = {
                    value: [("last" if where == name else where, place) for where, place in refs]
                    for value, refs in known.items()
                }
        sends = [step for step in all_steps.exchange[stage] if step.kind is Kind.SEND]
        receives = [step for step in all_steps.exchange[stage] if step.kind is Kind.RECEIVE]
        for name, steps in (("send", sends), ("receive", receives)):
            lifetimes = once_lifetimes(draft, steps, last, ends_step=True)
            result[name] = self._compile(name, stage, steps, lifetimes, writers)
        epilogue = all_steps.epilogue[stage]
        lifetimes = once_lifetimes(draft, epilogue, [*last, *receives], ends_step=True)
        self._free_rest(epilogue, stage, lifetimes, prologue, last, [*sends, *receives])
        result["epilogue"] = self._compile("epilogue", stage, epilogue, lifetimes, writers)
        return result

    def _free_rest(
        self,
        epilogue: Sequence[Step],
        stage: int,
        lifetimes: Lifetimes,
        prologue: Sequence[Step],
        backward: Sequence[Step],
        exchange: Sequence[Step],
    ) -> None:
        """At the update, give back what lived for the whole step: prologue and reduced gradients."""
        draft = self.draft
        synced = {v for step in backward if step.last_only for v in step.reads}
        values = {v for step in prologue for v in writes_of(draft, step)}
        for step in (*backward, *exchange, *epilogue):
            values |= {
                value
                for value in writes_of(draft, step)
                if draft.values[value].role == "gradient"
                and draft.values[value].scope == "step"
                and value not in synced
            }
        place = next(i for i, step in enumerate(epilogue) if step.kind is Kind.UPDATE)
        reported = {draft.root(output.value) for output in draft.outputs} - values
        for value in sorted(v for v in reported if draft.values[v].mesh == stage):
            pieces = draft.strategy.pipeline.num_microbatches
            lives = pieces if draft.values[value].scope == "microbatch" else 1
            lifetimes.frees[place].append(value)
            lifetimes.freed[place] += lives * draft.bytes_of(value)
        mine = sorted(value for value in values if draft.values[value].mesh == stage)
        lifetimes.frees[place] += mine
        lifetimes.freed[place] += sum(draft.bytes_of(value) for value in mine)

    def _compile(
        self,
        name: str,
        stage: int,
        steps: Sequence[Step],
        lifetimes: Lifetimes,
        writers: dict[int, list[tuple[str, int]]],
    ) -> _Compiled:
        draft = self.draft
        places: list[int] = []
        targets: list[int] = []
        groups: dict[tuple[str, int], list[int]] = {}

        def refer(place: int, instance: str, other: int, target: int) -> None:
            groups.setdefault((instance, other), []).append(len(places))
            places.append(place)
            targets.append(target)

        compute = -1
        for place, step in enumerate(steps):
            sources = {ref for value in step.reads for ref in self._writers(writers, value)}
            for instance, target in sorted(sources):
                refer(place, "self" if instance == name else instance, stage, target)
            if step.kind is Kind.RECEIVE:
                source = "exchange" if name == "receive" else name
                instance, other, target = self.senders[source, step.item]
                refer(place, instance, other, target)
            if step.kind in (Kind.MESSAGE, Kind.SEND):
                if compute >= 0:
                    refer(place, "self", stage, compute)
                else:
                    refer(place, _PREVIOUS, stage, 0)
            if step.kind in _COMPUTE:
                compute = place
            for value in writes_of(draft, step):
                is_sum = draft.values[value].role == "gradient"
                known = [r for r in writers.get(value, []) if r[0] == name] if is_sum else []
                writers[value] = [*known, (name, place)]
        offsets = np.cumsum([0, *(len(values) for values in lifetimes.frees)], dtype=np.int64)
        freed_values = [value for values in lifetimes.frees for value in values]
        resources = [self.layout.resource(step.resource) for step in steps]
        return _Compiled(
            stage=stage,
            kind=np.array([step.kind for step in steps], dtype=np.int8),
            item=np.array([step.item for step in steps], dtype=np.int32),
            resource=np.array(resources, dtype=np.int32),
            last_compute=compute,
            lifetimes=lifetimes,
            allocated=np.array(lifetimes.allocated, dtype=np.int64),
            freed=np.array(lifetimes.freed, dtype=np.int64),
            temporary=np.array(lifetimes.temporary, dtype=np.int64),
            free_offset=offsets,
            free_value=np.array(freed_values, dtype=np.int32),
            places=np.array(places, dtype=np.int64),
            references={key: np.array(rows, dtype=np.int64) for key, rows in groups.items()},
            targets=np.array(targets, dtype=np.int64),
        )

    def _writers(
        self, writers: dict[int, list[tuple[str, int]]], value: int
    ) -> list[tuple[str, int]]:
        while value not in writers and self.draft.values[value].alias >= 0:
            value = self.draft.values[value].alias
        return writers.get(value, [])


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
        for index in np.flatnonzero(np.isin(kind, _COMPUTE)):
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
    order = np.lexsort((targets, rows))
    counts = np.bincount(rows, minlength=layout.size)
    free_counts = np.concatenate([np.diff(part.free_offset) for part, _, _, _ in parts])
    item = np.concatenate([part.item for part, _, _, _ in parts])
    segments = _number_used(item, np.isin(kind, _SEGMENTS), draft.segments)
    messages = _number_used(item, np.isin(kind, _MESSAGES), draft.messages)
    return Program(
        strategy=draft.strategy,
        values=tuple(draft.values),
        segments=segments,
        messages=messages,
        loss=loss,
        outputs=draft.outputs,
        kind=kind,
        group=group,
        item=item,
        microbatch=_repeat(parts, [microbatch for _, microbatch, _, _ in parts]),
        resource=np.concatenate([part.resource for part, _, _, _ in parts]),
        resource_names=tuple(layout.resources),
        offset=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        predecessor=targets[order].astype(np.int32),
        free_offset=np.concatenate([[0], np.cumsum(free_counts)]).astype(np.int64),
        free_value=np.concatenate([part.free_value for part, _, _, _ in parts]),
        allocated=np.concatenate([allocated for _, _, allocated, _ in parts]),
        freed=np.concatenate([part.freed for part, _, _, _ in parts]),
        temporary=np.concatenate([temporary for _, _, _, temporary in parts]),
        base_bytes=tuple(base_bytes(draft, mesh) for mesh in range(len(draft.strategy.meshes))),
    )


def _number_used(
    item: NDArray[np.int32], chosen: NDArray[np.bool_], drafted: Sequence[Drafted]
) -> tuple[Drafted, ...]:
    """Return those of a draft's segments or messages that run, and number the items by them."""
    used, numbers = np.unique(item[chosen], return_inverse=True)
    item[chosen] = numbers
    return tuple([drafted[index] for index in used.tolist()])


def _repeat(
    parts: Sequence[tuple[_Compiled, int, NDArray[np.int64], NDArray[np.int64]]],
    numbers: Sequence[int],
) -> NDArray[np.int32]:
    lengths = [len(part.kind) for part, _, _, _ in parts]
    return np.repeat(np.array(numbers, dtype=np.int32), lengths)
