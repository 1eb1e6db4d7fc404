"""Attention over equal pieces of a sequence, one call for each, as one call whose batch are the pieces.

Towers that take patches of all images one behind the other cut them by image, or by window, attend within each, and lay
the results one behind the other. So an operator belongs to one image: a step of many is a large graph in which none
of these splits over samples.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardwright.runtime.capture.record import aten

_ATTENTION = aten.scaled_dot_product_attention.default
_COPIES = (aten.contiguous.default, aten.clone.default)
_SPLITS = (aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default)
_RESHAPES = (aten.reshape.default, aten.view.default)


@dataclass(frozen=True)
class _Piece:
    """A call on the one piece of a sequence, and the dims that are exchanged in what it makes."""

    call: fx.Node
    exchanged: tuple[tuple[int, int], ...]

    def is_like(self, other: _Piece | None) -> bool:
        """Whether another call is given the same besides queries, keys and values, and handed on alike."""
        return other is not None and (
            self.call.args[3:] == other.call.args[3:]
            and self.call.kwargs == other.call.kwargs
            and self.exchanged == other.exchanged
        )

    @property
    def can_join(self) -> bool:
        """Whether the call on all pieces does what those on each do: no mask is one piece's, and nothing is dropped at
        random, which would be in another order."""
        drops: Any = self.call.args[4] if len(self.call.args) > 4 else 0.0
        drops = self.call.kwargs.get("dropout_p", drops)
        return drops == 0.0 and len(self.call.all_input_nodes) == 3

    @property
    def lies_at(self) -> tuple[int]:
        """The dim along which the positions lie in the end; a call's are samples, heads, positions, features."""
        dim = 2
        for one, other in self.exchanged:
            dim = {one: other, other: one}.get(dim, dim)
        return (dim,)


def joined(module: fx.GraphModule) -> fx.GraphModule:
    """Join calls over equal pieces in an exported graph."""
    for node in list(module.graph.nodes):
        if node.target is aten.cat.default and isinstance(node.args[0], (list, tuple)):
            _join(module.graph, node)
    return module


def _join(graph: fx.Graph, cat: fx.Node) -> None:
    found = _alike(cat)
    sources = _sources([one.call for one in found])
    if len(sources) == 3 and all(map(_stays, _between(graph, sources, cat))):
        _put(graph, cat, found[0], [(one, len(found)) for one in sources])


def _alike(cat: fx.Node) -> list[_Piece]:
    """Return the pieces that are laid one behind the other, none where one call cannot do what those do."""
    found: Any = [_piece(one) for one in cat.args[0]]  # type: ignore[union-attr]
    if len(found) < 2 or found[0] is None or not (found[0].can_join and _shape(cat)):
        return []
    is_behind = found[0].lies_at == cat.args[1:] == (1,)
    return found if is_behind and all(map(found[0].is_like, found)) else []


def _sources(calls: Sequence[fx.Node]) -> list[fx.Node]:
    """Return what queries, keys and values are pieces of, where that is known."""
    found = [_source([one.args[place] for one in calls]) for place in range(3)]
    return [one for one in found if one is not None]


def _put(graph: fx.Graph, cat: fx.Node, first: _Piece, sources: list[tuple[fx.Node, int]]) -> None:
    """Put one call in the place of all."""

    def make(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta = {key: one for key, one in cat.meta.items() if key != "val"}
        return made

    with graph.inserting_before(cat):
        parts = [_parted(make, *one) for one in sources]
        result = make(_ATTENTION, *parts, *first.call.args[3:], **first.call.kwargs)
        for pair in first.exchanged:
            result = make(aten.transpose.int, result, *pair)
        result = make(aten.reshape.default, result, list(_shape(cat)))
    cat.replace_all_uses_with(result)
    _erase_unused(graph, cat)


def _between(graph: fx.Graph, sources: Sequence[fx.Node], last: fx.Node) -> list[fx.Node]:
    """Return the nodes behind the first of some up to another."""
    nodes = list(graph.nodes)
    return nodes[min(map(nodes.index, sources)) + 1 : nodes.index(last)]


def _stays(node: fx.Node) -> bool:
    """Whether what was read before a node could as well be read behind it: it writes nothing, and begins no region."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable
    return node.target is operator.getitem or node.op in ("placeholder", "get_attr")


def _piece(node: fx.Node) -> _Piece | None:
    """Return the call whose result a node is, if it only exchanges dims of it other than the first."""
    exchanged: list[tuple[int, int]] = []
    while node.target is not _ATTENTION:
        pair = _exchanged(node)
        if pair is None or len(node.users) != 1:
            return None
        exchanged = [pair, *exchanged] if pair[0] != pair[1] else exchanged
        node = node.args[0]  # type: ignore[assignment]
    return _Piece(node, tuple(exchanged)) if len(node.users) == 1 else None


def _exchanged(node: fx.Node) -> tuple[int, int] | None:
    """Return the dims that a call exchanges, two equal ones where it changes nothing, None where it does something else."""
    if node.target is aten.transpose.int and (rank := len(_shape(node))):
        dims: Any = node.args[1:]
        one, other = (dim % rank for dim in dims)
        return (one, other) if one and other else None
    return (0, 0) if node.target in _COPIES or _keeps_shape(node) else None


def _shape(node: Any) -> tuple[int, ...]:
    """Return the shape of what a node makes, () where that was not noted: of what capture itself has written."""
    return tuple(getattr(node.meta.get("val"), "shape", ()))


def _keeps_shape(node: fx.Node) -> bool:
    return node.target in _RESHAPES and _shape(node) == _shape(node.args[0]) != ()


def _source(pieces: Sequence[Any]) -> fx.Node | None:
    """Return the tensor of one sample whose equal pieces along its positions these are, in order and all."""
    split = _split_of(pieces)
    if split is None or split.args[2:] not in ((2,), (-2,)):
        return None
    source: Any = split.args[0]
    shape, lengths = _shape(source), {_shape(piece)[2:3] for piece in pieces}
    if len(shape) != 4 or shape[0] != 1:
        return None
    return (
        source if lengths == {(shape[2] // len(pieces),)} and not shape[2] % len(pieces) else None
    )


def _split_of(pieces: Sequence[Any]) -> fx.Node | None:
    """Return the call that made pieces, in their order, None of others."""
    if not pieces or pieces[0].target is not operator.getitem:
        return None
    split = pieces[0].args[0]
    expected = [(split, place) for place in range(len(pieces))]
    return split if split.target in _SPLITS and [one.args for one in pieces] == expected else None


def _parted(make: Any, source: fx.Node, count: int) -> fx.Node:
    """Return a tensor with its pieces as samples."""
    _, heads, length, width = _shape(source)
    apart = make(aten.reshape.default, source, [heads, count, length // count, width])
    return make(aten.transpose.int, apart, 0, 1)


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Take out what only a node has read, and the node."""
    waiting, gone = [node], set[fx.Node]()
    while waiting:
        one = waiting.pop()
        if one.op == "call_function" and not one.users and one not in gone:
            waiting += one.all_input_nodes
            graph.erase_node(one)
            gone.add(one)
