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
from shardwright.runtime.capture.layers import Layers, place_in
from shardwright.runtime.capture.record import (
    Record,
    Recorder,
    Unsupported,
    Value,
    aten,
    map_values,
    tensors_in,
)

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?(\.\d+)?")

# What picks a part of a tensor, by numbers that may count on from layer to layer.
_PICKS = (aten.select.int, aten.slice.Tensor)


def repeat_layers(
    recorder: Recorder, lists: Sequence[Layers], owned: Mapping[str, Value], graph: fx.Graph
) -> None:
    """Record a copy of the third layer of every list for each of its layers that was not exported, behind it.

    ``lists`` are in the order in which they run, ``owned`` are parameters and buffers by name, ``graph`` is what was
    exported. Raises Unsupported where the second and the third layer differ.
    """
    records, node_name = recorder.records, recorder.node_name
    for layers in lists:
        strides = _strides(graph, layers)
        inner = replace(layers, path=layers.path[len(PREFIX) :])
        if any(inner.path in note for note in recorder.notes):
            raise Unsupported("notes on a layer")
        records = _repeated(records, inner, owned, strides)
        node_name = _later(node_name, strides, len(layers.repeated))
    _number(records)
    recorder.replace(records, node_name)


def _repeated(
    records: Span, layers: Layers, owned: Mapping[str, Value], strides: Mapping[str, int]
) -> list[Record]:
    """Return records with those of the layers that were not exported; in ``strides`` their names count on."""
    spans = _cut(records, layers)
    growth, ends = _growing(spans, layers, owned)
    made, last = [*spans[0], *spans[1], *spans[2], *spans[3]], _outputs(spans[3])
    third, previous = layers.of(layers.kept[2]), last
    own = [name for name in owned if place_in(third, name)]
    for times, name in enumerate(layers.repeated, 1):
        here = layers.of(name)
        known = dict(zip(_outputs(spans[2]), previous, strict=True))
        known |= {owned[one]: owned[_moved(one, third, here)] for one in own}
        known |= zip(last, map(_renewed, last), strict=True)
        made += [
            _with(_counted_on(_renamed(record, strides, times, third, here), grown, times), known)
            for record, grown in zip(spans[3], growth, strict=True)
        ]
        previous = [known[value] for value in last]
    count, known = len(layers.repeated), dict(zip(last, previous, strict=True))
    tail = [_renamed(one, strides, count) for one in spans[4]]
    tail[: len(ends)] = [_counted_on(*one, count) for one in zip(tail, ends, strict=False)]
    return [*made, *[_with(one, known) for one in tail]]


def _renamed(
    record: Record,
    strides: Mapping[str, int],
    times: int,
    layer: tuple[str, ...] = (),
    other: tuple[str, ...] = (),
) -> Record:
    """Return a record as it is called so many layers later, in another layer where it is in one."""
    path = tuple([_moved(one, layer, other) for one in record.path])
    return replace(record, name=_later(record.name, strides, times), path=path)


Span = Sequence[Record]
# By how much numbers of one record grow from layer to layer, by argument.
_Growth = dict[str, int]


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


def _growing(
    spans: Sequence[Span], layers: Layers, owned: Mapping[str, Value]
) -> tuple[list[_Growth], list[_Growth]]:
    """Return how numbers grow of each record from the second layer to the third, and of those of the last that are
    alike. Raises Unsupported unless these two are recorded alike but for them, from the layer before, and
    later ones read nothing of those further back."""
    made = [_outputs(span) for span in spans]
    second, third, last = (
        _said(span, layers.of(layers.kept[place - 1]), made[place - 1], owned)
        for place, span in ((2, spans[2]), (3, spans[3]), (4, spans[4][: len(spans[3])]))
    )
    tail = {value for record in spans[4] for value in _inputs(record)}
    if second != third or not tail.isdisjoint(made[1] + made[2]):
        raise Unsupported("equal layers that are recorded otherwise")
    growth = [_grown(*pair) for pair in zip(spans[2], spans[3], strict=True)]
    pairs = zip(growth, third, last, strict=False)
    ends = [grown for grown, *_ in itertools.takewhile(lambda one: one[1] == one[2], pairs)]
    if (_steps(growth), _steps(ends)) != (layers.strides, layers.ends):
        raise Unsupported("numbers that do not count on as they were given")
    return growth, ends


def _grown(one: Record, other: Record) -> _Growth:
    later = _numbers(other)
    return {name: later[name] - number for name, number in _numbers(one).items()}


def _numbers(record: Record) -> dict[str, int]:
    """Return the numbers by which a record picks a part of a tensor, by argument."""
    if record.target not in _PICKS:
        return {}
    return {name: number for name, number in record.kwargs.items() if type(number) is int}


def _steps(growth: Iterable[_Growth]) -> tuple[int, ...]:
    return tuple([step for grown in growth for step in grown.values() if step])


def _counted_on(record: Record, growth: _Growth, times: int) -> Record:
    """Return a record whose numbers are those of so many layers later."""
    if not any(growth.values()):
        return record
    numbers = _numbers(record)
    later = {name: numbers[name] + step * times for name, step in growth.items()}
    return replace(record, kwargs={**record.kwargs, **later})


def _said(
    records: Sequence[Record],
    layer: tuple[str, ...],
    before: Sequence[Value],
    owned: Mapping[str, Value],
) -> list[Any]:
    """Write a layer's records so that they are equal to those of another where these compute the same, but for the
    numbers by which they pick."""
    place: dict[Value, Any] = {
        value: ("own", inside) for name, value in owned.items() if (inside := place_in(layer, name))
    }
    # Counted from behind: the first layer may begin otherwise, as where sums begin with zeros.
    place |= {value: ("before", len(before) - at) for at, value in enumerate(before)}
    said: list[Any] = []

    def source(value: Value) -> Any:
        return place.get(value, ("model", id(value)))

    for record in records:
        named = {**record.kwargs, **dict.fromkeys(_numbers(record), int)}
        said.append(
            (
                record.target,
                _typed(map_values(list(record.args), source)),
                _typed(map_values([*named.items()], source)),
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
