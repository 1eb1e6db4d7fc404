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
    kernel, rank = weight.shape[2:], len(stride)

    def of_data() -> Tensor:
        rest = [0] * rank
        if not transposed:  # what the last stride has not reached
            rest = [
                size - ((out - 1) * step - 2 * pad + hole * (width - 1) + 1)
                for size, out, step, pad, hole, width in zip(
                    data.shape[2:],
                    gradient.shape[2:],
                    stride,
                    padding,
                    dilation,
                    kernel,
                    strict=True,
                )
            ]
        how: Any = (stride, padding, dilation, not transposed, rest, groups)
        return aten.convolution.default(gradient, weight, None, *how)

    def of_weight() -> Tensor:
        # Samples are channels here, windows lie as far apart as the kernel's holes.
        wide, narrow = (gradient, data) if transposed else (data, gradient)
        wide, narrow = (one.unflatten(1, (groups, -1)) for one in (wide, narrow))
        wide = wide.transpose(0, 2).flatten(1, 2)
        narrow = narrow.movedim(0, 2).flatten(0, 1)
        how: Any = (dilation, padding, stride, False, [0] * rank, groups)
        found = aten.convolution.default(wide, narrow, None, *how).transpose(0, 1)
        for dim, width in enumerate(kernel, 2):
            found = found.narrow(dim, 0, width)
        return found

    def of_bias() -> Tensor:
        return gradient.sum([0, *range(2, rank + 2)])

    made = (of_data, of_weight, of_bias)
    return tuple(make() if wants else None for make, wants in zip(made, wanted, strict=True))
