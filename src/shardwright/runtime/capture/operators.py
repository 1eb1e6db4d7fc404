"""Operators of our own: what ATen computes in one piece but a plan must be able to take apart.

A mean over the batch cannot be summed over shards; a sum and a count can. These are plain
differentiable functions of local tensors: what shards mean is said by the planner's rules. An
operator that writes a buffer returns nothing and is never dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.capture.applied import run_function
from shardwright.runtime.capture.ctc import ctc_losses
from shardwright.runtime.capture.grouped import grouped_product
from shardwright.runtime.capture.packed import packed_recurrence
from shardwright.runtime.capture.vocabulary import (
    vocabulary_cross_entropy_sum,
    vocabulary_logsumexp,
)

aten = torch.ops.aten


def linear_blocks(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, rows: bool = True
) -> tuple[Tensor, ...]:
    """Return ``blocks`` linear maps of one input, computed as one product.

    The weight is ``blocks n k``, as that of ``F.linear`` with its rows in blocks, or without ``rows``
    ``k blocks n``; the bias is ``blocks n``, each result ``.. n``.
    """
    dim = 0 if rows else 1
    flat = weight.flatten(dim, dim + 1)
    blocks = weight.shape[dim]
    shift = None if bias is None else bias.flatten()
    if rows or shift is None:
        full = F.linear(input, flat if rows else flat.t(), shift)
    else:  # the very product that was written, to the last bit
        full = torch.addmm(shift, input.flatten(0, -2), flat)
        full = full.view(*input.shape[:-1], flat.shape[1])
    return full.chunk(blocks, -1)


def cross_entropy_sum(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy summed over all targets that are not ignored.

    Divided by ``count_targets`` it equals ``F.cross_entropy`` with reduction mean, also with class
    weights, label smoothing and targets that are probabilities.
    """
    return F.cross_entropy(
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def token_cross_entropy_sum(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return ``cross_entropy_sum`` of scores ``.. c`` and classes ``..``, flattened here.

    Flattened outside, all but the first dim of the tokens could not be split.
    """
    return cross_entropy_sum(
        input.flatten(0, -2), target.flatten(), weight, ignore_index, label_smoothing
    )


def embedding_bags(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    mode: int = 0,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Return the folds of bags of any length: ``indices`` in one row, of which a bag begins at each
    of ``offsets``."""
    given = (per_sample_weights, include_last_offset, padding_idx)
    return torch.embedding_bag(
        weight, indices, offsets, False, mode, False, *given
    )[0]  # fmt: skip


def nll_sum(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """Return the negative log likelihood summed over all targets that are not ignored."""
    # Of pictures whose memory lies otherwise, as pieces arrive or channels last, torch's kernel has no gradient.
    input = input.contiguous()
    return F.nll_loss(input, target, weight, ignore_index=ignore_index, reduction="sum")


def count_targets(
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return how many targets count: a scalar of ``dtype``, with class weights their sum.

    The count is exact in float32 up to 2**24 targets. No gradient flows through it.
    """
    counted = target != ignore_index
    if weight is None:
        return counted.sum().to(dtype)
    chosen = weight.detach()[torch.where(counted, target, 0)]
    return torch.where(counted, chosen, 0).sum().to(dtype)


def count_rows(target: Tensor, classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return how many probability vectors ``target`` holds, as a scalar of ``dtype``."""
    return torch.full((), target.numel() / classes, dtype=dtype, device=target.device)


def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    correction: float,
) -> None:
    """Blend batch statistics into running ones, in place.

    ``variance`` is the biased one; ``correction`` is n / (n - 1) for the n values per channel of the
    whole batch.
    """
    with torch.no_grad():
        running_mean.lerp_(mean.reshape(-1).to(running_mean.dtype), momentum)
        running_var.lerp_((variance * correction).reshape(-1).to(running_var.dtype), momentum)


def increment(buffer: Tensor, amount: float) -> None:
    """Add a constant to a buffer in place (the counter of batch norm)."""
    buffer.data.add_(amount)


def place_slice(
    input: Tensor,
    src: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    """Return ``input`` with a slice replaced: ATen's ``slice_scatter`` has no gradient for complex
    numbers."""
    result = input.clone()
    at = [slice(None)] * (dim % input.dim())
    result[(*at, slice(start, end, step))] = src
    return result


def as_complex(input: Tensor) -> Tensor:
    """View pairs as complex numbers; those of a shard may lie apart."""
    return torch.view_as_complex(input.contiguous())


def kron(input: Tensor, other: Tensor) -> Tensor:
    """Return a multiple of ``other`` for every element: torch's takes only what lies in order, as shards may not."""
    rank = max(input.dim(), other.dim())
    one, each = ((*[1] * (rank - len(of)), *of) for of in (input.shape, other.shape))
    outer = input.reshape([size for mine in one for size in (mine, 1)])
    inner = other.reshape([size for theirs in each for size in (1, theirs)])
    return (outer * inner).reshape([a * b for a, b in zip(one, each, strict=True)])


def max_unpool2d(input: Tensor, indices: Tensor, output_size: Sequence[int]) -> Tensor:
    """Put maxima back where they were: torch's takes only indices that lie in order, as those of shards may not."""
    return aten.max_unpool2d.default(input, indices.contiguous(), output_size)  # type: ignore[no-any-return]


def assign(buffer: Tensor, value: Tensor) -> None:
    """Write a buffer's new value in place.

    Without a trace in autograd, as a model that writes ``buffer.data``: a segment may hand on, and
    so differentiate, what the model only compares.
    """
    buffer.data.copy_(value)


def straight(input: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` with the gradient of ``input``: what a write leaves of a tensor whose history
    does not know of it."""
    return run_function(_Straight, input, value)  # type: ignore[no-any-return]


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


# Name of each function's operator kind.
KINDS = {
    function: f"shardwright.{function.__name__}"
    for function in (
        linear_blocks, cross_entropy_sum, token_cross_entropy_sum, vocabulary_logsumexp,
        vocabulary_cross_entropy_sum, nll_sum, count_targets, count_rows, update_running,
        increment, assign, as_complex, place_slice, ctc_losses, embedding_bags, straight,
        packed_recurrence, kron, max_unpool2d, grouped_product,
    )
}  # fmt: skip
