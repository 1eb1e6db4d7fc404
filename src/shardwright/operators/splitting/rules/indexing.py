"""Operators that pick or place elements by index. A dim that is looked up stays whole."""

from __future__ import annotations

from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules.notation import equation
from shardwright.operators.splitting.rules.signature import (
    NotUnderstood,
    Rule,
    Signature,
    blank,
    broadcast,
    broadcast_shape,
    family,
    leading,
    numbered,
    space,
)

_EMBEDDING = "weight v d, indices b.. -> b.. d"


def embedding(call: Signature) -> Iteration:
    """Look rows up; a piece of the vocabulary ``v`` gives zero rows for what it does not hold."""
    if call.attribute("scale_grad_by_freq") is True:
        return equation("weight _ d, indices _.. -> _.. d")(call)
    if call.integer("padding_idx", -1) >= 0:  # the padding row's index would have to be shifted
        return equation("weight _ d, indices b.. -> b.. d")(call)
    return equation(_EMBEDDING, offset="v")(call)


def rowwise(call: Signature) -> Iteration:
    """Split the rows of a module that computes each by itself: the first dim of all results, and of the
    inputs numbered in ``rows``."""
    rows = call.integers("rows")
    inputs = [
        ("r" if place in rows else "", *[""] * (len(shape) - 1)) if shape else ()
        for place, shape in enumerate(call.inputs)
    ]
    return space(call, inputs, [("r", *[""] * (len(shape) - 1)) for shape in call.outputs])


def gather(call: Signature) -> Iteration:
    """Pick along ``dim``: the picks ``i`` split, and other dims which the index covers."""
    picked, index = call.inputs
    dim = call.tensor_dim("dim")
    names = numbered(len(index))
    partial = {at for at, size in enumerate(index) if at != dim and picked[at] != size}
    of_index = tuple("i" if at == dim else name for at, name in enumerate(blank(names, partial)))
    return space(call, [blank(names, partial | {dim}), of_index], [of_index])


def scatter(call: Signature) -> Iteration:
    """Place along ``dim``: other dims split where index and values cover them whole."""
    names = numbered(len(call.inputs[0]))
    dim = call.tensor_dim("dim")
    columns = zip(*call.inputs, strict=True)
    partial = {at for at, sizes in enumerate(columns) if len(set(sizes)) > 1}
    kept = blank(names, partial | {dim})
    # Adding is linear in what is added to and in what is added; the index is between them.
    linear = (0, 2) if call.kind == "aten.scatter_add.default" else ()
    return space(call, [kept] * len(call.inputs), [kept], linear=linear)


def index_select(call: Signature) -> Iteration:
    """Pick along ``dim`` by a vector: the picks ``i`` split, and all other dims."""
    dim = call.tensor_dim("dim")
    names = numbered(len(call.inputs[0]))
    result = tuple("i" if at == dim else name for at, name in enumerate(names))
    return space(call, [blank(names, {dim}), ("i",) * len(call.inputs[1])], [result])


def index_place(call: Signature) -> Iteration:
    """Place, add or reduce along ``dim`` by a vector: all other dims split."""
    kept = blank(numbered(len(call.inputs[0])), {call.tensor_dim("dim")})
    inputs = [kept, ("",), *([kept] * (len(call.inputs) - 2))]
    if len(call.inputs) > 2 and len(call.inputs[2]) != len(kept):
        raise NotUnderstood(f"{call.kind} of a scalar")
    return space(call, inputs, [kept], linear=(0, 2) if "index_add" in call.kind else ())


def index(call: Signature) -> Iteration:
    """Pick by tensors ``x[i, :, j]``: the index tensors' own dims split, and dims not indexed."""
    at, free, full = _indexed(call)
    picks = numbered(len(full), "i")
    is_run = at == tuple(range(at[0], at[-1] + 1))
    first = at[0] if is_run else 0
    rest = tuple(name for name in free if name)
    inputs = [free, *(broadcast(shape, picks, full) for shape in call.inputs[1:])]
    return space(call, inputs, [(*rest[:first], *picks, *rest[first:])])


def index_put(call: Signature) -> Iteration:
    """Place by tensors ``x[i, j] = values``: dims behind the indexed ones split.

    Where one mask of the leading dims says where, all dims split.
    """
    if call.dtypes[1] == "bool":
        return _masked(call)
    at, free, full = _indexed(call)
    if at != tuple(range(len(at))):
        raise NotUnderstood("an index in the middle")
    values = call.shape_of("values")
    whole_values = full + tuple(call.inputs[0][len(at) :])
    names = ("",) * len(full) + free[len(at) :]
    inputs = [
        broadcast(shape, names, whole_values) if name == "values" else ("",) * len(shape)
        for name, shape in zip(call.names[1:], call.inputs[1:], strict=True)
    ]
    is_sum = call.attribute("accumulate") is True and values == whole_values
    linear = (0, call.position("values")) if is_sum else ()
    return space(call, [free, *inputs], [free], linear=linear)


def _masked(call: Signature) -> Iteration:
    """``x[mask] = values``, as many values as dims behind the mask: the same at every place of it."""
    if call.names[1:] != ("indices.0", "values"):
        raise NotUnderstood("more than one mask")
    full, mask, values = call.inputs
    names = numbered(len(full))
    behind = full[len(mask) :]
    if mask != full[: len(mask)] or len(values) > len(behind):
        raise NotUnderstood("a value for every place, as many as the mask is true")
    given = broadcast(values, names[len(mask) :], behind)
    return space(call, [names, names[: len(mask)], given], [names])


def _indexed(call: Signature) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]:
    """Return the indexed dims, the names of dims with those blanked, and the index shape."""
    positions = [at for at, name in enumerate(call.names) if name.startswith("indices.")]
    if not positions or any(call.dtypes[at] not in ("int64", "int32") for at in positions):
        raise NotUnderstood("a mask decides the shape")
    at = tuple(int(call.names[position].partition(".")[2]) for position in positions)
    free = blank(numbered(len(call.inputs[0])), at)
    return at, free, broadcast_shape(call.inputs[position] for position in positions)


def pairs(call: Signature) -> Iteration:
    """All ways to take an element of each: those of the first are far apart, the others' are not."""
    others = [("",)] * (len(call.inputs) - 1)
    return space(call, [("n",), *others], [("n", "")[: len(call.outputs[0])]])


def one_hot(call: Signature) -> Iteration:
    """Split the index's dims; the classes are a new last dim."""
    if call.integer("num_classes", -1) < 0:
        raise NotUnderstood("the data decide the number of classes")
    names = leading(len(call.inputs[0]))
    return space(call, [names], [(*names, "")])


def embedding_bags(call: Signature) -> Iteration:
    """Fold bags: each column by itself; where a bag begins says nothing about its neighbours' rows."""
    others = [("",) * len(shape) for shape in call.inputs[1:]]
    return space(call, [("", "d"), *others], [("", "d")])


def searchsorted(call: Signature) -> Iteration:
    """Find places in one row, or for every row in its own."""
    own = "sorted_sequence b.. _, self b.. m -> b.. m"
    return equation(own if len(call.inputs[0]) > 1 else "sorted_sequence _, self b.. -> b..")(call)


def grid_sampler(call: Signature) -> Iteration:
    """Look up points of pictures or of volumes: each of what was asked for by itself, in all that there is."""
    is_volume = len(call.inputs[0]) > 4
    every, points = ("_ _ _", "d h w") if is_volume else ("_ _", "h w")
    return equation(f"input n c {every}, grid n {points} _ -> n c {points}")(call)


RULES: dict[str, Rule] = {
    "shardwright.embedding_bags": embedding_bags,
    "aten.embedding.default": embedding,
    "aten.affine_grid_generator.default": equation("theta n _ _ -> n _.."),
    "aten.searchsorted.Tensor": searchsorted,
    "shardwright.max_unpool2d": equation("input n c _ _, indices n c _ _ -> n c _ _"),
    "aten.bucketize.Tensor": equation("self b.., boundaries _ -> b.."),
    "aten.isin.Tensor_Tensor": equation("elements b.., test_elements _.. -> b.."),
    "aten.isin.Tensor_Scalar": equation("elements b.. -> b.."),
    "aten.grid_sampler.default": grid_sampler,
    "aten.gather.default": gather,
    **family(
        scatter,
        """
        scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add.default
        scatter_reduce.two
        """,
    ),
    "aten.index_select.default": index_select,
    **family(
        index_place,
        """
        index_add.default index_copy.default index_reduce.default index_fill.int_Scalar
        index_fill.int_Tensor
        """,
    ),
    "aten.index.Tensor": index,
    "aten.take.default": equation("self _.., index b.. -> b..", linear="self"),
    "aten.cartesian_prod.default": pairs,
    "aten.index_put.default": index_put,
    "aten.one_hot.default": one_hot,
}
