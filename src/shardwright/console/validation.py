"""How predicted beside published runs sounds."""

from __future__ import annotations

from dataclasses import asdict

from rich.text import Text

from shardwright.console.terminal import Terminal
from shardwright.core.accuracy import Validation
from shardwright.report.tables import filled_table
from shardwright.report.validation import (
    CASE_COLUMNS,
    SOURCE_COLUMNS,
    case_rows,
    lines,
    source_rows,
)


def show_validation(terminal: Terminal, found: Validation, with_cases: bool) -> None:
    """Print what errors add up to, per source and overall, and every run if wanted."""
    if with_cases:
        title, rows = f"Runs of {found.file}", case_rows(found.cases)
        terminal.say(filled_table(title, CASE_COLUMNS, rows, left=CASE_COLUMNS))
    title = f"Predicted against published, {found.file}"
    table = filled_table(title, SOURCE_COLUMNS, source_rows(found))
    terminal.say(table, Text("\n".join(lines(found))))
    terminal.emit(
        file=found.file,
        overall=asdict(found.overall),
        source_median=found.source_median,
        source_median_baseline=found.source_median_baseline,
        sources=[asdict(one) for one in found.sources],
        reasons=[{"reason": reason, "count": count} for reason, count in found.reasons],
        cases=[asdict(case) | {"error": case.error, "memory_error": case.memory_error}
               for case in found.cases],
        seconds=found.seconds,
    )  # fmt: skip
    if not with_cases:
        terminal.next("`--cases` prints every run, `--json` all there is")
