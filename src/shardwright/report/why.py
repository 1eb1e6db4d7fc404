"""Why a plan, as words and rows: what the terminal prints and the page shows is written once, here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.core.plan import Plan
from shardwright.report.units import seconds_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A table as text. ``numbers`` are the columns to align right, ``caption`` may be empty."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    caption: str = ""

    def first(self, count: int) -> Rows:
        """Return the table with at most so many rows."""
        return replace(self, rows=self.rows[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """All that speaks for a plan: how good it is proved to be, what else could have been decided,
    what more of everything would buy, and what the step waits for.

    ``decisions`` is None and ``prices`` empty where they were not looked for.
    """

    bound: str
    decisions: Rows | None
    prices: tuple[str, ...]
    critical: Rows
    notes: tuple[str, ...] = ()


def bound_text(plan: Plan) -> str:
    """Say how far the plan may be from the best possible; empty where nothing is proved of it."""
    if plan.bound is None or plan.is_stale:
        return ""
    return (
        f"No plan of the searched space is faster than {seconds_text(plan.bound.step_seconds)} "
        f"(gap {plan.bound.gap:.1%}; {plan.bound.model})."
    )
