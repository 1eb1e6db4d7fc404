"""Tables of algorithms: ``layer,algorithm,seconds,bytes`` and, where there are several, ``batch``; a row an algorithm
of a layer. Times are seconds or what the column's ending says (``seconds_us``, ``seconds_ms``)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from shardwright.core.algorithms import Algorithm, AlgorithmTable, LayerAlgorithms
from shardwright.errors import InputError
from shardwright.files.limits import read_text, table_rows

LARGEST_FILE, MOST_ROWS = 4 * 2**20, 50_000
LONGEST_SECONDS, MOST_BYTES, MOST_SAMPLES = 1e9, 2**53, 2**31
_SECONDS = {"seconds": 1.0, "seconds_ms": 1e-3, "seconds_us": 1e-6}
_EXAMPLE = "layer,algorithm,seconds,bytes"


def read_algorithms(path: str | Path) -> tuple[AlgorithmTable, ...]:
    """Read the tables of a file, one for each batch, the smallest first. Raises InputError."""
    text = read_text(path, LARGEST_FILE, "a table of algorithms", f"give a table {_EXAMPLE}")
    return parse_algorithms(text, str(path))


def parse_algorithms(text: str, name: str = "table") -> tuple[AlgorithmTable, ...]:
    """Read the tables of a text; ``name`` is used in messages."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > MOST_ROWS:
        raise InputError(
            f"a table of algorithms has at most {MOST_ROWS:,} rows, but {name} has {len(lines):,}; leave "
            "out algorithms that others beat"
        )
    rows = table_rows(lines, name, f"write {_EXAMPLE}")
    columns, unit = _columns([cell.strip().lower() for cell in rows[0]] if rows else [], name)
    batches: dict[int, dict[str, dict[str, Algorithm]]] = {}
    for number, cells in enumerate(rows[1:], 2):
        try:
            batch, layer, algorithm = _row(cells, columns, unit)
            known = batches.setdefault(batch, {}).setdefault(layer, {})
            if algorithm.name in known:
                raise InputError(
                    f"algorithm {algorithm.name[:40]!r} of layer {layer[:40]!r} stands twice; keep one"
                )
        except InputError as error:
            raise InputError(f"{name}, row {number}: {error}") from error
        known[algorithm.name] = algorithm
    return _tables(batches, name)


def _columns(header: Sequence[str], name: str) -> tuple[dict[str, int], float]:
    """Return the places of the columns, and the unit of seconds."""
    _check_once(header, name)
    spelling = next((one for one in _SECONDS if one in header), "seconds")
    needed = ("layer", "algorithm", spelling, "bytes")
    if missing := [one for one in needed if one not in header]:
        raise InputError(
            f"{name} lacks the columns {', '.join(missing)}: its first row is {','.join(header)[:80]!r}; "
            f"write {_EXAMPLE}, and batch where there are several"
        )
    names = ("layer", "algorithm", "seconds", "bytes")
    places: dict[str, int] = dict(zip(names, map(header.index, needed)))
    if "batch" in header:
        places["batch"] = header.index("batch")
    return places, _SECONDS[spelling]


def _check_once(header: Sequence[str], name: str) -> None:
    known = [one for one in header if one in ("layer", "algorithm", "bytes", "batch", *_SECONDS)]
    for first, second in itertools.combinations(known, 2):
        if first == second or {first, second} <= _SECONDS.keys():
            raise InputError(
                f"{name}, row 1: the columns {first!r} and {second!r} say the same; keep one"
            )


def _row(cells: list[str], columns: dict[str, int], unit: float) -> tuple[int, str, Algorithm]:
    def text(column: str) -> str:
        place = columns[column]
        return cells[place].strip() if place < len(cells) else ""

    def number(column: str, most: float, least: float = 0.0) -> float:
        try:
            value = float(text(column)) * (unit if column == "seconds" else 1.0)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise InputError(
                f"{column} must be a number from {least:g} to {most:g}, not {text(column)[:40]!r}; correct it"
            )
        return value

    if not text("layer") or not text("algorithm"):
        raise InputError("a row names a layer and an algorithm; add what is missing")
    batch = number("batch", MOST_SAMPLES, 1) if "batch" in columns else 0
    algorithm = Algorithm(
        name=text("algorithm"),
        seconds=number("seconds", LONGEST_SECONDS),
        bytes=math.ceil(number("bytes", MOST_BYTES)),
    )
    return _whole(batch), text("layer"), algorithm


def _whole(batch: float) -> int:
    if batch != int(batch):
        raise InputError(f"batch must be a whole number, not {batch}; correct it")
    return int(batch)


def _tables(
    batches: dict[int, dict[str, dict[str, Algorithm]]], name: str
) -> tuple[AlgorithmTable, ...]:
    if not batches:
        raise InputError(f"{name} has no algorithms; write {_EXAMPLE} and a row for each")
    every = {layer for layers in batches.values() for layer in layers}
    for batch, layers in batches.items():
        if missing := sorted(every - layers.keys()):
            raise InputError(
                f"{name} has no algorithm of layer {missing[0][:60]!r} for a batch of {batch}, which others "
                "have; add its rows"
            )
    return tuple(
        AlgorithmTable(
            batch=batch,
            layers=tuple(
                LayerAlgorithms(name=layer, algorithms=tuple(known.values()))
                for layer, known in layers.items()
            ),
        )
        for batch, layers in sorted(batches.items())
    )
