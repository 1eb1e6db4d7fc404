"""What compresses gradients into bytes, adds up what ranks made so, and merges selections."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shardwright.core.compression import INDEX_BYTES, merge_rounds
from shardwright.core.program import Transform, Value
from shardwright.runtime.compression import (
    Sparse,
    after_round,
    all_finite,
    largest,
    quantised,
    signs,
    unpacked,
    unsigned,
)
from shardwright.runtime.compression import (
    packed as pairs_packed,
)
from shardwright.runtime.store import DTYPES

Sum = Callable[[Tensor, Tensor], Tensor]


class Pack(Protocol):
    """Returns, of what is to be sent and the bytes to send, these and what is not sent."""

    def __call__(self, owed: Tensor, size: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Front:
    """The velocity that runs before a selection, its momentum, and whether it begins anew where something was sent."""

    velocity: Tensor
    momentum: float
    is_masked: bool


def packed(
    pack: Pack, transform: Transform, tensors: Sequence[Tensor], results: Sequence[Value]
) -> list[Tensor]:
    """Add gradients to their residuals, and pack what these are then; what that loses stays in them."""
    states, momentum = transform.count("states", 1), transform.number("momentum", 0)
    bound, is_masked = transform.number("bound", 0), bool(transform.number("masked", 0))
    count = len(tensors) // (1 + states)
    kept = tensors[count:]
    nothing = [None] * count
    residuals = kept[:count] if states > bool(momentum) else nothing
    velocities = kept[-count:] if momentum else nothing
    messages = list[Tensor]()
    for gradient, residual, velocity, result in zip(
        tensors, residuals, velocities, results, strict=False
    ):
        into, dtype = partial(pack, size=math.prod(result.shape)), wide_like(gradient, residual)
        comes = partial(bounded, gradient, bound, dtype)
        front = None if velocity is None else Front(velocity, momentum, is_masked)
        messages.append(_packed_one(into, comes(), residual, front))
    return [*messages, *kept]


def _packed_one(
    pack: Callable[[Tensor], tuple[Tensor, Tensor]],
    comes: Tensor,
    residual: Tensor | None,
    front: Front | None,
) -> Tensor:
    """Pack what comes of one gradient."""
    if front is not None:
        comes = front.velocity * front.momentum + comes
    owed = (comes if residual is None else residual + comes).view(-1)
    message, lost = pack(owed)
    # Where a gradient is not finite all ranks learn of it, and nothing is owed because of it.
    is_finite = all_finite(owed)
    if residual is not None:
        _keep(residual, lost, is_finite)
    if front is not None:
        runs_on = comes.view(-1)
        if front.is_masked:
            runs_on = runs_on * ((lost != 0) | (owed == 0))
        _keep(front.velocity, runs_on, is_finite)
    return message


def wide_like(gradient: Tensor, state: Tensor | None) -> torch.dtype:
    """Return the dtype in which a gradient is compressed: that of its states, if there are any."""
    return torch.promote_types(gradient.dtype, torch.float32) if state is None else state.dtype


def bounded(gradient: Tensor, bound: float, dtype: torch.dtype) -> Tensor:
    """Return a gradient in a dtype, of a norm of at most the bound times the root of its elements (0: any)."""
    if not bound:
        return gradient.to(dtype)
    norm = torch.linalg.vector_norm(gradient, dtype=dtype)  # squares of halves overflow
    scale = (bound * math.sqrt(gradient.numel()) / norm).clamp(max=1.0)
    return gradient.to(dtype) * scale


def _keep(state: Tensor, new: Tensor, is_finite: Tensor) -> None:
    flat = state.view(-1)
    torch.where(is_finite, new, flat, out=flat)


def summed(
    add: Sum, transform: Transform, tensors: Sequence[Tensor], results: Sequence[Value]
) -> list[Tensor]:
    """Add up what all ranks packed, in their order: all have equal bits."""
    dtype, made = DTYPES[transform.word("dtype")], list[Tensor]()
    for tensor, result in zip(tensors, results, strict=True):
        total = torch.zeros(math.prod(result.shape), dtype=dtype, device=tensor.device)
        for message in tensor.view(transform.count("ranks"), -1):
            total = add(total, message)
        made.append(total.view(result.shape))
    return made


def merge(
    transform: Transform, tensors: Sequence[Tensor], results: Sequence[Value]
) -> list[Tensor]:
    """Merge what came in a round with what was held. Where residuals keep what that drops, what of the latter
    is this rank's own comes behind, before them, and is written for rounds to come."""
    rounds = merge_rounds(transform.word("compressor"), transform.count("ranks"))
    turn, place = rounds[transform.count("turn")], transform.count("place")
    count, dtype = transform.count("gradients"), DTYPES[transform.word("dtype")]
    held, came, mine, states = (tensors[at * count : (at + 1) * count] for at in range(4))
    going_on = mine[: len(results) - count - len(states)]
    if turn.sender_to(place) < 0:
        return [*held, *going_on, *states]
    if turn.replaces:
        return [*came]
    ends = [_selections(each, dtype) for each in (held, came, mine or held)]
    found = after_round(turn, place, *ends)
    for residual, one in zip(states, found):
        _owe(residual, one.rest)
    left = [one.mine for one in found[: len(going_on)]]
    return [*_messages([one.held for one in found]), *_messages(left), *states]


def _selections(messages: Sequence[Tensor], dtype: torch.dtype) -> list[Sparse]:
    return [_selection(one, dtype) for one in messages]


def _messages(selections: Sequence[Sparse]) -> list[Tensor]:
    return [pairs_packed(one).view(torch.uint8) for one in selections]


def take_back(
    transform: Transform, tensors: Sequence[Tensor], results: Sequence[Value]
) -> list[Tensor]:
    """Owe what was sent and is not among what was kept of all: gTop-k's published rule."""
    count, dtype = len(results), DTYPES[transform.word("dtype")]
    residuals = tensors[2 * count :]
    for sent, final, residual in zip(tensors, tensors[count:], residuals):
        mine, all_ = _selection(sent, dtype), _selection(final, dtype)
        refused = mine.values.masked_fill(torch.isin(mine.indices, all_.indices), 0)
        _owe(residual, Sparse(mine.indices, refused))
    return [*residuals]


def _owe(residual: Tensor, rest: Sparse) -> None:
    """Add elements to a residual where all are finite."""
    values = torch.where(rest.values.isfinite().all(), rest.values, 0)
    residual.view(-1).index_add_(0, rest.indices, values)


def _selection(message: Tensor, dtype: torch.dtype) -> Sparse:
    return unpacked(message.clone().view(torch.int32), dtype)


def pack_largest(owed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Keep values and places of the elements of largest magnitude."""
    indices = largest(owed, size // (owed.itemsize + INDEX_BYTES))
    message = pairs_packed(Sparse(indices, owed[indices])).view(torch.uint8)
    return message, owed.index_fill(0, indices, 0)


def add_largest(total: Tensor, message: Tensor) -> Tensor:
    """Add a rank's elements."""
    theirs = _selection(message, total.dtype)
    return total.index_add_(0, theirs.indices, theirs.values)


def pack_levels(owed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Keep one of 255 levels of each element."""
    del size
    codes, level = quantised(owed)
    return torch.cat([codes.view(torch.uint8), level.view(torch.uint8)]), owed - codes * level


def add_levels(total: Tensor, message: Tensor) -> Tensor:
    """Add a rank's levels."""
    codes, bits = message.split([len(total), total.itemsize])
    return total.add_(codes.view(torch.int8) * bits.clone().view(total.dtype))


def pack_signs(owed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Keep a bit of each element, and two means."""
    del size
    bits, means = signs(owed)
    message = torch.cat([bits, means.view(torch.uint8)])
    return message, owed - unsigned(bits, means, len(owed))


def add_signs(total: Tensor, message: Tensor) -> Tensor:
    """Add a rank's signs."""
    bits, means = message.split([len(message) - 2 * total.itemsize, 2 * total.itemsize])
    return total.add_(unsigned(bits, means.clone().view(total.dtype), len(total)))
