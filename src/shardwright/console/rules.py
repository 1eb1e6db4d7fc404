"""How rules sound: their checks, one clear message for a wrong one, lines to paste, and what has
none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from shardwright.console.terminal import Terminal
from shardwright.report.tables import filled_table
from shardwright.report.text import unruled_lines

if TYPE_CHECKING:
    from shardwright.files.planfile import Unruled
    from shardwright.verbs.results import Proposal, RuleCheck, RuleChecks

EVIDENCE = (
    "Each line held in all these tests, which is evidence and no proof: read it against what the "
    "operator means before you paste it."
)


def show_rules(terminal: Terminal, found: RuleChecks) -> None:
    """Print one line per kind, then what is wrong."""
    columns = ("kind", "rule", "cases", "splits", "difference", "verdict")
    rows = [
        (
            row.kind,
            row.rule,
            str(row.num_cases),
            str(row.num_splits),
            _difference(row),
            _verdict(row),
        )
        for row in found.rows
    ]
    title = f"Operators in pieces against whole, seed {found.seed}"
    table = filled_table(title, columns, rows, left=("rule", "difference", "verdict"))
    splits = sum(row.num_splits for row in found.rows)
    verdict = (
        Text("\n".join(row.problem for row in found.wrong), style="bold red")
        if found.wrong
        else Text(f"All {len(found.rows)} rules hold in {splits} splits.", style="green")
    )
    note = Text("difference: in units of the tolerance; more than 1 is wrong", style="dim")
    stopped = [] if found.is_complete else [Text("Stopped before the last rule.", style="yellow")]
    terminal.say(table, note, *stopped, verdict)
    terminal.emit(
        holds=not found.wrong,
        complete=found.is_complete,
        seed=found.seed,
        rules=list(found.rows),
    )
    if found.wrong:
        terminal.next("correct the rule in planner/space/rules; docs/guides/add-an-operator.md")


def _difference(row: RuleCheck) -> str:
    return f"{row.difference:.1e}" if row.difference else "0"


def _verdict(row: RuleCheck) -> Text:
    return Text("wrong", style="bold red") if row.problem else Text("holds")


def show_unruled(
    terminal: Terminal, rows: Sequence[Unruled], model: str, notes: Sequence[str] = ()
) -> None:
    """Say, before anything runs, what of a model no rule splits, what it costs, and the plan's notes."""
    lines = unruled_lines([(one.kind, one.count, one.share) for one in rows], model)
    terminal.say(*lines, *(Text(f"Note: {note}", style="dim") for note in notes))


def show_proposals(terminal: Terminal, found: Sequence[Proposal]) -> None:
    """Print lines to paste, and how often each was tested."""
    for one in found:
        tested = f"# held for {one.num_cases} calls in {one.num_splits} splits"
        unexplained = f"{one.num_unexplained} of {one.num_examples} calls"
        if not one.lines:
            reason = one.problem or "no way to cut it was found"
            terminal.say(Text(f"{one.kind}: {reason}; it runs replicated."), *_crashes(one))
            continue
        terminal.say(Text("\n".join([tested, *one.lines])), *_crashes(one))
        if one.num_unexplained:
            terminal.say(Text(f"No line was found for {unexplained}.", style="yellow"))
        if len(one.lines) > 1:
            terminal.say(
                Text(
                    "Several lines: which one holds depends on the arguments, so this kind needs a "
                    "function that looks at them (planner/space/rules/signature.py).",
                    style="yellow",
                )
            )
    if not found:
        terminal.say(Text("Every operator of the model has a rule.", style="green"))
    terminal.emit(proposals=list(found))
    if any(one.lines for one in found):
        terminal.say(Text(EVIDENCE, style="dim"))
        terminal.next(
            "paste into planner/space/rules with an example; then `shardwright verify-rules`"
        )


def _crashes(one: Proposal) -> list[Text]:
    """Say that a kernel does not look at its shapes."""
    if not one.num_crashes:
        return []
    said = f"{one.num_crashes} wrong cuts ended the process in which they were tried."
    return [Text(said, style="dim")]
