"""Example calls of operators that make tensors."""

from __future__ import annotations

from shardwright.verbs.examples.notation import F, K, U, call, every

EXAMPLES = {
    **every("tril_indices.default triu_indices.default", call(4, 6)),
    **every("hann_window.default hamming_window.default blackman_window.default", call(6)),
    **every("hann_window.periodic", call(6, False)),
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
    **every("randint_like.low_dtype", call(K(4, 6), 2, 5)),
    **every("bernoulli.Tensor", call(K(4, 6), K(6))),
    **every("bernoulli.p", call(K(4, 6), 0.5)),
    **every("multinomial.default", call(U(4, 6), 2)),
    **every("exponential.default cauchy.default log_normal.default uniform.default", call(K(4, 6))),
    **every("geometric.default", call(K(4, 6), 0.5)),
    **every("normal_functional.default", call(K(4, 6))),
}
