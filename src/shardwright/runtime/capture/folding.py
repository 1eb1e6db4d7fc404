"""What an exported graph computes of known entries alone (``known``), computed once: constants in place of operators."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.runtime.capture.counting import tensors_of, written_by
from shardwright.runtime.capture.filled import Filled, filled, let_through, picks_in
from shardwright.runtime.capture.known import asks, is_repeatable, known_of
from shardwright.runtime.capture.lying import memory_of
from shardwright.runtime.capture.record import Unsupported

_AUTOCAST = torch.amp.autocast_mode._enter_autocast


@dataclass(frozen=True)
class Folded:
    """The constants that stand at the end of a graph's placeholders, what the entries they were made of say in
    each row, and what rows are all picked by."""

    constants: tuple[tuple[str, Tensor], ...] = ()
    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    filled: tuple[Filled, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What the user is told of it."""
        counted = [
            f"forward counts by {name}, so that it must say {row} of every sample, as in this batch; another is refused"
            for name, row in self.rows.items()
        ]
        return counted + [
            f"{one.rule}, as in this batch; another is refused" for one in self.filled
        ]


def fold(
    program: Any,
    names: Mapping[str, str],
    batch: Mapping[str, Tensor],
    example: Mapping[str, Any],
) -> Folded:
    """Replace in an exported program what is made of entries that are known and of constants alone, or needs values for
    its shape. What is made of constants alone otherwise stays: it may be split. ``names``: the entries' by their placeholders';
    ``batch`` has them without values, ``example`` as they were given. Masks that are not known let all rows through.
    """
    graph: fx.Graph = program.graph_module.graph
    if any(node.target is _AUTOCAST for node in graph.nodes):
        raise Unsupported("sizes known of a model that uses autocast inside")
    entries = _entries(names, batch)
    given = {**entries, **_constants(program)}
    lost: set[fx.Node] = set()
    masks = _masks(graph, given, lost)
    passing = tuple(filled(graph, one, names, example) for one in masks)
    let_through(graph, _passed(graph, given, lost))
    values = _computed(graph, given, lost)
    chosen = _chosen(graph, values, {*entries, *(one.name for one in masks)})
    used = {node.name for node in chosen if node.op == "placeholder" and node.users}
    constants = _replaced(graph, given, lost, chosen)
    _erase(graph, chosen)
    rows = {names[key]: tuple(value[0].tolist()) for key, value in entries.items() if key in used}
    return Folded(tuple(constants), rows, passing)


def _masks(graph: fx.Graph, given: dict[str, Tensor], lost: set[fx.Node]) -> list[fx.Node]:
    """Return the masks that rows are picked by and that are not known; they are ``given`` as letting all through."""
    found: list[fx.Node] = []
    while True:
        values = _computed(graph, given, lost)
        unknown = [mask for mask in picks_in(graph).values() if mask not in values]
        if not unknown:
            return found
        if unknown[0] in lost or unknown[0] in found:
            raise Unsupported("rows that are picked by values that change inside")
        found.append(unknown[0])
        given[unknown[0].name] = torch.ones(unknown[0].meta["val"].shape, dtype=torch.bool)


def _passed(
    graph: fx.Graph, given: Mapping[str, Tensor], lost: set[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Return the picks of something unknown, by what is known to let all rows through where it is read."""
    picks = picks_in(graph)
    found: dict[fx.Node, fx.Node] = {}
    for node, values in _played(graph, given, lost):
        if node not in values and node in picks:
            if not values[picks[node]].all():
                raise Unsupported("rows that are picked by sizes, not all of them")
            found[node] = picks[node]
    return found


def _erase(graph: fx.Graph, chosen: frozenset[fx.Node]) -> None:
    for node in reversed(list(graph.nodes)):
        if node in chosen and node.op != "placeholder":
            graph.erase_node(node)


def _entries(names: Mapping[str, str], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the known entries by the names of their placeholders."""
    found = {key: known_of(batch[name]) for key, name in names.items()}
    return {key: value for key, value in found.items() if value is not None}


def _constants(program: Any) -> dict[str, Tensor]:
    """Return the tensors that a trace has lifted, by the names of their placeholders."""
    lifted = {
        one.arg.name: program.constants.get(one.target)
        for one in program.graph_signature.input_specs
        if one.kind.name == "CONSTANT_TENSOR"
    }
    return {name: one for name, one in lifted.items() if type(one) is Tensor and not one.is_meta}


def _value(node: fx.Node, values: dict[fx.Node, Any], given: Mapping[str, Tensor]) -> Any:
    """Return what a node makes where all that it reads is known, None of another."""
    if node.name in given:
        return given[node.name].clone()
    if node.op != "call_function" or any(one not in values for one in node.all_input_nodes):
        return None
    if not is_repeatable(node.target) and node.target is not operator.getitem:
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: values[one])
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _played(
    graph: fx.Graph, given: Mapping[str, Tensor], lost: set[fx.Node]
) -> Iterator[tuple[fx.Node, dict[fx.Node, Any]]]:
    """Yield the nodes in order, each with what is known behind it: what is written later still has its old values."""
    values: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        value = None if node in lost else _value(node, values, given)
        if value is not None:
            values[node] = value
        yield node, values


def _computed(
    graph: fx.Graph, given: Mapping[str, Tensor], lost: set[fx.Node]
) -> dict[fx.Node, Any]:
    """Return what is known; what something unknown is written into is ``lost``, and all begins anew without it."""
    values: dict[fx.Node, Any] = {}
    for node, values in _played(graph, given, lost):
        if node in values:
            continue
        if written := {memory_of(one) for one in _written(node, values)}:
            lost |= {one for one, value in values.items() if written & _memories(value)}
            return _computed(graph, given, lost)
    return values


def _written(node: fx.Node, values: Mapping[fx.Node, Any]) -> list[Tensor]:
    """Return the known tensors that a node writes."""
    if not hasattr(node.target, "_schema"):
        return []
    args, named = fx.map_arg((node.args, node.kwargs), values.get)
    return written_by(node.target, args, named)


def _memories(value: Any) -> set[int]:
    return {memory_of(one) for one in tensors_of(value)}


def _chosen(
    graph: fx.Graph, values: Mapping[fx.Node, Any], entries: Iterable[str]
) -> frozenset[fx.Node]:
    """Return the known nodes that are made of entries (or of masks, by name), or of a shape that values tell, with all that
    shares their memory."""
    names = set(entries)
    chosen: set[fx.Node] = set()
    memories: set[int] = set()
    count = -1
    while count != len(chosen):
        count = len(chosen)
        for node in graph.nodes:
            if node not in values or node in chosen:
                continue
            is_asked = node.op != "placeholder" and asks(node.target, values[node])
            begins = node.name in names or is_asked
            if begins or chosen & set(node.all_input_nodes) or memories & _memories(values[node]):
                chosen.add(node)
                memories |= _memories(values[node])
    return frozenset(chosen)


def _read(node: fx.Node, chosen: frozenset[fx.Node]) -> list[fx.Node]:
    """Return what a node that stays reads of those that do not."""
    return [] if node in chosen else [one for one in node.all_input_nodes if one in chosen]


def _replaced(
    graph: fx.Graph, given: Mapping[str, Tensor], lost: set[fx.Node], chosen: frozenset[fx.Node]
) -> list[tuple[str, Tensor]]:
    """Let all others read constants in place of what is chosen, as it is where they read it; return these."""
    made: dict[tuple[fx.Node, int], fx.Node] = {}
    found: list[tuple[str, Tensor]] = []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node, values in _played(graph, given, lost):
        for one in _read(node, chosen):
            key = (one, values[one]._version)
            if key not in made:
                with graph.inserting_after(last):
                    last = made[key] = graph.placeholder(f"known_{one.name}")
                last.meta = {"val": one.meta.get("val")}
                found.append((last.name, values[one].detach().clone()))
            node.replace_input_with(one, made[key])
    return found
