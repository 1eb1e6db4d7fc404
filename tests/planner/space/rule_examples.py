"""Example calls of every kind of operator that has a rule.

A call is written as the user would write it; ``F``, ``U``, ``I``, ``B`` stand for tensors: floats
of either sign, floats between 0 and 1, integers below ``high``, booleans; ``K`` is ``U`` where
torch has no gradient to give. Sizes are multiples of small numbers so that dims can be split, and
differ so that they cannot be confused.
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


def K(*shape: int) -> Drawn:
    return Drawn("constant", shape)


def I(*shape: int, high: int = 5) -> Drawn:  # noqa: E743
    return Drawn("integer", shape, high)


def B(*shape: int) -> Drawn:
    return Drawn("boolean", shape)


def C(*shape: int) -> Drawn:
    return Drawn("complex", shape)


def L(*values: int) -> Drawn:
    """A vector of given integers, where random ones would collide or not ascend."""
    return Drawn("given", values)


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
        detach.default lift_fresh_copy.default
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
        true_divide.Tensor
        """,
        call(F(4, 6), F(4, 6)),
        call(F(2, 4, 6), F(6)),
        call(F(4, 6), F(4, 1)),
        call(F(4, 6), 2),
    ),
    **every(
        """
        atan2.default clamp_max.Tensor clamp_min.Tensor
        fmax.default fmin.default fmod.Tensor  hypot.default logaddexp.default
        logaddexp2.default maximum.default minimum.default remainder.Tensor rsub.Tensor eq.Tensor
        ne.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor isclose.default logical_and.default
        logical_or.default logical_xor.default  complex.default polar.default
        clamp.Tensor
        """,
        call(F(4, 6), F(4, 6)),
        call(F(2, 4, 6), F(6)),
        call(F(4, 6), F(4, 1)),
    ),
    **every("max.other min.other", call(F(4, 6), F(6))),
    **every("clip.Tensor", call(F(4, 6), F(4, 1), F(6))),
    **every("divide.Tensor_mode", call(F(4, 6), F(4, 6), rounding_mode="trunc")),
    **every("divide.Scalar_mode", call(F(4, 6), 2.0, rounding_mode="floor")),
    **every("subtract.Scalar multiply.Scalar divide.Scalar true_divide.Scalar", call(F(4, 6), 2)),
    **every("remainder.Scalar_Tensor", call(2, K(4, 6))),
    **every("xlogy.Scalar_Other", call(F(4, 6), 2)),
    **every("xlogy.Scalar_Self", call(2, U(4, 6))),
    **every("fill.Scalar", call(F(4, 6), 2.0)),
    **every("fill.Tensor", call(F(4, 6), F())),
    **every(
        "floor_divide.default heaviside.default copy.default",
        call(K(4, 6), K(4, 6)),
        call(K(4, 6), K(6)),
    ),
    **every("floor_divide.Scalar", call(K(4, 6), 0.2)),
    **every("to.device", call(F(4, 6), "cpu", "float64")),
    **every("pow.Tensor_Tensor xlogy.Tensor", call(U(4, 6), U(4, 6)), call(U(4, 6), U(6))),
    **every(
        """
        add.Scalar sub.Scalar mul.Scalar div.Scalar rsub.Scalar fmod.Scalar remainder.Scalar
         pow.Tensor_Scalar eq.Scalar ne.Scalar ge.Scalar gt.Scalar le.Scalar
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
    **every(
        "cdist.default",
        call(F(4, 3), F(6, 3)),
        call(F(2, 4, 3), F(2, 6, 3)),
        call(F(2, 4, 3), F(6, 3)),
    ),
    **every("bilinear.default", call(F(4, 6), F(4, 8), F(2, 6, 8), F(2))),
    "transformers.grouped_mm_fallback.default": (call(F(8, 4), F(3, 4, 6), L(2, 6, 8)),),
    **every("_grouped_mm.default", call(F(8, 4), F(3, 4, 6), L(2, 6, 8))),
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
    **every("squeeze.default", call(F(4, 1, 2))),
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
    **every("unsafe_chunk.default unsafe_split.Tensor", call(F(4, 6), 2, 1)),
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
