"""What compresses gradients: functions of tensors that know neither ranks nor steps.

All take flat tensors of a floating dtype and return tensors of their own. Indices are 64 bits inside and
32 on the wire, so that they are exact up to 2^31 elements. Who sends what to whom, and what is owed
to later steps, is said elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright.core.compression import Round

NUMPYS = (torch.float32, torch.float64)  # what NumPy has, too
MOST_ELEMENTS = 2**31 - 1  # of what one index of 32 bits can point into
UNIT_BITS = 32  # of a key behind the number of its unit
# Elements of which the largest are estimated, and how many of them are above the estimate at least.
SAMPLE, LEAST_ABOVE = 4096, 16


@dataclass(frozen=True, slots=True)
class Sparse:
    """Kept elements of a flat tensor: ``indices`` (int64) and ``values``, of equal length.

    No index occurs twice, but for padding: value 0 at the first index there is.
    """

    indices: Tensor
    values: Tensor

    def padded(self, count: int, place: int = 0) -> Sparse:
        """Return the same with zeros of a place behind, ``count`` elements in all."""
        missing = count - len(self.indices)
        if missing <= 0:
            return self
        zeros = self.values.new_zeros(missing)
        return Sparse(
            torch.cat([self.indices, self.indices.new_full((missing,), place)]),
            torch.cat([self.values, zeros]),
        )


def largest(flat: Tensor, count: int) -> Tensor:
    """Return indices of the elements of largest magnitude; NaN counts as larger than all.

    On CPUs few are looked for among those that reach what a sample says: the others are only compared. Else NumPy's
    partition takes a third of what ``torch.topk`` does of many elements, whatever their share.
    """
    sizes = flat.abs()
    if flat.device.type == "cpu" and flat.dtype in NUMPYS:
        numbers = sizes.numpy()
        near = _near(numbers, count)
        if near is None:
            near = np.flatnonzero(~(numbers < np.partition(numbers, -count)[-count]))
        found = torch.from_numpy(near)
        # Of equals, and of NaN, there may be more.
        return found if len(found) == count else found[_largest(sizes[found], count)]
    return _largest(sizes, count)


def _near(numbers: NDArray[Any], count: int) -> NDArray[np.int64] | None:
    """Return the places of at least the largest, NaN among them, and of few others; None where a sample does not tell.

    Of evenly spaced elements twice as many as their share of the largest, and some more, reach what it says: that
    too few of all do is less likely than one in a thousand, and is seen. Where many are equal to it, as zeros are,
    those above it are the largest, or all of them and some of the equal ones: a partition of equals takes many times
    as long as one of others.
    """
    sample = numbers[:: max(1, len(numbers) // SAMPLE)]
    reach = 2 * count * len(sample) // len(numbers) + LEAST_ABOVE
    least = np.partition(sample, -min(reach, len(sample)))[-min(reach, len(sample))]
    near, most = np.flatnonzero(~(numbers < least)), max(count, len(numbers) // 2)
    if len(near) > most:
        above = np.flatnonzero(~(numbers <= least))
        missing = max(0, count - len(above))
        near = np.concatenate([above, np.flatnonzero(numbers == least)[:missing]])
    return near if count <= len(near) <= most else None


def _largest(sizes: Tensor, count: int) -> Tensor:
    return torch.topk(sizes, count, sorted=False).indices


def all_finite(tensor: Tensor) -> Tensor:
    """Return whether all elements are finite: asking the least and the largest takes a tenth of asking each."""
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


def above(flat: Tensor, threshold: float, count: int) -> Tensor:
    """Return indices of elements of at least a magnitude: the largest ``count`` of them, or fewer."""
    found = torch.nonzero(flat.abs() >= threshold).view(-1)
    if len(found) > count:
        found = found[largest(flat[found], count)]
    return found


def sampled_threshold(flat: Tensor, count: int, sample: int, generator: torch.Generator) -> float:
    """Estimate the magnitude which ``count`` elements reach, from a sample (Deep Gradient Compression).

    Elements are drawn with replacement. The expected number above is ``count``, give or take.
    """
    drawn = torch.randint(len(flat), (sample,), generator=generator).to(flat.device)
    kept = max(1, round(sample * count / len(flat)))
    return float(torch.topk(flat[drawn].abs(), min(kept, sample)).values[-1])


def merged(one: Sparse, other: Sparse, counts: Sequence[int]) -> tuple[Sparse, list[Sparse]]:
    """Add sparse tensors of several units, so many elements of each in either, unit behind unit; return as many of
    largest magnitude of each, and the rest of each.

    The operator of gTop-k (Shi et al., ICDCS 2019). It is not associative. Equal magnitudes keep the
    lower index, so that whoever merges the same two in the same order has the same bits.
    """
    if one.values.device.type == "cpu" and one.values.dtype in NUMPYS:
        return _merged_in_order(one, other, counts)
    return _merged_by_sorting(one, other, counts)


def _merged_in_order(
    one: Sparse, other: Sparse, counts: Sequence[int]
) -> tuple[Sparse, list[Sparse]]:
    from shardwright.runtime.merges import merge_units  # compiles, which others need not wait for

    kept = Sparse(torch.zeros_like(one.indices), torch.zeros_like(one.values))
    rest = Sparse(torch.empty_like(one.indices), torch.empty_like(one.values))
    first, second, most_of, rest_of = (
        (each.indices.numpy(), each.values.numpy()) for each in (one, other, kept, rest)
    )
    sizes = np.array(counts, np.int64)
    left = merge_units(first, second, sizes, most_of, rest_of).tolist()
    most = sum(left)
    return kept, split(Sparse(rest.indices[:most], rest.values[:most]), left)


def _merged_by_sorting(
    one: Sparse, other: Sparse, counts: Sequence[int]
) -> tuple[Sparse, list[Sparse]]:
    begins, of_one = _begins(one, counts), len(one.indices)
    keys = torch.cat([one.indices | begins, other.indices | begins])
    keys, order = torch.sort(keys, stable=True)
    is_first = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=is_first[1:])
    # What torch.unique says, at a fifth of its time.
    place = torch.empty_like(order).scatter_(0, order, is_first.cumsum(0) - 1)
    keys = keys[is_first]
    values = one.values.new_zeros(len(keys))
    values.index_add_(0, place[:of_one], one.values)
    values.index_add_(0, place[of_one:], other.values)
    # By unit, in each by magnitude, of equal ones by index.
    order = torch.argsort(values.abs(), descending=True, stable=True)
    order = order[torch.argsort(keys[order] >> UNIT_BITS, stable=True)]
    keys, values = keys[order], values[order]
    unit, indices = keys >> UNIT_BITS, keys & (1 << UNIT_BITS) - 1
    found, most = torch.bincount(unit, minlength=len(counts)), torch.tensor(counts).to(unit)
    nth = torch.arange(len(keys), device=keys.device) - (found.cumsum(0) - found)[unit]
    is_kept = nth < most[unit]
    at = (nth + (most.cumsum(0) - most)[unit])[is_kept]
    kept = Sparse(torch.zeros_like(one.indices), torch.zeros_like(one.values))
    kept.indices[at], kept.values[at] = indices[is_kept], values[is_kept]
    left = (found - most).clamp(min=0).tolist()
    rest = zip(indices[~is_kept].split(left), values[~is_kept].split(left), strict=True)
    return kept, [Sparse(*each) for each in rest]


def _begins(sparse: Sparse, counts: Sequence[int]) -> Tensor:
    """Return of each element of units of so many what makes its index one that no other unit has."""
    both = (torch.tensor(one) for one in (list(range(len(counts))), counts))
    units = torch.repeat_interleave(*both, output_size=len(sparse.indices))
    return (units << UNIT_BITS).to(sparse.indices.device)


def is_among(mine: Sparse, others: Sparse, counts: Sequence[int]) -> Tensor:
    """Return which elements of a selection another one of equal units has, too."""
    if mine.indices.device.type == "cpu":
        from shardwright.runtime.merges import places_among  # compiles, as above

        sides = mine.indices.numpy(), others.indices.numpy()
        return torch.from_numpy(places_among(*sides, np.array(counts, np.int64)))
    return _is_among_sorted(mine, others, counts)


def _is_among_sorted(mine: Sparse, others: Sparse, counts: Sequence[int]) -> Tensor:
    begins = _begins(mine, counts)
    keys, theirs = mine.indices | begins, (others.indices | begins).sort().values
    at = torch.searchsorted(theirs, keys).clamp_(max=max(0, len(theirs) - 1))
    return theirs[at] == keys


@dataclass(frozen=True, slots=True)
class Merged:
    """What a place has of a gradient after a round: what it ``held`` then, what of that it answers for
    (``mine``), and what was dropped that it owes (``rest``)."""

    held: Sparse
    mine: Sparse
    rest: Sparse


def after_round(
    turn: Round, place: int, held: Sequence[Sparse], came: Sequence[Sparse], mine: Sequence[Sparse]
) -> list[Merged]:
    """Merge what ``came`` to a place in a round with what it held, ``mine`` of which is its own: gradient by gradient.

    What is dropped goes back to who put it in, so that each keeps its own terms: the sum of all, released
    by one rank at once, is as many times as large a step.
    """
    counts = [len(one.indices) for one in held]
    is_lower = place < turn.sender_to(place)
    lower, higher = map(joined, (held, came) if is_lower else (came, held))
    together, rests = merged(lower, higher, counts)
    kept = split(together, counts)
    if turn.receiver_of(place) < 0:
        return [Merged(one, one, rest) for one, rest in zip(kept, rests, strict=True)]
    own = joined(mine)
    is_left = is_among(own, together, counts)
    left, refused = (
        split(Sparse(own.indices, own.values.masked_fill(away, 0)), counts)
        for away in (~is_left, is_left)
    )
    ends = zip(kept, left, refused, strict=True)
    return [Merged(held, mine, rest) for held, mine, rest in ends]


def joined(units: Sequence[Sparse]) -> Sparse:
    """Return selections one behind the other."""
    return Sparse(
        torch.cat([unit.indices for unit in units]), torch.cat([unit.values for unit in units])
    )


def split(sparse: Sparse, counts: Sequence[int]) -> list[Sparse]:
    """Return what ``joined`` joined, of so many elements each."""
    parts = zip(sparse.indices.split(list(counts)), sparse.values.split(list(counts)), strict=True)
    return [Sparse(*part) for part in parts]


def packed(sparse: Sparse) -> Tensor:
    """Return the values' bits and the indices as one int32 tensor."""
    return torch.cat([sparse.values.view(torch.int32), sparse.indices.to(torch.int32)])


def unpacked(message: Tensor, dtype: torch.dtype) -> Sparse:
    """Return what ``packed`` packed; ``dtype`` is that of the values, of 4 or 8 bytes."""
    words = dtype.itemsize // 4
    count = len(message) // (words + 1)
    bits, indices = message[: words * count], message[words * count :]
    return Sparse(indices.to(torch.int64), bits.clone().view(dtype))


def quantised(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Round to 255 levels of the largest magnitude: int8 codes, and the size of a level (one element)."""
    scale = (flat.abs().amax() / 127).view(1)
    codes = flat / torch.where(scale == 0, torch.ones_like(scale), scale)
    return codes.nan_to_num_(0).round_().to(torch.int8), scale


def signs(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Keep one bit each: whether an element is below 0, eight to a byte, and the means of those that
    are not and of those that are (two elements; Seide et al., Interspeech 2014)."""
    below = flat < 0
    counts = torch.stack([(~below).sum(), below.sum()]).clamp(min=1)
    sums = torch.stack([flat.masked_fill(below, 0).sum(), flat.masked_fill(~below, 0).sum()])
    padded = torch.nn.functional.pad(below.to(torch.uint8), (0, -len(flat) % 8)).view(-1, 8)
    return (padded << _places(flat)).sum(1, dtype=torch.uint8), sums / counts


def unsigned(bits: Tensor, means: Tensor, count: int) -> Tensor:
    """Return what ``signs`` kept of ``count`` elements."""
    below = ((bits.view(-1, 1) >> _places(bits)) & 1).view(-1)[:count]
    return means[below.long()]


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of a matrix's columns; one more at will where they are dependent."""
    wide = matrix.float() if matrix.dtype.itemsize < 4 else matrix
    return torch.linalg.qr(wide).Q.to(matrix.dtype)


def left_product(matrix: Tensor, right: Tensor) -> Tensor:
    """Return a matrix times a few columns, which lie one behind the other (on CPUs some five times as fast)."""
    return matrix @ right.T.contiguous().T


def right_product(matrix: Tensor, left: Tensor) -> Tensor:
    """Return a matrix's transpose times a few columns (on CPUs some twenty times as fast as written so)."""
    return (left.T @ matrix).T
