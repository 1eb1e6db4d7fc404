"""Order files: what every worker of a pipeline runs, one row each.

Text such as ``2F0`` (stage, phase, microbatch), parted by spaces or commas; ``#`` begins a comment.
``docs/guides/schedules.md`` describes it.
"""

from __future__ import annotations

import re
from pathlib import Path

from shardwright.core.legality import MOST_MICROBATCHES
from shardwright.errors import InputError
from shardwright.files.limits import read_text

MAX_FILE_BYTES = 16 * 2**20
REMEDY = "docs/guides/schedules.md shows one"


def read_order(path: str | Path) -> tuple[tuple[str, ...], int]:
    """Read the rows of an order file, actions parted by single spaces, and count its microbatches.

    What is no action is for others to refuse. Raises InputError.
    """
    text = read_text(path, MAX_FILE_BYTES, "an order file", REMEDY)
    rows = [" ".join(line.split("#")[0].replace(",", " ").split()) for line in text.splitlines()]
    rows = [row for row in rows if row]
    if not rows:
        raise InputError(f"{path} has no actions; write a row for every worker, {REMEDY}")
    numbers = [int(number) for row in rows for number in re.findall(r"[FBIW](\d{1,6})\b", row)]
    count = 1 + max(numbers, default=0)
    if count > MOST_MICROBATCHES:
        raise InputError(
            f"a step has at most {MOST_MICROBATCHES:,} microbatches, numbered from 0, but {path} names "
            f"microbatch {count - 1:,}; number them from 0, or make microbatches of more samples"
        )
    return tuple(rows), count
