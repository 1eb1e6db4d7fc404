"""Why a plan, for people: its decisions with their runners-up, and what more of everything would buy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.core.explanation import Decision, Reasons, Relaxation, ShadowPrice
from shardwright.core.plan import Plan
from shardwright.report.critical import CriticalRow
from shardwright.report.text import plain_table
from shardwright.report.units import bytes_text, seconds_text

GIB = 2**30
# What saves less than this share of a step is not worth a sentence.
WORTH = 0.0005


def reason_parts(
    plan: Plan, reasons: Reasons, critical: Sequence[CriticalRow], limit: float, rows: int
) -> Group:
    """Show decisions, shadow prices and the critical path, ``rows`` of each at most."""
    parts: list[RenderableType] = []
    if reasons.decisions:
        parts += [decision_table(plan, reasons.decisions[:rows], limit), Text("")]
    parts += [*(Text(line) for line in price_lines(plan, reasons)), Text("")]
    parts.append(critical_table(critical[:rows], plan.predicted.step_seconds))
    parts += [Text(f"Note: {note}", style="dim") for note in reasons.notes]
    return Group(*parts)


def decision_table(plan: Plan, decisions: Sequence[Decision], limit: float) -> Table:
    """Show each decision with its runner-up, and what that would cost."""
    table = plain_table(
        "Decisions and their runners-up (modelled: additive model; simulated: the runner-up's plan)"
    )
    table.add_column("decision", overflow="fold", ratio=2)
    for name in ("chosen", "runner-up"):
        table.add_column(name, overflow="fold", ratio=1)
    for name in ("count", "modelled", "simulated", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in decisions:
        simulated, memory = "", ""
        if not math.isnan(one.step_seconds):
            simulated = _change(one.step_seconds / plan.predicted.step_seconds - 1)
            memory = bytes_text(one.peak_bytes) + (" !" if one.peak_bytes > limit else "")
        modelled = "" if math.isnan(one.added_seconds) else _signed(one.added_seconds)
        table.add_row(
            Text(one.what), Text(one.chosen), Text(one.runner_up), str(one.count),
            modelled, simulated, memory,
        )  # fmt: skip
    notes: list[str] = []
    if any(one.peak_bytes > limit for one in decisions):
        notes.append("! does not fit into memory")
    step = plan.predicted.step_seconds
    if any(one.step_seconds < step and one.peak_bytes <= limit for one in decisions):
        notes.append("a runner-up with a minus is faster: the search did not simulate it")
    table.caption, table.caption_justify = "; ".join(notes) or None, "left"
    return table


def price_lines(plan: Plan, reasons: Reasons) -> list[str]:
    """Say in one sentence each what more memory, links and rates would buy, the most first."""
    step = plan.predicted.step_seconds
    lines = [
        _price_line(one, step) for one in reasons.prices if one.step_seconds < step * (1 - WORTH)
    ]
    if math.isnan(reasons.byte_seconds):
        return lines
    if reasons.byte_seconds * GIB < WORTH * step:
        return ["Memory is not what this plan is short of: more of it buys nothing.", *lines]
    worth = reasons.byte_seconds * GIB
    first = (
        f"At its memory, one GiB per device more is worth {seconds_text(worth)} per step "
        f"({worth / step:.1%}; slope of the additive model's frontier there, modelled)."
    )
    return [first, *lines]


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


def critical_table(rows: Sequence[CriticalRow], step: float) -> Table:
    """Show what the step waits for."""
    table = plain_table("Critical path by operator and link (what the step waits for; simulated)")
    for name in ("what", "where"):
        table.add_column(name, overflow="fold")
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for row in rows:
        share = row.seconds / step if step else 0.0
        table.add_row(Text(row.what), Text(row.where), seconds_text(row.seconds), f"{share:.1%}")
    return table


def _change(share: float) -> str:
    return f"{share:+.1%}"


def _signed(seconds: float) -> str:
    sign = "-" if seconds < 0 else "+"
    return f"{sign}{seconds_text(abs(seconds))}"
