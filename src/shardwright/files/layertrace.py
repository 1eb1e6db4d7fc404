"""Traces of layers: a table with ``name, forward, backward, bytes``, a layer a row in the order of forward.

Times are seconds, or what the column's ending says: ``forward_us``, ``backward_ms``. ``numel`` (float32
numbers) may stand in place of ``bytes``. Columns are separated by commas or tabs, and others are ignored.
Rows named data, input or fetch (reading a batch), copy or h2d, and update are what their names say, by
their ``forward``. Neighbours whose names differ in a last ``.weight`` or ``_bias`` only are parameters of one
layer, whose time each of them repeats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardwright.core.layertrace import LayerTrace, TracedLayer
from shardwright.errors import InputError
from shardwright.files.limits import check_width, numbered_rows, read_text

LARGEST_FILE, MOST_LAYERS = 4 * 2**20, 20_000
_UNITS = {"": 1.0, "_s": 1.0, "_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9}
_OTHERS = {
    "data": "fetch_seconds", "input": "fetch_seconds", "fetch": "fetch_seconds", "io": "fetch_seconds",
    "copy": "copy_seconds", "h2d": "copy_seconds", "update": "update_seconds",
}  # fmt: skip
_PARAMETER = re.compile(r"(?P<module>.*)[._/-](weight|bias|w|b|gamma|beta)", re.IGNORECASE)
# Columns as they are written, and as what they count, times how much.
_KNOWN = {
    "name": ("name", 1.0),
    "bytes": ("bytes", 1.0),
    "size": ("bytes", 1.0),
    "numel": ("bytes", 4.0),
} | {
    f"{time}{end}": (time, unit) for time in ("forward", "backward") for end, unit in _UNITS.items()
}
LONGEST_SECONDS, MOST_BYTES = 1e9, 2**53
_EXAMPLE = "name,forward_us,backward_us,bytes"


def read_layer_trace(path: str | Path) -> LayerTrace:
    """Read a trace. Raises InputError with the row, what is wrong with it and what is accepted."""
    text = read_text(path, LARGEST_FILE, "a trace of layers", f"give a table {_EXAMPLE}")
    return parse_layer_trace(text, str(path))


def parse_layer_trace(text: str, name: str = "trace") -> LayerTrace:
    """Read a trace from its text; ``name`` is used in messages."""
    (_, header), *rows = _rows(text, name) or [(1, [])]
    columns = _columns([cell.strip().lower() for cell in header], name)
    layers, others = list[TracedLayer](), dict[str, float]()
    for place, (number, cells) in enumerate(rows):
        check_width(cells, header, f"{name}, row {number}")
        try:
            _take(_layer(cells, columns, place), layers, others)
        except InputError as error:
            raise InputError(f"{name}, row {number}: {error}") from error
    if not layers:
        raise InputError(f"{name} has no layers; write {_EXAMPLE} and a row for each")
    return LayerTrace(name=name, layers=tuple(layers), **others)


def _rows(text: str, name: str) -> list[tuple[int, list[str]]]:
    delimiter = "\t" if "\t" in text else ","
    rows = numbered_rows(text.splitlines(), name, f"write {_EXAMPLE}", delimiter)
    if len(rows) > MOST_LAYERS:
        raise InputError(
            f"a trace has at most {MOST_LAYERS:,} rows, but {name} has {len(rows):,}; merge layers"
        )
    return rows


def _columns(header: Sequence[str], name: str) -> dict[str, tuple[int, float]]:
    """Return the place of each column that is read, and what its numbers are multiplied by."""
    found: dict[str, tuple[int, float]] = {}
    for place, cell in enumerate(header):
        column, unit = _KNOWN.get(cell, ("", 1.0))
        if column in found:
            first = header[found[column][0]]
            raise InputError(
                f"{name}, row 1: the columns {first!r} and {cell!r} both say {column}; keep one"
            )
        if column:
            found[column] = (place, unit)
    missing = [one for one in ("forward", "backward", "bytes") if one not in found]
    if missing:
        raise InputError(
            f"{name} lacks the columns {', '.join(missing)}: its first row is {','.join(header)[:80]!r}; "
            f"write {_EXAMPLE}"
        )
    return found


def _layer(
    cells: Sequence[str], columns: Mapping[str, tuple[int, float]], place: int
) -> TracedLayer:
    def number(column: str, most: float) -> float:
        where, unit = columns[column]
        cell = cells[where].strip() if where < len(cells) else ""
        try:
            value = float(cell) * unit
        except ValueError:
            value = math.nan
        if not 0 <= value <= most:
            raise InputError(
                f"{column} must be a number from 0 to {most:g} (in seconds or bytes), not {cell[:40]!r}; "
                "correct it"
            )
        return value

    where = columns["name"][0] if "name" in columns else len(cells)
    return TracedLayer(
        name=cells[where].strip() if where < len(cells) else f"layer {place + 1}",
        forward_seconds=number("forward", LONGEST_SECONDS),
        backward_seconds=number("backward", LONGEST_SECONDS),
        bytes=round(number("bytes", MOST_BYTES)),
    )


def _take(layer: TracedLayer, layers: list[TracedLayer], others: dict[str, float]) -> None:
    """Add a row: a layer, one more parameter of the last, or what is no layer."""
    other = _OTHERS.get(layer.name.lower())
    if other is not None:
        if layer.bytes or layer.backward_seconds:
            raise InputError(
                f"{layer.name!r} is no layer: its seconds are its forward, and backward and bytes are 0; "
                "correct it, or call the layer otherwise"
            )
        others[other] = others.get(other, 0.0) + layer.forward_seconds
        return
    last = layers[-1] if layers else None
    if last is not None and _is_parameter_of(layer, last):
        layers[-1] = replace(last, bytes=last.bytes + layer.bytes)
        return
    layers.append(layer)


def _is_parameter_of(layer: TracedLayer, last: TracedLayer) -> bool:
    found = [_PARAMETER.fullmatch(one.name) for one in (layer, last)]
    modules = {one["module"] for one in found if one is not None and one["module"]}
    times = {(one.forward_seconds, one.backward_seconds) for one in (layer, last)}
    return None not in found and len(modules) == len(times) == 1 and layer.name != last.name
