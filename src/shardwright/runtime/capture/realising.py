"""Copies of models and batches with values, so that they can be run once where they are captured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.capture.prepare import real_twin
from shardwright.runtime.capture.record import Unsupported
from shardwright.runtime.capture.source import maker_of

# A real run of a model on the meta device allocates it: not beyond this many elements.
LARGEST_REAL_MODEL = 500_000_000


def real_copy(module: nn.Module) -> nn.Module:
    """Return a copy on the CPU with storage: the module's own values; for one on the meta device
    those it would have been built with, or small noise where it is not known how it was built."""
    if sum(parameter.numel() for parameter in module.parameters()) > LARGEST_REAL_MODEL:
        raise Unsupported("the model is too large to be run once on this machine")
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return real_twin(module).cpu()
    make = maker_of(module)
    if make is not None:
        with torch.random.fork_rng():
            return make()
    twin = real_twin(module).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.normal_(0, 0.02) if tensor.is_floating_point() else tensor.zero_()
    return twin


def real_tensor(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a batch tensor's own copy: a forward may ask it for a gradient."""
    if not isinstance(value, Tensor):
        return value
    chosen = dtype if dtype is not None and value.is_floating_point() else value.dtype
    if value.is_meta:
        return torch.zeros(value.shape, dtype=chosen)
    copied = value.detach().to(device="cpu", dtype=chosen, copy=True)
    return copied.requires_grad_(value.requires_grad)
