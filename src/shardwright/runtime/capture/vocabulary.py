"""Cross entropy in two operators, so that scores may stay split over their classes.

``vocabulary_logsumexp`` reduces each block of classes to one number, and
``vocabulary_cross_entropy_sum`` needs only those numbers of the blocks that lie elsewhere: what
travels is ``blocks`` numbers per token instead of the scores. Blocks, rather than the running maximum
and sum of Megatron-LM (arXiv:1909.08053, section 3), need no new kind of partial result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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

    The row's is read off its greatest share, and the blocks' shares of it are added up by a product: the kernel
    of softmax takes half the time of subtracting and ``exp`` on a CPU, a product half that of reductions over
    short rows. A block whose classes are all but impossible beside others may be -inf.
    No gradient flows through it: all of it is in ``vocabulary_cross_entropy_sum``.
    """
    scores = input.detach()
    shape = (*scores.shape[:-1], scores.shape[-1] // width)
    if scores.is_meta:
        return scores.new_empty(shape)
    rows, wide = scores.reshape(-1, scores.shape[-1]), _wide(scores.dtype)
    step = _rows_per_step(scores)
    shares = rows.new_empty((min(step, len(rows)), rows.shape[1]), dtype=wide)
    greatest, share = rows.new_empty((2, len(rows), 1), dtype=wide).unbind()
    sums = rows.new_empty((len(rows), shape[-1]), dtype=wide)
    ones = rows.new_ones(width, dtype=wide)
    for start in range(0, len(rows), step):
        some = slice(start, start + step)
        part = rows[some].to(wide)
        mine = torch.softmax(part, -1, out=shares[: len(part)])
        torch.amax(part, -1, keepdim=True, out=greatest[some])
        torch.amax(mine, -1, keepdim=True, out=share[some])
        torch.mv(mine.view(-1, width), ones, out=sums[some].view(-1))
    del shares, part, mine
    is_infinite = greatest.isinf()
    total = torch.where(is_infinite, greatest, greatest - share.log_())
    return sums.masked_fill_(is_infinite, 0).log_().add_(total).to(scores.dtype).view(shape)


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
    return _VocabularyLoss.apply(
        input, target, blocks, weight, ignore_index, label_smoothing, classes, offset
    )  # type: ignore[no-any-return]


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
        width = classes // blocks.shape[-1]
        total = _total(blocks.narrow(-1, offset // width, x.shape[1] // width), wide).unsqueeze(-1)
        is_impossible = total.isinf()
        factor = (total - z).exp_()  # this piece's share of all exponentials
        labels = target.reshape(-1)
        counted = labels != ignored
        chosen, place = _share(labels, x.shape[1], ignored, offset)
        own = gradient.to(wide) * counted * (1 - smoothing)
        spread = gradient.to(wide) * counted * smoothing
        if weight is not None:
            own = own * weight[torch.where(counted, labels, 0)].to(wide)
            spread = spread * (weight.to(wide).sum() / classes)
        factor *= (own + spread).unsqueeze(1)
        own = torch.where(chosen, own, 0).unsqueeze(1)
        result = torch.empty_like(x)
        step = _rows_per_step(x)
        masks = x.device.type != "cpu" or bool(is_impossible.any())  # a GPU is not waited for
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            into = result[rows] if wide == x.dtype else None
            part = torch.softmax(x[rows].to(wide), -1, out=into)
            if masks:
                part.masked_fill_(is_impossible[rows], 0)
            part.mul_(factor[rows])
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
