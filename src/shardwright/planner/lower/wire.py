"""Gradients on their way to the optimizer, in the dtype in which they travel.

Where that is not the parameters' own they are cast before the first message and after the last, by
instructions of their own: what is added up on the way stays in it, and what waits for the wire needs
no more memory than what travels.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.program import Kind, Scope, Transform
from shardwright.core.strategy import wire_dtype
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.lower.compress import compressed, compressible
from shardwright.planner.lower.lot import Pair, residual_of


def other_dtype(builder: ProgramBuilder, gradient: int) -> str:
    """Return the dtype in which a gradient travels, "" where that is its tensor's own: messages then
    convert sums as they pack them, unless what that loses is fed back."""
    own, sync = builder.own_dtype(builder.values[gradient].tensor), builder.strategy.gradient_sync
    wire = wire_dtype(sync.dtype, own)
    is_own = wire == own and not (sync.error_feedback and builder.values[gradient].dtype != wire)
    return "" if is_own else wire


def synchronise(
    builder: ProgramBuilder, pairs: Sequence[Pair], *, last_only: bool = False
) -> list[Step]:
    """Return the steps that bring each (source, result) pair of gradients to its result's layout.

    As ``ProgramBuilder.chain`` does; casts come first and last.
    """
    smaller, pairs = compressible(builder, pairs)
    if smaller:
        # What travels whole is ready before any pack is, and nothing of it waits for packs of others.
        rest = synchronise(builder, pairs, last_only=last_only) if pairs else []
        at = unanswered(rest)
        packs, sums = compressed(builder, smaller, last_only)
        return [*rest[:at], *packs, *rest[at:], *sums]
    wire = max(other_dtype(builder, source) for source, _ in pairs)  # "" or one and the same
    source, result = (builder.values[end] for end in pairs[0])
    moves = any(step.primitive != "slice" for step in builder.reshard(pairs[0][0], result.layout))
    if not wire or not (moves or wire in (source.dtype, result.dtype)):
        return builder.chain(pairs, "synchronise", last_only=last_only)
    if source.layout == result.layout:
        return [_cast(builder, pairs, last_only)]
    return _sent_in(builder, pairs, wire, last_only)


def _sent_in(
    builder: ProgramBuilder, pairs: Sequence[Pair], wire: str, last_only: bool
) -> list[Step]:
    """Return messages in another dtype, and the casts to it and from it."""
    # What arrives of a microbatch is no sum over microbatches, as the result may be.
    scope = builder.values[pairs[0][0]].scope
    leaving = [_in_dtype(builder, one, wire, scope) for one, _ in pairs]
    arriving = [_in_dtype(builder, one, wire, scope) for _, one in pairs]
    down = [(one, sent) for (one, _), sent in zip(pairs, leaving, strict=True) if sent != one]
    up = [(came, one) for (_, one), came in zip(pairs, arriving, strict=True) if came != one]
    sent = list(zip(leaving, arriving, strict=True))
    messages = builder.chain(sent, "synchronise", last_only=last_only, dtype=wire)
    casts = [[_cast(builder, some, last_only)] if some else [] for some in (down, up)]
    return [*casts[0], *messages, *casts[1]]


def unanswered(steps: Sequence[Step]) -> int:
    """Return how many steps there are up to the first that needs what a message among them brings."""
    brought = set[int]()
    for number, step in enumerate(steps):
        if not brought.isdisjoint(step.reads):
            return number
        if step.kind is not Kind.TRANSFORM:
            brought.update(step.writes)
    return len(steps)


def _in_dtype(builder: ProgramBuilder, value: int, dtype: str, scope: Scope) -> int:
    """Return a gradient like another in a dtype; itself where that is its own."""
    entry = builder.values[value]
    if entry.dtype == dtype:
        return value
    return builder.add_value(entry.tensor, entry.mesh, entry.layout, scope, "gradient", dtype=dtype)


def _cast(builder: ProgramBuilder, pairs: Sequence[Pair], last_only: bool) -> Step:
    """Append a cast of each (source, result) pair, or error feedback where it rounds, and return its step."""
    sources, results = (tuple([pair[end] for pair in pairs]) for end in (0, 1))
    widths = [DTYPE_BYTES[builder.values[pair].dtype] for pair in pairs[0]]
    rounds = builder.strategy.gradient_sync.error_feedback and widths[0] > widths[1]
    residuals = tuple([residual_of(builder, source) for source in sources]) if rounds else ()
    transform = Transform(
        name="feedback" if rounds else "cast",
        mesh=builder.values[sources[0]].mesh,
        reads=(*sources, *residuals),
        writes=(*results, *residuals),
        purpose="synchronise",
    )
    return builder.transform_step(transform, sources, results, last_only=last_only)
