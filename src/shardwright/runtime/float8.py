"""Linear maps whose three products, one forward and two backward, are computed in 8-bit floats.

Each operand is divided by a scale that brings its largest element to the largest number of its
format, and rounded: one scale for the tensor, or one for each row that is summed over. Weights and
activations are rounded to ``e4m3``; gradients too with scales by row, else to ``e5m2``, whose range is
wider. Scales are those of this device's shard, of this microbatch: nothing is remembered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InputError

FINE, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
LEAST_CAPABILITY = (8, 9)
TINY = 1e-12


def scaled_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, by_row: bool = False
) -> Tensor:
    """Return ``F.linear`` by way of 8-bit products."""
    result = _Linear.apply(input, weight, by_row)
    return result if bias is None else result + bias


def scaled_linear_blocks(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    rows: bool = True,
    by_row: bool = False,
) -> tuple[Tensor, ...]:
    """Return ``linear_blocks`` by way of 8-bit products, one for all blocks."""
    dim = 0 if rows else 1
    flat = weight.flatten(dim, dim + 1)
    shift = None if bias is None else bias.flatten()
    full = scaled_linear(input, flat if rows else flat.t(), shift, by_row)
    return full.chunk(weight.shape[dim], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.by_row = by_row
        result = product(input.flatten(0, -2), weight.t(), FINE, by_row)
        return result.view(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight = ctx.saved_tensors
        gradient, by_row = gradients[0].flatten(0, -2), ctx.by_row
        kind = FINE if by_row else WIDE
        to_input = to_weight = None
        if ctx.needs_input_grad[0]:
            to_input = product(gradient, weight, kind, by_row).view(input.shape)
        if ctx.needs_input_grad[1]:
            to_weight = product(gradient.t(), input.flatten(0, -2), kind, by_row)
        return to_input, to_weight, None


def product(left: Tensor, right: Tensor, kind: torch.dtype, by_row: bool) -> Tensor:
    """Return ``left @ right``, the left one rounded to ``kind``, the right one to ``e4m3``."""
    one, scale = rounded(left, kind, 1 if by_row else None)
    other, its_scale = rounded(right, FINE, 0 if by_row else None)
    return torch._scaled_mm(
        one.contiguous(),
        other.t().contiguous().t(),  # columns one after another, as the kernels want it
        scale_a=scale,
        scale_b=its_scale,
        out_dtype=left.dtype,
    )


def rounded(tensor: Tensor, kind: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """Return a matrix in 8 bits and the scales (float32) to multiply it by: one, or, where ``dim`` is
    given, one for each vector along it."""
    largest = torch.linalg.vector_norm(tensor, float("inf"), dim=dim, keepdim=dim is not None)
    scale = (largest.float() / torch.finfo(kind).max).clamp(min=TINY).to(tensor.dtype)
    return (tensor / scale).to(kind), scale.float()


def check_device(device: torch.device) -> None:
    """Refuse a device that cannot multiply 8-bit floats. A CPU can, slowly."""
    if device.type == "cpu":
        return
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip or capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise InputError(
            "fp8 products need a device that multiplies 8-bit floats in OCP's formats (CUDA, "
            f"compute capability 8.9 or higher), but {name} (capability "
            f"{'.'.join(map(str, capability))}) cannot; plan with --precision bfloat16"
        )


# What computes which operator in 8 bits (``core.float8.PRODUCTS``).
SCALED = {
    "aten.linear.default": scaled_linear,
    "shardwright.linear_blocks": scaled_linear_blocks,
}
