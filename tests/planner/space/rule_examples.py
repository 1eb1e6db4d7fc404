"""Example calls of every kind of operator that has a rule.

A call is written as the user would write it; ``F``, ``U``, ``I`` and ``B`` stand for tensors: floats
of either sign, floats between 0 and 1, integers below ``high``, booleans. Sizes are multiples of
small numbers so that dims can be split, and differ so that they cannot be confused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Drawn:
    """A tensor argument to be drawn at random."""

    draw: str
    shape: tuple[int, ...]
    high: int = 0


@dataclass(frozen=True)
class Call:
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def F(*shape: int) -> Drawn:
    return Drawn("float", shape)


def U(*shape: int) -> Drawn:
    return Drawn("unit", shape)


def I(*shape: int, high: int = 5) -> Drawn:  # noqa: E743
    return Drawn("integer", shape, high)


def B(*shape: int) -> Drawn:
    return Drawn("boolean", shape)


def C(*shape: int) -> Drawn:
    return Drawn("complex", shape)


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


def every(names: str, *calls: Call) -> dict[str, tuple[Call, ...]]:
    return {f"aten.{name}": calls for name in names.split()}


POINTWISE = {
    **every(
        """
        abs.default absolute.default asinh.default atan.default ceil.default celu.default
        cos.default cosh.default deg2rad.default elu.default erf.default erfc.default exp.default
        exp2.default expm1.default floor.default frac.default gelu.default hardshrink.default
        hardsigmoid.default hardswish.default hardtanh.default leaky_relu.default
        log_sigmoid.default mish.default nan_to_num.default neg.default negative.default
        positive.default reciprocal.default relu.default relu6.default round.default selu.default
        sgn.default sigmoid.default sign.default silu.default sin.default sinc.default sinh.default
        softplus.default softshrink.default square.default tan.default tanh.default trunc.default
        isfinite.default isinf.default isnan.default logical_not.default zeros_like.default
        ones_like.default empty_like.default clone.default contiguous.default alias.default
        detach.default lift_fresh_copy.default to.device
        """,
        call(F(4, 6)),
        call(F(12)),
        call(F()),
    ),
    **every(
        """
        acos.default acosh.default asin.default atanh.default digamma.default erfinv.default
        lgamma.default log.default log10.default log1p.default log2.default logit.default
        rsqrt.default sqrt.default
        """,
        call(U(4, 6)),
    ),
    **every(
        """
        add.Tensor sub.Tensor subtract.Tensor mul.Tensor multiply.Tensor div.Tensor divide.Tensor
        true_divide.Tensor atan2.default clamp_max.Tensor clamp_min.Tensor floor_divide.default
        fmax.default fmin.default fmod.Tensor heaviside.default hypot.default logaddexp.default
        logaddexp2.default maximum.default minimum.default remainder.Tensor rsub.Tensor eq.Tensor
        ne.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor isclose.default logical_and.default
        logical_or.default logical_xor.default copy.default complex.default polar.default
        clamp.Tensor
        """,
        call(F(4, 6), F(4, 6)),
        call(F(2, 4, 6), F(6)),
        call(F(4, 6), F(4, 1)),
    ),
    **every("pow.Tensor_Tensor xlogy.Tensor", call(U(4, 6), U(4, 6)), call(U(4, 6), U(6))),
    **every(
        """
        add.Scalar sub.Scalar mul.Scalar div.Scalar rsub.Scalar fmod.Scalar remainder.Scalar
        floor_divide.Scalar pow.Tensor_Scalar eq.Scalar ne.Scalar ge.Scalar gt.Scalar le.Scalar
        lt.Scalar clamp.default clamp_max.default clamp_min.default clip.default full_like.default
        """,
        call(F(4, 6), 2),
    ),
    **every(
        """
        bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor
        bitwise_right_shift.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor
        """,
        call(I(4, 6), I(6)),
    ),
    **every(
        """
        bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar bitwise_left_shift.Tensor_Scalar
        bitwise_right_shift.Tensor_Scalar __and__.Scalar __or__.Scalar __xor__.Scalar
        """,
        call(I(4, 6), 3),
    ),
    **every("bitwise_not.default", call(B(4, 6))),
    **every("pow.Scalar", call(2.0, F(4, 6))),
    **every("round.decimals", call(F(4, 6), decimals=1)),
    **every("threshold.default", call(F(4, 6), 0.1, 0.0)),
    **every("div.Tensor_mode", call(F(4, 6), F(4, 6), rounding_mode="floor")),
    **every("div.Scalar_mode", call(F(4, 6), 2.0, rounding_mode="trunc")),
    **every("where.self", call(B(4, 6), F(2, 4, 6), F()), call(B(4, 1), F(4, 6), F(6))),
    **every("where.Scalar", call(B(4, 6), 1.0, 2.0)),
    **every("where.ScalarOther", call(B(4, 6), F(4, 6), 2.0)),
    **every("where.ScalarSelf", call(B(4, 6), 2.0, F(4, 6))),
    **every("masked_fill.Scalar", call(F(2, 4, 6), B(4, 6), 0.5)),
    **every("masked_fill.Tensor", call(F(2, 4, 6), B(4, 1), F())),
    **every("addcdiv.default", call(F(4, 6), F(4, 6), U(6))),
    **every("addcmul.default", call(F(4, 6), F(4, 6), F(6))),
    **every("lerp.Scalar", call(F(4, 6), F(4, 6), 0.3)),
    **every("lerp.Tensor", call(F(4, 6), F(4, 6), F(6))),
    **every("to.dtype", call(F(4, 6), "float64"), call(F(4, 6), "float32"), call(I(4), "float64")),
    **every("to.dtype_layout _to_copy.default", call(F(4, 6), dtype="float64")),
    **every("type_as.default to.other", call(F(4, 6), I(4, 6)), call(F(4, 6), F())),
    **every(
        "dropout.default alpha_dropout.default feature_dropout.default",
        call(F(4, 6, 2), 0.5, False),
    ),
    **every("native_dropout.default", call(F(4, 6), 0.5, False)),
    **every("prelu.default", call(F(4, 6, 2), F(6)), call(F(4, 6), F(1))),
}

ALGEBRA = {
    **every(
        "linear.default",
        call(F(4, 6, 8), F(12, 8), F(12)),
        call(F(4, 8), F(12, 8)),
        call(F(8), F(12, 8), F(12)),
        call(F(2, 4, 6, 8), F(12, 8)),
    ),
    **every(
        "matmul.default",
        call(F(4, 6), F(6, 8)),
        call(F(6), F(6)),
        call(F(4, 6), F(6)),
        call(F(6), F(6, 8)),
        call(F(2, 4, 6, 8), F(2, 4, 8, 12)),
        call(F(2, 4, 6, 8), F(8, 12)),
        call(F(2, 1, 6, 8), F(4, 8, 12)),
        call(F(4, 6, 8), F(8)),
        call(F(8), F(4, 8, 6)),
    ),
    **every("mm.default", call(F(4, 6), F(6, 8))),
    **every("bmm.default", call(F(2, 4, 6), F(2, 6, 8))),
    **every("mv.default", call(F(4, 6), F(6))),
    **every("dot.default vdot.default", call(F(12), F(12))),
    **every("outer.default ger.default", call(F(4), F(6))),
    **every(
        "addmm.default",
        call(F(12), F(4, 6), F(6, 12)),
        call(F(4, 12), F(4, 6), F(6, 12), beta=0.5, alpha=2.0),
        call(F(1, 12), F(4, 6), F(6, 12)),
    ),
    **every("addmv.default", call(F(4), F(4, 6), F(6)), call(F(1), F(4, 6), F(6))),
    **every(
        "baddbmm.default",
        call(F(2, 4, 8), F(2, 4, 6), F(2, 6, 8)),
        call(F(2, 1, 8), F(2, 4, 6), F(2, 6, 8), beta=0.5),
    ),
    **every("addbmm.default", call(F(4, 8), F(2, 4, 6), F(2, 6, 8))),
    **every(
        "einsum.default",
        call("bnk,bkm->bnm", [F(2, 4, 6), F(2, 6, 8)]),
        call("...k,nk->...n", [F(2, 4, 6), F(8, 6)]),
        call("...k,...k->...", [F(2, 4, 6), F(4, 6)]),
        call("bk,kn", [F(2, 4), F(4, 6)]),
        call("ii->i", [F(4, 4)]),
        call("ij,ij,j->i", [F(4, 6), F(1, 6), F(6)]),
        call("...ij->...ji", [F(2, 4, 6)]),
    ),
    **every("bilinear.default", call(F(4, 6), F(4, 8), F(2, 6, 8), F(2))),
    "transformers.grouped_mm_fallback.default": (call(F(8, 4), F(3, 4, 6), [2, 6, 8]),),
    **every("_grouped_mm.default", call(F(8, 4), F(3, 4, 6), [2, 6, 8])),
}

VIEWS = {
    **every(
        "view.default reshape.default _unsafe_view.default",
        call(F(4, 6, 8), [4, 48]),
        call(F(4, 48), [4, 6, 8]),
        call(F(4, 6, 8), [24, 8]),
        call(F(24, 8), [4, 6, 8]),
        call(F(4, 6, 8), [-1]),
        call(F(6, 4), [3, 8]),
        call(F(6, 4), [4, 6]),
        call(F(2, 1, 6), [2, 6, 1, 1]),
        call(F(1), []),
        call(F(2, 2, 3, 4), [4, 12]),
        call(F(0, 4), [4, 0]),
    ),
    **every("flatten.using_ints", call(F(4, 6, 2), 0, 1), call(F(4, 6, 2), 1), call(F())),
    **every("ravel.default", call(F(4, 6))),
    **every("unflatten.int", call(F(4, 12), 1, [6, 2]), call(F(12, 4), 0, [-1, 3])),
    **every("permute.default", call(F(2, 4, 6), [2, 0, 1]), call(F(2, 4, 6), [-1, 1, -3])),
    **every(
        "transpose.int swapaxes.default swapdims.default",
        call(F(2, 4, 6), 1, 2),
        call(F(2, 4, 6), -1, 0),
    ),
    **every("movedim.int", call(F(2, 4, 6), 0, 2), call(F(2, 4, 6), -1, 0)),
    **every("movedim.intlist", call(F(2, 4, 6), [0, 1], [2, 0])),
    **every("t.default", call(F(4, 6)), call(F(4))),
    **every("numpy_T.default", call(F(4, 6)), call(F(6))),
    **every("mT.default", call(F(2, 4, 6))),
    **every(
        "expand.default",
        call(F(4, 6), [2, 4, 6]),
        call(F(1, 4, 6), [2, -1, -1]),
        call(F(4, 1), [4, 6]),
        call(F(), [4]),
    ),
    **every("expand_as.default", call(F(4, 1), F(4, 6)), call(F(6), F(4, 6))),
    **every("view_as.default reshape_as.default", call(F(4, 6), F(2, 2, 6)), call(F(4, 6), F(24))),
    **every("squeeze.dim", call(F(4, 1, 6), 1), call(F(4, 1, 6), -1), call(F(2), 0), call(F(), 0)),
    **every("squeeze.dims", call(F(4, 1, 6, 1), [1, 3]), call(F(4, 1, 2), [0, 1])),
    **every("unsqueeze.default", call(F(4, 6), 0), call(F(4, 6), -1), call(F(4, 6), 1)),
    **every(
        "slice.Tensor",
        call(F(4, 6), 1, 0, 3),
        call(F(4, 6), 1),
        call(F(4, 6), 0, 0, 4),
        call(F(4, 6), 1, 0, 2**63 - 1),
        call(F(4, 6), 1, 0, 2**63 - 1, 2),
        call(F(4, 6), -1, -6),
        call(F(4, 6), 1, 0, -1),
    ),
    **every(
        "cat.default concat.default concatenate.default",
        call([F(4, 2), F(4, 6)], 1),
        call([F(2, 4), F(2, 4)]),
    ),
    **every("split.Tensor", call(F(4, 6), 2, 1), call(F(4, 6), 3), call(F(4, 6), 4, -1)),
    **every("split.sizes split_with_sizes.default", call(F(4, 6), [2, 4], -1)),
    **every("chunk.default", call(F(4, 6), 2, -1), call(F(4, 6), 2)),
    **every("tensor_split.sections", call(F(4, 6), 4, 1)),
    **every("tensor_split.indices", call(F(4, 6), [1, 3], 1)),
    **every("narrow.default", call(F(4, 6), 1, 0, 4), call(F(4, 6), 0, 0, 4)),
    **every("unfold.default", call(F(4, 6), 1, 2, 1), call(F(4, 6), 0, 2, 2)),
    **every("select.int", call(F(4, 6), 1, -1), call(F(4, 6, 2), 0, 1)),
    **every("unbind.int", call(F(2, 4, 6)), call(F(4, 6, 2), -1)),
    **every("stack.default", call([F(4, 6), F(4, 6)]), call([F(4, 6), F(4, 6)], -1)),
    **every("slice_scatter.default", call(F(4, 6), F(4, 2), 1, 0, 2)),
    **every("select_scatter.default", call(F(4, 6), F(4), 1, 2)),
    **every(
        "pad.default",
        call(F(4, 6), [1, 2]),
        call(F(2, 4, 6), [0, 0, 1, 0], "constant", 3.0),
        call(F(2, 4, 6), [1, 1], "reflect"),
    ),
    **every("constant_pad_nd.default", call(F(4, 6), [1, 2]), call(F(4, 6), [0, 1], 2.0)),
    **every("repeat.default", call(F(4, 6), [3, 1, 2]), call(F(4), [2]), call(F(1, 4), [2, 1])),
    **every("tile.default", call(F(4, 6), [2]), call(F(4), [2, 1])),
    **every(
        "repeat_interleave.self_int",
        call(F(4, 6), 2, 1),
        call(F(4, 6), 3, 0),
        call(F(4, 6), 2),
        call(F(4, 6), 2, 0, output_size=8),
    ),
    **every(
        "roll.default", call(F(4, 6), [1], [1]), call(F(4, 6), [1]), call(F(4, 6), [1, 2], [0, 1])
    ),
    **every("flip.default", call(F(4, 6), [1]), call(F(2, 4, 6), [-1, 0])),
    **every("tril.default triu.default", call(F(2, 4, 6)), call(F(2, 4, 6), 1)),
    **every("pixel_shuffle.default", call(F(2, 16, 4, 6), 2)),
    **every("pixel_unshuffle.default", call(F(2, 4, 4, 12), 2)),
    **every("view_as_complex.default", call(F(4, 6, 2))),
    **every("view_as_real.default", call(C(4, 6))),
    **every("meshgrid.default", call([F(4), F(6)])),
    **every(
        "meshgrid.indexing", call([F(4), F(6)], indexing="ij"), call([F(4), F(6)], indexing="xy")
    ),
}

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
    **every("std.dim var.dim", call(F(4, 6), [1])),
    **every(
        "std.correction var.correction std_mean.correction var_mean.correction",
        call(F(4, 6), [1], correction=0),
    ),
    **every("kthvalue.default", call(F(4, 6), 2), call(F(4, 6), 2, 0, True)),
    **every("median.dim nanmedian.dim", call(F(4, 6), 1), call(F(4, 6), 0)),
    **every("mode.default", call(F(4, 6))),
    **every(
        "softmax.int log_softmax.int cumprod.default cumsum.default logcumsumexp.default cummax.default cummin.default",
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
        call(F(4, 6, 3), F(6), F(6), F(6), U(6), True, 0.1, 1e-5, False),
        call(F(4, 6, 2, 8), F(6), F(6), F(6), U(6), False, 0.1, 1e-5, False),
        call(F(4, 6), None, None, None, None, True, 0.1, 1e-5, False),
    ),
    **every(
        "instance_norm.default",
        call(F(4, 6, 8), F(6), F(6), None, None, True, 0.1, 1e-5, False),
        call(F(4, 6, 8), F(6), F(6), F(6), U(6), False, 0.1, 1e-5, False),
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
    **every("upsample_trilinear3d.vec", call(F(2, 4, 3, 3, 3), [6, 6, 6], False, None)),
}

LOSSES = {
    **every(
        "mse_loss.default l1_loss.default smooth_l1_loss.default huber_loss.default soft_margin_loss.default",
        call(F(4, 6), F(4, 6)),
        call(F(4, 6), F(4, 6), 0),
        call(F(4, 6), F(4, 6), 2),
    ),
    **every(
        "binary_cross_entropy.default", call(U(4, 6), U(4, 6)), call(U(4, 6), U(4, 6), U(6), 0)
    ),
    **every(
        "binary_cross_entropy_with_logits.default",
        call(F(4, 6), U(4, 6)),
        call(F(4, 6), U(4, 6), U(4, 1), U(6), 2),
    ),
    **every("kl_div.default", call(F(4, 6), U(4, 6)), call(F(4, 6), F(4, 6), 2, log_target=True)),
    **every(
        "cross_entropy_loss.default",
        call(F(4, 6), I(4)),
        call(F(4, 6), I(4), None, 0),
        call(F(4, 6, 2), I(4, 2), U(6), 2, 3),
        call(F(4, 6), U(4, 6), None, 2, label_smoothing=0.1),
    ),
    **every("nll_loss.default", call(F(4, 6), I(4), U(6), 2)),
    **every(
        "nll_loss_nd.default", call(F(4, 6, 2), I(4, 2), None, 2), call(F(4, 6), I(4), None, 0)
    ),
    **every("nll_loss2d.default", call(F(4, 6, 2, 2), I(4, 2, 2), None, 2)),
    "shardwright.cross_entropy_sum": (
        call(F(8, 6), I(8)),
        call(F(4, 6, 2), I(4, 2), U(6), 3),
        call(F(6), I()),
        call(F(4, 6), U(4, 6), label_smoothing=0.1),
    ),
    "shardwright.nll_sum": (call(F(8, 6), I(8)), call(F(4, 6, 2), I(4, 2), U(6), 3)),
    "shardwright.count_targets": (call(I(8), None, 3), call(I(4, 6), U(6))),
    "shardwright.count_rows": (call(U(8, 6), 6), call(U(8, 6, 2), 6), call(U(6), 6)),
    "shardwright.update_running": (call(F(6), F(6), F(1, 6, 1), F(1, 6, 1), 0.1, 1.5),),
    "shardwright.increment": (call(F(), 1),),
    "shardwright.assign": (call(F(4), F(4)),),
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
    **every("randint_like.default", call(F(4, 6), 5)),
    **every("bernoulli.p", call(U(4, 6), 0.5)),
    **every("multinomial.default", call(U(4, 6), 2)),
    **every("normal_functional.default", call(F(4, 6))),
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
    **every("scatter.value", call(F(4, 6), 1, I(4, 2), 1.5)),
    **every(
        "scatter_add.default",
        call(F(4, 6), 1, I(4, 8), F(4, 8)),
        call(F(4, 6), 0, I(2, 2, high=4), F(2, 4)),
    ),
    **every("index_select.default", call(F(4, 6), 1, I(8)), call(F(6, 4, 2), 0, I(8))),
    **every("index_add.default", call(F(4, 6), 1, I(8), F(4, 8))),
    **every("index_copy.default", call(F(4, 6), 1, [0, 2], F(4, 2))),
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
        call(F(6, 4), [[0, 2, 3]], F(4)),
        call(F(4, 6), [None, [0, 1]], F(2)),
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
