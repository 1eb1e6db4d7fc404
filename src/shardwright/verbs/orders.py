"""Orders of one's own: read, and refused by file and line before anything else is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.errors import InputError
from shardwright.files.orderfile import OrderFile, read_order

if TYPE_CHECKING:
    from shardwright.planner.schedule import Crews, Line


def read_lines(
    path: str, count: int, remedy: str, crews: Crews = ()
) -> tuple[OrderFile, tuple[Line, ...]]:
    """Read and check an order of ``count`` rows: its file, and its actions. ``crews`` are the stages of each set
    of devices; none where the rows themselves say which stages lie together. ``remedy`` is for another count of
    rows. Raises InputError."""
    from shardwright.planner.schedule import OrderError, check_order, written

    file = read_order(path)
    if len(file.rows) != count:
        raise InputError(
            f"{path}: an order has a row for every worker, that is for each set of devices, {count}, but this one "
            f"has {len(file.rows):,} (the last in line {file.lines[-1]:,}); {remedy}"
        )
    try:
        lines = written(file.rows)
        check_order(lines, crews, file.microbatches)
    except OrderError as error:
        at = "" if error.row is None else f", line {file.lines[error.row]}"
        raise InputError(f"{path}{at}: {error.problem}; {error.remedy}") from None
    return file, lines
