"""How tensors lie in memory: what kernels make in an order that meta tensors do not know, and which operands they copy first
since these lie otherwise than they want them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from shardwright.core.vocabulary import LOSS

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
CONVOLUTIONS = frozenset({
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv_transpose1d.default,
    aten.conv_transpose2d.input, aten.conv_transpose3d.input,
})  # fmt: skip


def memory_of(tensor: Tensor) -> int:
    """Return a number of the memory that a tensor looks at."""
    return tensor.untyped_storage()._cdata


def order_of_images(images: Tensor, weights: Tensor) -> torch.memory_format:
    """Return how a convolution wants what it reads to lie in memory: channels last where either does."""
    orders = (suggest_memory_format(images), suggest_memory_format(weights))
    return next((one for one in orders if one != torch.contiguous_format), orders[0])


def laid_out(
    target: Any, args: Sequence[Tensor], kwargs: Mapping[str, Any], result: Tensor
) -> Tensor:
    """Return what an operator made of meta tensors as its kernels lay it out."""
    lays_out = _LAYS_OUT.get(target)
    return lays_out(args, kwargs, result) if lays_out else result


def _as_queries(args: Sequence[Tensor], kwargs: Mapping[str, Any], result: Tensor) -> Tensor:
    """Return what attention makes as fused kernels lay it out, in the order of its queries, which meta tensors do not
    meet: theirs is the composed one, which runs where there is dropout, too."""
    query, mask = args[0], next(iter(args[3:]), kwargs.get("attn_mask"))
    drops = kwargs.get("dropout_p", next(iter(args[4:]), 0.0))
    trains = mask is not None and mask.requires_grad
    if drops or trains or query.dim() != 4 or query.shape != result.shape:
        return result
    return torch.empty_like(query).requires_grad_(result.requires_grad)


def _as_images(args: Sequence[Tensor], _: Mapping[str, Any], result: Tensor) -> Tensor:
    """Return what a convolution makes; meta tensors have channels first always."""
    order, grad = order_of_images(args[0], args[1]), result.requires_grad
    return torch.empty_like(result, memory_format=order).requires_grad_(grad)


def _in_order(args: Sequence[Tensor], _: Mapping[str, Any], result: Tensor) -> Tensor:
    """Return what batch norm makes, in the order of its dims whatever that of what it reads; meta tensors keep that."""
    order, grad = suggest_memory_format(args[0]), result.requires_grad
    return torch.empty_like(result, memory_format=order).requires_grad_(grad)


_LAYS_OUT: dict[Any, Callable[[Sequence[Tensor], Mapping[str, Any], Tensor], Tensor]] = {
    ATTENTION: _as_queries, **dict.fromkeys(CONVOLUTIONS, _as_images),
    aten.batch_norm.default: _in_order,
}  # fmt: skip


Shapes = Sequence[tuple[int, ...]]


def copied_operands(kind: str, operands: Sequence[Tensor], made: Shapes) -> tuple[int, ...]:
    """Return the positions of the operands that an operator copies before it reads them."""
    copies = _COPIES.get(kind)
    return copies(operands, made) if copies else ()


def _by_shape(operands: Sequence[Tensor], made: Shapes) -> tuple[int, ...]:
    return (0,) * (not _is_view(operands[0], made[0]))


def _by_rows(operands: Sequence[Tensor], _made: Shapes) -> tuple[int, ...]:
    seen = operands[0]
    return (0,) * (not _is_view(seen, (-1, seen.shape[-1])))


def _by_image(operands: Sequence[Tensor], _made: Shapes) -> tuple[int, ...]:
    order = order_of_images(operands[0], operands[1])
    return (0,) * (not operands[0].is_contiguous(memory_format=order))


def _by_matrices(operands: Sequence[Tensor], _made: Shapes) -> tuple[int, ...]:
    """Of stacks of as many matrices those are copied that are no one stack; of several times one matrix, what is no
    rows."""
    left, right = operands[:2]
    if right.dim() == 2 and left.dim() > 2:
        return _by_rows(operands, _made) if left.requires_grad else ()
    if left.dim() < 3 or left.shape[:-2] != right.shape[:-2]:
        return ()
    stack = math.prod(left.shape[:-2])
    pairs = enumerate((left, right))
    return tuple(place for place, one in pairs if not _is_view(one, (stack, *one.shape[-2:])))


def _is_view(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Whether a tensor can be seen in a shape as it lies."""
    try:
        torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(tuple(shape))
    except RuntimeError:
        return False
    return True


_COPIES: dict[str, Callable[[Sequence[Tensor], Shapes], tuple[int, ...]]] = {
    **dict.fromkeys(("aten.reshape.default", "aten.reshape_as.default", "aten.flatten.using_ints",
                     "aten.ravel.default"), _by_shape),
    **dict.fromkeys(map(str, CONVOLUTIONS), _by_image),
    **dict.fromkeys(("aten.linear.default", "shardwright.linear_blocks", LOSS), _by_rows),
    "aten.matmul.default": _by_matrices,
}  # fmt: skip
