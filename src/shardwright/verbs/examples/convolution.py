"""Example calls of convolutions, pooling and resizing."""

from __future__ import annotations

from shardwright.verbs.examples.notation import F, call, every

EXAMPLES = {
    **every(
        "conv1d.default",
        call(F(4, 6, 9), F(8, 6, 3), F(8), [1], [1]),
        call(F(4, 6, 9), F(6, 1, 3), F(6), [1], [1], [1], 6),
        call(F(6, 9), F(8, 6, 3)),
    ),
    **every(
        "conv2d.default",
        call(F(2, 4, 5, 5), F(6, 4, 3, 3), F(6)),
        call(F(2, 4, 5, 5), F(6, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], 2),
        call(F(2, 4, 8, 6), F(6, 4, 3, 3), F(6), [1, 1], [1, 1]),
        call(F(2, 4, 8, 12), F(6, 2, 5, 7), F(6), [2, 2], [2, 3], [1, 1], 2),
        call(F(2, 4, 8, 6), F(4, 1, 3, 3), None, [1, 1], [2, 2], [2, 2], 4),
        call(F(2, 4, 8, 6), F(6, 4, 2, 2), None, [2, 2]),
        call(F(2, 4, 8, 6), F(6, 4, 1, 1), None, [2, 2]),
    ),
    **every(
        "conv3d.default",
        call(F(2, 4, 3, 3, 3), F(6, 4, 2, 2, 2), F(6)),
        call(F(2, 4, 4, 3, 4), F(6, 4, 3, 3, 3), F(6), [1, 1, 1], [1, 1, 1]),
    ),
    **every("conv1d.padding", call(F(4, 6, 9), F(8, 6, 3), F(8), padding="same")),
    **every("conv2d.padding", call(F(2, 4, 5, 5), F(6, 4, 3, 3), F(6), padding="valid")),
    **every("conv3d.padding", call(F(2, 4, 3, 3, 3), F(6, 4, 2, 2, 2), None, padding="same")),
    **every(
        "convolution.default",
        call(F(2, 4, 9), F(6, 4, 3), F(6), [1], [0], [1], False, [0], 1),
        call(F(2, 4, 9), F(4, 6, 3), F(6), [1], [0], [1], True, [0], 1),
        call(F(2, 4, 8), F(6, 4, 5), F(6), [1], [2], [1], False, [0], 1),
    ),
    **every(
        "conv_transpose1d.default",
        call(F(2, 4, 5), F(4, 6, 3), F(6)),
        call(F(2, 4, 6), F(4, 2, 3), F(4), [2], [1], [1], 2),
    ),
    **every(
        "conv_transpose2d.input",
        call(F(2, 4, 5, 5), F(4, 6, 3, 3), F(6), [2, 2]),
        call(F(2, 4, 4, 4), F(4, 6, 2, 2), F(6), [2, 2]),
    ),
    **every("conv_transpose3d.input", call(F(2, 4, 3, 3, 3), F(4, 6, 2, 2, 2))),
    **every("im2col.default", call(F(2, 4, 6, 6), [2, 2], [1, 1], [0, 0], [2, 2])),
    **every("col2im.default", call(F(2, 16, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2])),
    **every(
        "avg_pool1d.default max_pool1d.default max_pool1d_with_indices.default",
        call(F(2, 4, 8), [2]),
        call(F(4, 8), [2]),
        call(F(2, 4, 12), [3], [1], [1]),
    ),
    **every("adaptive_avg_pool1d.default adaptive_max_pool1d.default", call(F(2, 4, 8), [3])),
    **every(
        "avg_pool2d.default max_pool2d.default max_pool2d_with_indices.default",
        call(F(2, 4, 8, 6), [2, 2]),
        call(F(2, 4, 8, 6), [3, 3], [1, 1], [1, 1]),
        call(F(4, 8, 6), [3, 3], [2, 2], [1, 1]),
        call(F(2, 4, 8, 6), [3, 3], [2, 2], [0, 1], ceil_mode=True),
    ),
    **every("adaptive_avg_pool2d.default adaptive_max_pool2d.default", call(F(2, 4, 8, 6), [1, 1])),
    **every(
        "avg_pool3d.default max_pool3d.default max_pool3d_with_indices.default",
        call(F(2, 4, 4, 4, 4), [2, 2, 2]),
    ),
    **every(
        "adaptive_avg_pool3d.default adaptive_max_pool3d.default", call(F(2, 4, 4, 4, 4), [2, 2, 2])
    ),
    **every("upsample_nearest1d.vec", call(F(2, 4, 6), [12], None), call(F(2, 4, 6), None, [3.0])),
    **every("upsample_nearest1d.default", call(F(2, 4, 6), [12])),
    **every("upsample_linear1d.vec", call(F(2, 4, 6), [12], False, None)),
    **every("upsample_linear1d.default", call(F(2, 4, 6), [12], False)),
    **every(
        "upsample_nearest2d.vec _upsample_nearest_exact2d.vec",
        call(F(2, 4, 6, 6), None, [2.0, 2.0]),
    ),
    **every("upsample_nearest2d.default", call(F(2, 4, 6, 6), [12, 9])),
    **every(
        "upsample_bilinear2d.vec upsample_bicubic2d.vec _upsample_bilinear2d_aa.vec",
        call(F(2, 4, 6, 6), [12, 9], False, None),
    ),
    **every(
        "upsample_bilinear2d.default upsample_bicubic2d.default", call(F(2, 4, 6, 6), [12, 9], True)
    ),
    **every(
        "upsample_nearest3d.vec",
        call(F(2, 4, 3, 3, 3), [6, 6, 6], None),
        call(F(2, 4, 2, 4, 3), None, [2.0, 1.0, 2.0]),
    ),
    **every("upsample_nearest3d.default", call(F(2, 4, 3, 3, 3), [6, 6, 6])),
    **every("upsample_trilinear3d.default", call(F(2, 4, 3, 3, 3), [6, 6, 6], False)),
    **every("upsample_trilinear3d.vec", call(F(2, 4, 3, 3, 3), [6, 6, 6], False, None)),
}
EXAMPLES["aten.avg_pool2d.default"] += (
    call(F(2, 4, 8, 6), [3, 3], [1, 1], [1, 1], count_include_pad=False),
)
