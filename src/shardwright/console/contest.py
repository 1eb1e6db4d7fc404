"""How an answer to a problem of the IOPDDL contest sounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from shardwright.console.terminal import Terminal
from shardwright.report.tables import filled_table

if TYPE_CHECKING:
    from shardwright.verbs.results import ContestAnswer

FIELDS = "name cost bound gap is_optimal peak limit fits is_allowed is_impossible is_complete seconds choice".split()


def show_contest(terminal: Terminal, found: ContestAnswer, path: Path | None) -> None:
    """Print a solution's cost, how far it is from the bound, and its memory."""
    used = f"{found.peak:,}" + (f" of {found.limit:,}" if found.limit is not None else "")
    rows = {
        "cost": f"{found.cost:,}",
        "lower bound": f"{found.bound:,.0f}",
        "gap": "0, proved optimal" if found.is_optimal else f"{found.gap:.3%}",
        "peak usage": used,
        "seconds": f"{found.seconds:.1f}",
    }
    title = f"{found.name}: {found.num_nodes} nodes, {found.num_edges} edges"
    terminal.say(filled_table(title, ("what", "value"), rows.items()))
    if wrong := _wrong(found):
        terminal.say(Text(wrong, style="bold red"))
    if not found.is_complete:
        terminal.say(Text("Stopped early: this is the best found so far.", style="yellow"))
    summary = {name: getattr(found, name) for name in FIELDS}
    terminal.emit(**summary, file=str(path) if path else None)
    if path:
        terminal.say(Text(f"Wrote {path}."))
    else:
        terminal.next("`--out solution.json` keeps the solution, `--seconds` gives it more time")


def _wrong(found: ContestAnswer) -> str:
    if found.is_impossible:
        return "Proved: no choice keeps the limit and avoids what is forbidden; raise usage_limit."
    if not found.fits:
        return "Over the limit: nothing that fits was found; give --seconds more time."
    return "" if found.is_allowed else "No allowed choice was found; give --seconds more time."
