"""Operators that only move elements: reshapes, transpositions, slices, joins and repeats.

All are linear, so partial sums pass through them.
"""

from __future__ import annotations

from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules.notation import equation
from shardwright.operators.splitting.rules.signature import (
    Names,
    NotUnderstood,
    Rule,
    Shape,
    Signature,
    blank,
    broadcast,
    family,
    numbered,
    space,
    whole,
    without,
)


def reshape(call: Signature) -> Iteration:
    """Match factors: the leading dim of each group of merged or divided dims can be split."""
    before, after = match_factors(call.inputs[0], call.outputs[0])
    return space(
        call, [before, *[("",) * len(shape) for shape in call.inputs[1:]]], [after], linear=(0,)
    )


def match_factors(before: Shape, after: Shape) -> tuple[Names, Names]:
    """Name dims of equal-sized runs of ``before`` and ``after`` alike, by the dim of ``after``.

    Walks both shapes from the front and closes a group whenever the products agree. The leading
    dims of a group cut the same contiguous pieces, for every number of pieces that divides both.
    """
    names_before, names_after = [""] * len(before), [""] * len(after)
    if 0 in before:
        return tuple(names_before), tuple(names_after)
    left = [dim for dim, size in enumerate(before) if size > 1]
    right = [dim for dim, size in enumerate(after) if size > 1]
    while left and right:
        names_before[left[0]] = names_after[right[0]] = f"d{right[0]}"
        product_left, product_right = before[left.pop(0)], after[right.pop(0)]
        while product_left != product_right:
            if product_left < product_right:
                product_left *= before[left.pop(0)]
            else:
                product_right *= after[right.pop(0)]
    return tuple(names_before), tuple(names_after)


def permute(call: Signature) -> Iteration:
    """Follow every dim to its new place."""
    rank = len(call.inputs[0])
    names = numbered(rank)
    after = numbered(rank)
    family = call.kind.split(".")[1].rstrip("_")
    if family == "permute":
        after = tuple(names[dim] for dim in call.integers("dims"))
    elif family == "movedim":
        after = _moved(names, call.integers("source"), call.integers("destination"))
    elif rank > 1:
        swapped = [*names]
        first, second = _swapped_dims(call, family, rank)
        swapped[first], swapped[second] = names[second], names[first]
        after = tuple(swapped) if family != "numpy_T" else names[::-1]
    return space(call, [names], [after], linear=(0,))


def _swapped_dims(call: Signature, family: str, rank: int) -> tuple[int, int]:
    if family in ("t", "mT", "mH", "matrix_H", "adjoint", "numpy_T"):
        return rank - 2, rank - 1
    pair = ("axis0", "axis1") if family == "swapaxes" else ("dim0", "dim1")
    return call.tensor_dim(pair[0]), call.tensor_dim(pair[1])


def _moved(names: Names, sources: tuple[int, ...], targets: tuple[int, ...]) -> Names:
    rank = len(names)
    placed = {
        target % rank: names[source % rank] for source, target in zip(sources, targets, strict=True)
    }
    rest = iter([name for name in names if name not in placed.values()])
    return tuple(placed[dim] if dim in placed else next(rest) for dim in range(rank))


def expand(call: Signature) -> Iteration:
    """Split any dim of the result; the input lacks those along which it is repeated."""
    full = call.outputs[0]
    names = numbered(len(full))
    inputs = [broadcast(call.inputs[0], names, full), *_like_output(call, names)]
    return space(call, inputs, [names], linear=(0,))


def view_like(call: Signature) -> Iteration:
    """Reshape to the shape of another tensor, which is split as the result is."""
    before, after = match_factors(call.inputs[0], call.outputs[0])
    return space(call, [before, *_like_output(call, after)], [after], linear=(0,))


def squeeze(call: Signature) -> Iteration:
    """Drop dims of size 1. A named dim that is larger stays only as long as nobody splits it."""
    shape = call.inputs[0]
    names = numbered(len(shape))
    listed = {dim % max(len(shape), 1) for dim in call.integers("dim")}
    gone = {dim for dim in listed if shape and shape[dim] == 1}
    kept = blank(names, listed)
    return space(call, [kept], [without(kept, gone)], linear=(0,))


def unsqueeze(call: Signature) -> Iteration:
    """Insert a dim of size 1."""
    names = numbered(len(call.inputs[0]))
    dim = call.tensor_dim("dim", rank=len(names) + 1)
    return space(call, [names], [(*names[:dim], "", *names[dim:])], linear=(0,))


def slice_dim(call: Signature) -> Iteration:
    """Split every dim but the sliced one, unless the slice takes all of it."""
    names = numbered(len(call.inputs[0]))
    dim = call.tensor_dim("dim", 0)
    start, end = call.attribute("start"), call.attribute("end")
    reaches_end = end is None or (isinstance(end, int) and end >= call.inputs[0][dim])
    takes_all = start in (None, 0) and reaches_end and call.integer("step", 1) == 1
    names = names if takes_all else blank(names, {dim})
    return space(call, [names], [names], linear=(0,))


def keep_dim(call: Signature) -> Iteration:
    """Split every dim but ``dim``, which all tensors have (cat, split, chunk, narrow ...)."""
    names = blank(numbered(len(call.inputs[0])), {call.tensor_dim("dim", 0)})
    linear = tuple(range(len(call.inputs)))
    return space(call, [names] * len(call.inputs), [names] * len(call.outputs), linear=linear)


def unfold(call: Signature) -> Iteration:
    """Split every dim but the one cut into windows; the windows make a new last dim."""
    names = blank(numbered(len(call.inputs[0])), {call.tensor_dim("dimension")})
    return space(call, [names], [(*names, "")], linear=(0,))


def remove_dim(call: Signature) -> Iteration:
    """Split every dim but ``dim``, which the results lack (select, unbind)."""
    names = numbered(len(call.inputs[0]))
    dim = call.tensor_dim("dim", 0)
    kept = without(names, {dim})
    return space(call, [blank(names, {dim})], [kept] * len(call.outputs), linear=(0,))


def stack(call: Signature) -> Iteration:
    """Split every dim but the new one."""
    names = numbered(len(call.outputs[0]))
    dim = call.tensor_dim("dim", 0, rank=len(names))
    inputs = [without(names, {dim})] * len(call.inputs)
    return space(call, inputs, [blank(names, {dim})], linear=tuple(range(len(inputs))))


def replace_slice(call: Signature) -> Iteration:
    """Split every dim but ``dim`` (slice_scatter; with an index, ``src`` lacks it)."""
    names = numbered(len(call.inputs[0]))
    dim = call.tensor_dim("dim", 0)
    kept = blank(names, {dim})
    source = kept if call.attribute("index") is None else without(names, {dim})
    return space(call, [kept, source], [kept], linear=(0, 1))


def pad(call: Signature) -> Iteration:
    """Split the dims that are not padded; only zeros keep a sum of partial results right."""
    names = numbered(len(call.inputs[0]))
    widths = call.integers("pad")
    ends = range(0, len(widths), 2)
    padded = {len(names) - 1 - end // 2 for end in ends if any(widths[end : end + 2])}
    kept = blank(names, padded)
    is_constant = call.attribute("mode", "constant") == "constant"
    adds = is_constant and call.attribute("value") not in (None, 0, 0.0, False)
    return space(call, [kept], [kept], linear=() if adds else (0,))


def repeat(call: Signature) -> Iteration:
    """Split the dims that are repeated once."""
    times = call.integers("repeats") or call.integers("dims")
    names = numbered(len(call.outputs[0]))
    new = len(names) - len(call.inputs[0])
    if new < 0:
        raise NotUnderstood("fewer repeats than dims")
    times = (1,) * (len(names) - len(times)) + times
    kept = blank(names, {dim for dim, count in enumerate(times) if count != 1})
    return space(call, [kept[new:]], [kept], linear=(0,))


def repeat_interleave(call: Signature) -> Iteration:
    """Split any dim: copies stay next to their original. Without ``dim`` the tensor is flat.

    Where the output's size along ``dim`` is an argument, that dim stays whole.
    """
    names = numbered(len(call.inputs[0]))
    is_flat = call.attribute("dim") is None
    if call.attribute("output_size") is not None:
        if is_flat:
            raise NotUnderstood("the output size is fixed")
        names = blank(names, {call.tensor_dim("dim")})
    after = names[:1] if is_flat else names
    before = names[:1] + ("",) * len(names[1:]) if is_flat else names
    return space(call, [before], [after], linear=(0,))


def shift(call: Signature) -> Iteration:
    """Split the dims that are neither rolled nor flipped."""
    names = numbered(len(call.inputs[0]))
    moved = {dim % max(len(names), 1) for dim in call.integers("dims")}
    if not moved:
        raise NotUnderstood("the tensor is rolled as if flat")
    kept = blank(names, moved)
    return space(call, [kept], [kept], linear=(0,))


def triangle(call: Signature) -> Iteration:
    """Split all but the last two dims."""
    names = numbered(len(call.inputs[0]))
    kept = blank(names, range(len(names) - 2, len(names)))
    return space(call, [kept], [kept], linear=(0,))


def pixel_shuffle(call: Signature) -> Iteration:
    """Split samples, channels (their leading factor) and both directions of the image."""
    rank = len(call.inputs[0])
    names = (*numbered(rank - 3), "c", "h", "w")
    return space(call, [names], [names], linear=(0,))


def complex_pairs(call: Signature) -> Iteration:
    """Split all but the last dim of the real tensor, which holds real and imaginary parts."""
    rank = min(len(call.inputs[0]), len(call.outputs[0]))
    names = numbered(rank)
    shapes = (*call.inputs, *call.outputs)
    before, after = (names + ("",) * (len(shape) - rank) for shape in shapes)
    return space(call, [before], [after], linear=(0,))


def turn(call: Signature) -> Iteration:
    """Split the dims that are not turned into each other."""
    rank = len(call.inputs[0])
    turned = {dim % rank for dim in call.integers("dims") or (0, 1)}
    names = blank(numbered(rank), turned)
    return space(call, [names], [names], linear=(0,))


def meshgrid(call: Signature) -> Iteration:
    """Let each input vary along its own dim of every result."""
    if call.attribute("indexing", "ij") != "ij" or any(len(s) != 1 for s in call.inputs):
        raise NotUnderstood("meshgrid other than ij")
    names = numbered(len(call.inputs))
    return space(call, [(name,) for name in names], [names] * len(call.outputs))


def _like_output(call: Signature, names: Names) -> list[Names]:
    """Name further inputs that only lend their shape."""
    full = call.outputs[0]
    return [names if shape == full else ("",) * len(shape) for shape in call.inputs[1:]]


RULES: dict[str, Rule] = {
    **family(
        reshape,
        """
        view.default reshape.default _unsafe_view.default flatten.using_ints unflatten.int
        ravel.default
        """,
    ),
    **family(
        permute,
        """
        permute.default transpose.int swapaxes.default swapdims.default movedim.int movedim.intlist
        t.default numpy_T.default mT.default mH.default matrix_H.default adjoint.default
        """,
    ),
    **family(expand, "expand.default expand_as.default"),
    **family(view_like, "view_as.default reshape_as.default"),
    **family(squeeze, "squeeze.dim squeeze.dims"),
    # It would also drop a dim of which a piece has only one entry.
    "aten.squeeze.default": whole,
    "aten.unsqueeze.default": unsqueeze,
    "aten.slice.Tensor": slice_dim,
    **family(
        keep_dim,
        """
        cat.default concat.default concatenate.default split.Tensor split.sizes
        split_with_sizes.default chunk.default unsafe_chunk.default unsafe_split.Tensor
        tensor_split.sections tensor_split.indices narrow.default
        """,
    ),
    "aten.unfold.default": unfold,
    **family(remove_dim, "select.int unbind.int"),
    "aten.stack.default": stack,
    **family(replace_slice, "slice_scatter.default select_scatter.default"),
    "shardwright.place_slice": replace_slice,
    **family(pad, "pad.default constant_pad_nd.default"),
    **family(repeat, "repeat.default tile.default"),
    "aten.repeat_interleave.self_int": repeat_interleave,
    **family(shift, "roll.default flip.default"),
    **family(triangle, "tril.default triu.default"),
    **family(pixel_shuffle, "pixel_shuffle.default pixel_unshuffle.default"),
    **family(complex_pairs, "view_as_complex.default view_as_real.default"),
    "aten.channel_shuffle.default": equation("self n _ _.. -> n _ _..", linear="self"),
    "aten.rot90.default": turn,
    "shardwright.as_complex": complex_pairs,
    "aten.meshgrid.default": meshgrid,
    "aten.meshgrid.indexing": meshgrid,
}
