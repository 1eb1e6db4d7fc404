"""How an analysis of a loader sounds."""

from __future__ import annotations

from dataclasses import asdict

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
from shardwright.report.tables import filled_table


def show_stalls(terminal: Terminal, found: Stalls, page: str) -> None:
    """Print where a step waits and what would help; ``page`` is where charts were written, if anywhere."""
    phases = filled_table("A step, with its data out of memory", PHASE_COLUMNS, phase_rows(found))
    rates = filled_table("Rates", ("of", "samples/s"), rate_rows(found))
    rows = list(knob_rows(found))
    knobs = filled_table("What would help (modelled)", KNOB_COLUMNS, rows, left=("change",))
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
