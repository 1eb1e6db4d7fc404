"""``as_strided``, which reads memory as it lies, as a choice of elements by number.

Shards do not lie in memory as the whole tensor does, nor do results of another kernel, so that an operator
by strides would read other elements there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardwright.runtime.capture.record import Unsupported, aten

Make = Callable[..., fx.Node]


def picked(module: fx.GraphModule) -> fx.GraphModule:
    """Replace ``as_strided`` in an exported graph, sample by sample where it stays within samples.

    Raises Unsupported where elements lie apart, or where something is written that it shares memory with.
    """
    for node in list(module.graph.nodes):
        if node.target is aten.as_strided.default:
            _replace(module.graph, node)
    return module


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    source, size, stride, first = _asked(node)
    seen: torch.Tensor = source.meta["val"]

    def make(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta = {key: one for key, one in node.meta.items() if key != "val"}
        return made

    dims = list(zip(size, stride, strict=True))
    is_by_sample = _stays_in_samples(seen, dims, first)
    with graph.inserting_before(node):
        shape = [seen.shape[0], seen.stride(0)] if is_by_sample else [seen.numel()]
        flat = make(aten.reshape.default, source, shape)
        positions = _positions(make, first, dims[1:] if is_by_sample else dims)
        found = make(aten.index_select.default, flat, len(shape) - 1, positions)
        result = make(aten.reshape.default, found, size)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _stays_in_samples(tensor: torch.Tensor, dims: list[tuple[int, int]], first: int) -> bool:
    """Whether the first dim counts samples before and after, and each is read for itself."""
    if not dims or not tensor.dim() or dims[0] != (tensor.shape[0], tensor.stride(0)):
        return False
    return first + sum((count - 1) * step for count, step in dims[1:]) < tensor.stride(0)


def _asked(node: fx.Node) -> tuple[fx.Node, list[int], list[int], int]:
    """Return a call's tensor, sizes and strides, and where it begins within the tensor."""
    names = ("self", "size", "stride", "storage_offset")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    source, offset = given["self"], given.get("storage_offset")
    seen: torch.Tensor = source.meta["val"]
    first = 0 if offset is None else offset - seen.storage_offset()
    size, stride = list(given["size"]), list(given["stride"])
    if not seen.is_contiguous() or not all(type(one) is int for one in (first, *size, *stride)):
        raise Unsupported("as_strided of a tensor whose elements lie apart")
    if _is_written(source) or _is_written(node):
        raise Unsupported("as_strided of a tensor that is written")
    return source, size, stride, first


def _positions(make: Make, first: int, dims: list[tuple[int, int]]) -> fx.Node:
    """Return the numbers of the elements, in order."""
    total = make(aten.arange.default, 1, device=torch.device("cpu"), pin_memory=False)
    total = make(aten.add.Scalar, total, first)
    for place, (count, step) in enumerate(dims):
        along = make(aten.arange.default, count, device=torch.device("cpu"), pin_memory=False)
        along = make(aten.mul.Scalar, along, step)
        shape = [count, *[1] * (len(dims) - 1 - place)]
        total = make(aten.add.Tensor, total, make(aten.reshape.default, along, shape))
    return make(aten.reshape.default, total, [-1])


def _is_written(node: fx.Node) -> bool:
    """Whether a tensor is written anywhere in its graph, through views or not."""
    for user in node.users:
        target = user.target
        if isinstance(target, torch._ops.OpOverload):
            writes = target._schema.is_mutable and user.args and user.args[0] is node
            if writes or (target.is_view and _is_written(user)):
                return True
    return False
