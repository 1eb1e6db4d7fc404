"""Connectionist temporal classification, as a loss per sample that is then added up.

Torch computes it with a table whose shape depends on the values of the lengths, which a trace cannot
hold; of the losses themselves the shape is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, library
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from shardwright.runtime.capture.record import Unsupported

NONE, MEAN, SUM = 0, 1, 2  # torch's at::Reduction

_operators = library.Library("shardwright", "FRAGMENT")
_operators.define(
    "ctc_losses(Tensor scores, Tensor target, Tensor scores_lengths, Tensor target_lengths, "
    "int blank, bool zero_infinity) -> Tensor"
)
_plain: Any = torch.ctc_loss


@library.register_fake("shardwright::ctc_losses", lib=_operators)
def _fake_losses(scores: Tensor, *_: Any) -> Tensor:
    return scores.new_empty(scores.shape[1])


def ctc_losses(
    input: Tensor,
    target: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Tensor:
    """Return the loss of every sample, of log probabilities ``t b c`` and classes ``b s``."""
    if input.is_meta:
        return input.sum((0, 2))
    return _plain(input, target, input_lengths, target_lengths, blank, NONE, zero_infinity)


@contextlib.contextmanager
def traceable_ctc() -> Iterator[None]:
    """Let ``torch.ctc_loss`` of tensors without values be the losses of the samples, reduced."""
    plain: Any = torch._C.TensorBase.masked_select

    def select(tensor: Tensor, mask: Tensor) -> Any:
        is_traced = isinstance(tensor, (FakeTensor, FunctionalTensor))
        if not is_traced or tensor.dim() != 2 or tensor.shape != mask.shape:
            return plain(tensor, mask)
        return Selected(tensor.gather(1, (~mask).long().argsort(dim=1, stable=True)))

    torch.ctc_loss = _loss  # type: ignore[assignment]
    torch.Tensor.masked_select = select  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.ctc_loss = _plain
        del torch.Tensor.masked_select


class Selected:
    """Elements of ``b s`` where a mask is true, which a trace cannot count: in ``rows`` those of each
    row come first. The classes of all samples in one row are made so; nothing else may use it."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __getattr__(self, name: str) -> Any:
        raise Unsupported("masked_select, of which the values decide the shape")


def _loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    lengths = [input_lengths, target_lengths]
    if isinstance(targets, Selected):
        targets = targets.rows
    is_traced = isinstance(log_probs, (FakeTensor, FunctionalTensor))
    if not is_traced or log_probs.dim() != 3 or targets.dim() != 2:
        return _plain(log_probs, targets, *lengths, blank, reduction, zero_infinity)
    known = [one if isinstance(one, Tensor) else torch.tensor(one) for one in lengths]
    each = torch.ops.shardwright.ctc_losses(log_probs, targets, *known, blank, zero_infinity)
    if reduction == MEAN:
        return (each / known[1].clamp(min=1)).mean()
    return each.sum() if reduction == SUM else each
