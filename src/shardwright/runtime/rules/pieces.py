"""Run an operator in the pieces of a split, put the pieces together, and compare with the whole.

Each axis of imagined devices gives every tensor a placement of its value and one of its gradient,
as in ``core.layout``. A sharded tensor is cut and joined, a partial one is a sum of terms, a
replicated one is what every piece has. Axes nest: a piece of the first is split by the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.core.halo import Halo
from shardwright.core.layout import PARTIAL
from shardwright.runtime.halos import pad
from shardwright.runtime.rules.cases import REFUSALS, Case, Outside

Results = list[Tensor]
Gradients = list[Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One way of cutting: (value, gradient) placements of every input and output.

    ``once``: inputs that only the first piece takes, others take zeros. ``scale``: each piece's
    result is divided by the number of pieces. ``offset_dim``: the dim of the first tensor whose
    offset the kernel is told, or -1. ``halo``: rows of the neighbours that pieces of the first
    tensor come with.
    """

    pieces: int
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    once: tuple[int, ...] = ()
    scale: bool = False
    offset_dim: int = -1
    halo: Halo | None = None


Split = Sequence[Axis]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a piece stands: its tensors, the gradients given for its results, and how to run it."""

    inputs: Sequence[Tensor]
    seeds: Sequence[Tensor]
    without: frozenset[int] = frozenset()
    scale: int = 1
    offset: int | None = None
    outside: Outside = ()


def difference(case: Case, split: Split) -> tuple[float, str]:
    """Return the largest difference between pieces and whole, and what differs.

    Relative to the tensor's largest element (or 1, if that is more), in units of a tolerance of
    1e-10 for float64 and 1e-5 for float32; infinite where shapes, types or exact values differ or
    the pieces cannot be run. More than 1 means: the split is wrong. Raises Refused where torch does
    not take the whole call.
    """
    wanted = case.results
    seeds = _seeds(wanted)
    leaves = _leaves(case, case.tensors)
    wanted_gradients = _gradients(leaves, case.run(leaves), seeds)
    try:
        results, gradients = _run(case, split, _Piece(case.tensors, seeds))
    except REFUSALS as error:
        return math.inf, f"a piece cannot be run: {str(error).partition(chr(10))[0]}"
    worst, where = 0.0, ""
    pairs: list[tuple[str, Tensor | None, Tensor | None]] = [
        *((f"result {at}", *pair) for at, pair in enumerate(_zip(results, wanted))),
        *(
            (f"gradient of {name}", *pair)
            for name, *pair in _zip(case.names, gradients, wanted_gradients)
        ),
    ]
    for name, one, other in pairs:
        gap = _gap(one, other)
        if not gap <= worst:
            worst, where = gap, f"{name} differs from the whole"
    return worst, where


def _run(case: Case, split: Split, piece: _Piece) -> tuple[Results, Gradients]:
    if not split:
        return _run_piece(case, piece)
    axis, *rest = split
    parts = [_run(case, rest, _cut(axis, piece, number)) for number in range(axis.pieces)]
    results = [
        _join(column, value)
        for column, (value, _) in _zip(zip(*(part[0] for part in parts), strict=True), axis.outputs)
    ]
    columns = list(zip(*(part[1] for part in parts), strict=True))
    gradients = [
        None if column[0] is None else _join(column, gradient)
        for column, (_, gradient) in _zip(columns, axis.inputs)
    ]
    if axis.halo is not None and columns[0][0] is not None:
        gradients[0] = _join_halos(columns[0], axis.halo)
    return results, gradients


def _run_piece(case: Case, piece: _Piece) -> tuple[Results, Gradients]:
    leaves = _leaves(case, piece.inputs)
    fed = [leaf * 0 if at in piece.without else leaf for at, leaf in enumerate(leaves)]
    shape = tuple(piece.seeds[0].shape) if piece.seeds else None
    results = case.run(fed, shape, piece.offset, piece.outside)
    if piece.scale > 1:
        results = [result / piece.scale for result in results]
    return [result.detach() for result in results], _gradients(leaves, results, piece.seeds)


def _cut(axis: Axis, piece: _Piece, number: int) -> _Piece:
    inputs = [_slice(t, value, axis, number) for t, (value, _) in _zip(piece.inputs, axis.inputs)]
    seeds = [
        _slice(seed, gradient, axis, number)
        for seed, (_, gradient) in _zip(piece.seeds, axis.outputs)
    ]
    offset, outside = piece.offset, piece.outside
    if axis.halo is not None:
        inputs[0] = _with_halo(piece.inputs[0], axis.halo, axis.pieces, number)
        is_last = number == axis.pieces - 1
        before, after = axis.halo.before * (number == 0), axis.halo.after * is_last
        outside = (*outside, (axis.halo.dim, before, after))
    if axis.offset_dim >= 0:
        offset = number * inputs[0].shape[axis.offset_dim]
    return _Piece(
        inputs=inputs,
        seeds=seeds,
        without=piece.without | frozenset(axis.once if number else ()),
        scale=piece.scale * (axis.pieces if axis.scale else 1),
        offset=offset,
        outside=outside,
    )


def _with_halo(tensor: Tensor, halo: Halo, pieces: int, number: int) -> Tensor:
    """Cut a piece with its halo out of the whole tensor."""
    size = tensor.shape[halo.dim] // pieces
    padded = pad(tensor, halo.dim, halo.before, halo.after, halo.fill)
    return padded.narrow(halo.dim, number * size, halo.size + size).contiguous()


def _join_halos(parts: Sequence[Tensor], halo: Halo) -> Tensor:
    """Add the gradients of all pieces where they lie; what is beyond the whole is nobody's."""
    size = parts[0].shape[halo.dim] - halo.size
    shape = list(parts[0].shape)
    shape[halo.dim] = size * len(parts) + halo.size
    total = parts[0].new_zeros(shape)
    for number, part in enumerate(parts):
        total.narrow(halo.dim, number * size, size + halo.size).add_(part)
    return total.narrow(halo.dim, halo.before, size * len(parts))


def _slice(tensor: Tensor, placement: int, axis: Axis, number: int) -> Tensor:
    if placement >= 0:
        return tensor.chunk(axis.pieces, placement)[number].contiguous()
    if placement != PARTIAL:
        return tensor
    generator = torch.Generator().manual_seed(9)
    terms = [
        torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        for _ in range(axis.pieces - 1)
    ]
    return terms[number] if number < len(terms) else tensor - sum(terms)


def _join(parts: Sequence[Tensor], placement: int) -> Tensor:
    if placement >= 0:
        return torch.cat(list(parts), placement)
    if placement != PARTIAL:
        return parts[-1]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _gap(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        return math.inf if any(map(_has_values, (one, other))) else 0.0
    if one.dtype != other.dtype or one.shape != other.shape:
        return math.inf
    if not one.numel() or torch.equal(one, other):
        return 0.0
    return _apart(one, other) if one.is_floating_point() or one.is_complex() else math.inf


def _has_values(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(torch.any(tensor))


def _apart(one: Tensor, other: Tensor) -> float:
    """Return the largest difference between numbers, in units of the tolerance."""
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().masked_fill(same, 0.0)
    finite = other.abs()[other.isfinite()]
    largest = max(1.0, float(finite.max())) if finite.numel() else 1.0
    tolerance = 1e-5 if one.dtype in (torch.float32, torch.complex64) else 1e-10
    gap = float(apart.max()) / largest / tolerance
    return math.inf if math.isnan(gap) else gap


def _seeds(results: Iterable[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)
        for result in results
    ]


def _leaves(case: Case, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy tensors so that gradients are taken."""
    return [
        tensor.detach().clone().requires_grad_(is_leaf)
        for tensor, is_leaf in _zip(tensors, case.differentiable)
    ]


def _gradients(
    inputs: Sequence[Tensor], results: Sequence[Tensor], seeds: Sequence[Tensor]
) -> Gradients:
    pairs = [(r, s) for r, s in _zip(results, seeds) if r.requires_grad and r.is_floating_point()]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    ends, seeds = _zip(*pairs)
    found = iter(torch.autograd.grad(ends, wanted, seeds, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


def _zip(*columns: Any) -> Any:
    return zip(*columns, strict=True)
