"""Losses. Sums over samples leave partial sums; the class dim is needed whole, but
in the two operators of a vocabulary."""

from __future__ import annotations

from dataclasses import replace

from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules.notation import equation
from shardwright.operators.splitting.rules.signature import (
    NotUnderstood,
    Rule,
    Signature,
    blank,
    broadcast,
    broadcast_shape,
    family,
    numbered,
    space,
    whole,
)

NONE, MEAN, SUM = 0, 1, 2  # torch's at::Reduction


def elementwise_loss(call: Signature) -> Iteration:
    """Compare two tensors element by element, then keep, average or add up."""
    full = broadcast_shape(call.inputs)
    names = numbered(len(full))
    inputs = [broadcast(shape, names, full) for shape in call.inputs]
    reduction = call.integer("reduction", MEAN)
    mean = names if reduction == MEAN else ()
    return space(call, inputs, [names if reduction == NONE else ()], mean=mean)


def class_loss(call: Signature) -> Iteration:
    """Compare scores ``n c d..`` with classes ``n d..``; an average depends on what is ignored."""
    reduction = call.integer("reduction", MEAN)
    if reduction == MEAN:
        return whole(call)
    return _class_loss(call, keeps=reduction == NONE)


def class_loss_sum(call: Signature) -> Iteration:
    """Add up the losses of scores ``n c d..`` and classes ``n d..`` over all samples."""
    return _class_loss(call, keeps=False)


def _class_loss(call: Signature, keeps: bool) -> Iteration:
    scores, target = call.inputs[:2]
    channel = 1 if len(scores) > 1 else 0
    names = tuple("" if dim == channel else f"d{dim}" for dim in range(len(scores)))
    samples = names[:channel] + names[channel + 1 :]
    if target == scores:  # class probabilities
        of_target = names
    elif target == scores[:channel] + scores[channel + 1 :]:
        of_target = samples
    else:
        raise NotUnderstood(f"scores {scores} and target {target}")
    others = [("",) * len(shape) for shape in call.inputs[2:]]
    return space(call, [names, of_target, *others], [samples if keeps else ()])


def token_loss_sum(call: Signature) -> Iteration:
    """Add up the losses of scores ``n d.. c`` and classes ``n d..`` over all tokens."""
    names = (*numbered(len(call.inputs[0]) - 1), "")
    others = [("",) * len(shape) for shape in call.inputs[2:]]
    return space(call, [names, names[:-1], *others], [()])


def vocabulary_logsumexp(call: Signature) -> Iteration:
    """Reduce blocks of scores ``d.. v`` to ``d.. v`` numbers, one per block."""
    names = (*numbered(len(call.inputs[0]) - 1), "v")
    return space(call, [names], [names])


def vocabulary_loss_sum(call: Signature) -> Iteration:
    """Add up the losses of scores ``d.. v`` and classes ``d..``, given all blocks' sums.

    A piece of ``v`` gives the share of those tokens whose class it holds.
    """
    names = numbered(len(call.inputs[0]) - 1)
    others = [("",) * len(shape) for shape in call.inputs[3:]]
    iteration = space(call, [(*names, "v"), names, (*names, ""), *others], [()])
    return replace(iteration, offset="v") if call.inputs[0][-1] > 1 else iteration


def count_targets(call: Signature) -> Iteration:
    """Count, or add up the class weights of, the targets that are not ignored."""
    others = [("",) * len(shape) for shape in call.inputs[1:]]
    return space(call, [numbered(len(call.inputs[0])), *others], [()])


def count_rows(call: Signature) -> Iteration:
    """Count probability vectors ``n c d..``."""
    rank = len(call.inputs[0])
    return space(call, [blank(numbered(rank), {min(1, rank - 1)})], [()])


def ctc_losses(call: Signature) -> Iteration:
    """Losses of the samples of scores ``t b c``; classes in one row belong to nobody in particular."""
    if len(call.inputs[1]) != 2:
        raise NotUnderstood("classes in one row")
    return space(call, [("", "b", ""), ("b", ""), ("b",), ("b",)], [("b",)])


def by_sample(text: str) -> Rule:
    """Split the losses of samples, or elements, as an equation says, where they are not reduced."""
    each = equation(text)

    def rule(call: Signature) -> Iteration:
        if call.attribute("reduction", 1) != 0:
            raise NotUnderstood("a mean or sum over the batch")
        return each(call)

    rule.__name__ = f"by_sample({text!r})"
    return rule


RULES: dict[str, Rule] = {
    "shardwright.ctc_losses": ctc_losses,
    **family(
        elementwise_loss,
        """
        mse_loss.default l1_loss.default smooth_l1_loss.default huber_loss.default
        binary_cross_entropy.default binary_cross_entropy_with_logits.default kl_div.default
        soft_margin_loss.default poisson_nll_loss.default
        """,
    ),
    "aten.triplet_margin_loss.default": by_sample("anchor b _, positive b _, negative b _ -> b"),
    "aten.cosine_embedding_loss.default": by_sample("input1 b _, input2 b _, target b -> b"),
    "aten.margin_ranking_loss.default": by_sample("input1 b, input2 b, target b -> b"),
    "aten.hinge_embedding_loss.default": by_sample("self b.., target b.. -> b.."),
    "aten.multi_margin_loss.default": by_sample("self b _, target b -> b"),
    "aten.multilabel_margin_loss.default": by_sample("self b _, target b _ -> b"),
    **family(
        class_loss,
        """
        cross_entropy_loss.default nll_loss.default nll_loss_nd.default nll_loss2d.default
        """,
    ),
    "shardwright.cross_entropy_sum": class_loss_sum,
    "shardwright.token_cross_entropy_sum": token_loss_sum,
    "shardwright.vocabulary_logsumexp": vocabulary_logsumexp,
    "shardwright.vocabulary_cross_entropy_sum": vocabulary_loss_sum,
    "shardwright.nll_sum": class_loss_sum,
    "shardwright.count_targets": count_targets,
    "shardwright.count_rows": count_rows,
    # These write buffers, which all devices hold whole.
    "shardwright.update_running": whole,
    "shardwright.increment": whole,
    "shardwright.assign": whole,
}
