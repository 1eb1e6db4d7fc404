"""Operators that make tensors. Fills can be made in pieces, sequences and random draws cannot."""

from __future__ import annotations

from shardwright.planner.space.iteration import Iteration
from shardwright.planner.space.rules.signature import (
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
        rand_like.default randn_like.default randint_like.default bernoulli.default bernoulli.p
        bernoulli.Tensor multinomial.default normal_functional.default
        """,
    ),
}
