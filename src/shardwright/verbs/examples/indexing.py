"""Example calls of indexing, gathering and scattering."""

from __future__ import annotations

from shardwright.verbs.examples.notation import B, D, F, I, K, L, U, call, every, fixed

EXAMPLES = {
    "shardwright.embedding_bags": (
        call(F(12, 6), I(8, high=12), L(0, 3, 3)),
        call(F(12, 6), I(8, high=12), L(0, 3, 5), mode=1, padding_idx=2),
        call(F(12, 6), I(8, high=12), L(0, 2, 8), U(8), include_last_offset=True),
    ),
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
    **every("affine_grid_generator.default", call(F(4, 2, 3), [4, 2, 6, 5], False)),
    **every("searchsorted.Tensor", call(L(-1, 0, 1), K(4, 6)), call(K(4, 5), K(4, 3))),
    "shardwright.max_unpool2d": (
        fixed((3, 5), call(F(4, 2, 3, 3), D(4, 2, 3, 3, high=25), [5, 5])),
    ),
    **every("take.default", call(F(4, 6), I(8, 2, high=4)), call(F(6), I(4, high=6))),
    **every("cartesian_prod.default", call([F(4), F(6)]), call([F(6), F(2), F(8)]), call([F(4)])),
    **every("bucketize.Tensor", call(F(4, 6), L(-1, 0, 1))),
    **every("isin.Tensor_Tensor", call(I(4, 6), L(0, 2)), call(I(4, 6), I(2, 3), invert=True)),
    **every("isin.Tensor_Scalar", call(I(4, 6), 2)),
    **every(
        "grid_sampler.default",
        call(F(2, 4, 5, 5), U(2, 6, 8, 2), 0, 0, False),
        call(F(2, 4, 3, 5, 5), U(2, 4, 6, 8, 3), 0, 1, True),
    ),
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
    **every(
        "index_reduce.default",
        call(F(4, 6), 1, I(8), F(4, 8), "amax"),
        call(F(4, 6), 1, I(8), F(4, 8), "mean", include_self=False),
        call(F(4, 6), 0, I(8, high=4), F(8, 6), "prod"),
    ),
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
        call(F(4, 6, 8), [B(4, 6)], F(8)),
        call(F(4, 6, 8), [B(4)], F()),
        call(F(4, 6), [B(4, 6)], F()),
        call(F(4, 6), [B(4, 6)], F(), True),
        call(F(4, 6, 8), [B(4)], F(6, 1)),
    ),
    **every("one_hot.default", call(I(4, 6), 5), call(I(4, 6))),
}
