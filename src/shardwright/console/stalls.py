"""How an analysis of a loader sounds."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from shardwright.console.terminal import Terminal
from shardwright.core.stalls import Stalls
from shardwright.report.stalls import (
    KNOB_COLUMNS,
    PHASE_COLUMNS,
    knob_rows,
    phase_rows,
    rate_rows,
    sentences,
)
from shardwright.report.tables import plain_table


def show_stalls(terminal: Terminal, found: Stalls, page: str) -> None:
    """Print where a step waits and what would help; ``page`` is where charts were written, if anywhere."""
    phases = _table("A step, with its data out of memory", PHASE_COLUMNS)
    for row in phase_rows(found):
        phases.add_row(*map(Text, row))
    rates = _table("Rates", ("of", "samples/s"))
    for row in rate_rows(found):
        rates.add_row(*map(Text, row))
    knobs = _table("What would help (modelled)", KNOB_COLUMNS)
    rows = list(knob_rows(found))
    for row in rows:
        knobs.add_row(*map(Text, row))
    terminal.say(phases, rates, *([knobs] if rows else []), Text("\n".join(sentences(found))))
    terminal.emit(
        **asdict(found),
        prep_stall_seconds=found.prep_stall,
        fetch_stall_seconds=found.fetch_stall,
        binding=found.rates.binding(0.0),
        least_cache=found.rates.least_cache(),
        cache_bytes=found.cache_bytes,
        knobs=[asdict(knob) for knob in found.knobs()],
        workers_curve=found.worker_curve(),
        cache_curve=found.cache_curve(),
        page=page,
    )
    if page:
        terminal.next(f"open {page}")
    elif rows:
        terminal.next("`--html stalls.html` draws the what-if curves")


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = plain_table(title)
    for place, name in enumerate(columns):
        table.add_column(
            name, justify="right" if place and name != "change" else "left", overflow="fold"
        )
    return table
