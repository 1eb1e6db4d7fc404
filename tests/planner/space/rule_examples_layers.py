"""More example calls: reductions, layers, losses, indexing, sequences. See ``rule_examples``."""

from __future__ import annotations

from tests.planner.space.rule_examples import (
    ALGEBRA,
    POINTWISE,
    VIEWS,
    B,
    Call,
    F,
    I,
    K,
    L,
    U,
    call,
    every,
)

REDUCTIONS = {
    **every("sum.default mean.default count_nonzero.default", call(F(4, 6)), call(F())),
    **every(
        "sum.dim_IntList mean.dim",
        call(F(2, 4, 6), [1]),
        call(F(2, 4, 6), [-1], True),
        call(F(2, 4, 6), [0, 2]),
        call(F(4, 6), None),
    ),
    **every("count_nonzero.dim_IntList", call(I(4, 6), [1])),
    **every("all.default any.default", call(B(4, 6))),
    **every("all.dim any.dim", call(B(4, 6), 1), call(B(4, 6), 0, True)),
    **every("all.dims any.dims", call(B(2, 4, 6), [0, 1])),
    **every(
        "amax.default amin.default", call(F(4, 6), [1]), call(F(4, 6)), call(F(4, 6), [0], True)
    ),
    **every("logsumexp.default", call(F(4, 6), [1]), call(F(4, 6), [0], True)),
    **every("aminmax.default", call(F(4, 6), dim=1), call(F(4, 6))),
    **every(
        "argmax.default argmin.default", call(F(4, 6), 1), call(F(4, 6)), call(F(4, 6), 0, True)
    ),
    **every("linalg_vector_norm.default", call(F(4, 6), 2, [1]), call(F(4, 6))),
    **every("max.default min.default prod.default std.default var.default", call(F(4, 6))),
    **every("max.dim min.dim", call(F(4, 6), 1), call(F(4, 6), 0, True)),
    **every("norm.Scalar", call(F(4, 6))),
    **every("norm.ScalarOpt_dim", call(F(4, 6), 2, [1]), call(F(4, 6), None, [0], True)),
    **every("prod.dim_int", call(F(4, 6), 1)),
    **every("median.default nanmedian.default", call(F(5, 3))),
    **every("std_mean.default var_mean.default", call(F(4, 6))),
    **every("std_mean.dim var_mean.dim", call(F(4, 6), [1])),
    **every("std.dim var.dim", call(F(4, 6), [1])),
    **every(
        "std.correction var.correction std_mean.correction var_mean.correction",
        call(F(4, 6), [1], correction=0),
    ),
    **every("kthvalue.default", call(F(4, 6), 2), call(F(4, 6), 2, 0, True)),
    **every("median.dim nanmedian.dim", call(F(4, 6), 1), call(F(4, 6), 0)),
    **every("mode.default", call(F(4, 6))),
    **every(
        "softmax.int log_softmax.int cumprod.default cumsum.default logcumsumexp.default "
        "cummax.default cummin.default",
        call(F(2, 4, 6), -1),
        call(F(4, 6), 0),
    ),
    **every("_softmax.default _log_softmax.default", call(F(4, 6), 1, False)),
    **every("argsort.default sort.default", call(F(4, 6)), call(F(4, 6), 0)),
    **every("argsort.stable sort.stable", call(F(4, 6), stable=True, dim=1)),
    **every("glu.default", call(F(4, 6)), call(F(4, 6), 0)),
    **every("topk.default", call(F(4, 6), 2), call(F(4, 6), 2, 0)),
    **every("diff.default", call(F(4, 6)), call(F(4, 6), 1, 0, F(2, 6))),
    **every("cosine_similarity.default", call(F(4, 6), F(4, 6)), call(F(4, 1, 6), F(2, 6), -1)),
    **every("histc.default", call(F(4, 6), 4, -1, 1), call(F(12), 4)),
}

NORMALISATION = {
    **every(
        "layer_norm.default",
        call(F(4, 6, 8), [8], F(8), F(8)),
        call(F(4, 6, 8), [6, 8]),
        call(F(8), [8], F(8)),
    ),
    **every("native_layer_norm.default", call(F(4, 6, 8), [8], F(8), F(8), 1e-5)),
    **every("rms_norm.default", call(F(4, 6, 8), [8], F(8)), call(F(4, 8), [8])),
    **every("_fused_rms_norm.default", call(F(4, 6, 8), [8], F(8), 1e-5)),
    **every("group_norm.default", call(F(4, 6, 2), 3, F(6), F(6)), call(F(4, 6), 2)),
    **every(
        "batch_norm.default",
        call(F(4, 6, 3), F(6), F(6), K(6), K(6), True, 0.1, 1e-5, False),
        call(F(4, 6, 2, 8), F(6), F(6), K(6), K(6), False, 0.1, 1e-5, False),
        call(F(4, 6), None, None, None, None, True, 0.1, 1e-5, False),
    ),
    **every(
        "instance_norm.default",
        call(F(4, 6, 8), F(6), F(6), None, None, True, 0.1, 1e-5, False),
        call(F(4, 6, 8), F(6), F(6), K(6), K(6), False, 0.1, 1e-5, False),
    ),
    **every("_weight_norm.default", call(F(4, 6, 2), F(4, 1, 1), 0), call(F(4, 6), F(1, 6), 1)),
}

CONVOLUTION = {
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
    ),
    **every("conv3d.default", call(F(2, 4, 3, 3, 3), F(6, 4, 2, 2, 2), F(6))),
    **every("conv1d.padding", call(F(4, 6, 9), F(8, 6, 3), F(8), padding="same")),
    **every("conv2d.padding", call(F(2, 4, 5, 5), F(6, 4, 3, 3), F(6), padding="valid")),
    **every("conv3d.padding", call(F(2, 4, 3, 3, 3), F(6, 4, 2, 2, 2), None, padding="same")),
    **every(
        "convolution.default",
        call(F(2, 4, 9), F(6, 4, 3), F(6), [1], [0], [1], False, [0], 1),
        call(F(2, 4, 9), F(4, 6, 3), F(6), [1], [0], [1], True, [0], 1),
    ),
    **every("conv_transpose1d.default", call(F(2, 4, 5), F(4, 6, 3), F(6))),
    **every("conv_transpose2d.input", call(F(2, 4, 5, 5), F(4, 6, 3, 3), F(6), [2, 2])),
    **every("conv_transpose3d.input", call(F(2, 4, 3, 3, 3), F(4, 6, 2, 2, 2))),
    **every("im2col.default", call(F(2, 4, 6, 6), [2, 2], [1, 1], [0, 0], [2, 2])),
    **every("col2im.default", call(F(2, 16, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2])),
    **every(
        "avg_pool1d.default max_pool1d.default max_pool1d_with_indices.default",
        call(F(2, 4, 8), [2]),
        call(F(4, 8), [2]),
    ),
    **every("adaptive_avg_pool1d.default adaptive_max_pool1d.default", call(F(2, 4, 8), [3])),
    **every(
        "avg_pool2d.default max_pool2d.default max_pool2d_with_indices.default",
        call(F(2, 4, 8, 6), [2, 2]),
        call(F(4, 8, 6), [3, 3], [2, 2], [1, 1]),
    ),
    **every("adaptive_avg_pool2d.default adaptive_max_pool2d.default", call(F(2, 4, 8, 6), [1, 1])),
    **every(
        "avg_pool3d.default max_pool3d.default max_pool3d_with_indices.default",
        call(F(2, 4, 4, 4, 4), [2, 2, 2]),
    ),
    **every(
        "adaptive_avg_pool3d.default adaptive_max_pool3d.default", call(F(2, 4, 4, 4, 4), [2, 2, 2])
    ),
    **every("upsample_nearest1d.vec", call(F(2, 4, 6), [12], None)),
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
    **every("upsample_nearest3d.vec", call(F(2, 4, 3, 3, 3), [6, 6, 6], None)),
    **every("upsample_nearest3d.default", call(F(2, 4, 3, 3, 3), [6, 6, 6])),
    **every("upsample_trilinear3d.default", call(F(2, 4, 3, 3, 3), [6, 6, 6], False)),
    **every("upsample_trilinear3d.vec", call(F(2, 4, 3, 3, 3), [6, 6, 6], False, None)),
}

LOSSES = {
    **every(
        "mse_loss.default l1_loss.default smooth_l1_loss.default huber_loss.default",
        call(F(4, 6), F(4, 6)),
        call(F(4, 6), F(4, 6), 0),
        call(F(4, 6), F(4, 6), 2),
    ),
    **every(
        "binary_cross_entropy.default", call(U(4, 6), U(4, 6)), call(U(4, 6), U(4, 6), K(6), 0)
    ),
    **every(
        "binary_cross_entropy_with_logits.default",
        call(F(4, 6), U(4, 6)),
        call(F(4, 6), U(4, 6), K(4, 1), K(6), 2),
    ),
    **every("soft_margin_loss.default", call(F(4, 6), K(4, 6)), call(F(4, 6), K(4, 6), 2)),
    **every("kl_div.default", call(F(4, 6), U(4, 6)), call(F(4, 6), F(4, 6), 2, log_target=True)),
    **every(
        "cross_entropy_loss.default",
        call(F(4, 6), I(4)),
        call(F(4, 6), I(4), None, 0),
        call(F(4, 6, 2), I(4, 2), K(6), 2, 3),
        call(F(4, 6), U(4, 6), None, 2, label_smoothing=0.1),
    ),
    **every("nll_loss.default", call(F(4, 6), I(4), K(6), 2)),
    **every(
        "nll_loss_nd.default", call(F(4, 6, 2), I(4, 2), None, 2), call(F(4, 6), I(4), None, 0)
    ),
    **every("nll_loss2d.default", call(F(4, 6, 2, 2), I(4, 2, 2), None, 2)),
    "shardwright.token_cross_entropy_sum": (
        call(F(4, 6, 8), I(4, 6)),
        call(F(2, 4, 6), I(2, 4), K(6), 3),
        call(F(4, 6), I(4), label_smoothing=0.1),
    ),
    "shardwright.cross_entropy_sum": (
        call(F(8, 6), I(8)),
        call(F(4, 6, 2), I(4, 2), K(6), 3),
        call(F(6), I()),
        call(F(4, 6), U(4, 6), label_smoothing=0.1),
    ),
    "shardwright.vocabulary_logsumexp": (call(F(4, 6, 24), 4), call(F(4, 12), 3)),
    "shardwright.vocabulary_cross_entropy_sum": (
        call(F(4, 6, 8), I(4, 6), K(4, 6, 4), classes=8),
        call(F(4, 6, 8), I(4, 6), K(4, 6, 2), K(8), 3, 0.1, 8),
    ),
    "shardwright.nll_sum": (call(F(8, 6), I(8)), call(F(4, 6, 2), I(4, 2), K(6), 3)),
    "shardwright.count_targets": (call(I(8), None, 3), call(I(4, 6), K(6))),
    "shardwright.count_rows": (call(U(8, 6), 6), call(U(8, 6, 2), 6), call(K(6), 6)),
    "shardwright.update_running": (call(K(6), K(6), F(1, 6, 1), F(1, 6, 1), 0.1, 1.5),),
    "shardwright.increment": (call(K(), 1),),
    "shardwright.assign": (call(K(4), F(4)),),
}

CREATION = {
    **every("zeros.default ones.default empty.memory_format", call([4, 6]), call([])),
    **every("full.default", call([4, 6], 2.5)),
    **every("new_zeros.default new_ones.default new_empty.default", call(F(3), [4, 6])),
    **every("new_full.default", call(F(4, 6), [4, 6], 0.5)),
    **every("arange.default randperm.default eye.default", call(4)),
    **every("arange.start", call(2, 6)),
    **every("arange.start_step", call(2, 8, 2)),
    **every("linspace.default", call(0.0, 1.0, 6)),
    **every("scalar_tensor.default", call(2.0)),
    **every("eye.m", call(4, 6)),
    **every("rand.default randn.default", call([4, 6])),
    **every("randint.default", call(5, [4, 6])),
    **every("randint.low", call(2, 5, [4, 6])),
    **every("rand_like.default randn_like.default bernoulli.default", call(U(4, 6))),
    **every("randint_like.default", call(K(4, 6), 5)),
    **every("bernoulli.Tensor", call(K(4, 6), K(6))),
    **every("bernoulli.p", call(K(4, 6), 0.5)),
    **every("multinomial.default", call(U(4, 6), 2)),
    **every("normal_functional.default", call(K(4, 6))),
}

INDEXING = {
    **every(
        "embedding.default",
        call(F(12, 6), I(4, 8, high=12)),
        call(F(12, 6), I(8, high=12), 0),
        call(F(12, 6), I(4, high=12), -1, True),
        call(F(12, 6), I(high=12)),
    ),
    **every(
        "gather.default",
        call(F(4, 6), 1, I(4, 8)),
        call(F(4, 6), 0, I(8, 6, high=4)),
        call(F(8, 6), 1, I(4, 6)),
        call(F(2, 4, 6), 1, I(2, 2, 6, high=4)),
    ),
    **every("scatter.src", call(F(4, 6), 1, I(4, 2), F(4, 2)), call(F(4, 6), 1, I(2, 2), F(2, 2))),
    **every("scatter_reduce.two", call(F(4, 6), 1, I(4, 2), F(4, 2), "amax")),
    **every("bucketize.Tensor", call(F(4, 6), L(-1, 0, 1))),
    **every("grid_sampler.default", call(F(2, 4, 5, 5), U(2, 6, 8, 2), 0, 0, False)),
    **every("scatter.reduce", call(K(4, 6), 1, I(4, 2), K(4, 2), reduce="add")),
    **every("scatter.value_reduce", call(K(4, 6), 1, I(4, 2), 1.5, reduce="add")),
    **every("index_fill.int_Tensor", call(F(4, 6), 1, I(2), K())),
    **every("scatter.value", call(F(4, 6), 1, I(4, 2), 1.5)),
    **every(
        "scatter_add.default",
        call(F(4, 6), 1, I(4, 8), F(4, 8)),
        call(F(4, 6), 0, I(2, 2, high=4), F(2, 2)),
    ),
    **every("index_select.default", call(F(4, 6), 1, I(8)), call(F(6, 4, 2), 0, I(8))),
    **every("index_add.default", call(F(4, 6), 1, I(8), F(4, 8))),
    **every("index_copy.default", call(F(4, 6), 1, L(0, 2), F(4, 2))),
    **every("index_fill.int_Scalar", call(F(4, 6), 1, I(2), 0.5)),
    **every(
        "index.Tensor",
        call(F(6, 4), [I(8)]),
        call(F(4, 6, 8), [None, I(2, 1), I(4)]),
        call(F(6, 4, 6), [I(8), None, I(8)]),
        call(F(6, 6), [I(4, 1), I(1, 2)]),
        call(F(4, 6), [B(4, 6)]),
        call(F(4, 6, 2), [None, I(8), None]),
    ),
    **every(
        "index_put.default",
        call(F(6, 4), [I(8)], F(8, 4), True),
        call(F(6, 4), [L(0, 2, 3)], F(4)),
        call(F(4, 6), [None, L(0, 1)], F(2)),
        call(F(6, 6, 4), [I(8), I(8)], F(1, 4), True),
    ),
    **every("one_hot.default", call(I(4, 6), 5), call(I(4, 6))),
}

SEQUENCES = {
    **every(
        "scaled_dot_product_attention.default",
        call(F(2, 4, 6, 8), F(2, 4, 6, 8), F(2, 4, 6, 8), is_causal=True),
        call(F(2, 4, 6, 8), F(2, 4, 3, 8), F(2, 4, 3, 5), B(2, 1, 6, 3)),
        call(F(2, 4, 6, 8), F(2, 2, 6, 8), F(2, 2, 6, 8), F(6, 6), enable_gqa=True),
        call(F(2, 4, 6, 8), F(2, 1, 6, 8), F(2, 1, 6, 8), enable_gqa=True, scale=0.3),
        call(F(4, 6, 8), F(4, 3, 8), F(4, 3, 8), F(4, 1, 3)),
        call(F(4, 8), F(6, 8), F(6, 8)),
    ),
    **every(
        "lstm.input",
        call(
            F(4, 6, 3),
            [F(1, 4, 2), F(1, 4, 2)],
            [F(8, 3), F(8, 2), F(8), F(8)],
            True,
            1,
            0.0,
            True,
            False,
            True,
        ),
        call(
            F(6, 4, 3),
            [F(2, 4, 2), F(2, 4, 2)],
            [F(8, 3), F(8, 2), F(8, 3), F(8, 2)],
            False,
            1,
            0.0,
            True,
            True,
            False,
        ),
    ),
    **every(
        "gru.input",
        call(F(4, 6, 3), F(1, 4, 2), [F(6, 3), F(6, 2)], False, 1, 0.0, True, False, True),
    ),
    **every(
        "rnn_tanh.input rnn_relu.input",
        call(F(6, 4, 3), F(1, 4, 2), [F(2, 3), F(2, 2)], False, 1, 0.0, True, False, False),
    ),
}

EXAMPLES: dict[str, tuple[Call, ...]] = {
    **POINTWISE,
    **ALGEBRA,
    **VIEWS,
    **REDUCTIONS,
    **NORMALISATION,
    **CONVOLUTION,
    **LOSSES,
    **CREATION,
    **INDEXING,
    **SEQUENCES,
}
