"""Cross entropy in two operators, so that scores may stay split over their classes.

``vocabulary_logsumexp`` reduces each block of classes to one number, and
``vocabulary_cross_entropy_sum`` needs only those numbers of the blocks that lie elsewhere: what
travels is ``blocks`` numbers per token instead of the scores. Blocks, rather than the running maximum
and sum of Megatron-LM (arXiv:1909.08053, section 3), need no new kind of partial result. A device that has the
scores of all classes needs no such numbers (``core.vocabulary.is_whole``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.capture.applied import run_function

# Classes are never split into more pieces than there are blocks.
MOST_BLOCKS = 32
# Below so many classes the scores are too small to be worth two operators.
FEWEST_CLASSES = 48
# Elements that one step of a kernel works on: a temporary of float32 fits the cache of a core.
CPU_ELEMENTS = 1 << 18
ACCELERATOR_ELEMENTS = 1 << 26


def block_width(classes: int) -> int:
    """Return how many classes make a block: blocks are equal, and a power of two if that divides."""
    power = min(MOST_BLOCKS, classes & -classes)
    blocks = power
    if power < 8:
        blocks = max(n for n in range(1, MOST_BLOCKS + 1) if classes % n == 0)
    return classes // blocks


def vocabulary_logsumexp(input: Tensor, width: int) -> Tensor:
    """Return log sum exp of scores ``.. c`` over every ``width`` classes: ``.. c/width``.

    Shares of the row's whole sum are added up by a product: reductions over short rows take twice the
    time. A block whose classes are all but impossible beside others may be -inf.
    No gradient flows through it: all of it is in ``vocabulary_cross_entropy_sum``.
    """
    scores = input.detach()
    shape = (*scores.shape[:-1], scores.shape[-1] // width)
    if scores.is_meta:
        return scores.new_empty(shape)
    rows, wide = scores.reshape(-1, scores.shape[-1]), _wide(scores.dtype)
    result = rows.new_empty((rows.shape[0], shape[-1]))
    ones = rows.new_ones(width, dtype=wide)
    step = _rows_per_step(scores)
    for start in range(0, rows.shape[0], step):
        shares, total = _shares(rows[start : start + step].to(wide))
        sums = shares.view(-1, width) @ ones
        result[start : start + step] = sums.view(len(total), -1).log_().add_(total)
        del shares  # before the next rows have theirs
    return result.view(shape)


def _shares(scores: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the softmax of rows, 0 where a row is impossible throughout, and log sum exp of each row,
    ``n 1``.

    The sum is read off the greatest share: the kernel of softmax takes half the time of subtracting and
    ``exp`` on a CPU, and does not tell it.
    """
    shares = torch.softmax(scores, -1, out=out)
    greatest = scores.amax(-1, keepdim=True)
    total = greatest - shares.amax(-1, keepdim=True).log_()
    is_infinite = greatest.isinf()
    if scores.device.type != "cpu" or bool(is_infinite.any()):  # a GPU is not waited for
        total = torch.where(is_infinite, greatest, total)
        shares.masked_fill_(is_infinite, 0)
    return shares, total


def vocabulary_cross_entropy_sum(
    input: Tensor,
    target: Tensor,
    blocks: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    classes: int = 0,
    offset: int = 0,
) -> Tensor:
    """Return this piece's share of the cross entropy summed over all targets not ignored.

    ``input`` holds the scores ``.. c`` of the classes from ``offset`` on, out of ``classes``;
    ``target``, ``blocks`` (see ``vocabulary_logsumexp``) and class weights are whole. Shares add up.
    """
    return run_function(  # type: ignore[no-any-return]
        _VocabularyLoss,
        input, target, blocks, weight, ignore_index, label_smoothing, classes, offset,
    )  # fmt: skip


def whole_cross_entropy_sum(
    input: Tensor,
    target: Tensor,
    blocks: object = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    classes: int = 0,
) -> Tensor:
    """Return the cross entropy summed over all targets not ignored, of the scores ``.. c`` of all classes.

    Stands for ``vocabulary_cross_entropy_sum``, whose arguments it has. Scores are kept, not what is made of them:
    backward makes a softmax where the gradient comes to lie, and both go over rows that fit a cache.
    """
    return run_function(  # type: ignore[no-any-return]
        _WholeLoss, input, target, weight, ignore_index, label_smoothing
    )


def unmade_logsumexp(input: Tensor, width: int) -> Tensor:
    """Stand for ``vocabulary_logsumexp`` where nobody reads what it makes."""
    return input.detach()


class _WholeLoss(torch.autograd.Function):
    """As ``_VocabularyLoss`` has it, in few calls: those of a small loss take longer than its numbers."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        scores, target, weight, ignored, smoothing = given
        ctx.settings = (ignored, smoothing)
        ctx.save_for_backward(scores, target, weight)
        if scores.is_meta:
            return scores.new_empty(())
        x, labels = scores.reshape(-1, scores.shape[-1]), target.reshape(-1)
        wide, step = _wide(x.dtype), _rows_per_step(x)
        factors = None if weight is None else weight.to(wide)
        terms: list[Tensor] = []
        for rows, classes in zip(x.split(step), labels.split(step), strict=True):
            told = torch.log_softmax(rows, -1, dtype=wide)
            term = torch.nn.functional.nll_loss(
                told, classes, factors, ignore_index=ignored, reduction="sum"
            )
            if smoothing:
                each = told.sum(-1) if factors is None else told @ factors
                rest = torch.where(classes == ignored, 0, each).sum()
                term = term * (1 - smoothing) - rest * (smoothing / x.shape[1])
            terms.append(term)
            del told  # before the next rows have theirs
        return sum(terms[1:], start=terms[0]).to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        scores, target, weight = ctx.saved_tensors
        ignored, smoothing = ctx.settings
        x, labels = scores.reshape(-1, scores.shape[-1]), target.reshape(-1, 1)
        wide, step = _wide(x.dtype), _rows_per_step(x)
        counted = labels != ignored
        place = torch.where(counted, labels, 0)
        own = share = torch.where(counted, gradient.to(wide), 0)
        spread = None
        if weight is not None or smoothing:
            factors = x.new_ones(x.shape[1], dtype=wide) if weight is None else weight.to(wide)
            spread = own * (smoothing / x.shape[1]), factors
            own = own * factors[place] * (1 - smoothing)
            share = own + spread[0] * factors.sum()
        result = torch.empty_like(x)
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            into = result[rows]
            part = into if wide == x.dtype else torch.empty_like(into, dtype=wide)
            torch.softmax(x[rows].to(wide), -1, out=part).mul_(share[rows])
            part.scatter_add_(1, place[rows], -own[rows])
            if spread is not None:
                part.addmm_(spread[0][rows], spread[1].unsqueeze(0), alpha=-1)
            if part is not into:
                into.copy_(part)
        return (result.view(scores.shape), *[None] * 4)


class _VocabularyLoss(torch.autograd.Function):
    """Per counted token: ``a w_t (z - x_t) + b sum_j w_j (z - x_j)``, z the log of the sum of all
    exponentials, a = 1 - smoothing, b = smoothing / classes, w the class weights."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        scores, target, blocks, weight, ignored, smoothing, classes, offset = given
        ctx.settings = (ignored, smoothing, classes, offset)
        ctx.save_for_backward(scores, target, blocks, weight)
        if scores.is_meta:
            return scores.new_empty(())
        x, wide = scores.reshape(-1, scores.shape[-1]), _wide(scores.dtype)
        z = _total(blocks, wide)
        labels = target.reshape(-1)
        chosen, place = _share(labels, x.shape[1], ignored, offset)
        own = 1 if weight is None else weight[torch.where(chosen, labels, 0)].to(wide)
        picked = x.gather(1, place.unsqueeze(1)).squeeze(1).to(wide)
        total = torch.where(chosen, (z - picked) * own, 0).sum() * (1 - smoothing)
        if smoothing:
            local = x.new_ones(x.shape[1]) if weight is None else _slice(weight, x, offset)
            local = local.to(wide)
            each = z * local.sum() - x.to(wide) @ local
            total += torch.where(labels != ignored, each, 0).sum() * (smoothing / classes)
        return total.to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        scores, target, blocks, weight = ctx.saved_tensors
        ignored, smoothing, classes, offset = ctx.settings
        x, wide = scores.reshape(-1, scores.shape[-1]), _wide(scores.dtype)
        z = _total(blocks, wide).unsqueeze(-1)
        labels = target.reshape(-1)
        counted = labels != ignored
        chosen, place = _share(labels, x.shape[1], ignored, offset)
        own = gradient.to(wide) * counted * (1 - smoothing)
        spread = gradient.to(wide) * counted * smoothing
        if weight is not None:
            own = own * weight[torch.where(counted, labels, 0)].to(wide)
            spread = spread * (weight.to(wide).sum() / classes)
        share = (own + spread).unsqueeze(1)
        own = torch.where(chosen, own, 0).unsqueeze(1)
        result = torch.empty_like(x)
        step = _rows_per_step(x)
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            into = result[rows] if wide == x.dtype else None
            part, total = _shares(x[rows].to(wide), into)
            part.mul_((total - z[rows]).exp_().mul_(share[rows]))
            part.scatter_add_(1, place[rows].unsqueeze(1), -own[rows])
            if smoothing:
                flat = counted[rows].unsqueeze(1) * gradient.to(wide) * (smoothing / classes)
                part -= flat if weight is None else flat * _slice(weight, x, offset).to(wide)
            if into is None:
                result[rows] = part
        return (result.view(scores.shape), *[None] * 7)


def _share(labels: Tensor, width: int, ignored: int, offset: int) -> tuple[Tensor, Tensor]:
    """Return which tokens' classes lie in this piece, and where (0 for the others)."""
    local = labels - offset
    chosen = (local >= 0) & (local < width) & (labels != ignored)
    return chosen, torch.where(chosen, local, 0)


def _total(blocks: Tensor, wide: torch.dtype) -> Tensor:
    """Return log sum exp of all classes of each token."""
    return blocks.reshape(-1, blocks.shape[-1]).to(wide).logsumexp(-1)


def _slice(weight: Tensor, scores: Tensor, offset: int) -> Tensor:
    return weight[offset : offset + scores.shape[1]]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _rows_per_step(scores: Tensor) -> int:
    elements = CPU_ELEMENTS if scores.device.type == "cpu" else ACCELERATOR_ELEMENTS
    return max(1, elements // scores.shape[-1])
