"""The table of methods: how lots of gradients are exchanged, and what that puts on the wire.

A method makes of what every rank has accumulated (gradient and residual) what is to be sent, lot by lot. Exchanged
together, these give the mean of what was sent, equal to the last bit on all ranks, and what this rank still owes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, islice
from typing import Any

import torch
from torch import Tensor

from shardwright.core.compression import Round, merge_rounds
from shardwright.ddp.settings import Compression, MethodName
from shardwright.ddp.wire import Wire
from shardwright.runtime.compression import (
    Sparse,
    after_round,
    all_finite,
    joined,
    left_product,
    orthonormal,
    packed,
    quantised,
    right_product,
    signs,
    split,
    unpacked,
    unsigned,
)

# Of a flat unit, how many to keep and what the unit is called: indices, at most so many.
Select = Callable[[Tensor, int, str], Tensor]


@dataclass(slots=True)
class Lot:
    """Gradients of one bucket that are compressed together.

    ``flat`` holds the units one after another; ``sizes``, ``kept``, ``names``, ``shapes`` and ``places`` have an entry
    for each. Means of all ranks are put in ``means``, those of a unit from its place on; where that ``is_in_place``,
    it is the gradients' own memory. ``factors`` are PowerSGD's Q by name, replaced by those of this step.
    """

    flat: Tensor
    names: Sequence[str]
    shapes: Sequence[torch.Size]
    kept: Sequence[int]
    settings: Compression
    select: Select
    ranks: int
    factors: dict[str, Tensor] = field(default_factory=dict)
    means: Tensor = field(init=False)
    places: Sequence[int] = field(init=False)
    is_in_place: bool = False

    def __post_init__(self) -> None:
        self.means, self.places = torch.empty_like(self.flat), self.starts

    @property
    def starts(self) -> list[int]:
        """Where the units begin in ``flat``."""
        return list(accumulate(self.sizes, initial=0))[:-1]

    @property
    def sizes(self) -> list[int]:
        """Elements of each unit."""
        return [shape.numel() for shape in self.shapes]

    def units(self) -> Sequence[Tensor]:
        """Return the units as views."""
        return self.flat.split(self.sizes)

    def unit_means(self) -> list[Tensor]:
        """Return where the means of the units belong, as views."""
        return [self.means[at : at + size] for at, size in zip(self.places, self.sizes)]

    def away(self) -> Tensor:
        """Return of each element that is kept how far behind its place in ``flat`` that in ``means`` is."""
        shifts = [at - start for at, start in zip(self.places, self.starts, strict=True)]
        both = (torch.tensor(one, device=self.flat.device) for one in (shifts, self.kept))
        return torch.repeat_interleave(*both, output_size=sum(self.kept))

    def put(self, flat: Tensor) -> None:
        """Let the means be these, as flat as the units."""
        scatter(flat, self.unit_means())

    def load(self) -> Load:
        """Return what exchanging it costs by."""
        factors = sum(
            (shape[0] + one.shape[0]) * one.shape[1]
            for shape, one in zip(self.shapes, self.factors.values())
        )
        return Load(
            ranks=self.ranks,
            elements=len(self.flat),
            kept=sum(self.kept),
            width=self.flat.itemsize,
            units=len(self.names),
            factors=factors,
        )

    def matrices(self) -> list[Tensor]:
        """Return the units as matrices."""
        pairs = zip(self.units(), self.shapes, strict=True)
        return [unit.view(shape[0], -1) for unit, shape in pairs]


def scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy what lies one after another to where each belongs."""
    for tensor, part in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What came of a lot, whose means are in their place: what this rank ``owes`` (the lot's own memory), whether
    all that came ``is_finite``, and the indices that it ``sent``, where it selected some."""

    owed: Tensor
    is_finite: bool
    sent: Tensor | None = None


def _narrowed(lot: Lot, dtype: torch.dtype | None = None) -> Tensor:
    """Divide first, so that half precision does not overflow."""
    return (lot.flat / lot.ranks).to(dtype or lot.flat.dtype)


def _dense(begun: Sequence[tuple[Lot, Tensor]], wire: Wire) -> list[Exchanged]:
    found = list[Exchanged]()
    for (lot, mine), total in zip(begun, _summed([mine for _, mine in begun], wire), strict=True):
        # What is as wide as it was loses nothing.
        sent = mine.to(lot.flat.dtype) * wire.size if mine.dtype != lot.flat.dtype else lot.flat
        lot.flat.sub_(sent)
        lot.put(total)
        found.append(Exchanged(lot.flat, bool(all_finite(total))))
    return found


def _selected(lot: Lot) -> Sparse:
    """Take the selections of all units out of a lot, each of as many elements as are kept. All means are 0 from here
    on, so that only what comes is written behind the exchange."""
    for mean in lot.unit_means():
        mean.zero_()
    units = list[Sparse]()
    for unit, name, count, start in zip(lot.units(), lot.names, lot.kept, lot.starts, strict=True):
        indices = lot.select(unit, count, name)
        sent = Sparse(indices, unit[indices]).padded(count)
        units.append(Sparse(sent.indices + start, sent.values))
        unit[indices] = 0
    return joined(units)


def _top_k(begun: Sequence[tuple[Lot, Sparse]], wire: Wire) -> list[Exchanged]:
    """Gather every rank's selections and add them in rank order."""
    rows = wire.all_gather(packed(joined([mine for _, mine in begun])))
    dtype = begun[0][0].flat.dtype
    return _added([unpacked(row, dtype) for row in rows], begun, wire)


def _g_top_k(begun: Sequence[tuple[Lot, Sparse]], wire: Wire) -> list[Exchanged]:
    """Keep the k largest of the merged selections of all ranks.

    What merging drops goes back to who put it in, or is owed by who dropped it where the others do not see that
    (conserving; ``core.compression.Round``). By the paper's rule each rank takes back those of its own that are
    not among the last k; what was dropped on the way and is among them by another rank's share is lost.
    """
    final = _merged_selection(begun, wire)
    rule = begun[0][0].settings.residual
    finals = split(final, [len(mine.indices) for _, mine in begun])
    for (lot, mine), kept in zip(begun, finals, strict=True) if rule == "paper" else ():
        refused = mine.values.masked_fill(torch.isin(mine.indices, kept.indices), 0)
        lot.flat.index_add_(0, mine.indices, refused)
    return _added([final], begun, wire)


def _added(
    terms: Sequence[Sparse], begun: Sequence[tuple[Lot, Sparse]], wire: Wire
) -> list[Exchanged]:
    """Add selections in their order to means. Only they are looked at: all other elements are 0."""
    is_finite = all(bool(all_finite(one.values)) for one in terms)
    away = torch.cat([lot.away() for lot, _ in begun])
    counts = [len(mine.indices) for _, mine in begun]
    for one in terms:
        moved = split(Sparse(one.indices + away, one.values / wire.size), counts)
        for (lot, _), part in zip(begun, moved, strict=True):
            lot.means.index_add_(0, part.indices, part.values)
    return [Exchanged(lot.flat, is_finite, mine.indices[mine.values != 0]) for lot, mine in begun]


def _merged_selection(begun: Sequence[tuple[Lot, Sparse]], wire: Wire) -> Sparse:
    """Merge in rounds (``core.compression.merge_rounds``), unit by unit; lots take back what is dropped where that
    is conserved."""
    lots, mine = zip(*begun, strict=True)
    settings, dtype = lots[0].settings, lots[0].flat.dtype
    kept = list(chain.from_iterable(lot.kept for lot in lots))
    held = own = split(joined(mine), kept)
    for turn in merge_rounds(settings.method, wire.size):
        theirs = _passed_on(turn, wire, packed(joined(held)))
        if theirs is None:
            continue
        came = split(unpacked(theirs, dtype), kept)
        if turn.replaces:
            held = came
            continue
        found = after_round(turn, wire.rank, held, came, own)
        held, own = [one.held for one in found], [one.mine for one in found]
        if settings.residual == "conserving":
            _take_back(lots, [one.rest for one in found])
    return joined(held)


def _take_back(lots: Sequence[Lot], rests: Sequence[Sparse]) -> None:
    """Owe what merging dropped of each unit."""
    left = iter(rests)
    for lot in lots:
        rest = joined(list(islice(left, len(lot.kept))))
        lot.flat.index_add_(0, rest.indices, rest.values)


def _passed_on(turn: Round, wire: Wire, message: Tensor) -> Tensor | None:
    """Send what is held as a round says, and return what comes, None where nothing does."""
    receiver, sender = turn.receiver_of(wire.rank), turn.sender_to(wire.rank)
    if receiver >= 0 and receiver == sender:
        return wire.swap(message, sender)
    if receiver >= 0:
        wire.send(message, receiver)
    return wire.receive(message, sender) if sender >= 0 else None


Codes = tuple[
    Tensor, Tensor
]  # of all units of a lot, as bytes, and the numbers that give them meaning


def _levels(lot: Lot) -> Codes:
    """Return 8-bit codes, with a scale for each unit."""
    return _coded(list(map(quantised, lot.units())))


def _from_levels(codes: Tensor, scales: Tensor, lot: Lot) -> Tensor:
    wide = scales.repeat_interleave(torch.tensor(lot.sizes, device=scales.device))
    return codes.view(torch.int8) * wide


def _bits(lot: Lot) -> Codes:
    """Return signs, with two means for each unit."""
    return _coded(list(map(signs, lot.units())))


def _from_bits(codes: Tensor, means: Tensor, lot: Lot) -> Tensor:
    lengths = [-(-size // 8) for size in lot.sizes]
    parts = zip(codes.split(lengths), means.view(-1, 2), lot.sizes, strict=True)
    return torch.cat([unsigned(bits, both, size) for bits, both, size in parts])


def _coded(pairs: Sequence[Codes]) -> Codes:
    codes = torch.cat([code.view(torch.uint8) for code, _ in pairs])
    return codes, torch.cat([number for _, number in pairs])


def _gathered(
    begun: Sequence[tuple[Lot, Codes]],
    wire: Wire,
    restored: Callable[[Tensor, Tensor, Lot], Tensor],
) -> list[Exchanged]:
    """Gather codes and numbers as bytes, those of each lot behind those of the one before, and add them in rank
    order."""
    parts = [part for _, codes in begun for part in (codes[1].view(torch.uint8), codes[0])]
    rows = wire.all_gather(torch.cat(parts))
    lengths, found = [len(part) for part in parts], list[Exchanged]()
    by_rank = [row.split(lengths) for row in rows]
    for place, (lot, mine) in enumerate(begun):
        mean, is_finite = torch.zeros_like(lot.flat), True
        for row in by_rank:
            theirs = row[2 * place].clone().view(mine[1].dtype)
            mean += restored(row[2 * place + 1], theirs / wire.size, lot)
            is_finite = is_finite and bool(all_finite(theirs))
        lot.put(mean)
        found.append(Exchanged(lot.flat.sub_(restored(*mine, lot)), is_finite))
    return found


def _lefts(lot: Lot) -> list[Tensor]:
    """Return each matrix times its right factor."""
    rights = [orthonormal(lot.factors[name]) for name in lot.names]
    return list(map(left_product, lot.matrices(), rights))


def _power_sgd(begun: Sequence[tuple[Lot, list[Tensor]]], wire: Wire) -> list[Exchanged]:
    """Approximate each matrix by one of low rank: two sums of factors (Vogels et al., NeurIPS 2019)."""
    lots = [lot for lot, _ in begun]
    lefts = _summed(list(chain.from_iterable(lefts for _, lefts in begun)), wire)
    if not all(bool(left.isfinite().all()) for left in lefts):
        return [Exchanged(lot.flat, is_finite=False) for lot in lots]
    lefts = [orthonormal(left) for left in lefts]
    matrices = list(chain.from_iterable(lot.matrices() for lot in lots))
    rights = [
        total / wire.size for total in _summed(list(map(right_product, matrices, lefts)), wire)
    ]
    factors = iter(zip(lefts, rights, strict=True))
    return [_of_factors(lot, list(islice(factors, len(lot.names)))) for lot in lots]


def _of_factors(lot: Lot, factors: Sequence[tuple[Tensor, Tensor]]) -> Exchanged:
    """Multiply the factors of a lot's matrices, and keep the right ones for the next step."""
    both = zip(lot.unit_means(), lot.units(), strict=True)
    for (mean, unit), shape, (left, right) in zip(both, lot.shapes, factors, strict=True):
        torch.mm(left, right.T, out=mean.view(shape[0], -1))
        unit.sub_(mean)
    rights = [right for _, right in factors]
    lot.factors.update(zip(lot.names, rights, strict=True))
    is_finite = all(bool(right.isfinite().all()) for right in rights)
    return Exchanged(lot.flat, is_finite)


def _summed(tensors: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    wire.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


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
    """What is made of a lot, how lots are then exchanged together, and the bytes that the busiest
    rank receives (all-gather, doubling, a ring) or receives and sends one after another (tree)."""

    begin: Callable[[Lot], Any]
    exchange: Callable[[Sequence[tuple[Lot, Any]], Wire], list[Exchanged]]
    wire_bytes: Callable[[Load], float]


METHODS: dict[MethodName, Method] = {
    "dense": Method(_narrowed, _dense, lambda load: _ring(load, load.width)),
    "bfloat16": Method(
        partial(_narrowed, dtype=torch.bfloat16), _dense, lambda load: _ring(load, 2)
    ),
    "float16": Method(partial(_narrowed, dtype=torch.float16), _dense, lambda load: _ring(load, 2)),
    "top-k": Method(_selected, _top_k, lambda load: (load.ranks - 1) * _pairs(load)),
    "gtop-k": Method(_selected, _g_top_k, partial(_merged, "gtop-k")),
    "gtop-k-tree": Method(_selected, _g_top_k, partial(_merged, "gtop-k-tree")),
    "int8": Method(
        _levels,
        partial(_gathered, restored=_from_levels),
        lambda load: (load.ranks - 1) * (load.elements + load.units * load.width),
    ),
    "1-bit": Method(
        _bits,
        partial(_gathered, restored=_from_bits),
        lambda load: (load.ranks - 1) * (math.ceil(load.elements / 8) + 2 * load.units * load.width),
    ),
    "powersgd": Method(
        _lefts, _power_sgd, lambda load: 2 * (load.ranks - 1) / load.ranks * load.factors * load.width
    ),
}  # fmt: skip


def wire_bytes(method: MethodName, load: Load) -> float:
    """Return the bytes of one exchange on its longest way; see ``Method``."""
    return METHODS[method].wire_bytes(load)
