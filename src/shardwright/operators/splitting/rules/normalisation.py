"""Normalisation layers: the normalised dims stay whole, samples and other dims split."""

from __future__ import annotations

from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules.notation import equation
from shardwright.operators.splitting.rules.signature import (
    NotUnderstood,
    Rule,
    Signature,
    family,
    leading,
    numbered,
    space,
)


def layer_norm(call: Signature) -> Iteration:
    """Normalise the last dims, as many as ``normalized_shape`` has; split those before."""
    depth = len(call.integers("normalized_shape"))
    if not depth:
        raise NotUnderstood("no normalized_shape")
    free = leading(len(call.inputs[0]) - depth)
    inputs = [("",) * len(shape) for shape in call.inputs]
    inputs[0] = free + ("",) * depth
    # Mean and reciprocal deviation, where returned, keep the normalised dims as ones.
    return space(call, inputs, [inputs[0]] * len(call.outputs))


def batch_norm(call: Signature) -> Iteration:
    """Split channels, and samples, where each piece uses its own statistics in training (as DDP).

    With running statistics (evaluation) every element stands for itself and all dims can be split.
    """
    shape = call.inputs[0]
    rest = numbered(len(shape) - 2, "h")
    if call.attribute("training", call.attribute("train")) is not False:
        rest = ("",) * len(rest)
    names = ("n", "c", *rest)
    return space(call, [names, *([("c",)] * (len(call.inputs) - 1))], [names])


def instance_norm(call: Signature) -> Iteration:
    """Normalise each channel of each sample: both can be split."""
    names = ("n", "c") + ("",) * (len(call.inputs[0]) - 2)
    if call.attribute("use_input_stats") is False or call.position("running_mean") >= 0:
        raise NotUnderstood("instance norm with running statistics")
    return space(call, [names, *([("c",)] * (len(call.inputs) - 1))], [names])


def norm_by_index(call: Signature) -> Iteration:
    """Set, or bound, the norm of all that has one index of ``dim``, which can be split."""
    dim = call.tensor_dim("dim", 0)
    names = tuple("n" if index == dim else "" for index in range(len(call.inputs[0])))
    return space(call, [names] * len(call.inputs), [names])


# Splits that change the result on purpose: each piece of the samples has its own statistics.
LOCAL_STATISTICS = frozenset({("aten.batch_norm.default", "n")})

RULES: dict[str, Rule] = {
    **family(
        layer_norm,
        "layer_norm.default native_layer_norm.default rms_norm.default _fused_rms_norm.default",
    ),
    "aten.group_norm.default": equation("input n _.. -> n _.."),
    "aten.batch_norm.default": batch_norm,
    "aten.instance_norm.default": instance_norm,
    **family(norm_by_index, "_weight_norm.default renorm.default"),
}
