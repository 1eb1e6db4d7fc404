"""Operators that compute every element of the result from the elements at the same place."""

from __future__ import annotations

from shardwright.core.graph import DTYPE_BYTES, FLOATING
from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules.signature import (
    NotUnderstood,
    Rule,
    Signature,
    broadcast,
    broadcast_shape,
    family,
    numbered,
    space,
)


def pointwise(call: Signature, linear: tuple[int, ...] = ()) -> Iteration:
    """Split any dim of the result; an input that is broadcast along a dim lacks it."""
    full = broadcast_shape((*call.inputs, call.outputs[0]))
    if any(shape != full for shape in call.outputs):
        raise NotUnderstood(f"{call.kind}: outputs {call.outputs}")
    names = numbered(len(full))
    inputs = [broadcast(shape, names, full) for shape in call.inputs]
    return space(call, inputs, [names] * len(call.outputs), linear=linear)


def first_is_linear(call: Signature) -> Iteration:
    """Pointwise, and partial sums pass through the first input (``x * constant``)."""
    return pointwise(call, (0,))


def sum_is_linear(call: Signature) -> Iteration:
    """Pointwise, and partial sums pass when both terms are tensors of partial sums."""
    return pointwise(call, (0, 1) if len(call.inputs) > 1 else ())


def cast(call: Signature) -> Iteration:
    """Change the dtype: partial sums pass only where that rounds nothing."""
    before, after = call.dtypes[0], call.dtypes[-1]
    widens = {before, after} <= FLOATING and DTYPE_BYTES[before] < DTYPE_BYTES[after]
    return pointwise(call, (0,) if before == after or widens else ())


def dropout(call: Signature) -> Iteration:
    """Split any dim: each piece draws its own mask."""
    is_identity = call.attribute("train") is False or call.attribute("p") == 0
    return pointwise(call, (0,) if is_identity else ())


def feature_dropout(call: Signature) -> Iteration:
    """Split over samples and channels: a channel is dropped as one."""
    names = numbered(len(call.outputs[0]))
    names = names[:2] + ("",) * len(names[2:])
    return space(call, [names], [names])


def like_first(call: Signature) -> Iteration:
    """Follow the first input; the others only lend dtype, device or shape (``type_as``)."""
    full = call.outputs[0]
    names = numbered(len(full))
    inputs = [names if shape == full else ("",) * len(shape) for shape in call.inputs]
    return space(call, inputs, [names] * len(call.outputs))


def parametric_relu(call: Signature) -> Iteration:
    """Follow the input; the slope is one number or one per channel (dim 1)."""
    full = call.outputs[0]
    names = numbered(len(full))
    slope = call.inputs[1]
    per_channel = len(full) > 1 and slope == full[1:2]
    return space(call, [names, names[1:2] if per_channel else ("",) * len(slope)], [names])


RULES: dict[str, Rule] = {
    **family(
        pointwise,
        """
        abs.default absolute.default acos.default acosh.default asin.default asinh.default
        atan.default atanh.default atan2.default ceil.default celu.default clamp.default
        clamp.Tensor clamp_max.default clamp_max.Tensor clamp_min.default clamp_min.Tensor
        clip.default cos.default cosh.default deg2rad.default digamma.default elu.default
        erf.default erfc.default erfinv.default exp.default exp2.default expm1.default
        floor.default floor_divide.default floor_divide.Scalar fmax.default fmin.default
        fmod.Scalar fmod.Tensor frac.default gelu.default hardshrink.default hardsigmoid.default
        hardswish.default hardtanh.default heaviside.default hypot.default leaky_relu.default
        lgamma.default log.default log10.default log1p.default log2.default log_sigmoid.default
        logaddexp.default logaddexp2.default logit.default maximum.default minimum.default
        mish.default nan_to_num.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
        reciprocal.default relu.default relu6.default remainder.Scalar remainder.Tensor
        round.default round.decimals rsqrt.default rsub.Scalar rsub.Tensor selu.default sgn.default
        sigmoid.default sign.default silu.default sin.default sinc.default sinh.default
        softplus.default softshrink.default sqrt.default square.default tan.default tanh.default
        threshold.default trunc.default xlogy.Tensor div.Tensor_mode div.Scalar_mode add.Scalar
        sub.Scalar eq.Scalar eq.Tensor ne.Scalar ne.Tensor ge.Scalar ge.Tensor gt.Scalar gt.Tensor
        le.Scalar le.Tensor lt.Scalar lt.Tensor isclose.default isfinite.default isinf.default
        isnan.default logical_and.default logical_not.default logical_or.default
        logical_xor.default bitwise_and.Scalar bitwise_and.Tensor bitwise_left_shift.Tensor
        bitwise_left_shift.Tensor_Scalar bitwise_not.default bitwise_or.Scalar bitwise_or.Tensor
        bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar
        bitwise_xor.Tensor __and__.Scalar __and__.Tensor __or__.Scalar __or__.Tensor __xor__.Scalar
        __xor__.Tensor __lshift__.Scalar __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor where.self where.Scalar where.ScalarOther where.ScalarSelf
        masked_fill.Scalar max.other min.other clip.Tensor divide.Tensor_mode divide.Scalar_mode
        subtract.Scalar remainder.Scalar_Tensor xlogy.Scalar_Other xlogy.Scalar_Self fill.Scalar
        masked_fill.Tensor addcdiv.default addcmul.default lerp.Scalar lerp.Tensor copy.default
        angle.default real.default imag.default conj_physical.default special_expit.default
        special_erf.default special_entr.default special_erfcx.default special_i0e.default
        special_i1.default special_i1e.default special_log_ndtr.default special_ndtri.default
        special_xlog1py.default i0.default polygamma.default mvlgamma.default copysign.Tensor
        copysign.Scalar signbit.default isposinf.default isneginf.default
        fill.Tensor polar.default complex.default zeros_like.default ones_like.default
        full_like.default empty_like.default
        """,
    ),
    **family(
        first_is_linear,
        """
        mul.Tensor mul.Scalar div.Tensor div.Scalar multiply.Tensor multiply.Scalar divide.Scalar
        true_divide.Scalar divide.Tensor true_divide.Tensor neg.default negative.default
        positive.default clone.default contiguous.default alias.default detach.default
        lift_fresh_copy.default
        """,
    ),
    **family(sum_is_linear, "add.Tensor sub.Tensor subtract.Tensor"),
    **family(cast, "to.dtype to.dtype_layout to.device _to_copy.default"),
    **family(like_first, "type_as.default to.other"),
    "shardwright.straight": pointwise,
    **family(dropout, "dropout.default native_dropout.default alpha_dropout.default rrelu.default"),
    **family(feature_dropout, "feature_dropout.default"),
    **family(parametric_relu, "prelu.default"),
}
