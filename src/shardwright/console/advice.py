"""How advice sounds."""

from __future__ import annotations

from dataclasses import asdict

from rich.text import Text

from shardwright.console.terminal import Terminal
from shardwright.core.advice import Advice
from shardwright.report.tables import filled_table


def show_advice(terminal: Terminal, found: Advice, page: str) -> None:
    """Print an answer and what it rests on; ``page`` is where charts were written, if anywhere."""
    if found.rows:
        terminal.say(filled_table(found.title, found.columns, found.rows))
    inputs = tuple(f"{name}: {value}" for name, value in found.inputs)
    terminal.say(
        Text("\n".join(found.answers)),
        _listed("Inputs", inputs),
        _listed("Assumes", found.assumptions),
        _listed("Sources", found.sources),
    )
    terminal.emit(
        title=found.title,
        answers=found.answers,
        inputs=dict(found.inputs),
        assumptions=found.assumptions,
        sources=found.sources,
        curves=[asdict(curve) for curve in found.curves],
        page=page,
        **found.values,
    )
    if page:
        terminal.next(f"open {page}")
    elif found.curves:
        terminal.next("`--html advice.html` draws it")


def _listed(title: str, lines: tuple[str, ...]) -> Text:
    return Text("\n  ".join((title, *lines)), style="dim")
