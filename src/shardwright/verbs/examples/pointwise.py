"""Example calls of elementwise operators."""

from __future__ import annotations

from shardwright.verbs.examples.notation import B, C, F, I, K, U, call, every

EXAMPLES = {
    **every("angle.default real.default imag.default conj_physical.default", call(C(4, 6))),
    **every("special_expit.default special_erf.default", call(F(4, 6))),
    **every(
        """
        special_erfcx.default special_i0e.default special_i1.default special_i1e.default
        special_log_ndtr.default i0.default signbit.default isposinf.default isneginf.default
        """,
        call(F(4, 6)),
    ),
    **every("special_entr.default special_ndtri.default", call(U(4, 6))),
    **every("polygamma.default", call(1, U(4, 6))),
    **every("mvlgamma.default", call(U(4, 6), 1)),
    **every("copysign.Tensor special_xlog1py.default", call(F(4, 6), U(6))),
    **every("copysign.Scalar", call(F(4, 6), -2.0)),
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
    "shardwright.straight": (call(F(4, 6), F(4, 6)),),
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
        bitwise_right_shift.Tensor __lshift__.Tensor __rshift__.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor
        """,
        call(I(4, 6), I(6)),
    ),
    **every(
        """
        bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar bitwise_left_shift.Tensor_Scalar
        bitwise_right_shift.Tensor_Scalar __lshift__.Scalar __rshift__.Scalar __and__.Scalar __or__.Scalar __xor__.Scalar
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
    **every("rrelu.default", call(F(4, 6)), call(F(12), 0.1, 0.3)),
    **every("native_dropout.default", call(F(4, 6), 0.5, False)),
    **every("prelu.default", call(F(4, 6, 2), F(6)), call(F(4, 6), F(1))),
}
