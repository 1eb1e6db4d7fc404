"""Example calls of normalisation layers."""

from __future__ import annotations

from shardwright.verbs.examples.notation import F, K, call, every

EXAMPLES = {
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
        call(F(4, 6, 3), F(6), F(6), K(6), K(6), True, 0.1, 1e-5, False),
        call(F(4, 6, 2, 8), F(6), F(6), K(6), K(6), False, 0.1, 1e-5, False),
        call(F(4, 6), None, None, None, None, True, 0.1, 1e-5, False),
    ),
    **every(
        "instance_norm.default",
        call(F(4, 6, 8), F(6), F(6), None, None, True, 0.1, 1e-5, False),
        call(F(4, 6, 8), F(6), F(6), K(6), K(6), False, 0.1, 1e-5, False),
    ),
    **every("renorm.default", call(F(4, 6), 2, 0, 1.0), call(F(4, 6, 8), 1, -2, 3.0)),
    **every("_weight_norm.default", call(F(4, 6, 2), F(4, 1, 1), 0), call(F(4, 6), F(1, 6), 1)),
}
