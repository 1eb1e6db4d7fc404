"""Why a plan, for people: its decisions with their runners-up, and what more of everything would buy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.core.counts import GIB
from shardwright.core.explanation import Decision, Reasons, Relaxation, ShadowPrice
from shardwright.core.plan import Plan
from shardwright.report.critical import CriticalRow
from shardwright.report.tables import plain_table
from shardwright.report.units import bytes_text, seconds_text
from shardwright.report.why import Rows, Why, bound_text

# What saves less than this share of a step is not worth a sentence.
WORTH = 0.0005


def why(
    plan: Plan, critical: Sequence[CriticalRow], reasons: Reasons | None, limit: float = math.inf
) -> Why:
    """Write down what speaks for a plan that may use ``limit`` bytes per device."""
    has_decisions = reasons is not None and bool(reasons.decisions)
    return Why(
        bound=bound_text(plan),
        decisions=_decisions(plan, reasons.decisions, limit) if reasons and has_decisions else None,
        prices=() if reasons is None else price_lines(plan, reasons),
        critical=_critical(critical, plan.predicted.step_seconds),
        notes=() if reasons is None else reasons.notes,
    )


def why_parts(found: Why, rows: int) -> Group:
    """Show decisions, shadow prices and the critical path, ``rows`` of each at most."""
    parts: list[RenderableType] = []
    if found.decisions is not None:
        parts += [_table(found.decisions.first(rows)), Text("")]
    parts += [*(Text(line) for line in found.prices), Text("")]
    parts.append(_table(found.critical.first(rows)))
    parts += [Text(f"Note: {note}", style="dim") for note in found.notes]
    return Group(*parts)


def _table(rows: Rows) -> Table:
    table = plain_table(rows.title)
    widest = 0 if rows.numbers else None
    for place, head in enumerate(rows.heads):
        if place in rows.numbers:
            table.add_column(head, justify="right", no_wrap=True)
        else:
            table.add_column(head, overflow="fold", ratio=2 if place == widest else 1)
    for row in rows.rows:
        table.add_row(*(Text(cell) for cell in row))
    table.caption, table.caption_justify = rows.caption or None, "left"
    return table


def _decisions(plan: Plan, decisions: Sequence[Decision], limit: float) -> Rows:
    """Tell each decision with its runner-up, and what that would cost."""
    step = plan.predicted.step_seconds
    rows: list[tuple[str, ...]] = []
    for one in decisions:
        simulated, memory = "", ""
        if not math.isnan(one.step_seconds):
            simulated = f"{one.step_seconds / step - 1:+.1%}"
            memory = bytes_text(one.peak_bytes) + (" !" if one.peak_bytes > limit else "")
        modelled = "" if math.isnan(one.added_seconds) else _signed(one.added_seconds)
        rows.append(
            (one.what, one.chosen, one.runner_up, str(one.count), modelled, simulated, memory)
        )
    notes: list[str] = []
    if any(one.peak_bytes > limit for one in decisions):
        notes.append("! does not fit into memory")
    if any(one.step_seconds < step and one.peak_bytes <= limit for one in decisions):
        notes.append("a runner-up with a minus is faster: the search did not simulate it")
    return Rows(
        title="Decisions and their runners-up (modelled: additive model; simulated: the runner-up's "
        "plan)",
        heads=("decision", "chosen", "runner-up", "count", "modelled", "simulated", "memory"),
        rows=tuple(rows),
        numbers=frozenset({3, 4, 5, 6}),
        caption="; ".join(notes),
    )


def price_lines(plan: Plan, reasons: Reasons) -> tuple[str, ...]:
    """Say in one sentence each what more memory, links and rates would buy, the most first."""
    step = plan.predicted.step_seconds
    lines = tuple(
        _price_line(one, step) for one in reasons.prices if one.step_seconds < step * (1 - WORTH)
    )
    if math.isnan(reasons.byte_seconds):
        return lines
    if reasons.byte_seconds * GIB < WORTH * step:
        return ("Memory is not what this plan is short of: more of it buys nothing.", *lines)
    worth = reasons.byte_seconds * GIB
    first = (
        f"At its memory, one GiB per device more is worth {seconds_text(worth)} per step "
        f"({worth / step:.1%}; slope of the additive model's frontier there, modelled)."
    )
    return (first, *lines)


def _price_line(one: ShadowPrice, step: float) -> str:
    saved = 1 - one.step_seconds / step
    whose = f"with {one.label}" if one.label else "for this plan as it is"
    return f"{one.what[0].upper()}{one.what[1:]} buys {saved:.1%} (simulated, {whose})."


def relaxations_text(found: tuple[Relaxation, ...]) -> str:
    """Write what helps as one sentence."""
    pieces = [
        f"{one.what}{f' ({one.option})' if one.option else ''}: {one.label}, "
        f"{seconds_text(one.step_seconds)} per step, {bytes_text(one.peak_bytes)}"
        for one in found
    ]
    return "any one of these helps, a plan was found under each: " + "; ".join(pieces)


def _critical(rows: Sequence[CriticalRow], step: float) -> Rows:
    """Tell what the step waits for."""
    return Rows(
        title="Critical path by operator and link (what the step waits for; simulated)",
        heads=("what", "where", "seconds", "share"),
        rows=tuple(
            (
                row.what,
                row.where,
                seconds_text(row.seconds),
                f"{row.seconds / step if step else 0.0:.1%}",
            )
            for row in rows
        ),
        numbers=frozenset({2, 3}),
    )


def _signed(seconds: float) -> str:
    sign = "-" if seconds < 0 else "+"
    return f"{sign}{seconds_text(abs(seconds))}"
