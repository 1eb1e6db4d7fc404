"""Rows that a model picks by values of the batch, where it picks them all: pictures that are no padding.

Models that take as many pictures as the fullest sample has leave out those that are nothing but zeros,
``pixels[(pixels == 0).sum((1, 2, 3)) != count]``. How many stay depends on data, which no graph holds. A batch without
padding has them all, and so have others that are made like it: the graph is made for these. What says of a row whether
it is picked is kept beside it, and asked of every batch before that is cut (``inputs``). Only numbers are so read, pixels
and sounds: words, and marks of words, differ from batch to batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.runtime.capture.counting import written_by
from shardwright.runtime.capture.known import all_rows, is_repeatable, mask_of
from shardwright.runtime.capture.lying import memory_of
from shardwright.runtime.capture.record import Unsupported, aten


@dataclass(frozen=True, eq=False)
class Filled:
    """What says of each row whether it is picked: a graph of the entries, in their dtypes."""

    entries: Mapping[str, torch.dtype]
    mask: fx.GraphModule

    def holds(self, batch: Mapping[str, Tensor]) -> bool:
        """Whether all rows of a batch are picked."""
        with torch.no_grad():
            given = [batch[name].detach().to(dtype) for name, dtype in self.entries.items()]
            return bool(self.mask(*given).all())

    @property
    def rule(self) -> str:
        """What a batch must be like."""
        return f"forward leaves out what its numbers say is padding of {' and '.join(self.entries)}, so that nothing of it may be"


def picks_in(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the nodes that pick all rows by a mask, and the masks."""
    found = {
        node: mask_of(node.target, node.args)
        for node in graph.nodes
        if node.target is aten.index.Tensor
    }
    return {node: mask for node, mask in found.items() if _picks_all(node, mask)}


def _picks_all(node: fx.Node, mask: Any) -> bool:
    """Whether a trace took a mask to let all rows through: their number does not depend on it."""
    nodes = [one for one in (mask, node, node.args[0]) if isinstance(one, fx.Node)]
    values: list[Any] = [one.meta.get("val") for one in nodes]
    if len(values) < 3 or any(not isinstance(one, Tensor) for one in values):
        return False
    shape = list(values[1].shape)
    is_told = values[0].dtype == torch.bool and all(isinstance(one, int) for one in shape)
    return is_told and shape == all_rows(values[2], values[0])


def filled(
    graph: fx.Graph, mask: fx.Node, names: Mapping[str, str], batch: Mapping[str, Tensor]
) -> Filled:
    """Return what says that a mask picks all rows. ``names``: the entries' by their placeholders'. Raises Unsupported where
    that is not to be asked of a batch, or not so of this one."""
    nodes = _made_of(graph, mask)
    if not all(_may_be_asked(node, names) for node in nodes):
        raise Unsupported("rows that are picked by values that no batch alone says")
    if any(_writes(node, nodes) for node in _before(graph, mask)):
        raise Unsupported("rows that are picked by what forward writes")
    found = _asked(nodes, mask, names)
    shapes = {names[one.name]: one.meta["val"].shape for one in nodes if one.op == "placeholder"}
    if not found.holds({name: _repeated(batch[name], shape) for name, shape in shapes.items()}):
        raise Unsupported("rows that are picked by values, not all in this batch")
    return found


def let_through(graph: fx.Graph, picks: Mapping[fx.Node, fx.Node]) -> None:
    """Put copies of all rows in the place of picks."""
    for node, mask in picks.items():
        source: Any = node.args[0]
        with graph.inserting_before(node):
            rows = graph.call_function(
                aten.reshape.default,
                (source, all_rows(source.meta["val"], mask.meta["val"])),
            )
            made = graph.call_function(aten.clone.default, (rows,))
        rows.meta, made.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _made_of(graph: fx.Graph, mask: fx.Node) -> list[fx.Node]:
    """Return a node with all that it is made of, in order."""
    found, waiting = {mask}, [mask]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return [node for node in graph.nodes if node in found]


def _may_be_asked(node: fx.Node, names: Mapping[str, str]) -> bool:
    """Whether a node is an entry of numbers, or made of others in the same way wherever these lie."""
    if node.op == "placeholder":
        value = node.meta.get("val")
        return node.name in names and isinstance(value, Tensor) and value.is_floating_point()
    is_call = node.op == "call_function" and is_repeatable(node.target)
    return is_call and bool(node.all_input_nodes) and not _is_mutable(node)


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _before(graph: fx.Graph, last: fx.Node) -> Iterator[fx.Node]:
    for node in graph.nodes:
        if node is last:
            return
        yield node


def _writes(node: fx.Node, nodes: list[fx.Node]) -> bool:
    """Whether a call may write what others are made of, or what looks at it."""
    if not _is_mutable(node):
        return False
    args: Any = node.args
    written = written_by(
        node.target, *fx.map_arg((args, node.kwargs), lambda one: one.meta.get("val"))
    )
    memories = {*map(memory_of, written)}
    values = (one.meta.get("val") for one in nodes)
    return any(isinstance(one, Tensor) and memory_of(one) in memories for one in values)


def _asked(nodes: list[fx.Node], mask: fx.Node, names: Mapping[str, str]) -> Filled:
    """Return a graph of its own that makes a mask of entries."""
    entries = {
        names[node.name]: node.meta["val"].dtype for node in nodes if node.op == "placeholder"
    }
    graph, places = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        places[node] = graph.node_copy(node, lambda one: places[one])
        places[node].meta = {}
    graph.output(places[mask])
    return Filled(entries, fx.GraphModule(torch.nn.Module(), graph))


def _repeated(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return an entry with as many samples as a graph is for."""
    count = shape[0] if shape else 0
    if not shape or tensor.shape[0] in (count, 0):
        return tensor
    return tensor[torch.arange(count, device=tensor.device) % tensor.shape[0]]
