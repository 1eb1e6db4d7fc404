"""Pipelines that are never flushed: the Program of one minibatch as the body of a loop.

What one minibatch does is what it does in a step of its own. Which period each instruction of it falls in follows
from its stage and from which half it belongs to (``core.staleness``): that is its ``shift``. What changes
is on which weights it runs: transforms write *versions* of a stage's parameters, and segments read these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import (
    BACKWARD_KINDS,
    SEGMENT_KINDS,
    Call,
    Kind,
    Program,
    Segment,
    Transform,
    Value,
)
from shardwright.core.staleness import Outlook, backward_shift, forward_shift, outlook

Ints = NDArray[np.int64]


class _Insertion(NamedTuple):
    """A transform before instruction ``before``, which is of its mesh and half; the bytes of what it writes, and
    those that it needs for a while."""

    before: int
    transform: Transform
    bytes: int
    temporary: int


def flushless(program: Program) -> Program:
    """Return the body of a loop, given the Program of one minibatch; itself where its pipeline is flushed.

    Instructions of one device keep their order: in a period it runs forward, backward, update.
    """
    pipeline, stages = program.strategy.pipeline, len(program.meshes)
    if pipeline.is_flushed or stages == 1:
        return program
    turns = [_turn(program, mesh) for mesh in range(stages)]
    index, group = np.arange(program.num_instructions), program.group
    late = np.array([backward_shift(mesh, stages) for mesh in range(stages)])[group]
    soon = np.array([forward_shift(mesh) for mesh in range(stages)])[group]
    shift = np.where(index >= np.array(turns)[group], late, soon).astype(np.int32)
    program = replace(program, shift=shift)
    for mesh in range(stages):
        look = outlook(pipeline.staleness, mesh, stages)
        if not look.is_plain:
            program = _with_versions(program, mesh, look)
    return program


def _turn(program: Program, mesh: int) -> int:
    """Return the first instruction of a mesh that belongs to the backward, or comes behind it."""
    for index in np.flatnonzero(program.group == mesh).tolist():
        kind, item = Kind(int(program.kind[index])), int(program.item[index])
        if kind in (*BACKWARD_KINDS, Kind.RECOMPUTE, Kind.UPDATE):
            return index
        is_message = kind in (Kind.RECEIVE, Kind.MESSAGE)
        if is_message and program.messages[item].purpose in ("gradient", "synchronise"):
            return index
    return program.num_instructions


def _with_versions(program: Program, mesh: int, look: Outlook) -> Program:
    """Return a Program in which a mesh runs on versions of its parameters."""
    program, reads, writes = _reading_versions(program, mesh, again=look.backward is not None)
    if not reads:
        return program
    mine = (program.group == mesh) & np.isin(program.kind, SEGMENT_KINDS)
    runs = np.flatnonzero(mine).tolist()
    ahead = [index for index in runs if program.shift_of(index) == forward_shift(mesh)]
    behind = [index for index in runs if index not in ahead]
    sizes = [program.values[one].bytes for one in writes]
    if look.backward is None:
        turns = [(ahead[0], max(runs), (look.forward, look.lag, 1, look.behind))]
    else:
        is_ahead = int(look.forward + look.lag > 0)
        turns = [(ahead[0], max(ahead), (look.forward, look.lag, is_ahead, 0))]
        if behind:
            turns.append((behind[0], max(behind), (look.backward, 0, int(look.backward > 0), 0)))
    freed, frees, insertions = (
        program.freed.copy(),
        dict[int, tuple[int, ...]](),
        list[_Insertion](),
    )
    for first, last, how in turns:
        made, spare = how[2] * sum(sizes), how[2] * 2 * max(sizes)
        insertions.append(_Insertion(first, _transform(mesh, reads, writes, how), made, spare))
        freed[last] += made
        frees[last] = writes
    # What older weights a stage keeps besides those that minibatches under way run on.
    base = list(program.base_bytes)
    base[mesh] += look.behind * sum(sizes)
    program = replace(program, freed=freed, base_bytes=tuple(base))
    return _inserted(program, insertions, frees)


def _reading_versions(
    program: Program, mesh: int, *, again: bool
) -> tuple[Program, tuple[int, ...], tuple[int, ...]]:
    """Return a Program whose segments on a mesh read versions of its trained parameters, these and
    their versions; ``again``: they are written a second time for backward."""
    values, new = list(program.values), dict[int, int]()
    for index, value in enumerate(program.values):
        if value.mesh == mesh and value.role == "parameter" and value.gradient >= 0:
            new[index] = len(values)
            values.append(_version(value, new))
    reads = tuple([one for one in new if program.values[one].alias < 0])
    segments = [
        _reading(segment, new, again=again) if segment.mesh == mesh else segment
        for segment in program.segments
    ]
    program = replace(program, values=tuple(values), segments=tuple(segments))
    return program, reads, tuple([new[one] for one in reads])


def _version(parameter: Value, new: dict[int, int]) -> Value:
    alias = parameter.alias
    return replace(
        parameter,
        role="version",
        scope="microbatch",
        resident=False,
        alias=-1 if alias < 0 else new[alias],
    )


def _reading(segment: Segment, new: dict[int, int], *, again: bool) -> Segment:
    """Return a segment that reads versions; where these are written ``again`` for backward its graph holds none."""

    def other(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([new.get(one, one) for one in numbers])

    def calling(call: Call) -> Call:
        return replace(call, operands=other(call.operands))

    mine = other(tuple([one for one in segment.inputs if one in new]))
    remade = mine if again and segment.has_backward else ()
    return replace(
        segment,
        calls=tuple(map(calling, segment.calls)),
        inputs=other(segment.inputs),
        rematerialised=(*segment.rematerialised, *remade),
        unused_in_backward=other(segment.unused_in_backward),
    )


def _transform(
    mesh: int, reads: tuple[int, ...], writes: tuple[int, ...], how: tuple[int, int, int, int]
) -> Transform:
    names = ("forward", "lag", "copies", "behind")
    return Transform(
        name="version",
        mesh=mesh,
        reads=reads,
        writes=writes,
        purpose="parameter",
        constants=tuple(zip(names, how, strict=True)),
    )


def _inserted(
    program: Program, insertions: Sequence[_Insertion], frees: dict[int, tuple[int, ...]]
) -> Program:
    """Return a Program with transforms, for whose results the segments of their mesh and shift wait."""
    count, at = program.num_instructions, [one.before for one in insertions]
    place = np.arange(count) + np.searchsorted(at, np.arange(count), side="right")
    inside = np.array(at) + np.arange(len(at))  # where the transforms will be
    order = np.insert(np.arange(count), at, at)  # which instruction each is like

    def column(name: str, new: Sequence[int]) -> NDArray[np.int32]:
        made = getattr(program, name)[order].copy()
        made[inside] = new
        return made

    waits, freed = _moved(program, place, len(order))
    for index, values in frees.items():
        freed[int(place[index])] += values
    for one, new in zip(insertions, inside.tolist(), strict=True):
        for index in _readers(program, one):
            waits[int(place[index])].append(new)
    offset, predecessor = _flat(list(map(sorted, waits)))
    free_offset, free_value = _flat(freed)
    number, shift = len(program.transforms), program.shift
    assert shift is not None
    return replace(
        program,
        transforms=(*program.transforms, *[one.transform for one in insertions]),
        kind=column("kind", [Kind.TRANSFORM] * len(at)),
        group=program.group[order],
        item=column("item", range(number, number + len(at))),
        microbatch=column("microbatch", [0] * len(at)),
        shift=shift[order],
        resource=program.resource[order],
        offset=offset,
        predecessor=predecessor,
        free_offset=free_offset,
        free_value=free_value,
        allocated=column("allocated", [one.bytes for one in insertions]),
        freed=column("freed", [0] * len(at)),
        temporary=column("temporary", [one.temporary for one in insertions]),
    )


def _moved(program: Program, place: Ints, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return what instructions wait for and free, where they stand in ``place`` among so many."""
    waits: list[list[int]] = [[] for _ in range(count)]
    freed: list[list[int]] = [[] for _ in range(count)]
    for index, (a, b) in enumerate(pairwise(program.offset)):
        waits[int(place[index])] = place[program.predecessor[a:b]].tolist()
    for index, (a, b) in enumerate(pairwise(program.free_offset)):
        freed[int(place[index])] = program.free_value[a:b].tolist()
    return waits, freed


def _readers(program: Program, insertion: _Insertion) -> list[int]:
    """Return the instructions that run on what a transform writes: those of its mesh and its half."""
    shift, first = program.shift, insertion.before
    assert shift is not None
    alike = (program.group == program.group[first]) & (shift == shift[first])
    return np.flatnonzero(alike & np.isin(program.kind, SEGMENT_KINDS)).tolist()


def _flat(lists: Sequence[Sequence[int]]) -> tuple[Ints, NDArray[np.int32]]:
    lengths = np.array([len(one) for one in lists], dtype=np.int64)
    flat = np.array([number for one in lists for number in one], dtype=np.int32)
    return np.concatenate([[0], np.cumsum(lengths)]), flat


def unrolled(program: Program, minibatches: int) -> tuple[Program, Ints]:
    """Return some minibatches of a pipeline that is flushed behind the last, and which instruction of its
    body each is. Minibatches take the place of microbatches.

    What works for a minibatch that there is not is skipped. O(instructions times minibatches).
    """
    shift = program.shift
    assert shift is not None
    count, periods = program.num_instructions, minibatches + int(shift.max())
    period = np.repeat(np.arange(periods), count)
    source = np.tile(np.arange(count), periods)
    minibatch = period - shift[source]
    is_there = (minibatch >= 0) & (minibatch < minibatches)
    source, minibatch = source[is_there], minibatch[is_there]
    place = np.full((minibatches, count), -1, dtype=np.int64)
    place[minibatch, source] = np.arange(len(source))
    own = [program.predecessor[a:b] for a, b in pairwise(program.offset)]
    old = [program.free_value[a:b].tolist() for a, b in pairwise(program.free_offset)]
    offset, predecessor = _flat(
        [place[one, own[index]].tolist() for index, one in zip(source, minibatch, strict=True)]
    )
    free_offset, free_value = _flat([old[index] for index in source])
    return replace(
        program,
        kind=program.kind[source],
        group=program.group[source],
        item=program.item[source],
        microbatch=minibatch.astype(np.int32),
        shift=None,
        resource=program.resource[source],
        offset=offset,
        predecessor=predecessor,
        free_offset=free_offset,
        free_value=free_value,
        allocated=program.allocated[source],
        freed=program.freed[source],
        temporary=program.temporary[source],
    ), source
