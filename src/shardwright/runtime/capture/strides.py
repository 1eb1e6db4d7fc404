"""``as_strided``, which reads memory as it lies, as a choice of elements by number.

Shards do not lie in memory as the whole tensor does, nor do results of another kernel, so that an operator
by strides would read other elements there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardwright.runtime.capture.record import Unsupported, aten

Make = Callable[..., fx.Node]


def picked(module: fx.GraphModule) -> fx.GraphModule:
    """Replace ``as_strided`` in an exported graph, along the dims alone that it does not read as they are.

    Raises Unsupported where elements lie apart, or where something is written that it shares memory with.
    """
    for node in list(module.graph.nodes):
        if node.target is aten.as_strided.default:
            _replace(module.graph, node)
    return module


@dataclass(frozen=True)
class _Reading:
    """Which dims of a tensor are read as they are, by the result's dims that read them; all ``others`` of the tensor, from
    the widest step to the narrowest, lie in memory like one whose steps are ``unit``."""

    kept: dict[int, int]
    others: list[int]
    unit: int


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    source, size, stride, first = _asked(node)
    seen: torch.Tensor = source.meta["val"]
    dims = list(zip(size, stride, strict=True))
    reading = _reading(seen, dims, first)
    rest = sorted({*range(len(size))} - {*reading.kept})

    def make(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta = {key: one for key, one in node.meta.items() if key != "val"}
        return made

    with graph.inserting_before(node):
        kept = [seen.shape[dim] for dim in reading.kept.values()]
        laid = _turned(make, source, [*reading.kept.values(), *reading.others])
        flat = make(aten.reshape.default, laid, [*kept, seen.numel() // math.prod(kept)])
        steps = [(dims[place][0], dims[place][1] // reading.unit) for place in rest]
        positions = _positions(make, first // reading.unit, steps)
        found = make(aten.index_select.default, flat, len(kept), positions)
        made = make(aten.reshape.default, found, [*kept, *(size[place] for place in rest)])
        places = [*reading.kept, *rest]
        result = _turned(make, made, [places.index(place) for place in range(len(size))])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _turned(make: Make, tensor: fx.Node, order: list[int]) -> fx.Node:
    """Return a tensor with its dims in another order."""
    return tensor if order == sorted(order) else make(aten.permute.default, tensor, order)


def _reading(tensor: torch.Tensor, dims: list[tuple[int, int]], first: int) -> _Reading:
    """Return how a tensor is read: as many dims as may be as they are. Raises Unsupported where others lie apart."""
    for kept in _choices(_alike(tensor, dims)):
        steps = [one for place, one in enumerate(dims) if place not in kept]
        others = sorted(
            set(range(tensor.dim())) - set(kept.values()), key=lambda dim: -tensor.stride(dim)
        )
        unit = _unit(tensor, others)
        if unit and _stays_inside(tensor, others, steps, first, unit):
            return _Reading(kept, others, unit)
    raise Unsupported("as_strided of a tensor whose elements lie apart")


def _choices(alike: dict[int, int]) -> Iterator[dict[int, int]]:
    """Yield the parts of a mapping, larger ones first."""
    for count in range(len(alike), -1, -1):
        for places in itertools.combinations(alike, count):
            yield {place: alike[place] for place in places}


def _alike(tensor: torch.Tensor, dims: list[tuple[int, int]]) -> dict[int, int]:
    """Return dims of a tensor that a result's dims may read as they are, one each, by the latter."""
    own = list(zip(tensor.shape, tensor.stride(), strict=True))
    found: dict[int, int] = {}
    for place, one in enumerate(dims):
        free = [dim for dim, other in enumerate(own) if one == other and dim not in found.values()]
        if free and one[0] > 1:
            found[place] = free[0]
    return found


def _unit(tensor: torch.Tensor, others: list[int]) -> int:
    """Return the step of the narrowest of some dims, 0 where they do not lie one within the other."""
    others = [dim for dim in others if tensor.shape[dim] > 1]
    pairs = itertools.pairwise(others)
    if any(tensor.stride(a) != tensor.stride(b) * tensor.shape[b] for a, b in pairs):
        return 0
    return tensor.stride(others[-1]) if others else 1


def _stays_inside(
    tensor: torch.Tensor, others: list[int], steps: list[tuple[int, int]], first: int, unit: int
) -> bool:
    """Whether what is read, but for what is read as it is, are whole steps within some dims."""
    steps = [(count, step) for count, step in steps if count > 1]
    last = first + sum((count - 1) * step for count, step in steps)
    is_whole = not any(one % unit for one in (first, *(step for _, step in steps)))
    return is_whole and first >= 0 and last < unit * math.prod(tensor.shape[dim] for dim in others)


def _asked(node: fx.Node) -> tuple[fx.Node, list[int], list[int], int]:
    """Return a call's tensor, sizes and strides, and where it begins within the tensor."""
    names = ("self", "size", "stride", "storage_offset")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    source, offset = given["self"], given.get("storage_offset")
    seen: torch.Tensor = source.meta["val"]
    first = 0 if offset is None else offset - seen.storage_offset()
    size, stride = list(given["size"]), list(given["stride"])
    if not all(type(one) is int for one in (first, *size, *stride)):
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
