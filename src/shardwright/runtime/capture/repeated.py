"""Records of a deep model from those of a few of its layers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

from torch import fx
from torch._ops import OpOverload

from shardwright.runtime.capture.entries import PREFIX
from shardwright.runtime.capture.record import (
    Record,
    Recorder,
    Unsupported,
    Value,
    map_values,
    tensors_in,
)
from shardwright.runtime.capture.streams import Layers, place_in

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?(\.\d+)?")


def repeat_layers(
    recorder: Recorder, layers: Layers, owned: Mapping[str, Value], graph: fx.Graph
) -> None:
    """Record a copy of the third layer for every layer that was not exported, behind it.

    ``owned`` are parameters and buffers by name, ``graph`` is what was exported. Raises Unsupported where the second
    and the third layer differ.
    """
    strides = _strides(graph, layers)
    layers = replace(layers, path=layers.path[len(PREFIX) :])
    if any(layers.path in note for note in recorder.notes):
        raise Unsupported("notes on a layer")
    spans = _cut(recorder.records, layers)
    _check_alike(spans, layers, owned)
    made, last = [*spans[0], *spans[1], *spans[2], *spans[3]], _outputs(spans[3])
    third, previous = layers.of(layers.kept[2]), last
    own = [name for name in owned if place_in(third, name)]
    for number, name in enumerate(layers.repeated):
        here = layers.of(name)
        known = dict(zip(_outputs(spans[2]), previous, strict=True))
        known |= {owned[one]: owned[_moved(one, third, here)] for one in own}
        known |= zip(last, map(_renewed, last), strict=True)
        for record in spans[3]:
            path = tuple([_moved(one, third, here) for one in record.path])
            copy = replace(record, name=_later(record.name, strides, number + 1), path=path)
            made.append(_with(copy, known))
        previous = [known[value] for value in last]
    count, known = len(layers.repeated), dict(zip(last, previous, strict=True))
    tail = [replace(one, name=_later(one.name, strides, count)) for one in spans[4]]
    made += [_with(one, known) for one in tail]
    _number(made)
    recorder.replace(made, _later(recorder.node_name, strides, count))


Span = Sequence[Record]


def _cut(records: Span, layers: Layers) -> list[Span]:
    """Return the records before the first layer, of the first three, and from the last on."""
    around = [record.path for record in records]
    cuts = [0, *(_start(around, layers.of(name)) for name in layers.kept), len(records)]
    if sorted({*cuts[1:]}) != cuts[1:]:
        raise Unsupported("layers that are not one after the other")
    return [records[start:stop] for start, stop in itertools.pairwise(cuts)]


def _start(paths: Iterable[Sequence[str]], layer: tuple[str, ...]) -> int:
    """Return the first place of a layer."""
    for place, around in enumerate(paths):
        if not set(layer).isdisjoint(around):
            return place
    raise Unsupported("a layer without operators")


def _check_alike(spans: Sequence[Span], layers: Layers, owned: Mapping[str, Value]) -> None:
    """Raise Unsupported unless the second and the third layer are recorded alike, from the layer before, and
    later ones read nothing of those further back."""
    made = [_outputs(span) for span in spans]
    second, third = (
        _said(spans[place], layers.of(layers.kept[place - 1]), made[place - 1], owned)
        for place in (2, 3)
    )
    tail = {value for record in spans[4] for value in _inputs(record)}
    if second != third or not tail.isdisjoint(made[1] + made[2]):
        raise Unsupported("equal layers that are recorded otherwise")


def _said(
    records: Sequence[Record],
    layer: tuple[str, ...],
    before: Sequence[Value],
    owned: Mapping[str, Value],
) -> list[Any]:
    """Write a layer's records so that they are equal to those of another where these compute the same."""
    place: dict[Value, Any] = {
        value: ("own", inside) for name, value in owned.items() if (inside := place_in(layer, name))
    }
    place |= {value: ("before", number) for number, value in enumerate(before)}
    said: list[Any] = []

    def source(value: Value) -> Any:
        return place.get(value, ("model", id(value)))

    for record in records:
        said.append(
            (
                record.target,
                _typed(map_values(list(record.args), source)),
                _typed(map_values([*record.kwargs.items()], source)),
                [
                    (one.meta.shape, one.meta.stride(), one.meta.dtype, one.meta.requires_grad)
                    for one in record.outputs
                ],
                [place_in(layer, one) or one for one in record.path],
            )
        )
        number = len(said)
        place |= {value: ("made", number, n) for n, value in enumerate(record.outputs)}
    return said


def _typed(argument: Any) -> Any:
    """Return an argument with the types of what is in it: 1 and True are equal."""
    if isinstance(argument, (list, tuple)):
        return [_typed(one) for one in argument]
    return type(argument), repr(argument) if isinstance(argument, float) else argument


def _strides(graph: fx.Graph, layers: Layers) -> dict[str, int]:
    """Return by how much the number in the name of a node grows from one layer to the next."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if any(not isinstance(one.target, OpOverload) and one.target is not getitem for one in nodes):
        raise Unsupported("regions of another mode")
    paths = [[path for path, _ in node.meta.get("nn_module_stack", {}).values()] for node in nodes]
    second, third, end = (_start(paths, layers.of(name)) for name in layers.kept[1:])
    return _growth(nodes[second:third], nodes[third:end])


def _growth(before: Sequence[fx.Node], after: Sequence[fx.Node]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one, other in zip(before, after, strict=True):
        (stem, number, _), (same, later, _) = _parted(one.name), _parted(other.name)
        if stem != same or found.setdefault(stem, later - number) != later - number:
            raise Unsupported("names that do not count on")
    return found


def _parted(name: str) -> tuple[str, int, str]:
    match = _NUMBERED.fullmatch(name)
    assert match is not None  # any text does
    stem, number, end = match.groups()
    return stem, int(number or 0), end or ""


def _later(name: str, strides: Mapping[str, int], times: int) -> str:
    """Return what a node is called that many layers later."""
    stem, number, end = _parted(name)
    number += strides.get(stem, 0) * times
    return f"{stem}_{number}{end}" if number else stem + end


def _moved(path: str, layer: tuple[str, ...], other: tuple[str, ...]) -> str:
    """Return the path of what another layer has in place of a layer's."""
    inside = place_in(layer, path)
    return other[inside[0]] + inside[1] if inside else path


def _number(records: Span) -> None:
    """Let values say which record makes them."""
    for place, record in enumerate(records):
        for value in record.outputs:
            value.producer = place


def _renewed(value: Value) -> Value:
    return Value(value.meta)


def _with(record: Record, values: Mapping[Value, Value]) -> Record:
    """Return a record that reads and makes other values."""

    def change(value: Value) -> Value:
        return values.get(value, value)

    return replace(
        record,
        args=tuple(map_values(list(record.args), change)),
        kwargs={key: map_values(one, change) for key, one in record.kwargs.items()},
        outputs=tuple(map(change, record.outputs)),
    )


def _outputs(records: Sequence[Record]) -> list[Value]:
    return [value for record in records for value in record.outputs]


def _inputs(record: Record) -> list[Value]:
    return [*tensors_in([record.args, list(record.kwargs.values())])]
