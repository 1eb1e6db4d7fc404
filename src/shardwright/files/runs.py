"""The border where published training runs are read: a CSV file, one run a row.

A blank cell means "not published", never zero. Columns that are not known here are ignored. What is
wrong with a file is one InputError: the row's number (the header is row 1), the column, what was
found and what is accepted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from shardwright.errors import InputError
from shardwright.files.limits import read_text, table_rows

LARGEST_FILE = 4 * 2**20
REQUIRED = ("id", "source_id", "model", "layers", "hidden", "heads", "seq", "gpu", "gpus")
LARGEST = 10**12
# Of counts, so that the tensors of a model can be counted: what grows with the batch, and all others.
MOST_SAMPLES, MOST_WIDTH = 2**31, 2**18
OF_SAMPLES = ("vocab", "seq", "gpus", "micro_batch", "global_batch", "grad_accum")
MOST_LAYERS = 2048  # each is planned
# What people write into a cell that has nothing.
BLANKS = ("-", "--", "?", "n/a", "na", "unknown", "not published", "not stated")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One run as its source printed it; None and "" are what it did not print.

    Degrees, dimensions and batches are counts, ``gpu_mem_gb`` and the links' rates in the units that
    their names say. ``iter_s`` seconds per step. ``row`` is the line in the file.
    """

    row: int
    id: str
    source_id: str
    source: str = ""
    table: str = ""
    quality: str = ""
    task: str = ""
    model: str
    arch: str = ""
    layers: int
    hidden: int
    heads: int
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    ffn_type: str = ""
    experts: int | None = None
    experts_topk: int | None = None
    vocab: int | None = None
    seq: int
    params_b: float | None = None
    active_params_b: float | None = None
    gpu: str
    gpu_mem_gb: float | None = None
    gpus_per_node: int | None = None
    gpus: int
    intra_bw_gbs: float | None = None
    inter_bw_gbps_node: float | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    sharding: str = ""
    seq_parallel: str = ""
    micro_batch: int | None = None
    global_batch: int | None = None
    grad_accum: int | None = None
    precision: str = ""
    recompute: str = ""
    flash_attn: str = ""
    compile: str = ""
    framework: str = ""
    software_date: str = ""
    tflops_per_gpu: float | None = None
    flops_convention: str = ""
    tokens_per_s_per_gpu: float | None = None
    iter_s: float | None = None
    samples_per_s: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    peak_mem_gib: float | None = None
    mem_kind: str = ""
    oom: str = ""
    notes: str = ""


def read_runs(path: str | Path) -> tuple[PublishedRun, ...]:
    """Read a file of published runs. Raises InputError."""
    text = read_text(path, LARGEST_FILE, "a file of published runs", "export fewer rows as CSV")
    return parse_runs(text, str(path))


def parse_runs(text: str, where: str = "runs") -> tuple[PublishedRun, ...]:
    """Read published runs from CSV; ``where`` begins every complaint."""
    rows = table_rows(text.splitlines(), where, "quote cells that hold commas or quotes")
    header = tuple(name.strip() for name in rows[0]) if rows else ()
    _check_header(header, where)
    runs = tuple(_run(header, row, number, where) for number, row in enumerate(rows[1:], 2) if row)
    if not runs:
        raise InputError(f"{where}: has a header and no runs; add one run a row")
    _check_names(runs, where)
    return runs


def _check_header(header: tuple[str, ...], where: str) -> None:
    if not header:
        raise InputError(f"{where}: is empty; the first row names the columns")
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise InputError(
            f"{where}, row 1: the columns {', '.join(missing)} are missing; every file of runs has "
            f"{', '.join(REQUIRED)} (docs/reference/validation.md lists all)"
        )
    double = sorted({name for name in header if name and header.count(name) > 1})
    if double:
        raise InputError(f"{where}, row 1: the column {double[0]!r} appears twice; keep one")


def _check_names(runs: tuple[PublishedRun, ...], where: str) -> None:
    seen: dict[str, int] = {}
    for run in runs:
        if run.id in seen:
            raise InputError(
                f"{where}, row {run.row}, column id: {run.id!r} is also the run of row "
                f"{seen[run.id]}; give every run its own id"
            )
        seen[run.id] = run.row


_TYPES = get_type_hints(PublishedRun)
_COLUMNS = tuple(field.name for field in fields(PublishedRun) if field.name != "row")


def _run(header: tuple[str, ...], found: list[str], row: int, where: str) -> PublishedRun:
    if len(found) > len(header):
        raise InputError(
            f"{where}, row {row}: has {len(found) - len(header)} cells more than the header has columns; "
            "quote cells that hold commas"
        )
    values: dict[str, Any] = {"row": row}
    cells = dict(zip(header, found, strict=False))
    for name in _COLUMNS:
        text = cells.get(name, "").strip()
        if not text or (text.lower() in BLANKS and name not in REQUIRED):
            if name in REQUIRED:
                raise InputError(
                    f"{where}, row {row}, column {name}: is blank, but every run needs it; fill it "
                    "in or leave the row out"
                )
            continue
        most = MOST_SAMPLES if name in OF_SAMPLES else MOST_WIDTH
        values[name] = _value(text, _TYPES[name], most, f"{where}, row {row}, column {name}")
    if values["layers"] > MOST_LAYERS:
        raise InputError(
            f"{where}, row {row}, column layers: a model of at most {MOST_LAYERS:,} layers is planned, "
            f"not of {values['layers']:,}; leave the row out"
        )
    return PublishedRun(**values)


def _value(text: str, wanted: type | UnionType, most: int, where: str) -> str | int | float:
    """Read a cell; a count is at most ``most``."""
    kinds = set(get_args(wanted)) - {NoneType} or {wanted}
    if str in kinds:
        return text
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    is_count = int in kinds
    if not 0 < number <= (most if is_count else LARGEST) or (is_count and number != int(number)):
        what = f"a whole number from 1 to {most:,}" if is_count else "a number above 0"
        raise InputError(
            f"{where}: must be {what}, or blank where it was not published, not {text[:40]!r}; correct it"
        )
    return int(number) if is_count else number
