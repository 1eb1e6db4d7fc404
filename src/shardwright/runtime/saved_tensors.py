"""Inputs that a segment's graph does not hold: they are dropped after forward and made again.

Autograd would keep an input alive in two ways: as the leaf that its gradient belongs to, and among
the tensors it saves. So another leaf, without memory of its own, stands in for the first, and a saved
tensor that lies in such an input is noted by its place in it and looked up when backward wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def stand_in(tensor: Tensor, leaf: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (a leaf of the tensor's shape without its memory, the tensor as made from the leaf), where gradients are
    recorded; the leaf is a new one, or the one that stood in for this tensor before.

    The view keeps the memory that its leaf then exchanges for none: no Python runs in backward.
    """
    if leaf is None:
        leaf = tensor.detach().requires_grad_()
    else:
        leaf.data = tensor.detach()
    made = leaf.view_as(leaf)
    leaf.data = _hollow(tensor.shape, tensor.dtype, tensor.device)
    return leaf, made


@cache
def _hollow(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of one element's memory; nobody reads or writes it."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A strided part of what will lie in a slot; ``whole`` are the strides of all of it."""

    slot: int
    whole: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def look_up_saved(data: list[Tensor | None], slots: Sequence[int]) -> AbstractContextManager[None]:
    """Within it, autograd saves no tensor that lies in one of the slots, but where it lies.

    Backward finds it in what the slot holds by then. Only dense inputs are so treated: of others a
    part cannot be told from its neighbours, and is saved as usual.
    """
    if not slots:
        return nullcontext()
    ranges = [(slot, tensor) for slot in slots if (tensor := data[slot]) is not None]
    known = [
        (
            slot,
            tensor.data_ptr(),
            tensor.numel() * tensor.element_size(),
            tensor.dtype,
            tensor.stride(),
        )
        for slot, tensor in ranges
        if _is_dense(tensor)
    ]

    def pack(saved: Tensor) -> Tensor | _Piece:
        place = saved.data_ptr()
        for slot, start, length, dtype, whole in known:
            if start <= place < start + length and dtype is saved.dtype:
                offset = (place - start) // saved.element_size()
                return _Piece(slot, whole, tuple(saved.shape), saved.stride(), offset)
        return saved

    def unpack(held: Tensor | _Piece) -> Tensor:
        if isinstance(held, Tensor):
            return held
        tensor = data[held.slot]
        if tensor is None:
            raise RuntimeError("an input was to be made again before this backward, but was not")
        if tensor.stride() != held.whole:
            copy = tensor.new_empty_strided(tensor.shape, held.whole)
            tensor = copy.copy_(tensor)
        return tensor.as_strided(held.size, held.stride, tensor.storage_offset() + held.offset)

    return saved_tensors_hooks(pack, unpack)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill its stretch of memory, so that a part of it is its own."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * step for size, step in pairs) + 1 == tensor.numel()
