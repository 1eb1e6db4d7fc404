"""Reads PipeDream's profile graphs (``graph.txt``).

One layer a line, then one edge a line, which begins with a tab:

    node1 -- Conv2d(3, 64) -- forward_compute_time=1.2, backward_compute_time=2.4,
        activation_size=1024.0, parameter_size=6912.000[ -- stage_id=0]      (all on one line)
    <tab>node1 -- node2

Times are milliseconds, sizes bytes; an activation may be a list ``[1024.0; 64.0]`` of outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from shardwright.core.profile import Layer, LayerGraph
from shardwright.errors import InputError
from shardwright.files.limits import read_text

FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
LARGEST_FILE = 2**20
# Nothing is scanned twice, so that time is linear in a line's length.
_FIELD = re.compile(r"\b(\w+)=(\[[^\]\[=]*\]|[^,]*)")


def read_layer_graph(path: str | Path) -> LayerGraph:
    """Read a profile; nothing in it is executed.

    Input nodes (loading data) and unused ``__getitem__`` outputs are left out, as PipeDream does.
    Raises InputError with the line and what is wrong with it.
    """
    text = read_text(path, LARGEST_FILE, "a profile", "give a graph.txt")
    return parse_layer_graph(text, str(path))


def parse_layer_graph(text: str, name: str = "profile") -> LayerGraph:
    """Read a profile from its text; ``name`` is used in messages."""
    layers: dict[str, Layer] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            if line[0] == "\t":
                edges.append(_edge(line, layers))
            else:
                layer = _layer(line)
                if layer.name in layers:
                    raise InputError(
                        f"layer {layer.name!r} appears twice; rename one, names must differ"
                    )
                layers[layer.name] = layer
        except InputError as error:
            raise InputError(f"{name}, line {number}: {error}") from error
    if not layers:
        raise InputError(f"{name} has no layers; give a graph.txt as PipeDream's profiler writes")
    return _without_inputs(name, layers, edges)


def _layer(line: str) -> Layer:
    """Read one layer."""
    parts = line.strip().split(" -- ")
    if len(parts) > 3 and parts[-1].startswith("stage_id="):
        parts.pop()
    if len(parts) < 3:
        raise InputError(
            "a layer is `name -- description -- forward_compute_time=1.2, "
            "backward_compute_time=2.4, activation_size=1024.0, parameter_size=64.0`, not "
            f"{line.strip()[:80]!r}; write the line so"
        )
    fields = _fields(parts)
    missing = [field for field in FIELDS if field not in fields]
    if missing:
        raise InputError(
            f"layer {parts[0][:80]!r} lacks {', '.join(missing)}; add them to its line"
        )
    forward, backward, activation, parameters = (
        math.fsum(_numbers(field, fields[field])) for field in FIELDS
    )
    return Layer(
        name=parts[0],
        description=" -- ".join(parts[1:-1]),
        forward_seconds=forward / 1e3,
        backward_seconds=backward / 1e3,
        activation_bytes=activation,
        parameter_bytes=parameters,
    )


def _fields(parts: list[str]) -> dict[str, str]:
    found = _FIELD.findall(parts[-1])
    names = [name for name, _ in found]
    if len(set(names)) < len(names):
        double = max(names, key=names.count)
        raise InputError(f"layer {parts[0][:80]!r} has {double[:40]} twice; keep one")
    return dict(found)


def _numbers(field: str, text: str) -> Iterator[float]:
    for word in text.strip("[]").replace(",", ";").split(";"):
        try:
            value = float(word)
        except ValueError:
            raise InputError(
                f"{field} must be a number, not {word.strip()[:40]!r}; write it as 1.5"
            ) from None
        if not 0 <= value < math.inf:
            raise InputError(
                f"{field} must be finite and 0 or more, not {word.strip()[:40]}; measure it again"
            )
        yield value


def _edge(line: str, layers: dict[str, Layer]) -> tuple[str, str]:
    ends = line.strip().split(" -- ")
    if len(ends) != 2:
        raise InputError(
            f"an edge is `<tab>from -- to`, not {line.strip()[:80]!r}; write the line so"
        )
    for end in ends:
        if end not in layers:
            raise InputError(
                f"the edge names layer {end[:40]!r}, which no line above describes; add its line, or "
                "remove the edge"
            )
    if ends[0] == ends[1]:
        raise InputError(f"layer {ends[0][:80]!r} feeds itself; remove the edge")
    return ends[0], ends[1]


def _without_inputs(
    name: str, layers: dict[str, Layer], edges: list[tuple[str, str]]
) -> LayerGraph:
    """Leave out inputs (wherever data is loaded is no choice) and outputs nobody reads."""
    fed = {consumer for _, consumer in edges}
    kept = {n for n, v in layers.items() if n in fed or not v.description.startswith("Input")}
    read = {producer for producer, consumer in edges if consumer in kept}
    kept -= {n for n in kept - read if layers[n].description.startswith("__getitem__")}
    position = {n: i for i, n in enumerate(n for n in layers if n in kept)}
    return LayerGraph(
        name=name,
        layers=tuple(layers[n] for n in position),
        edges=tuple(sorted({(position[a], position[b]) for a, b in edges if {a, b} <= kept})),
    )
