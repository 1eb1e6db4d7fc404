"""Order files: what every worker of a pipeline runs, one row each.

Text such as ``2F0`` (stage, phase, microbatch), parted by spaces or commas; ``#`` begins a comment.
``docs/guides/schedules.md`` describes it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from shardwright.core.legality import MOST_MICROBATCHES
from shardwright.errors import InputError
from shardwright.files.limits import read_text

MAX_FILE_BYTES = 16 * 2**20
MOST_ROWS = 1024  # as many parts as a parts file may have
REMEDY = "docs/guides/schedules.md shows one"


class OrderFile(NamedTuple):
    """An order file, its rows, actions parted by single spaces, the line of each, and how many microbatches
    they name."""

    path: str
    rows: tuple[str, ...]
    lines: tuple[int, ...]
    microbatches: int


def read_order(path: str | Path) -> OrderFile:
    """Read an order file. What is no action is for others to refuse. Raises InputError."""
    text = read_text(path, MAX_FILE_BYTES, "an order file", REMEDY)
    found = {
        number: " ".join(line.split("#")[0].replace(",", " ").split())
        for number, line in enumerate(text.split("\n"), 1)
    }
    found = {number: row for number, row in found.items() if row}
    if not found:
        raise InputError(f"{path} has no actions; write a row for every worker, {REMEDY}")
    if len(found) > MOST_ROWS:
        raise InputError(
            f"{path}, line {list(found)[MOST_ROWS]}: an order has at most {MOST_ROWS:,} rows, one for every worker, "
            f"but there are {len(found):,}; write all that a worker runs in its row, {REMEDY}"
        )
    most, at = max((_last(row), number) for number, row in found.items())
    if most >= MOST_MICROBATCHES:
        raise InputError(
            f"{path}, line {at}: a step has at most {MOST_MICROBATCHES:,} microbatches, numbered from 0, but here is "
            f"microbatch {most:,}; number them from 0, or make microbatches of more samples"
        )
    return OrderFile(str(path), tuple(found.values()), tuple(found), 1 + most)


def _last(row: str) -> int:
    """Return the highest microbatch that a row names."""
    return max(map(int, re.findall(r"[FBIW]([0-9]{1,6})\b", row)), default=0)
