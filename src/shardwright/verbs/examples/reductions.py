"""Example calls of reductions, scans and sorts."""

from __future__ import annotations

from shardwright.verbs.examples.notation import B, F, I, U, call, every, fixed

EXAMPLES = {
    **every(
        "pairwise_distance.default",
        call(F(4, 6), F(4, 6)),
        call(F(4, 3, 6), F(4, 3, 6), 1.0, keepdim=True),
    ),
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
    **every(
        "logsumexp.default special_logsumexp.default nanmean.default",
        call(F(4, 6), [1]),
        call(F(4, 6), [0], True),
    ),
    **every(
        "quantile.scalar nanquantile.scalar", call(F(4, 6), 0.3, 1), call(F(4, 6), 0.5, 0, True)
    ),
    **every(
        "quantile.default nanquantile.default",
        call(F(4, 6), U(3), 1),
        call(F(4, 6), U(), 0, True),
        call(F(2, 4, 6), U(3), -1, True),
        call(F(4, 6), U(3)),
    ),
    **every("nansum.default", call(F(4, 6)), call(F(2, 4, 6), [1], True), call(F(2, 4, 6), [0, 2])),
    **every("dist.default", call(F(4, 6), F(4, 6)), call(F(4, 6), F(6), 1.0)),
    **every(
        "trapezoid.x",
        call(F(4, 6), F(6)),
        call(F(4, 6), F(4, 6)),
        call(F(4, 6, 2), F(6), dim=1),
    ),
    **every(
        "cross.default linalg_cross.default", fixed((3,), call(F(4, 6, 3), F(4, 6, 3), dim=-1))
    ),
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
