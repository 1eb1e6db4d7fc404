"""Kernels that must know where their shard begins in the whole tensor.

Each has the arguments of the operator it stands for, and ``offset``: where this device's shard of
the first tensor begins along the dim that is split.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.core.graph import Operator
from shardwright.errors import RunError
from shardwright.runtime.capture.vocabulary import vocabulary_cross_entropy_sum


def embed_rows(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    offset: int,
) -> Tensor:
    """Look up the rows of a vocabulary shard; rows of other shards come out zero."""
    local = indices - offset
    elsewhere = (local < 0) | (local >= weight.shape[0])
    local = local.masked_fill(elsewhere, 0)
    padding = padding_idx - offset if padding_idx >= 0 else -1
    padding = padding if 0 <= padding < weight.shape[0] else -1
    rows = torch.embedding(weight, local, padding, scale_grad_by_freq, sparse)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


def attend_from(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    offset: int,
) -> Tensor:
    """Causal attention of queries that stand at ``offset`` and after; later keys are left out."""
    if attn_mask is not None or not is_causal:
        raise RunError("attention with an offset is causal and has no other mask")
    count = query.shape[-2]
    stop = min(offset + count, key.shape[-2])
    mask = None
    if offset > 0:
        rows = torch.arange(offset, offset + count, device=query.device).unsqueeze(-1)
        mask = rows >= torch.arange(stop, device=query.device)
    return F.scaled_dot_product_attention(
        query,
        key[..., :stop, :],
        value[..., :stop, :],
        mask,
        dropout_p,
        mask is None,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def with_offset(operator: Operator) -> Callable[..., Tensor]:
    """Return the kernel that stands for an operator whose rule needs an offset."""
    kernels: dict[str, Callable[..., Tensor]] = {
        "embedding": embed_rows,
        "scaled_dot_product_attention": attend_from,
        "vocabulary_cross_entropy_sum": vocabulary_cross_entropy_sum,
    }
    kind = operator.kind.split(".")[1]
    if kind not in kernels:
        raise RunError(
            f"operator {operator.name!r} ({operator.kind}) needs the offset of its shard, which "
            f"the runtime knows for {', '.join(kernels)} only; replicate that dim"
        )
    return kernels[kind]
