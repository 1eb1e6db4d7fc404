"""Lay phases out for every microbatch in the schedule's order: the columns of the Program.

A phase is compiled once per stage; each microbatch is then a shifted copy, made with NumPy, so
that a Program of 100,000 instructions costs little more than its distinct phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import STATES, Kind, Program, resource_classes
from shardwright.core.strategy import Mesh, crews_of, sorts_of_devices
from shardwright.planner.lower.builder import ProgramBuilder
from shardwright.planner.lower.compile import Compiled, Compiler, Phases
from shardwright.planner.lower.phases import PREVIOUS, Phase
from shardwright.planner.lower.template import COMPUTES, MOVES, RUNS_SEGMENT, Facts, Flags, Ints
from shardwright.planner.schedule.program import Entry, program_order, shares_devices

# Of actions: of a backward, whole or the second half, which one follows from how many are to come.
PHASES = {"F": Phase.FORWARD, "I": Phase.INPUT, "B": Phase.BACKWARD, "W": Phase.BACKWARD}
Element = TypeVar("Element", bound=np.generic)


class _Part(NamedTuple):
    """Some steps of a phase, which stand apart from the others: at ``rows`` of it."""

    compiled: Compiled
    rows: Ints
    length: int


def _parted(compiled: Compiled) -> tuple[_Part, _Part]:
    """Part a phase into what receives from other meshes, which may be posted ahead, and the rest."""
    receives = compiled.kind == Kind.RECEIVE
    return _part(compiled, receives), _part(compiled, ~receives)


def _part(compiled: Compiled, chosen: Flags) -> _Part:
    rows, needed, frees = np.flatnonzero(chosen), compiled.needed, compiled.frees
    place = np.cumsum(chosen) - 1
    waits, freed = chosen[needed.place], frees[:, chosen[frees[0]]]
    part = replace(
        compiled,
        kind=compiled.kind[rows],
        item=compiled.item[rows],
        resource=compiled.resource[rows],
        sizes=compiled.sizes[:, rows],
        frees=np.array([place[freed[0]], freed[1]]),
        needed=needed._replace(
            place=place[needed.place[waits]], writer=needed.writer[waits],
            target=needed.target[waits],
        ),
    )  # fmt: skip
    return _Part(part, rows, len(chosen))


class _Instance(NamedTuple):
    """A phase, or a part of it, of one microbatch, with what it allocates and needs for a while there."""

    compiled: Compiled
    microbatch: int
    allocated: Ints
    temporary: Ints


class _Layout:
    """Appends instances of phases and remembers where each began."""

    def __init__(self, builder: ProgramBuilder) -> None:
        self.builder = builder
        self.resources: dict[str, int] = {}
        self.size = 0
        # Of every instance (phase, stage and microbatch) where it begins or, where its steps stand
        # apart, the place of each.
        self.begin: dict[tuple[int, int, int], int | Ints] = {}
        self.turns: dict[int, dict[int, int]] = {}  # per stage and microbatch, its backward's turn
        self.previous = [-1] * len(builder.strategy.meshes)
        self.instances: list[_Instance] = []
        self.predecessors: list[tuple[Ints, Ints]] = []

    def number(self, order: Iterable[Entry], adds: str) -> None:
        """Number each stage's microbatches in the order in which they add to its gradients."""
        for (stage, letter, microbatch), ahead in order:
            if letter == adds and not ahead:
                turns = self.turns.setdefault(stage, {})
                turns.setdefault(microbatch, len(turns))

    def _targets(self, compiled: Compiled, microbatch: int) -> Ints:
        """Return where what an instance waits for stands; below 0 where that is nowhere yet."""
        needed = compiled.needed
        most = max([number for number, _, _ in compiled.references], default=0)
        bases = np.zeros(most + 1, dtype=np.int64)
        targets = needed.target.copy()
        for number, phase, other in compiled.references:
            begin = self._begin(phase, other, microbatch)
            if isinstance(begin, int):
                bases[number] = begin
            else:
                mine = needed.writer == number
                targets[mine] = begin[targets[mine]]
        return targets + bases[needed.writer]

    def append(
        self, compiled: Compiled, microbatch: int, *, before: int = 0, apart: _Part | None = None
    ) -> None:
        """Append an instance, which adds to the gradients of so many microbatches ``before``; it is
        a part of the instance where some steps stand ``apart``."""
        base, stage, sizes, needed = self.size, compiled.stage, compiled.sizes, compiled.needed
        key = (compiled.phase.instance, stage, microbatch)
        if apart is None:
            self.begin[key] = base
        else:
            places = self.begin.setdefault(key, np.full(apart.length, -1, dtype=np.int64))
            assert not isinstance(places, int)
            places[apart.rows] = base + np.arange(len(apart.rows))
        targets = self._targets(compiled, microbatch)
        keep = targets >= 0
        self.predecessors.append((needed.place[keep] + base, targets[keep]))
        allocated = sizes[0] if before else sizes[0] + sizes[3]
        temporary = sizes[(2, 4, 5)[min(before, 2)]]
        self.instances.append(_Instance(compiled, microbatch, allocated, temporary))
        self.size += len(compiled.kind)
        if needed.last_compute >= 0 and (apart is None or COMPUTES[compiled.kind].any()):
            begin = self.begin[key]
            last = needed.last_compute
            self.previous[stage] = begin + last if isinstance(begin, int) else int(begin[last])

    def post(self, part: _Part, microbatch: int, before: int, crew: list[int]) -> None:
        """Append the receives of an instance, ahead of the others. The host comes to them when it has
        done what it computed before, on any mesh of the ``crew``."""
        base = self.size
        self.append(part.compiled, microbatch, before=before, apart=part)
        done = max(self.previous[mesh] for mesh in crew)
        if done >= 0:
            places = np.arange(base, self.size)
            self.predecessors.append((places, np.full(len(places), done)))

    def _begin(self, phase: int, stage: int, microbatch: int) -> int | Ints:
        if phase == PREVIOUS:
            return self.previous[stage]
        if phase == Phase.LAST:
            return self.begin[Phase.BACKWARD, stage, self._last_microbatch(stage)]
        return self.begin[phase, stage, microbatch if Phase(phase).is_each else -1]

    def column(self, read: Callable[[_Instance], NDArray[Element]]) -> NDArray[Element]:
        """Return what all instances have, one behind the other."""
        return np.concatenate([read(one) for one in self.instances])

    def repeated(self, read: Callable[[_Instance], int]) -> NDArray[np.int32]:
        """Return a number of each instance for each of its instructions."""
        lengths = [len(one.compiled.kind) for one in self.instances]
        return np.repeat(np.array([read(one) for one in self.instances], dtype=np.int32), lengths)

    def _last_microbatch(self, stage: int) -> int:
        return max(self.turns[stage], key=self.turns[stage].__getitem__)


def assemble(
    builder: ProgramBuilder, stages: Sequence[Phases], loss: int, facts: Facts | None = None
) -> Program:
    """Return the Program of every stage's phases; instruction order is topological and each stage's own order.

    ``facts`` of the values, where these are not all in the builder.
    """
    layout = _Layout(builder)
    compiled = Compiler(builder, layout.resources, facts).stages(stages)
    for own in compiled:
        layout.append(own[Phase.PROLOGUE], -1)
    _lay_out_microbatches(layout, compiled)
    for phase in (Phase.SEND, Phase.RECEIVE, Phase.EPILOGUE):
        for own in compiled:
            layout.append(own[phase], -1)
    return _program(builder, layout, loss)


def _crews(meshes: Sequence[Mesh]) -> list[list[int]]:
    """Return, by stage, the stages on some of its devices."""
    if not shares_devices(meshes):
        return [[stage] for stage in range(len(meshes))]
    crews = crews_of(meshes)
    sets = {devices: set(devices) for devices in crews}
    found = {
        mine: sorted(
            o for theirs in crews if not sets[mine].isdisjoint(theirs) for o in crews[theirs]
        )
        for mine in crews
    }
    return [found[mesh.devices] for mesh in meshes]


def _lay_out_microbatches(layout: _Layout, compiled: Sequence[Sequence[Compiled]]) -> None:
    """Append the instances of every microbatch in the schedule's order."""
    strategy = layout.builder.strategy
    most = strategy.pipeline.num_microbatches
    order = program_order(strategy)
    posts = any(entry.posts for entry in order)
    crews = _crews(strategy.meshes)
    adds = "W" if layout.builder.splits_backward else "B"
    layout.number(order, adds)
    parted: dict[tuple[int, Phase], tuple[_Part, _Part]] = {}
    for (stage, letter, microbatch), ahead in order:
        phase, before = PHASES[letter], 0
        if letter == adds:
            before = layout.turns[stage][microbatch]
            phase = Phase.LAST if before == most - 1 else Phase.BACKWARD
        whole, crew = compiled[stage][phase], crews[stage]
        if not posts:
            layout.append(whole, microbatch, before=before)
            continue
        if (stage, phase) not in parted:
            parted[stage, phase] = _parted(whole)
        receives, rest = parted[stage, phase]
        if ahead:
            layout.post(receives, microbatch, before, crew)
        else:
            layout.append(rest.compiled, microbatch, before=before, apart=rest)


def _turns(
    meshes: Sequence[Mesh], kind: NDArray[np.int8], group: NDArray[np.int32]
) -> tuple[Ints, Ints]:
    """Return (later, earlier) pairs that let meshes which share devices compute in index order.

    A device runs its instructions one after another, whichever of its meshes they belong to: each waits for
    the one before it. Those of one mesh do so by themselves, since they share a resource.
    """
    computing = np.flatnonzero(COMPUTES[kind])
    found = [np.zeros((0, 2), dtype=np.int64)]
    for own in set(sorts_of_devices(crews_of(meshes)).values()):
        is_mine = np.zeros(len(meshes), dtype=np.bool_)
        is_mine[list(own)] = True
        mine = computing[is_mine[group[computing]]]
        turns = np.flatnonzero(np.diff(group[mine]))
        found.append(np.stack([mine[turns + 1], mine[turns]], axis=1))
    pairs = np.unique(np.concatenate(found), axis=0)
    return pairs[:, 0], pairs[:, 1]


def _program(builder: ProgramBuilder, layout: _Layout, loss: int) -> Program:
    column, repeated = layout.column, layout.repeated
    kind, group = column(lambda one: one.compiled.kind), repeated(lambda one: one.compiled.stage)
    waits = [*layout.predecessors, _turns(builder.strategy.meshes, kind, group)]
    rows, targets = (np.concatenate(ends) for ends in zip(*waits, strict=True))
    offset, ordered = _by_row(rows, targets, layout.size)
    free_offset, free_value = _frees(layout)
    item = column(lambda one: one.compiled.item)
    segments = builder.segment_order()
    number = np.zeros(len(builder.segments), dtype=np.int32)
    number[segments] = np.arange(len(segments))
    runs = RUNS_SEGMENT[kind]
    item[runs] = number[item[runs]]
    messages = _renumber(item, MOVES[kind], len(builder.messages))
    microbatch = repeated(lambda one: one.microbatch)
    works = kind == Kind.TRANSFORM
    states = _state_bytes(builder, item[works], microbatch[works])
    transforms = _renumber(item, works, len(builder.transforms))
    return Program(
        strategy=builder.strategy,
        values=tuple(builder.values),
        segments=tuple([builder.segments[index] for index in segments]),
        messages=tuple([builder.messages[index] for index in messages]),
        transforms=tuple([builder.transforms[index] for index in transforms]),
        updates=tuple(builder.updates),
        loss=loss,
        outputs=builder.outputs,
        kind=kind,
        group=group,
        item=item,
        microbatch=microbatch,
        resource=column(lambda one: one.compiled.resource),
        resource_names=tuple(layout.resources),
        resource_class=resource_classes(layout.resources),
        offset=offset,
        predecessor=ordered.astype(np.int32),
        free_offset=free_offset,
        free_value=free_value.astype(np.int32),
        allocated=column(lambda one: one.allocated),
        freed=column(lambda one: one.compiled.sizes[1]),
        temporary=column(lambda one: one.temporary),
        base_bytes=tuple([builder.base_bytes(mesh) + own for mesh, own in enumerate(states)]),
    )


def _state_bytes(
    builder: ProgramBuilder, works: NDArray[np.int32], microbatch: NDArray[np.int32]
) -> list[int]:
    """Return one device's bytes of every mesh's states, given the transforms that run and when.

    In a microbatch a transform runs once, or as often as there are blocks which it stands for.
    """
    found = [0] * len(builder.strategy.meshes)
    if not builder.residuals:
        return found
    times: dict[int, int] = {}
    runs, counts = np.unique(np.stack([works, microbatch]), axis=1, return_counts=True)
    numbers: list[int] = runs[0].tolist()
    for number, count in zip(numbers, counts.tolist(), strict=True):
        for value in builder.transforms[number].reads:
            if builder.values[value].role in STATES:
                times[value] = max(times.get(value, 0), count)
    for value, count in times.items():
        found[builder.values[value].mesh] += count * builder.values[value].bytes
    return found


def _renumber(item: NDArray[np.int32], chosen: Flags, count: int) -> list[int]:
    """Number those of ``count`` items that the chosen instructions name; return which they are."""
    is_used = np.zeros(count, dtype=np.bool_)
    is_used[item[chosen]] = True
    item[chosen] = (np.cumsum(is_used) - 1)[item[chosen]]
    return np.flatnonzero(is_used).tolist()


def _by_row(rows: Ints, columns: Ints, size: int) -> tuple[Ints, Ints]:
    """Return where each row begins, and the columns row by row, ascending."""
    ordered = np.sort(rows * size + columns)
    offset = np.searchsorted(ordered, size * np.arange(size + 1))
    return offset.astype(np.int64), ordered % max(size, 1)


def _frees(layout: _Layout) -> tuple[Ints, Ints]:
    """Return where what each instruction frees begins, and what all of them free."""
    found = [one.compiled.frees for one in layout.instances]
    lengths = np.array([len(one.compiled.kind) for one in layout.instances], dtype=np.int64)
    counts = np.array([frees.shape[1] for frees in found], dtype=np.int64)
    places, values = np.concatenate(found, axis=1)
    places = places + np.repeat(np.cumsum(lengths) - lengths, counts)
    order = np.argsort(places, kind="stable")
    offset = np.zeros(layout.size + 1, dtype=np.int64)
    np.cumsum(np.bincount(places, minlength=layout.size), out=offset[1:])
    return offset, values[order]
