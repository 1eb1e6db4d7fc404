"""Example calls of views, joins and cuts."""

from __future__ import annotations

from shardwright.planner.space.rules.examples.notation import C, F, call, every

EXAMPLES = {
    **every(
        "diagonal.default", call(F(4, 6, 6), 0, 1, 2), call(F(6, 4, 8), 1, -1, 0), call(F(4, 6))
    ),
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
