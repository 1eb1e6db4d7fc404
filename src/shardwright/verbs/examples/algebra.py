"""Example calls of matrix products."""

from __future__ import annotations

from shardwright.verbs.examples.notation import F, I, L, call, every

EXAMPLES = {
    **every(
        "linear.default",
        call(F(4, 6, 8), F(12, 8), F(12)),
        call(F(4, 8), F(12, 8)),
        call(F(8), F(12, 8), F(12)),
        call(F(2, 4, 6, 8), F(12, 8)),
    ),
    "shardwright.linear_blocks": (
        call(F(4, 6, 8), F(3, 12, 8), F(3, 12)),
        call(F(4, 8), F(2, 12, 8)),
        call(F(4, 8), F(8, 3, 12), F(3, 12), rows=False),
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
    **every("addr.default", call(F(4, 6), F(4), F(6)), call(F(6), F(4), F(6), alpha=0.5)),
    **every(
        "inner.default",
        call(F(4, 6), F(8, 6)),
        call(F(2, 4, 6), F(3, 8, 6)),
        call(F(6), F(8, 6)),
        call(F(6), F(6)),
    ),
    **every(
        "tensordot.default",
        call(F(4, 6, 8), F(8, 6, 2), [1, 2], [1, 0]),
        call(F(4, 6), F(8, 6, 2), [-1], [1]),
        call(F(4, 6), F(8, 2), [], []),
        call(F(4, 6), F(4, 6), [0, 1], [0, 1]),
    ),
    "shardwright.kron": (
        call(F(4, 6), F(8, 2)),
        call(F(4, 1), F(8, 2)),
        call(F(6), F(4, 2)),
        call(F(4, 6, 2), F(8)),
    ),
    **every(
        "cdist.default",
        call(F(4, 3), F(6, 3)),
        call(F(2, 4, 3), F(2, 6, 3)),
        call(F(2, 4, 3), F(6, 3)),
    ),
    **every("bilinear.default", call(F(4, 6), F(4, 8), F(2, 6, 8), F(2))),
    "shardwright.grouped_product": (call(F(8, 4), F(3, 4, 6), I(8, high=3)),),
    "transformers.grouped_mm_fallback.default": (call(F(8, 4), F(3, 4, 6), L(2, 6, 8)),),
    **every("_grouped_mm.default", call(F(8, 4), F(3, 4, 6), L(2, 6, 8))),
}
