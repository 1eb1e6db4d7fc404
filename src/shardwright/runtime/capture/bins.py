"""``torch.bincount`` with as many bins as ``minlength`` says, the degrees of nodes or the loads of experts.

Torch makes more bins where a value is larger, so that no trace knows how many there are. Here such a
value is an error of the step instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


@contextlib.contextmanager
def traceable_bins() -> Iterator[None]:
    """Let ``bincount`` of tensors without values add to ``minlength`` bins."""
    plain, method = torch.bincount, torch._C.TensorBase.bincount

    def counted(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        is_traced = isinstance(input, (FakeTensor, FunctionalTensor))
        if not is_traced or minlength == 0:
            return method(input, weights, minlength)
        if weights is None:
            weights = torch.ones_like(input, dtype=torch.int64)
        elif weights.dtype != torch.float32:
            weights = weights.double()
        return weights.new_zeros(minlength).scatter_add(0, input.long(), weights)

    torch.bincount = counted  # type: ignore[assignment]
    torch.Tensor.bincount = counted  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.bincount = plain
        del torch.Tensor.bincount
