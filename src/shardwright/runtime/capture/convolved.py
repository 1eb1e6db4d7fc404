"""The backward of a convolution, as convolutions: gradients of it are taken inside forward, and split as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwright.runtime.capture.record import aten


def convolution_backward(
    gradient: Tensor,
    data: Tensor,
    weight: Tensor,
    bias: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of data, weight and bias that are ``wanted``: the arguments of ATen's operator."""
    del bias, output_padding
    windows = (stride, padding, dilation)
    found: list[Tensor | None] = [None, None, None]
    if wanted[0]:
        rest = [0] * len(stride) if transposed else _not_reached(gradient, data, weight, *windows)
        how: Any = (*windows, not transposed, rest, groups)
        found[0] = aten.convolution.default(gradient, weight, None, *how)
    if wanted[1]:
        wide, narrow = (gradient, data) if transposed else (data, gradient)
        found[1] = _of_weight(wide, narrow, weight.shape[2:], *windows, groups)
    if wanted[2]:
        found[2] = gradient.sum([0, *range(2, gradient.dim())])
    return tuple(found)


def _not_reached(
    gradient: Tensor,
    data: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return how many places of each dim lie behind the last window."""
    sizes = zip(data.shape[2:], gradient.shape[2:], weight.shape[2:], strict=True)
    windows = zip(stride, padding, dilation, strict=True)
    return [
        size - ((count - 1) * step - 2 * pad + hole * (width - 1) + 1)
        for (size, count, width), (step, pad, hole) in zip(sizes, windows, strict=True)
    ]


def _of_weight(
    wide: Tensor,
    narrow: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return the gradient of a kernel that made ``narrow`` of ``wide``: samples are channels here, and windows
    lie as far apart as the kernel's holes."""
    wide, narrow = (one.unflatten(1, (groups, -1)) for one in (wide, narrow))
    wide = wide.transpose(0, 2).flatten(1, 2)
    narrow = narrow.movedim(0, 2).flatten(0, 1)
    how: Any = (dilation, padding, stride, False, [0] * len(stride), groups)
    found = aten.convolution.default(wide, narrow, None, *how).transpose(0, 1)
    for dim, width in enumerate(kernel, 2):
        found = found.narrow(dim, 0, width)
    return found
