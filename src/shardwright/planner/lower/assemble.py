"""List phases for every microbatch in the schedule's order, and make the Program of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.core.joining import joined
from shardwright.core.program import STATES, Kind, Program, resource_classes
from shardwright.core.strategy import Mesh, Strategy, crews_of, sorts_of_devices
from shardwright.operators.keeping.backward import is_weight
from shardwright.planner.lower.builder import WIDE, ProgramBuilder
from shardwright.planner.lower.compile import Compiled, Compiler, Phases
from shardwright.planner.lower.finish import joined_bytes
from shardwright.planner.lower.instances import Instances, Part, parted, whole
from shardwright.planner.lower.phases import Phase
from shardwright.planner.lower.template import COMPUTES, MOVES, RUNS_SEGMENT, Facts, Flags, Ints
from shardwright.planner.schedule.pipeline import Action
from shardwright.planner.schedule.program import program_order, shares_devices

# Of actions: of a backward, whole or the second half, which one follows from how many are to come.
PHASES = {"F": Phase.FORWARD, "I": Phase.INPUT, "B": Phase.BACKWARD, "W": Phase.BACKWARD}


class _Order:
    """The parts of phases, and their instances in the order in which the Program lists them."""

    def __init__(self, compiled: Sequence[Sequence[Compiled]]) -> None:
        self.compiled = compiled
        self.parts: list[Part] = []
        self.instances: list[tuple[int, int, int]] = []
        # Instances that are asked for ahead, and of which stage.
        self.posted: list[tuple[int, int]] = []
        self.last: dict[int, int] = {}  # by stage, the microbatch that adds to its gradients last
        self._wholes: dict[tuple[int, Phase], int] = {}
        self._halves: dict[tuple[int, Phase], int] = {}

    def once(self, phase: Phase) -> None:
        """List what every stage does once."""
        for stage in range(len(self.compiled)):
            self._list(self._whole(stage, phase), -1)

    def microbatches(self, strategy: Strategy, adds: str) -> None:
        """List what stages do with every microbatch, in the schedule's order; actions with the letter ``adds``
        add to gradients."""
        order = program_order(strategy)
        turns = self._turns_of(
            one.action for one in order if one.action[1] == adds and not one.posts
        )
        posts = any(entry.posts for entry in order)
        most = strategy.pipeline.num_microbatches
        for (stage, letter, microbatch), ahead in order:
            phase, before = PHASES[letter], 0
            if letter == adds:
                before = turns[stage, microbatch]
                phase = Phase.LAST if before == most - 1 else Phase.BACKWARD
            if ahead:
                self.posted.append((len(self.instances), stage))
            part = self._half(stage, phase, ahead) if posts else self._whole(stage, phase)
            self._list(part, microbatch, before)

    def _turns_of(self, adding: Iterable[Action]) -> dict[tuple[int, int], int]:
        """Number each stage's microbatches in the order in which they add to its gradients."""
        counts, turns = Counter[int](), dict[tuple[int, int], int]()
        for stage, _, microbatch in adding:
            if (stage, microbatch) not in turns:
                turns[stage, microbatch] = counts[stage]
                counts[stage] += 1
                self.last[stage] = microbatch
        return turns

    def _list(self, part: int, microbatch: int, before: int = 0) -> None:
        self.instances.append((part, microbatch, before))

    def _whole(self, stage: int, phase: Phase) -> int:
        if (stage, phase) not in self._wholes:
            self._wholes[stage, phase] = len(self.parts)
            self.parts.append(whole(self.compiled[stage][phase]))
        return self._wholes[stage, phase]

    def _half(self, stage: int, phase: Phase, ahead: bool) -> int:
        """Return the part of a phase that may be posted ahead, or the other."""
        if (stage, phase) not in self._halves:
            self._halves[stage, phase] = len(self.parts)
            self.parts += parted(self.compiled[stage][phase])
        return self._halves[stage, phase] + (not ahead)


def assemble(
    builder: ProgramBuilder, stages: Sequence[Phases], loss: int, facts: Facts | None = None
) -> Program:
    """Return the Program of every stage's phases; instruction order is topological and each stage's own order.

    ``facts`` of the values, where these are not all in the builder.
    """
    resources: dict[str, int] = {}
    order = _Order(Compiler(builder, resources, facts).stages(stages))
    order.once(Phase.PROLOGUE)
    order.microbatches(builder.strategy, "W" if builder.splits_backward else "B")
    for phase in (Phase.SEND, Phase.RECEIVE, Phase.EPILOGUE):
        order.once(phase)
    layout = Instances(order.parts, order.instances)
    waits = [layout.waits(order.last), _after_crews(layout, order.posted, builder.strategy.meshes)]
    return _program(builder, layout, waits, tuple(resources), loss)


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


def _after_crews(
    layout: Instances, posted: Sequence[tuple[int, int]], meshes: Sequence[Mesh]
) -> tuple[Ints, Ints]:
    """Return (later, earlier) pairs of receives that are ``posted`` ahead: the host comes to them when it has
    done what it computed before, on any mesh of the crew."""
    found = [(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))]
    crews = _crews(meshes) if posted else []
    for stage in sorted({stage for _, stage in posted}):
        mine = np.array([number for number, other in posted if other == stage])
        done = np.max(
            [layout.computed(np.full(len(mine), mesh), mine) for mesh in crews[stage]], axis=0
        )
        places = np.flatnonzero(np.isin(layout.instance, mine[done >= 0]))
        earlier = done[np.searchsorted(mine, layout.instance[places])]
        found.append((places, earlier))
    later, earlier = (np.concatenate(ends) for ends in zip(*found, strict=True))
    return later, earlier


def _turns(
    meshes: Sequence[Mesh], kind: NDArray[np.int8], group: NDArray[np.int32]
) -> tuple[Ints, Ints]:
    """Return (later, earlier) pairs that let meshes which share devices compute in index order.

    A device runs its instructions one after another, whichever of its meshes they belong to: each waits for
    the one before it. Those of one mesh do so by themselves, since they share a resource.
    """
    computing = np.flatnonzero(COMPUTES[kind])
    found = [np.zeros(0, dtype=np.int64)]
    for own in set(sorts_of_devices(crews_of(meshes)).values()):
        if len(own) > 1:
            is_mine = np.zeros(len(meshes), dtype=np.bool_)
            is_mine[list(own)] = True
            mine = computing[is_mine[group[computing]]]
            turns = np.flatnonzero(np.diff(group[mine]))
            found.append(mine[turns + 1] * len(kind) + mine[turns])
    return np.divmod(np.unique(np.concatenate(found)), max(len(kind), 1))


def _program(
    builder: ProgramBuilder,
    layout: Instances,
    waits: list[tuple[Ints, Ints]],
    resources: tuple[str, ...],
    loss: int,
) -> Program:
    column = layout.column
    kind = column(lambda one: one.kind)
    group = column(lambda one: np.full(len(one.kind), one.stage, dtype=np.int32))
    waits = [*waits, _turns(builder.strategy.meshes, kind, group)]
    rows, targets = (np.concatenate(ends) for ends in zip(*waits, strict=True))
    offset, ordered = by_row(rows, targets, layout.size)
    free_offset, free_value = layout.frees()
    allocated, temporary = layout.bytes()
    item = column(lambda one: one.item)
    segments = builder.segment_order()
    number = np.zeros(len(builder.segments), dtype=np.int32)
    number[segments] = np.arange(len(segments))
    runs = RUNS_SEGMENT[kind]
    item[runs] = number[item[runs]]
    messages = _renumber(item, MOVES[kind], len(builder.messages))
    microbatch = layout.microbatch.astype(np.int32)[layout.instance]
    works = kind == Kind.TRANSFORM
    states = _state_bytes(builder, item[works], microbatch[works])
    transforms = _renumber(item, works, len(builder.transforms))
    program = Program(
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
        resource=column(lambda one: one.resource),
        resource_names=resources,
        resource_class=resource_classes(resources),
        offset=offset,
        predecessor=ordered.astype(np.int32),
        free_offset=free_offset,
        free_value=free_value,
        allocated=allocated,
        freed=column(lambda one: one.sizes[1]),
        temporary=temporary,
        base_bytes=tuple([builder.base_bytes(mesh) + own for mesh, own in enumerate(states)]),
    )
    _join(builder, program)
    return program


def _join(builder: ProgramBuilder, program: Program) -> None:
    """Count what backwards need for a while that run as one: autograd adds gradients as they come, where others add all
    that a segment makes."""
    times = Counter[int]()  # by gradient: how often this run has made it
    is_joined = joined(program)
    backwards = np.flatnonzero(program.kind == Kind.BACKWARD)
    backwards = backwards[np.argsort(program.group[backwards], kind="stable")]  # mesh by mesh
    follows = is_joined[backwards]
    in_a_run = follows | np.append(follows[1:], False)
    for index in backwards[in_a_run].tolist():
        segment = program.segments[int(program.item[index])]
        trained = {v: program.values[v].gradient for v in segment.inputs}
        if not is_joined[index]:
            times.clear()
        else:
            sums = _sums(builder, trained, times)
            alone = program.temporary[index] if sums else segment.temporary_bytes[1]
            program.temporary[index] += joined_bytes(builder, segment, sums) - alone
        times.update(trained.values())


def _sums(
    builder: ProgramBuilder, gradients: Mapping[int, int], times: Mapping[int, int]
) -> dict[int, bool]:
    """Return the values that have gradients, and whether the next sum is a new tensor; what is added to wider sums stays
    apart until the end."""
    begun = {v: g for v, g in gradients.items() if g >= 0 and times.get(g)}
    return {
        v: is_weight(builder.values[v]) and times[g] == 1
        for v, g in begun.items()
        if not builder.marks[g] & WIDE
    }


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


def by_row(rows: Ints, columns: Ints, size: int) -> tuple[Ints, Ints]:
    """Return where each row begins, and the columns row by row, ascending."""
    ordered = np.sort(rows * size + columns)
    offset = np.searchsorted(ordered, size * np.arange(size + 1))
    return offset.astype(np.int64), ordered % max(size, 1)
