"""Rows multiplied by the matrix of their group (tokens by that of the expert they chose), in whatever order they lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.capture.applied import run_function

ALIGNED = 8  # Numbers of bfloat16 that one address of ATen's kernel holds.


def grouped_product(input: Tensor, weight: Tensor, groups: Tensor) -> Tensor:
    """Return ``r n``: each row of ``input``, ``r k``, times ``weight[groups[row]]``, of matrices ``e k n``."""
    if input.is_meta:
        return input @ weight[0] + 0 * weight.sum()
    return run_function(_GroupedProduct, input, weight, groups)  # type: ignore[no-any-return]


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, groups: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight, groups)
        return _multiplied(input, weight, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight, groups = ctx.saved_tensors
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            of_input = _multiplied(gradients[0], weight.mT, groups)
        if ctx.needs_input_grad[1]:
            of_weight = _folded(input, gradients[0], groups, weight)
        return of_input, of_weight, None


def _multiplied(input: Tensor, weight: Tensor, groups: Tensor) -> Tensor:
    """Return rows times matrices, by one kernel where ATen has one for all groups."""
    made = input.new_zeros(len(input), weight.shape[-1])
    if _is_fused(input, weight):
        order, ends = _sorted(groups, len(weight))
        return made.index_copy_(0, order, torch._grouped_mm(input[order], weight, offs=ends))
    for group, rows in _runs(groups, len(weight)):
        made.index_copy_(0, rows, input[rows] @ weight[group])
    return made


def _folded(input: Tensor, gradient: Tensor, groups: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the matrices: of each the product of its rows and of their gradients."""
    if _is_fused(input, weight):
        order, ends = _sorted(groups, len(weight))
        return torch._grouped_mm(input[order].mT, gradient[order], offs=ends)
    made = torch.zeros_like(weight)
    for group, rows in _runs(groups, len(weight)):
        torch.mm(input[rows].mT, gradient[rows], out=made[group])
    return made


def _is_fused(input: Tensor, weight: Tensor) -> bool:
    is_aligned = all(size % ALIGNED == 0 for size in weight.shape[1:])
    return input.dtype == torch.bfloat16 and is_aligned


def _sorted(groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the rows in the order of their groups, and where each of ``count`` groups ends."""
    found, order = groups.sort(stable=True)
    every = torch.arange(count, device=groups.device, dtype=groups.dtype)
    return order, torch.searchsorted(found, every, right=True, out_int32=True)


def _runs(groups: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yield every group that has rows, and these."""
    order, ends = _sorted(groups, count)
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, order[start:end]
        start = end
