"""Pipelines that are never flushed: the Program of one minibatch as the body of a loop.

What one minibatch does is what it does in a step of its own. Which slot each instruction of it falls in follows
from its stage and from which half it belongs to (``core.staleness``): that is its ``shift`` in periods, and its
``position`` within one. What changes is on which weights it runs: transforms write *versions* of a stage's parameters, and
segments read these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.graph import Constant
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
from shardwright.core.staleness import Outlook, backward_slot, forward_slot, outlook
from shardwright.errors import InputError
from shardwright.planner.lower.assemble import by_row
from shardwright.planner.lower.instances import listed

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class _Insertion(NamedTuple):
    """A transform before instruction ``before``, which is of its mesh, microbatch and half; the bytes of what it writes, and
    those that it needs for a while."""

    before: int
    transform: Transform
    bytes: int
    temporary: int


class _Freeing(NamedTuple):
    """What an instruction frees besides: so many bytes, and values."""

    at: int
    bytes: int
    values: tuple[int, ...] = ()


class _Place(NamedTuple):
    """To which half of a minibatch each instruction belongs, and to which of its microbatches."""

    is_late: Flags
    piece: Ints


class _Change(NamedTuple):
    """What lets a mesh run on versions."""

    insertions: list[_Insertion]
    freed: list[_Freeing]


def flushless(program: Program) -> Program:
    """Return the body of a loop, given the Program of one minibatch; itself where its pipeline is flushed.

    Instructions of one device keep their order: in a slot it runs forward, backward and, once a period, update.
    """
    pipeline, stages = program.strategy.pipeline, len(program.meshes)
    if pipeline.is_flushed or stages == 1:
        return program
    where, pieces = _place(program), pipeline.num_microbatches
    late = np.array([backward_slot(mesh, stages) for mesh in range(stages)])[program.group]
    soon = np.array([forward_slot(mesh) for mesh in range(stages)])[program.group]
    slot = where.piece + np.where(where.is_late, late, soon)
    position = (2 * (slot % pieces) + where.is_late).astype(np.int32) if pieces > 1 else None
    program = replace(program, shift=(slot // pieces).astype(np.int32), position=position)
    changes = list[_Change]()
    for mesh in range(stages):
        look = outlook(pipeline.staleness, mesh, stages, pieces)
        if not look.is_plain:
            program, change = _with_versions(program, mesh, look, where)
            changes.append(change)
    return _changed(program, changes, where)


def _place(program: Program) -> _Place:
    """Return where instructions belong. What there is once is there before the first microbatch or, behind a
    mesh's first backward, behind the last."""
    count, pieces = program.num_instructions, program.strategy.pipeline.num_microbatches
    turning = np.flatnonzero(_turns_back(program))
    # By mesh and microbatch, the last for what there is once: where backward begins.
    begin = np.full((len(program.meshes), pieces + 1), count)
    for piece in (program.microbatch[turning], np.full(len(turning), -1)):
        np.minimum.at(begin, (program.group[turning], piece), turning)
    found = np.arange(count) >= begin[program.group, program.microbatch]
    piece = np.where(program.microbatch >= 0, program.microbatch, np.where(found, pieces - 1, 0))
    return _Place(found, piece.astype(np.int64))


def _turns_back(program: Program) -> Flags:
    """Return which instructions only come behind a mesh's forward."""
    found = np.isin(program.kind, (*BACKWARD_KINDS, Kind.RECOMPUTE, Kind.UPDATE))
    moves = np.isin(program.kind, (Kind.RECEIVE, Kind.MESSAGE))
    purposes = [one.purpose in ("gradient", "synchronise") for one in program.messages]
    found[moves] = np.array(purposes, dtype=np.bool_)[program.item[moves]]
    return found


def _with_versions(
    program: Program, mesh: int, look: Outlook, where: _Place
) -> tuple[Program, _Change]:
    """Return a Program in which a mesh runs on versions of its parameters, and what else has to change."""
    program, reads, writes = _reading_versions(program, mesh, again=look.backward is not None)
    change = _Change([], [])
    if not reads:
        return program, change
    _check_read_each(program, mesh)
    sizes = [program.values[one].bytes for one in writes]
    for half in _halves(look):
        _write_versions(program, mesh, half, (reads, writes), where, change)
    if look.buffered or look.regress:
        update = _update_of(program, mesh)
        constants: dict[str, Constant] = {"averages": look.regress}
        transform = _transform("buffer", mesh, (reads, ()), constants)
        for_a_while = 0 if look.buffered else sum(sizes)
        change.insertions.append(_Insertion(update, transform, for_a_while, 0))
        change.freed.append(_Freeing(update, for_a_while))
    # Older weights that a stage keeps besides those that minibatches under way run on, or how updates went.
    lasting = look.behind + (look.buffered or look.regress > 0)
    base = list(program.base_bytes)
    base[mesh] += lasting * sum(sizes)
    return replace(program, base_bytes=tuple(base)), change


def _check_read_each(program: Program, mesh: int) -> None:
    """Check that parameters of minibatches of many microbatches are read by each of these: for them there are versions."""
    mine = (program.group == mesh) & np.isin(program.kind, SEGMENT_KINDS) & (program.microbatch < 0)
    if program.strategy.pipeline.num_microbatches == 1:
        return
    numbers: list[int] = program.item[mine].tolist()
    for number in numbers:
        read = [
            one for one in program.segments[number].inputs if program.values[one].role == "version"
        ]
        if read:
            raise InputError(
                "an asynchronous pipeline of microbatches has versions of parameters for each of these, but stage "
                f"{mesh} computes once for all of them with parameter {program.values[read[0]].tensor} of the "
                'graph; choose a staleness of one microbatch, such as stash, or set it to "none"'
            )


class _Half(NamedTuple):
    """A half of a minibatch on a stage, before which versions are written: whether it is backward, what they are, whether
    they are copies, and whether they last until the end of the other half."""

    is_late: bool
    constants: dict[str, Constant]
    copies: bool
    lasts: bool


def _halves(look: Outlook) -> list[_Half]:
    known: dict[str, Constant] = {"buffered": int(look.buffered)}
    forward = {**known, "backward": 0, "forward": look.forward, "lag": look.lag}
    if look.backward is None:
        return [_Half(False, {**forward, "behind": look.behind}, True, True)]
    ahead, behind = look.forward + look.lag > 0, look.backward > 0 or look.regress > 0
    backward = {**known, "backward": 1, "forward": look.backward, "lag": -look.regress}
    return [
        _Half(False, {**forward, "behind": 0}, ahead, False),
        _Half(True, {**backward, "behind": 0}, behind, False),
    ]


def _write_versions(
    program: Program,
    mesh: int,
    half: _Half,
    values: tuple[tuple[int, ...], tuple[int, ...]],
    where: _Place,
    change: _Change,
) -> None:
    """Write versions for a half of every microbatch: its first makes them, the others have the same, and its last lets
    go of them."""
    mine = (program.group == mesh) & np.isin(program.kind, SEGMENT_KINDS)
    pieces = program.strategy.pipeline.num_microbatches
    sizes = [program.values[one].bytes for one in values[1]]
    for piece in range(pieces):
        runs = mine & (where.piece == piece)
        own = np.flatnonzero(runs & (where.is_late == half.is_late)).tolist()
        if not own:
            continue
        last = int(np.flatnonzero(runs)[-1]) if half.lasts else own[-1]
        made, ends = half.copies * (piece == 0), half.copies * (piece == pieces - 1)
        how = {**half.constants, "copies": made, "shares": half.copies - made}
        transform = _transform("version", mesh, values, how)
        insertion = _Insertion(own[0], transform, made * sum(sizes), made * 2 * max(sizes))
        change.insertions.append(insertion)
        change.freed.append(_Freeing(last, ends * sum(sizes), values[1]))


def _update_of(program: Program, mesh: int) -> int:
    mine = (program.kind == Kind.UPDATE) & (program.group == mesh)
    return int(np.flatnonzero(mine)[0])


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
    name: Literal["version", "buffer"],
    mesh: int,
    values: tuple[tuple[int, ...], tuple[int, ...]],
    constants: dict[str, Constant],
) -> Transform:
    return Transform(
        name=name,
        mesh=mesh,
        reads=values[0],
        writes=values[1],
        purpose="parameter",
        constants=tuple(constants.items()),
    )


def _changed(program: Program, changes: Sequence[_Change], where: _Place) -> Program:
    """Return a Program with transforms, for whose results the segments of their microbatch and half wait."""
    insertions = [one for change in changes for one in change.insertions]
    insertions.sort(key=lambda one: one.before)
    if not insertions:
        return program
    freeings = [one for change in changes for one in change.freed]
    at = np.array([one.before for one in insertions])
    order = np.insert(np.arange(program.num_instructions), at, at)  # which instruction each is like
    inside = at + np.arange(len(at))  # where the transforms will be

    def alike(like: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
        return None if like is None else like[order]

    transforms, columns = _as_columns(program, insertions, where)
    offset, predecessor, free_offset, free_value = _wired(program, insertions, freeings, where)
    program = replace(program, freed=_with_freed(program, freeings))
    made: dict[str, Any] = {}
    for name, new in columns.items():
        made[name] = getattr(program, name)[order]
        made[name][inside] = new
    return replace(
        program,
        transforms=(*program.transforms, *transforms),
        group=program.group[order],
        shift=alike(program.shift),
        position=alike(program.position),
        resource=program.resource[order],
        offset=offset,
        predecessor=predecessor,
        free_offset=free_offset,
        free_value=free_value,
        **made,
    )


def _as_columns(
    program: Program, insertions: Sequence[_Insertion], where: _Place
) -> tuple[tuple[Transform, ...], dict[str, list[int]]]:
    """Return what transforms there are, those that are equal once, and the columns of their instructions."""
    transforms = tuple(dict.fromkeys(one.transform for one in insertions))
    first = len(program.transforms)
    return transforms, {
        "kind": [Kind.TRANSFORM] * len(insertions),
        "item": [first + transforms.index(one.transform) for one in insertions],
        "microbatch": [_piece(one, where) for one in insertions],
        "allocated": [one.bytes for one in insertions],
        "freed": [0] * len(insertions),
        "temporary": [one.temporary for one in insertions],
    }


def _with_freed(program: Program, freeings: Sequence[_Freeing]) -> Ints:
    freed = program.freed.copy()
    for one in freeings:
        freed[one.at] += one.bytes
    return freed


def _wired(
    program: Program,
    insertions: Sequence[_Insertion],
    freeings: Sequence[_Freeing],
    where: _Place,
) -> tuple[Ints, NDArray[np.int32], Ints, NDArray[np.int32]]:
    """Return what every instruction waits for and frees once transforms stand between them."""
    count, at = program.num_instructions, [one.before for one in insertions]
    place = np.arange(count) + np.searchsorted(at, np.arange(count), side="right")
    size, free_value = count + len(at), program.free_value.astype(np.int64)
    waits: list[tuple[Ints, Ints]] = [
        (np.repeat(place, np.diff(program.offset)), place[program.predecessor])
    ]
    freed: list[tuple[Ints, Ints]] = [(np.repeat(place, np.diff(program.free_offset)), free_value)]
    for number, one in enumerate(insertions):
        readers = place[_readers(program, one, where)]
        waits.append((readers, np.full(len(readers), one.before + number)))
    for one in freeings:
        values = np.array(one.values, dtype=np.int64)
        freed.append((np.full(len(values), place[one.at]), values))
    later, earlier = map(np.concatenate, zip(*waits, strict=True))
    rows, values = map(np.concatenate, zip(*freed, strict=True))
    offset, predecessor = by_row(later, earlier, size)
    return offset, predecessor.astype(np.int32), *listed(rows, values, size)


def _piece(insertion: _Insertion, where: _Place) -> int:
    """Return the microbatch of a transform; what is done once behind all of them is of none."""
    return int(where.piece[insertion.before]) if insertion.transform.writes else -1


def _readers(program: Program, insertion: _Insertion, where: _Place) -> Ints:
    """Return the instructions that run on what a transform writes: those of its mesh, microbatch and half."""
    first = insertion.before
    if not insertion.transform.writes:
        return np.zeros(0, dtype=np.int64)
    alike = (program.group == program.group[first]) & (where.piece == where.piece[first])
    alike &= where.is_late == where.is_late[first]
    return np.flatnonzero(alike & np.isin(program.kind, SEGMENT_KINDS))


def _entries(offset: Ints, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Return where the entries of some rows begin, row by row, which they are, and of which row each is."""
    stop = np.cumsum(np.diff(offset)[rows])
    row = np.repeat(np.arange(len(rows)), np.diff(offset)[rows])
    begin = np.concatenate([[0], stop])
    return begin, np.arange(len(row)) + (offset[rows] - begin[:-1])[row], row


def unrolled(program: Program, minibatches: int) -> tuple[Program, Ints]:
    """Return some minibatches of a pipeline that is flushed behind the last, and which instruction of its
    body each is. The microbatches of all of them are numbered one behind the other.

    What works for a minibatch that there is not is skipped. O(instructions times minibatches).
    """
    shift = program.shift
    assert shift is not None
    count, periods = program.num_instructions, minibatches + int(shift.max())
    pieces = program.strategy.pipeline.num_microbatches
    period = np.repeat(np.arange(periods), count)
    source = np.tile(program.turns, periods)
    minibatch = period - shift[source]
    is_there = (minibatch >= 0) & (minibatch < minibatches)
    source, minibatch = source[is_there], minibatch[is_there]
    place = np.full((minibatches, count), -1, dtype=np.int64)
    place[minibatch, source] = np.arange(len(source))
    offset, waited, row = _entries(program.offset, source)
    predecessor = place[minibatch[row], program.predecessor[waited]].astype(np.int32)
    free_offset, freed, _ = _entries(program.free_offset, source)
    return replace(
        program,
        kind=program.kind[source],
        group=program.group[source],
        item=program.item[source],
        microbatch=(minibatch * pieces + np.maximum(program.microbatch[source], 0)).astype(
            np.int32
        ),
        shift=None,
        position=None,
        resource=program.resource[source],
        offset=offset,
        predecessor=predecessor,
        free_offset=free_offset,
        free_value=program.free_value[freed],
        allocated=program.allocated[source],
        freed=program.freed[source],
        temporary=program.temporary[source],
    ), source
