"""Prove of a Program that it is complete: what is read was made, and every gradient is summed and used.

A walk over the instructions, in their order, with marks in place of tensors. It rests on nothing that
lowering remembers: only on the Program, and on which dims of an operator's iteration index its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import PARTIAL, REPLICATE, Layout, is_split
from shardwright.core.program import (
    BACKWARD_KINDS,
    SEGMENT_KINDS,
    STATES,
    Kind,
    Message,
    Primitive,
    Program,
    Segment,
    Value,
    data_of,
)
from shardwright.operators.splitting import iterate
from shardwright.operators.splitting.iteration import PLUS

# What is there without an instruction, unless it is gathered for its use.
THERE = frozenset({"input", "buffer", "master"}) | STATES
Slot = tuple[int, int]  # a value and a microbatch, -1 for what is there once a step


def check_complete(program: Program, graph: OperatorGraph) -> None:
    """Raise ValueError where a value is read that nobody made, or a gradient is lost or not summed.

    Linear in instructions times what they touch.
    """
    for segment in program.segments:
        _check_terms(program, graph, segment)
    for message in program.messages:
        _check_sums(program, message)
    _check_flow(program)
    _check_backward(program)


def _check_terms(program: Program, graph: OperatorGraph, segment: Segment) -> None:
    """What an operator, split along a dim that an operand has not, gives to its gradient is a term."""
    axes, sizes = program.meshes[segment.mesh].axes, program.meshes[segment.mesh].sizes
    for call in segment.calls:
        inputs = iterate(graph, call.operator).inputs
        for value, names in zip(call.operands, inputs, strict=True):
            gradient = program.values[value].gradient
            if gradient < 0:
                continue
            layout = program.values[gradient].layout
            for axis, name in enumerate(call.dims):
                is_term = sizes[axis] > 1 and name not in ("", PLUS, *names)
                if is_term and layout[axis] != PARTIAL:
                    raise ValueError(
                        f"{graph.operators[call.operator].name} is split along {name} over "
                        f"{axes[axis]}, but nobody sums the gradient of "
                        f"{graph.tensors[program.values[value].tensor].name} over it"
                    )


def _check_sums(program: Program, message: Message) -> None:
    """A message turns layouts into others as its primitive does, so that sums are made, not assumed."""
    sizes = program.meshes[message.mesh].sizes
    for source, result in zip(message.sources, message.results, strict=True):
        before, after = program.values[source].layout, program.values[result].layout
        if message.primitive != "transfer":
            for axis, turn in enumerate(zip(before, after, strict=True)):
                if sizes[axis] > 1 and not _may_turn(message, axis, *turn):
                    raise ValueError(
                        f"{message.primitive} over axes {message.axes} does not turn {before} into {after}"
                    )
        elif before != after and PARTIAL in (*before, *after):
            _check_crossing(message, before, after)


def _check_crossing(message: Message, before: Layout, after: Layout) -> None:
    if PARTIAL in after:
        raise ValueError(f"a transfer makes no terms, but {before} is to arrive as {after}")
    if message.purpose != "synchronise":
        raise ValueError(
            f"only gradients of parameters are summed where they arrive, but {before} is to arrive as "
            f"{after} ({message.purpose})"
        )


def _may_turn(message: Message, axis: int, old: int, new: int) -> bool:
    if axis not in message.axes or message.primitive not in _TURNS:
        return old == new
    comes, goes = _TURNS[message.primitive]
    return comes(old) and goes(new)


def _is_term(placement: int) -> bool:
    return placement == PARTIAL


def _is_whole(placement: int) -> bool:
    return placement == REPLICATE


# What each primitive finds along its axes, and what it leaves there.
_TURNS: dict[Primitive, tuple[Callable[[int], bool], Callable[[int], bool]]] = {
    "all_reduce": (_is_term, _is_whole),
    "reduce_scatter": (_is_term, is_split),
    "all_gather": (is_split, _is_whole),
    "slice": (_is_whole, is_split),
    "all_to_all": (is_split, is_split),
}


def _check_flow(program: Program) -> None:
    """Walk through the instructions: ``made`` is there, ``unread`` are gradients, and new
    masters, that nobody read yet."""
    made, unread, updated = set[Slot](), set[Slot](), set[int]()
    masters = _masters(program)
    for index in range(program.num_instructions):
        reads, writes = _touched(program, masters, index)
        microbatch = int(program.microbatch[index])
        for slot in _slots(program, reads, microbatch):
            _check_read(program, index, slot, made)
            unread.discard(slot)
        for slot in _slots(program, writes, microbatch):
            made.add(slot)
            if program.values[slot[0]].role in ("gradient", "master"):
                unread.add(slot)
        if program.kind[index] == Kind.UPDATE:
            updated.update(reads)
        freed = program.free_value[program.free_offset[index] : program.free_offset[index + 1]]
        for slot in _slots(program, freed.tolist(), microbatch):
            made.discard(slot)
            _check_used(slot, unread)
    for slot in unread:
        _check_used(slot, unread)
    for master in masters:
        if program.values[master].gradient not in updated:
            raise ValueError(f"nobody updates parameter {program.values[master].tensor}")


def _check_backward(program: Program) -> None:
    """What runs forward for a backward has one, whole or in two halves, and none runs without it."""
    kept, halved = set[tuple[int, int]](), set[tuple[int, int]]()
    for index in range(program.num_instructions):
        kind, item = Kind(int(program.kind[index])), int(program.item[index])
        if kind not in SEGMENT_KINDS:
            continue
        segment, moment = program.segments[item], (item, int(program.microbatch[index]))
        if kind not in BACKWARD_KINDS:
            kept.update([moment] if _keeps(segment, kind) else ())
            continue
        before = halved if kind == Kind.WEIGHT_GRADIENT else kept
        if moment not in before:
            raise ValueError(f"{program.describe(index)} comes without what it goes back through")
        before.remove(moment)
        if kind == Kind.INPUT_GRADIENT and _trains(program, segment):
            halved.add(moment)
    for item, microbatch in kept | halved:
        raise ValueError(f"segment {item} has no whole backward of microbatch {microbatch}")


def _keeps(segment: Segment, kind: Kind) -> bool:
    """Whether a forward is the one that its backward goes back through."""
    return segment.has_backward and segment.recomputed == (kind == Kind.RECOMPUTE)


def _trains(program: Program, segment: Segment) -> bool:
    """Whether a segment gives gradients to parameters."""
    inputs = [program.values[value] for value in segment.inputs]
    return any(value.role == "parameter" and value.gradient >= 0 for value in inputs)


def _masters(program: Program) -> list[int]:
    """Return what optimizers change: masters, and parameters at rest that have none."""
    trained = [index for index, value in enumerate(program.values) if value.gradient >= 0]
    masters = [index for index in trained if program.values[index].role == "master"]
    separate = {program.values[index].tensor for index in masters}
    for index in trained:
        value = program.values[index]
        if _is_rest(value) and value.tensor not in separate:
            masters.append(index)
    return masters


def _is_rest(value: Value) -> bool:
    return value.role == "parameter" and value.resident and value.alias < 0


def _check_read(program: Program, index: int, slot: Slot, made: set[Slot]) -> None:
    value = program.values[slot[0]]
    is_update = program.kind[index] == Kind.UPDATE
    if is_update and PARTIAL in value.layout:
        raise ValueError(f"{program.describe(index)} takes gradient {slot[0]}, which nobody summed")
    if value.role in THERE or value.resident or slot in made:
        return
    if value.role != "gradient":  # of a gradient, nothing is zero
        raise ValueError(f"{program.describe(index)} reads value {slot[0]}, which nobody made")


def _check_used(slot: Slot, unread: set[Slot]) -> None:
    if slot in unread:
        raise ValueError(f"value {slot[0]} of microbatch {slot[1]} is made, but nobody reads it")


def _slots(program: Program, values: Sequence[int], microbatch: int) -> Iterator[Slot]:
    for value in values:
        if value >= 0:
            held = data_of(program.values, value)
            yield held, microbatch if program.values[held].scope == "microbatch" else -1


def _touched(
    program: Program, masters: Sequence[int], index: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Return what an instruction reads, and what it makes or adds to."""
    kind, item = Kind(int(program.kind[index])), int(program.item[index])
    if kind in (Kind.FORWARD, Kind.RECOMPUTE):
        return program.segments[item].inputs, program.segments[item].outputs
    if kind in BACKWARD_KINDS:
        return _touched_backward(program, kind, program.segments[item])
    if kind in (Kind.MESSAGE, Kind.SEND, Kind.RECEIVE):
        message = program.messages[item]
        reads = () if kind == Kind.RECEIVE else message.sources
        return reads, () if kind == Kind.SEND else message.results
    if kind == Kind.TRANSFORM:
        return program.transforms[item].reads, program.transforms[item].writes
    return _touched_update(program, masters, index)


def _touched_update(
    program: Program, masters: Sequence[int], index: int
) -> tuple[Sequence[int], Sequence[int]]:
    values, item = program.values, int(program.item[index])
    mine = [m for m in masters if values[m].mesh == program.group[index]]
    if program.kind[index] != Kind.UPDATE:  # clipping looks at all
        return _gradients(program, masters if program.strategy.pipeline.is_flushed else mine), ()
    taken = program.updates[item] if item >= 0 else mine
    return _gradients(program, taken), [m for m in taken if values[m].role == "master"]


def _touched_backward(
    program: Program, kind: Kind, segment: Segment
) -> tuple[Sequence[int], Sequence[int]]:
    values = program.values
    weights = [value for value in segment.inputs if values[value].role == "parameter"]
    others = [value for value in segment.inputs if values[value].role != "parameter"]
    if kind == Kind.WEIGHT_GRADIENT:
        return segment.deferred_values, _gradients(program, weights)
    needed = [value for value in weights if value not in segment.unused_in_backward]
    coming = _gradients(program, segment.outputs)
    given = others if kind == Kind.INPUT_GRADIENT else segment.inputs
    return [*coming, *needed, *segment.rematerialised], _gradients(program, given)


def _gradients(program: Program, values: Sequence[int]) -> list[int]:
    found = [program.values[value].gradient for value in values]
    return [gradient for gradient in found if gradient >= 0]
