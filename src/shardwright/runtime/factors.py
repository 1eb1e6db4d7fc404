"""PowerSGD's three pieces of local work, between which factors are summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.core.program import Transform, Value
from shardwright.runtime.compression import left_product, orthonormal, right_product
from shardwright.runtime.packing import bounded, wide_like

SEED = 0  # of right factors to begin with, which must be equal on all ranks


def left_factor(
    transform: Transform, tensors: Sequence[Tensor], results: Sequence[Value]
) -> list[Tensor]:
    """Add gradients to residuals, and multiply that, seen as matrices, by the right factors of the step before."""
    count, bound = len(results) // 2, transform.number("bound", 0)
    factors, owes = tensors[-count:], len(tensors) == 3 * count
    generator = torch.Generator().manual_seed(SEED)
    whole, left = list[Tensor](), list[Tensor]()
    for place, (gradient, factor) in enumerate(zip(tensors, factors, strict=False)):
        wide = bounded(gradient, bound, wide_like(gradient, factor))
        wide = wide + tensors[count + place] if owes else wide
        right = factor if bool(factor.any()) else _drawn(factor, generator)
        whole.append(wide)
        left.append(left_product(_matrix(wide), orthonormal(right)))
    return [*whole, *left]


def _drawn(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def right_factor(
    transform: Transform, tensors: Sequence[Tensor], results: Sequence[Value]
) -> list[Tensor]:
    """Make the summed left factors orthogonal, and multiply gradients by them. What is not finite is handed on."""
    del transform
    count = len(results) // 2
    basis = [_orthonormal(left) for left in tensors[count:]]
    return [
        *basis,
        *[right_product(_matrix(one), left) for one, left in zip(tensors, basis, strict=False)],
    ]


def _orthonormal(left: Tensor) -> Tensor:
    return orthonormal(left) if bool(left.isfinite().all()) else torch.full_like(left, math.nan)


def factor_sum(
    transform: Transform, tensors: Sequence[Tensor], results: Sequence[Value]
) -> list[Tensor]:
    """Multiply factors, and keep what that leaves of gradients; where something is not finite, what was."""
    count, ranks = transform.count("gradients"), transform.count("ranks")
    whole, basis, rights = (tensors[at * count : (at + 1) * count] for at in range(3))
    kept, made = tensors[3 * count :], list[Tensor]()
    residuals, factors = (kept[:-count] or [None] * count), kept[-count:]
    for one, left, right, residual, factor in zip(
        whole, basis, rights, residuals, factors, strict=True
    ):
        total = left @ right.T
        made.append(total.view_as(one))
        if not bool(right.isfinite().all()):
            continue
        if residual is not None:
            torch.sub(one, made[-1], alpha=1.0 / ranks, out=residual)
        factor.copy_(right).div_(ranks)
    return [*made, *kept]


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1)
