"""Small batches come from workers by value.

Torch hands each tensor over in memory that is shared, for which worker and reader talk about a file: that takes both
half a millisecond of a core, on 2 AMD EPYC cores, for two tensors of 2 kB or 64 kB (report of input). Bytes of that size
go through the pipe by which the reader is told anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from shardwright.runtime.stalls.replay import rebuilt
from shardwright.runtime.stalls.source import tensors_of

# What a pipe holds at once; 512 kB take as long in either way.
LARGEST = 64 * 1024


class _Handed:
    """A batch that comes out of a pipe as it is."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (rebuilt(self.batch, cast(Callable[[Tensor], Tensor], _Bytes)),)


class _Bytes:
    """A tensor that travels with its bytes, and comes out as a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        flat = self.tensor.contiguous().view(-1).view(torch.uint8)
        return _tensor, (self.tensor.dtype, self.tensor.shape, bytearray(flat.numpy().data))


def handed(batch: Any) -> Any:
    """Return what a worker is to send so that a batch arrives."""
    tensors = list(tensors_of(batch))
    if not tensors or not all(map(_is_plain, tensors)):
        return batch
    return _Handed(batch) if sum(one.nbytes for one in tensors) <= LARGEST else batch


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is what its bytes on a host say."""
    is_here = tensor.layout is torch.strided and tensor.device.type == "cpu"
    is_more = tensor.requires_grad or tensor.is_conj() or tensor.is_neg()
    return type(tensor) is Tensor and is_here and not is_more


def _same(batch: Any) -> Any:
    return batch


def _tensor(dtype: torch.dtype, shape: torch.Size, data: bytearray) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)
