"""Two plans of one model side by side: what differs, and the sentence that decides.

The instructions of a critical chain follow each other without a gap, so their seconds by kind of
work add up to the step time, and the differences of two chains to the difference of two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardwright.core.plan import Plan
from shardwright.core.strategy import Mesh
from shardwright.report.story import (
    WORK,
    PlanStory,
    memory_by_part,
    parameter_lines,
    work_of,
)
from shardwright.report.units import bytes_text, seconds_text

# Step times nearer than this are called equal.
ALIKE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One number of both plans. ``unit`` is ``seconds``, ``bytes`` or ``dollars``."""

    name: str
    one: float
    other: float
    unit: str = "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """One plan and another. ``facts`` are (what, first, other) in words, where they differ;
    ``sentence`` says what decides."""

    one: str
    other: str
    rows: tuple[Side, ...]
    facts: tuple[tuple[str, str, str], ...]
    sentence: str


def contrast(one: PlanStory, other: PlanStory, room: float = float("inf")) -> Contrast:
    """Lay two plans side by side; ``room`` is the bytes of a device that a plan may use."""
    rows = _rows(one, other)
    return Contrast(
        one=one.plan.strategy.label or "unnamed",
        other=other.plan.strategy.label or "unnamed",
        rows=rows,
        facts=tuple(fact for fact in _facts(one.plan, other.plan) if fact[1] != fact[2]),
        sentence=_sentence(one, other, rows, room),
    )


def critical_seconds(story: PlanStory) -> dict[str, float]:
    """Return the seconds per kind of work on the critical chain; they add up to the step."""
    timeline, program = story.predicted, story.program
    chain = np.array(timeline.critical, dtype=np.int64)
    lengths = (timeline.end - timeline.start)[chain] / timeline.laps
    sums = np.bincount(work_of(program)[chain], lengths, minlength=len(WORK))
    return {name: float(total) for name, total in zip(WORK, sums, strict=True) if total > 0}


def _rows(one: PlanStory, other: PlanStory) -> tuple[Side, ...]:
    first, second = one.plan.predicted, other.plan.predicted
    rows = [
        Side(
            name="step time",
            one=one.predicted.step_seconds,
            other=other.predicted.step_seconds,
        )
    ]
    was, now = critical_seconds(one), critical_seconds(other)
    rows += [
        Side(name=f"critical {name}", one=was.get(name, 0.0), other=now.get(name, 0.0))
        for name in WORK
        if name in was or name in now
    ]
    rows.append(
        Side(
            name="peak memory",
            one=one.predicted.worst_peak_bytes,
            other=other.predicted.worst_peak_bytes,
            unit="bytes",
        )
    )
    parts, others = (dict(memory_by_part(story, _fullest(story))) for story in (one, other))
    rows += [
        Side(name=name, one=parts.get(name, 0.0), other=others.get(name, 0.0), unit="bytes")
        for name in dict.fromkeys((*parts, *others))
    ]
    if first.dollars or second.dollars:
        rows.append(
            Side(name="price of a step", one=first.dollars, other=second.dollars, unit="dollars")
        )
    return tuple(rows)


def _facts(one: Plan, other: Plan) -> list[tuple[str, str, str]]:
    def row(what: str, write: Callable[[Plan], object]) -> tuple[str, str, str]:
        return what, str(write(one)), str(write(other))

    travel = row("gradients travel in", lambda plan: plan.strategy.gradient_sync.wire)
    lost = row("of gradients not sent in a step", lambda plan: f"{plan.objective.lost:.2%}")
    return [
        row("devices", lambda plan: len(plan.strategy.devices)),
        row("stages", lambda plan: " + ".join(_mesh(mesh) for mesh in plan.strategy.meshes)),
        row("microbatches", lambda plan: plan.strategy.pipeline.num_microbatches),
        row("schedule", lambda plan: plan.strategy.pipeline.title),
        row("recomputed blocks", lambda plan: len(plan.strategy.recompute)),
        row("segments begun for gradients", lambda plan: len(plan.strategy.segment_starts)),
        row(
            "parameters (at rest, optimizer state, reduced every: how many)",
            lambda plan: "; ".join(
                f"{rest}, {state}, {sync}: {count}"
                for rest, state, sync, count in parameter_lines(plan)
            ),
        ),
        row("precision", lambda plan: plan.strategy.precision),
        *[one for one in (travel, lost) if one[1] != one[2]],
    ]


def _mesh(mesh: Mesh) -> str:
    axes = [f"{axis} {size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True) if size > 1]
    return " x ".join(axes) or "single"


def _fullest(story: PlanStory) -> int:
    peaks = story.predicted.peak_bytes
    return max(range(len(peaks)), key=lambda mesh: peaks[mesh])


def _sentence(one: PlanStory, other: PlanStory, rows: tuple[Side, ...], room: float) -> str:
    """Say what decides between the two: memory first, then the time's largest differences."""
    mine, theirs = one.plan.strategy.label, other.plan.strategy.label
    need = other.predicted.worst_peak_bytes
    if need > room:
        stage = _fullest(other)
        biggest = max(memory_by_part(other, stage), key=lambda part: part[1])
        return (
            f"{theirs} does not fit: it needs {bytes_text(need)} per device on stage {stage}, "
            f"{bytes_text(need - room)} more than the {bytes_text(room)} there are; "
            f"{bytes_text(biggest[1])} of it are {biggest[0]}."
        )
    before, after = one.predicted.step_seconds, other.predicted.step_seconds
    share = after / before - 1
    if abs(share) < ALIKE:
        less = need - one.predicted.worst_peak_bytes
        word = "more" if less > 0 else "less"
        return (
            f"{theirs} is as fast as {mine} ({seconds_text(after)} against {seconds_text(before)}) "
            f"and needs {bytes_text(abs(less))} {word} memory per device."
        )
    word = "slower" if share > 0 else "faster"
    text = (
        f"{theirs} is {abs(share):.1%} {word} than {mine} ({seconds_text(after)} against "
        f"{seconds_text(before)})"
    )
    same, against = _on_critical_path(rows, share), _on_critical_path(rows, -share)
    text += f": on its critical path {_change(same[0])}" if same else ""
    text += f" and {_change(same[1])}" if len(same) > 1 and _matters(same[1], before) else ""
    text += f", though {_change(against[0])}" if against and _matters(against[0], before) else ""
    return text + "."


def _on_critical_path(rows: tuple[Side, ...], sign: float) -> list[Side]:
    """Return what differs in one direction on the critical path, the largest differences first."""
    parts = [row for row in rows if row.name.startswith("critical ")]
    found = [row for row in parts if (row.other - row.one) * sign > 0]
    return sorted(found, key=lambda row: -abs(row.other - row.one))


def _matters(row: Side, step: float) -> bool:
    return abs(row.other - row.one) >= ALIKE * step


def _change(row: Side) -> str:
    word = "more" if row.other > row.one else "less"
    name = row.name.removeprefix("critical ")
    return f"{name} takes {seconds_text(abs(row.other - row.one))} {word}"
