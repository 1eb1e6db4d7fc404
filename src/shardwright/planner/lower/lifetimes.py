"""When values of one stage appear and disappear: bytes allocated and freed by each template step.

A microbatch's forward and backward are looked at together. A value that backward reads before it
writes survives from forward; one that backward writes first (recomputed, or gathered again) does not.
Data viewed by aliases lives as long as its last alias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.program import Kind, Message
from shardwright.planner.lower.draft import Draft, Step


@dataclass(slots=True)
class Lifetimes:
    """Per template position: bytes appearing, bytes disappearing, and values freed.

    ``first`` holds bytes which appear with the first microbatch only (gradients that accumulate),
    ``later`` the temporary bytes of the other microbatches, which add to those.
    """

    allocated: list[int]
    freed: list[int]
    temporary: list[int]
    frees: list[list[int]]
    first: list[int] = field(default_factory=list[int])
    later: list[int] = field(default_factory=list[int])


def writes_of(draft: Draft, step: Step) -> tuple[int, ...]:
    """Return what a step writes; a segment writes its outputs."""
    if step.kind in (Kind.FORWARD, Kind.RECOMPUTE):
        return draft.segments[step.item].outputs
    return step.writes


def _held(draft: Draft, step: Step) -> tuple[int, ...]:
    """Return what a step needs alive: of a segment's outputs, its backward only what it saved."""
    if step.kind is not Kind.BACKWARD:
        return step.reads
    segment = draft.segments[step.item]
    dropped = (set(segment.outputs) - draft.saved[step.item]).union(segment.spared)
    return tuple(value for value in step.reads if value not in dropped)


def _touches(draft: Draft, step: Step) -> dict[int, None]:
    touched = (*_held(draft, step), *writes_of(draft, step))
    return dict.fromkeys(draft.root(value) for value in touched)


def _returns(draft: Draft, steps: Sequence[Step]) -> set[int]:
    """Values that every microbatch makes anew: per-microbatch ones and gathered parameters."""
    found: set[int] = set()
    for step in steps:
        found |= {v for v in _touches(draft, step) if draft.values[v].scope == "microbatch"}
        for value in writes_of(draft, step):
            if draft.values[value].role == "parameter" and not draft.values[value].resident:
                found.add(draft.root(value))
    return found


def _reported(draft: Draft) -> set[int]:
    """Values that live until the end of the step because somebody may ask for them."""
    return {draft.root(output.value) for output in draft.outputs}


def forward_lifetimes(
    draft: Draft, forward: Sequence[Step], backward: Sequence[Step]
) -> tuple[Lifetimes, set[int]]:
    """Return a forward template's lifetimes and the values alive when it ends."""
    returning = _returns(draft, forward)
    first_is_write: dict[int, bool] = {}
    for step in backward:
        for value in _held(draft, step):
            first_is_write.setdefault(draft.root(value), False)
        for value in writes_of(draft, step):
            first_is_write.setdefault(draft.root(value), True)
    dying = {value for value in returning if first_is_write.get(value, True)} - _reported(draft)
    alive: set[int] = set()
    lifetimes = _walk(draft, forward, dying, returning, alive)
    return lifetimes, alive


def backward_lifetimes(draft: Draft, backward: Sequence[Step], alive: set[int]) -> Lifetimes:
    """Return a backward template's lifetimes, given what forward left alive."""
    returning = _returns(draft, backward) | alive
    synced = {
        value
        for step in backward
        if step.kind is Kind.MESSAGE and draft.messages[step.item].purpose == "synchronise"
        for value in step.reads
    }
    dying = (returning | synced) - _reported(draft)
    lifetimes = _walk(draft, backward, dying, returning, set(alive))
    lifetimes.first = [0] * len(backward)
    begun: set[int] = set()
    for place, step in enumerate(backward):
        again: list[int] = []
        new: list[int] = []
        for value in writes_of(draft, step):
            entry = draft.values[value]
            if entry.role == "gradient" and value in begun:
                again.append(draft.bytes_of(value))
            elif entry.role == "gradient" and entry.scope == "step":
                target = lifetimes.allocated if step.last_only else lifetimes.first
                target[place] += draft.bytes_of(value)
                new += [] if step.last_only else [draft.bytes_of(value)]
            begun.add(value)
        alone = lifetimes.temporary[place]
        lifetimes.temporary[place] = _with_sums(draft, step, alone, again)
        lifetimes.later.append(_with_sums(draft, step, alone, again + new))
        if step.last_only:
            for value in set(step.reads) & synced:
                if draft.values[value].scope == "step":
                    lifetimes.freed[place] += draft.bytes_of(value)
    return lifetimes


def once_lifetimes(
    draft: Draft, steps: Sequence[Step], before: Sequence[Step], *, ends_step: bool
) -> Lifetimes:
    """Return lifetimes of steps that run once per training step (prologue, exchange, epilogue).

    What they make lives until the end of the step, except temporaries of the epilogue itself.
    Gradients that ``before`` already wrote are there and only accumulate.
    """
    made = {v for step in steps for v in writes_of(draft, step)}
    between = {v for v in made if ends_step and draft.values[v].role == "activation"}
    alive = {v for step in before for v in writes_of(draft, step)}
    return _walk(draft, steps, between, made, alive)


def _walk(
    draft: Draft, steps: Sequence[Step], dying: set[int], returning: set[int], alive: set[int]
) -> Lifetimes:
    """Play the steps: allocate at a first write, free ``dying`` values after their last touch."""
    last = {value: place for place, step in enumerate(steps) for value in _touches(draft, step)}
    count = len(steps)
    result = Lifetimes([0] * count, [0] * count, [0] * count, [[] for _ in range(count)])
    for place, step in enumerate(steps):
        for value in writes_of(draft, step):
            if value in returning and value not in alive and draft.values[value].alias < 0:
                alive.add(value)
                result.allocated[place] += draft.bytes_of(value)
        _segment_bytes(draft, step, place, result)
        for value in _touches(draft, step):
            if last[value] == place and value in dying:
                result.frees[place].append(value)
                if value in alive:
                    alive.discard(value)
                    result.freed[place] += draft.bytes_of(value)
    return result


def _segment_bytes(draft: Draft, step: Step, place: int, result: Lifetimes) -> None:
    if step.kind in (Kind.MESSAGE, Kind.SEND, Kind.RECEIVE):
        result.temporary[place] = _buffers(draft.messages[step.item])
        return
    if step.kind is Kind.UPDATE:
        # For-loop optimizers make a few temporaries of the size of one parameter at a time.
        sizes = [_value_bytes(draft, value) for value in step.writes]
        result.temporary[place] = 2 * max(sizes, default=0)
        return
    if step.kind is Kind.CLIP:
        return
    segment = draft.segments[step.item]
    is_backward = step.kind is Kind.BACKWARD
    result.temporary[place] = segment.temporary_bytes[int(is_backward)]
    keeps = step.kind is Kind.RECOMPUTE or (step.kind is Kind.FORWARD and not segment.recomputed)
    if is_backward:
        result.freed[place] += segment.saved_bytes
    elif keeps:
        result.allocated[place] += segment.saved_bytes


def _buffers(message: Message) -> int:
    """Return what a message needs besides its sources and results until it is complete.

    What is split is packed rank by rank first. All other buffers become the results, or stand where
    results will: see ``Message.is_unpacked`` for what is copied out at the end. Packed pieces to
    gather are left out: they are copied into the output at once.
    """
    return message.bytes if message.primitive in ("reduce_scatter", "all_to_all") else 0


def _with_sums(draft: Draft, step: Step, temporary: int, sizes: Sequence[int]) -> int:
    """Return a step's temporary bytes where it adds to gradients of these sizes.

    All terms of a backward are there before the first is added, and a sum is first taken out of
    place; by then what autograd saved is gone.
    """
    if not sizes or step.kind is not Kind.BACKWARD:
        return temporary + sum(sizes)
    saved = draft.segments[step.item].saved_bytes
    return sum(sizes) + max(temporary, max(sizes) - saved)


def _value_bytes(draft: Draft, value: int) -> int:
    entry = draft.values[value]
    return prod(entry.shape) * DTYPE_BYTES[entry.dtype]


def base_bytes(draft: Draft, mesh: int) -> int:
    """Bytes of one device that are there all the time: parameters, masters, states, buffers."""
    states = draft.strategy.optimizer_states
    total = 0
    for index in draft.lasting:
        entry = draft.values[index]
        if entry.mesh != mesh or entry.alias >= 0:
            continue
        total += _value_bytes(draft, index)
        if entry.role in ("parameter", "master") and entry.gradient >= 0:
            reduced = draft.values[entry.gradient]
            is_master = entry.role == "master" or (
                reduced.layout == entry.layout and reduced.dtype == entry.dtype
            )
            total += states * _value_bytes(draft, index) if is_master else 0
    return total
