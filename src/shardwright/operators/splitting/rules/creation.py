"""Operators that make tensors. Fills can be made in pieces, and so can draws that follow a tensor: each
piece draws its own, as dropout does. Sequences and draws of a given shape cannot."""

from __future__ import annotations

from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules.pointwise import pointwise
from shardwright.operators.splitting.rules.signature import (
    Rule,
    Signature,
    family,
    numbered,
    space,
    whole,
)


def fill(call: Signature) -> Iteration:
    """Fill every element with one number; an input only lends its dtype."""
    names = numbered(len(call.outputs[0]))
    full = call.outputs[0]
    inputs = [names if shape == full else ("",) * len(shape) for shape in call.inputs]
    return space(call, inputs, [names])


RULES: dict[str, Rule] = {
    **family(
        fill,
        """
        zeros.default ones.default full.default empty.memory_format new_zeros.default
        new_ones.default new_full.default new_empty.default
        """,
    ),
    **family(
        whole,
        """
        arange.default arange.start arange.start_step linspace.default scalar_tensor.default
        eye.default eye.m rand.default randn.default randint.default randint.low randperm.default
        multinomial.default tril_indices.default triu_indices.default hann_window.default
        hann_window.periodic hamming_window.default blackman_window.default
        """,
    ),
    **family(
        pointwise,
        """
        rand_like.default randn_like.default randint_like.default randint_like.low_dtype
        bernoulli.default bernoulli.p bernoulli.Tensor normal_functional.default
        exponential.default cauchy.default geometric.default log_normal.default uniform.default
        """,
    ),
}
