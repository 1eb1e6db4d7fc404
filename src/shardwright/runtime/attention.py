"""Attention with a mask, as a GPU's fused kernels take it.

They want its rows dense in memory. A bias that is looked up per pair of positions and permuted, as T5's,
is not, and ``contiguous`` is no operator of a captured graph. Without this, torch writes all scores out in
float32, twice where there is dropout: half of T5-base's memory on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KIND = "aten.scaled_dot_product_attention.default"


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Attend as torch does, with the mask's rows dense."""
    mask = dense_rows(attn_mask)
    return torch.ops.aten.scaled_dot_product_attention.default(
        query, key, value, mask, *args, **kwargs
    )


def dense_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dim lies dense, copied where it does not; what is expanded is copied once."""
    if tensor.stride(-1) in {0, 1}:
        return tensor
    once = tensor[tuple(slice(1) if step == 0 else slice(None) for step in tensor.stride())]
    return once.contiguous().expand(tensor.shape)
