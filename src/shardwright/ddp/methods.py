"""The table of methods: how a lot of gradients is exchanged, and what that puts on the wire.

A method takes what every rank has accumulated (gradient and residual) and returns the mean of what
was sent, equal to the last bit on all ranks, and what this rank still owes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shardwright.core.compression import Round, merge_rounds
from shardwright.ddp.settings import Compression, MethodName
from shardwright.ddp.wire import Wire
from shardwright.runtime.compression import (
    Sparse,
    after_round,
    left_product,
    orthonormal,
    packed,
    quantised,
    right_product,
    signs,
    unpacked,
    unsigned,
)

# Of a flat unit, how many to keep and what the unit is called: indices, at most so many.
Select = Callable[[Tensor, int, str], Tensor]


@dataclass(slots=True)
class Lot:
    """Gradients of one bucket that are compressed together.

    ``flat`` holds the units one after another; ``sizes``, ``kept``, ``names`` and ``shapes`` have an entry for
    each. ``factors`` are PowerSGD's Q by name, replaced by those of this step.
    """

    flat: Tensor
    names: Sequence[str]
    shapes: Sequence[torch.Size]
    kept: Sequence[int]
    settings: Compression
    select: Select
    factors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """Elements of each unit."""
        return [shape.numel() for shape in self.shapes]

    def units(self) -> Sequence[Tensor]:
        """Return the units as views."""
        return self.flat.split(self.sizes)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What came of a lot: ``mean`` of what all ranks sent, what this rank ``owes``, and the indices
    that it ``sent``, where it selected some."""

    mean: Tensor
    owed: Tensor
    sent: Tensor | None = None


def dense(lot: Lot, wire: Wire, dtype: torch.dtype | None = None) -> Exchanged:
    """Sum all in a dtype. It is divided first, so that half precision does not overflow."""
    share = lot.flat / wire.size
    wide = share.to(dtype or share.dtype)
    owed = lot.flat - wide.to(share.dtype) * wire.size if dtype else torch.zeros_like(lot.flat)
    wire.all_reduce(wide)
    return Exchanged(wide.to(share.dtype), owed)


def top_k(lot: Lot, wire: Wire) -> Exchanged:
    """Gather every rank's selection and add them in rank order."""
    mine = _selected(lot)
    total = torch.zeros_like(lot.flat)
    for row in wire.all_gather(packed(mine)):
        theirs = unpacked(row, lot.flat.dtype)
        total.index_add_(0, theirs.indices, theirs.values)
    return Exchanged(total / wire.size, _without(lot.flat, mine), mine.indices)


def g_top_k(lot: Lot, wire: Wire) -> Exchanged:
    """Keep the k largest of the merged selections of all ranks.

    What merging drops goes back to who put it in, or is owed by who dropped it where the others do not see that
    (conserving; ``core.compression.Round``). By the paper's rule each rank takes back those of its own that are
    not among the last k; what was dropped on the way and is among them by another rank's share is lost.
    """
    mine = _selected(lot)
    owed = _without(lot.flat, mine)
    final = _merged_selection(lot, wire, mine, owed)
    mean = torch.zeros_like(lot.flat).index_add_(0, final.indices, final.values)
    if lot.settings.residual == "paper":
        refused = Sparse(
            mine.indices, mine.values.masked_fill(torch.isin(mine.indices, final.indices), 0)
        )
        owed.index_add_(0, refused.indices, refused.values)
    return Exchanged(mean / wire.size, owed, mine.indices)


def _merged_selection(lot: Lot, wire: Wire, mine: Sparse, owed: Tensor) -> Sparse:
    """Merge in rounds (``core.compression.merge_rounds``), unit by unit; ``owed`` takes what is dropped
    where that is conserved."""
    held = own = _split(mine, lot.kept)
    for turn in merge_rounds(lot.settings.method, wire.size):
        theirs = _passed_on(turn, wire, packed(_joined(held)))
        if theirs is None:
            continue
        came = _split(unpacked(theirs, lot.flat.dtype), lot.kept)
        if turn.replaces:
            held = came
            continue
        units = zip(held, came, own, strict=True)
        found = [after_round(turn, wire.rank, *unit) for unit in units]
        held, own = [one.held for one in found], [one.mine for one in found]
        for one in found if lot.settings.residual == "conserving" else ():
            owed.index_add_(0, one.rest.indices, one.rest.values)
    return _joined(held)


def _passed_on(turn: Round, wire: Wire, message: Tensor) -> Tensor | None:
    """Send what is held as a round says, and return what comes, None where nothing does."""
    receiver, sender = turn.receiver_of(wire.rank), turn.sender_to(wire.rank)
    if receiver >= 0 and receiver == sender:
        return wire.swap(message, sender)
    if receiver >= 0:
        wire.send(message, receiver)
    return wire.receive(message, sender) if sender >= 0 else None


def _split(sparse: Sparse, counts: Sequence[int]) -> list[Sparse]:
    """Return the units of what ``_joined`` joined."""
    parts = zip(sparse.indices.split(list(counts)), sparse.values.split(list(counts)), strict=True)
    return [Sparse(*part) for part in parts]


def quantise(lot: Lot, wire: Wire) -> Exchanged:
    """Gather every rank's 8-bit codes, with a scale for each unit."""
    pairs = [quantised(unit) for unit in lot.units()]

    def restored(codes: Tensor, scales: Tensor) -> Tensor:
        wide = scales.repeat_interleave(torch.tensor(lot.sizes, device=scales.device))
        return codes.view(torch.int8) * wide

    return _gathered(lot, wire, pairs, restored)


def one_bit(lot: Lot, wire: Wire) -> Exchanged:
    """Gather every rank's signs, with two means for each unit."""
    pairs = [signs(unit) for unit in lot.units()]
    lengths = [len(bits) for bits, _ in pairs]

    def restored(codes: Tensor, means: Tensor) -> Tensor:
        parts = zip(codes.split(lengths), means.view(-1, 2), lot.sizes, strict=True)
        return torch.cat([unsigned(bits, both, size) for bits, both, size in parts])

    return _gathered(lot, wire, pairs, restored)


def _gathered(
    lot: Lot,
    wire: Wire,
    pairs: Sequence[tuple[Tensor, Tensor]],
    restored: Callable[[Tensor, Tensor], Tensor],
) -> Exchanged:
    """Gather (codes, numbers) of the units as bytes, numbers first, and add them in rank order."""
    numbers = torch.cat([number for _, number in pairs])
    codes = torch.cat([code.view(torch.uint8) for code, _ in pairs])
    total = torch.zeros_like(lot.flat)
    for row in wire.all_gather(torch.cat([numbers.view(torch.uint8), codes])):
        theirs = row[: numbers.nbytes].clone().view(numbers.dtype)
        total += restored(row[numbers.nbytes :], theirs)
    return Exchanged(total / wire.size, lot.flat - restored(codes, numbers))


def power_sgd(lot: Lot, wire: Wire) -> Exchanged:
    """Approximate each matrix by one of low rank: two sums of factors (Vogels et al., NeurIPS 2019)."""
    matrices = [
        unit.view(shape[0], -1) for unit, shape in zip(lot.units(), lot.shapes, strict=True)
    ]
    rights = [orthonormal(lot.factors[name]) for name in lot.names]
    lefts = _summed(list(map(left_product, matrices, rights)), wire)
    if not all(bool(left.isfinite().all()) for left in lefts):
        return Exchanged(torch.full_like(lot.flat, math.nan), lot.flat)
    lefts = [orthonormal(left) for left in lefts]
    rights = [
        total / wire.size for total in _summed(list(map(right_product, matrices, lefts)), wire)
    ]
    lot.factors.update(zip(lot.names, rights, strict=True))
    mean = torch.cat([(left @ right.T).view(-1) for left, right in zip(lefts, rights)])
    return Exchanged(mean, lot.flat - mean)


def _summed(tensors: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    wire.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _selected(lot: Lot) -> Sparse:
    """Return the selections of all units, each of as many elements as are kept."""
    units = list[Sparse]()
    starts = _starts(lot.sizes)
    for unit, name, count, start in zip(lot.units(), lot.names, lot.kept, starts, strict=True):
        indices = lot.select(unit, count, name)
        units.append(Sparse(indices + start, unit[indices]).padded(count))
    return _joined(units)


def _joined(units: Sequence[Sparse]) -> Sparse:
    return Sparse(
        torch.cat([unit.indices for unit in units]), torch.cat([unit.values for unit in units])
    )


def _without(flat: Tensor, sent: Sparse) -> Tensor:
    return flat.index_add(0, sent.indices, -sent.values)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:place]) for place in range(len(sizes))]


@dataclass(frozen=True, slots=True)
class Load:
    """What a method's cost depends on: ranks, elements, kept elements, bytes of a number, units, and
    the elements of PowerSGD's factors."""

    ranks: int
    elements: int
    kept: int = 0
    width: int = 4
    units: int = 1
    factors: int = 0


def _ring(load: Load, width: float) -> float:
    return 2 * (load.ranks - 1) / load.ranks * load.elements * width


def _pairs(load: Load) -> int:
    """Bytes of a selection: a value and an index of 32 bits each."""
    return load.kept * (load.width + 4)


def _merged(method: MethodName, load: Load) -> int:
    """Bytes of the busiest rank's messages, as many as there are rounds."""
    return len(merge_rounds(method, load.ranks)) * _pairs(load)


@dataclass(frozen=True, slots=True)
class Method:
    """How a lot is exchanged, and the bytes that the busiest rank receives (all-gather, doubling, a
    ring) or receives and sends one after another (tree)."""

    exchange: Callable[[Lot, Wire], Exchanged]
    wire_bytes: Callable[[Load], float]


METHODS: dict[MethodName, Method] = {
    "dense": Method(dense, lambda load: _ring(load, load.width)),
    "bfloat16": Method(partial(dense, dtype=torch.bfloat16), lambda load: _ring(load, 2)),
    "float16": Method(partial(dense, dtype=torch.float16), lambda load: _ring(load, 2)),
    "top-k": Method(top_k, lambda load: (load.ranks - 1) * _pairs(load)),
    "gtop-k": Method(g_top_k, partial(_merged, "gtop-k")),
    "gtop-k-tree": Method(g_top_k, partial(_merged, "gtop-k-tree")),
    "int8": Method(
        quantise, lambda load: (load.ranks - 1) * (load.elements + load.units * load.width)
    ),
    "1-bit": Method(
        one_bit,
        lambda load: (load.ranks - 1) * (math.ceil(load.elements / 8) + 2 * load.units * load.width),
    ),
    "powersgd": Method(
        power_sgd, lambda load: 2 * (load.ranks - 1) / load.ranks * load.factors * load.width
    ),
}  # fmt: skip


def wire_bytes(method: MethodName, load: Load) -> float:
    """Return the bytes of one exchange on its longest way; see ``Method``."""
    return METHODS[method].wire_bytes(load)
