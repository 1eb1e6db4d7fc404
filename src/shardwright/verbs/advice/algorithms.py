"""Advice on algorithms of layers under a bound of memory, and on the batch that goes with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwright.core.advice import Advice, Curve
from shardwright.core.algorithms import AlgorithmChoice, AlgorithmTable, Workspace
from shardwright.errors import InputError
from shardwright.files.algorithmtable import read_algorithms
from shardwright.layerwise.algorithms import Frontier, best_batch, frontier
from shardwright.report.units import bytes_text, seconds_text
from shardwright.verbs.advice.requests import PAPER, AlgorithmRequest

# Points of a frontier that are drawn and printed as JSON: more cannot be seen.
MOST_SHOWN = 1000


def advise_algorithms(path: str | Path, request: AlgorithmRequest) -> Advice:
    """Choose an algorithm for each layer of a table within a bound of memory, and the batch where there are several.

    Raises InputError for a malformed table, and where nothing fits, naming the least memory.
    """
    tables = read_algorithms(path)
    curves = {one.batch: frontier(one.layers, request.mode) for one in tables}
    found = [(one, curves[one.batch].best(request.workspace_bytes(one.batch))) for one in tables]
    best = best_batch(found, request.tolerance)
    if best is None:
        raise InputError(_nothing_fits(tables, curves, request))
    choice = next(fit for one, fit in found if one is best and fit)
    of_batch = f"a batch of {best.batch:,}, " if best.batch else ""
    return Advice(
        title="Algorithms under a bound of memory",
        answers=(
            f"Take {of_batch}{seconds_text(choice.seconds)} of all layers with "
            f"{bytes_text(choice.bytes)} of workspace.",
            *_changed(best, choice),
        ),
        inputs=(
            ("table", f"{path}: {len(best.layers)} layers, {len(tables)} batch size(s)"),
            ("memory", bytes_text(request.memory_bytes)),
            ("taken before workspaces", f"{bytes_text(request.fixed_bytes)} + "
                f"{bytes_text(request.sample_bytes)} a sample"),
            ("workspace", _WORKSPACE[request.mode]),
        ),
        assumptions=(
            "Times of layers add up, and each is that of the table whatever the others do.",
            "Of batches within the tolerance of the fastest the smallest is taken: larger ones need more samples.",
            "Exact: no other choice of the table's algorithms is faster within the bound.",
        ),
        sources=(f"{PAPER}, choosing algorithms as a 0/1 programme", f"seconds and bytes: {path}"),
        columns=("batch", "bound", "workspace", "time", "samples/s", "choices"),
        rows=tuple(_batch_row(one, fit, curves[one.batch], request, best) for one, fit in found),
        curves=(_frontier_curve(tables, curves, choice),),
        values={
            "batch": best.batch,
            "seconds": choice.seconds,
            "bytes": choice.bytes,
            "algorithms": _names(best, choice),
            "frontier": {str(batch): _shown(curve) for batch, curve in curves.items()},
        },
    )  # fmt: skip


_WORKSPACE: Mapping[Workspace, str] = {
    "sum": "all layers' together",
    "max": "the largest layer's, free after use",
}


def _names(table: AlgorithmTable, choice: AlgorithmChoice) -> dict[str, str]:
    """Return the algorithm of each layer by name."""
    pairs = zip(table.layers, choice.algorithms, strict=True)
    return {layer.name: layer.algorithms[place].name for layer, place in pairs}


def _nothing_fits(
    tables: Sequence[AlgorithmTable], curves: Mapping[int, Frontier], request: AlgorithmRequest
) -> str:
    least = min(
        (curves[one.batch].memory[0] + request.taken_bytes(one.batch), one.batch) for one in tables
    )
    of_batch = f" (a batch of {least[1]:,})" if least[1] else ""
    return (
        f"no choice fits in {bytes_text(request.memory_bytes)}: the smallest needs {math.ceil(least[0]):,} "
        f"bytes, {bytes_text(least[0])}{of_batch}; give more --memory, a smaller batch or smaller algorithms"
    )


def _changed(table: AlgorithmTable, choice: AlgorithmChoice) -> tuple[str, ...]:
    """Say which layers do not have their fastest algorithm."""
    slower = [
        f"{layer.name} ({layer.algorithms[place].name})"
        for layer, place in zip(table.layers, choice.algorithms, strict=True)
        if layer.algorithms[place].seconds > min(one.seconds for one in layer.algorithms)
    ]
    if not slower:
        return ("Every layer has its fastest algorithm.",)
    rest = f" and {len(slower) - 8} more" if len(slower) > 8 else ""
    return (f"Memory keeps from their fastest algorithm: {', '.join(slower[:8])}{rest}.",)


def _batch_row(
    table: AlgorithmTable,
    fit: AlgorithmChoice | None,
    curve: Frontier,
    request: AlgorithmRequest,
    best: AlgorithmTable,
) -> tuple[str, ...]:
    batch, bound = f"{table.batch:,}" if table.batch else "-", request.workspace_bytes(table.batch)
    if fit is None:
        least = bytes_text(curve.memory[0])
        return batch, bytes_text(max(0.0, bound)), f"needs {least}", "-", "-", "0"
    speed = f"{table.batch / fit.seconds:,.4g}" if table.batch and fit.seconds else "-"
    mark = " ▸" if table is best else ""
    return (
        batch, bytes_text(bound), bytes_text(fit.bytes), seconds_text(fit.seconds), speed + mark, str(len(curve)),
    )  # fmt: skip


def _shown(curve: Frontier) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of a frontier, evenly thinned where they are many."""
    every = len(curve)
    count = min(every, MOST_SHOWN)
    places = [round(k * (every - 1) / max(1, count - 1)) for k in range(count)]
    return [(int(curve.memory[k]), float(curve.seconds[k])) for k in places]


def _frontier_curve(
    tables: Sequence[AlgorithmTable], curves: Mapping[int, Frontier], choice: AlgorithmChoice
) -> Curve:
    return Curve(
        title="Time against workspace: all choices that no other beats",
        across="workspace, MiB",
        up="ms of all layers",
        lines=tuple(
            (
                f"batch {one.batch}" if one.batch else "all layers",
                tuple((size / 2**20, time * 1e3) for size, time in _shown(curves[one.batch])),
            )
            for one in tables
        ),
        marked=((choice.bytes / 2**20, choice.seconds * 1e3),),
    )
