"""A prediction laid beside its measurement: step time, memory, seconds per kind of work."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from shardwright.report.story import WORK, PlanStory, busiest_mesh, seconds_by_work
from shardwright.report.units import bytes_text, seconds_text

# Predictions nearer than this are the same but for rounding.
SAME = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Predicted beside measured. ``unit`` is ``seconds`` or ``bytes``."""

    name: str
    predicted: float
    measured: float
    unit: str = "seconds"

    @property
    def ratio(self) -> float:
        """(predicted - measured) / measured; NaN where nothing was measured."""
        return (self.predicted - self.measured) / self.measured if self.measured else float("nan")


def differences(story: PlanStory) -> tuple[Difference, ...]:
    """Lay a prediction beside its measurement: step time, peak memory, seconds per kind of work.

    The peak is the one that every other table shows, tensors and process; where a process is
    known to occupy something, tensors alone follow. Transfers are left out, since a measured
    receive also waits for its sender.
    """
    program, predicted, measured = story.program, story.predicted, story.measured
    if measured is None:
        return ()
    rows = [
        Difference(
            name="step time", predicted=predicted.step_seconds, measured=measured.step_seconds
        ),
        *_memory_rows(story),
    ]
    hidden = np.where(np.isnan(measured.start), np.nan, 0.0)
    there = replace(predicted, start=predicted.start + hidden, end=predicted.end + hidden)
    mesh = busiest_mesh(program, there)
    was = dict(seconds_by_work(program, there, mesh))
    now = dict(seconds_by_work(program, measured, mesh))
    names = [name for name in WORK[:-1] if name in was or name in now]
    rows += [
        Difference(name=name, predicted=was.get(name, 0.0), measured=now.get(name, 0.0))
        for name in names
    ]
    return tuple(rows)


def _memory_rows(story: PlanStory) -> list[Difference]:
    """Return the peak of a device and, where they are not the same, that of its tensors."""
    if story.measured is None:
        return []
    peaks = story.predicted.worst_peak_bytes, story.measured.worst_peak_bytes
    fixed = story.process_bytes
    parts = [("peak memory", 0.0), ("of it tensors", fixed)] if fixed else [("peak memory", 0.0)]
    return [
        Difference(name=name, predicted=peaks[0] - less, measured=peaks[1] - less, unit="bytes")
        for name, less in parts
    ]


def comparison_notes(story: PlanStory) -> tuple[str, ...]:
    """Say what the rows of ``differences`` count, and why they are not the plan file's figures
    where they are not."""
    notes: list[str] = []
    if story.process_bytes:
        notes.append(
            f"Peak memory of a device is {bytes_text(story.process_bytes)} that a process occupies "
            "before the model, as measured with the machine, and tensors, as their allocator "
            "counted them."
        )
    planned, told = story.plan.predicted, story.predicted
    if not (
        math.isclose(planned.step_seconds, told.step_seconds, rel_tol=SAME)
        and math.isclose(planned.peak_bytes, told.worst_peak_bytes, rel_tol=SAME)
    ):
        notes.append(
            f"The plan file predicts {seconds_text(planned.step_seconds)} and "
            f"{bytes_text(planned.peak_bytes)}; what is predicted here rests on what is measured "
            "by now. Plan again to choose by it."
        )
    return tuple(notes)
