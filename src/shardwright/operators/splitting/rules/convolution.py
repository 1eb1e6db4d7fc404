"""Convolutions, pooling and resizing of images."""

from __future__ import annotations

from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules.notation import equation
from shardwright.operators.splitting.rules.signature import (
    NotUnderstood,
    Rule,
    Signature,
    family,
    space,
)
from shardwright.operators.splitting.rules.windows import (
    convolved,
    enlarged,
    expanded,
    mean_over_space,
    pooling,
    with_windows,
)


def convolution(call: Signature) -> Iteration:
    """Split samples ``n``, filters ``f``, space and, as a reduction, input channels ``k``, which the weight of
    a transposed one has first."""
    data, kernel = call.inputs[:2]
    if len(data) != len(kernel):
        raise NotUnderstood("an unbatched convolution")
    rank = len(data) - 2
    is_transposed = "transpose" in call.kind or call.attribute("transposed") is True
    weight = ("k", "f") if is_transposed else ("f", "k")
    places, windows = (expanded(call, rank), ()) if is_transposed else convolved(call, rank)
    still = ("",) * rank
    names = [("n", "k", *places), (*weight, *still), ("f",)]
    result = ("n", "f", *places)
    if call.integer("groups", 1) != 1:  # a piece of the channels would need another `groups`
        names = [("n", "", *places), *(("",) * len(shape) for shape in call.inputs[1:])]
        result = ("n", "", *places)
    bias = call.position("bias")
    once = (bias,) if bias >= 0 else ()
    iteration = space(call, names[: len(call.inputs)], [result], once=once)
    return with_windows(iteration, call, windows)


def per_channel(spatial: int) -> Rule:
    """Split all but the last ``spatial`` dims: samples and channels."""

    def rule(call: Signature) -> Iteration:
        free = ("n", "c") if len(call.inputs[0]) == spatial + 2 else ("c",)
        names = free + ("",) * spatial
        return space(call, [names], [names] * len(call.outputs))

    return rule


RULES: dict[str, Rule] = {
    **family(
        convolution,
        """
        conv1d.default conv1d.padding conv2d.default conv2d.padding conv3d.default conv3d.padding
        convolution.default conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input
        """,
    ),
    "aten.im2col.default": equation("self n _.. -> n _.."),
    "aten.col2im.default": equation("self n _.. -> n _.."),
    **family(
        per_channel(1),
        """
        adaptive_max_pool1d.default upsample_nearest1d.default upsample_linear1d.vec upsample_linear1d.default
        """,
    ),
    **family(
        per_channel(2),
        """
        adaptive_max_pool2d.default upsample_nearest2d.default upsample_bilinear2d.vec upsample_bilinear2d.default
        upsample_bicubic2d.vec upsample_bicubic2d.default _upsample_nearest_exact2d.vec
        _upsample_bilinear2d_aa.vec
        """,
    ),
    **family(
        per_channel(3),
        """
        adaptive_max_pool3d.default upsample_trilinear3d.vec upsample_nearest3d.default upsample_trilinear3d.default
        """,
    ),
    **{f"aten.avg_pool{rank}d.default": pooling(rank, is_maximum=False) for rank in (1, 2, 3)},
    **{
        f"aten.max_pool{rank}d{form}.default": pooling(rank, is_maximum=True)
        for rank in (1, 2, 3)
        for form in ("", "_with_indices")
    },
    **{f"aten.adaptive_avg_pool{rank}d.default": mean_over_space(rank) for rank in (1, 2, 3)},
    **{f"aten.upsample_nearest{rank}d.vec": enlarged(rank) for rank in (1, 2, 3)},
}
