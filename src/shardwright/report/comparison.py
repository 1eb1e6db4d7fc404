"""A prediction laid beside its measurement: step time, memory, seconds per kind of work."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.completion import completions
from shardwright.core.plan import STALE
from shardwright.core.program import SEGMENT_KINDS, Kind, Program
from shardwright.core.timeline import Timeline
from shardwright.report.story import MESSAGES, WORK, PlanStory, busiest_mesh, seconds_of_work
from shardwright.report.units import bytes_text, percent_text, seconds_text

# Predictions nearer than this are the same but for rounding.
SAME = 1e-6
# A message that takes so many times what is predicted of it is worth a word.
_LONG = 2.0
# Steps that take so much longer while instructions are measured than before are, too.
_SLOWED = 0.03


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
    known to occupy something, tensors alone follow. Work is computing and sending on the busiest
    stage; how long its device stood still because another rank had not come stands in rows of its
    own. A transfer counts where it is sent. A step is one that all ranks begin together, as they do while they measure.
    """
    program, predicted, measured = story.program, story.predicted, story.measured
    if measured is None:
        return ()
    rows = [
        Difference(
            name="step time",
            predicted=predicted.together_seconds,
            measured=measured.step_seconds,
        ),
        *_memory_rows(story),
    ]
    unseen = np.where(np.isnan(measured.start), np.nan, 0.0)
    mesh = busiest_mesh(program, replace(predicted, end=predicted.end + unseen))
    pairs = [(predicted.worked_seconds + unseen, measured.worked_seconds)]
    pairs.append((waiting_seconds(program, predicted) + unseen, waiting_seconds(program, measured)))
    for (foretold, seen), words in zip(pairs, ("", "waiting for a rank: "), strict=True):
        was = dict(seconds_of_work(program, foretold, mesh))
        now = dict(seconds_of_work(program, seen, mesh))
        rows += [
            Difference(name=words + name, predicted=was.get(name, 0.0), measured=now.get(name, 0.0))
            for name in WORK
            if name in was or name in now
        ]
    return tuple(rows)


def waiting_seconds(program: Program, timeline: Timeline) -> NDArray[np.float64]:
    """Return how long each instruction's device stood still for another rank.

    In simulations all ranks of a stage come at once, and only receives wait: from when the device
    has done all that comes before it needs the result until the other stage sends.
    """
    if timeline.waited is not None:
        return timeline.waited
    waited = np.zeros(program.num_instructions)
    sends = {
        (int(program.item[index]), int(program.microbatch[index])): index
        for index in np.flatnonzero(program.kind == Kind.SEND).tolist()
    }
    if not sends:
        return waited
    until, computes = completions(program), np.isin(program.kind, SEGMENT_KINDS)
    for mesh in range(len(program.meshes)):
        mine = program.group == mesh
        busy = np.maximum.accumulate(np.where(mine & computes, timeline.end, 0.0))
        receives = np.flatnonzero(mine & (program.kind == Kind.RECEIVE))
        free = 0.0
        for index in receives[np.argsort(until[receives], kind="stable")].tolist():
            send = sends.get((int(program.item[index]), int(program.microbatch[index])), index)
            free = max(free, float(busy[int(until[index]) - 1]))
            waited[index] = max(0.0, float(timeline.start[send]) - free)
            free = max(free, float(timeline.end[index]))
    return waited


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
    notes += _of_measuring(story)
    planned, told = story.plan.predicted, story.predicted
    if told.step_seconds < told.together_seconds * (1 - SAME):
        notes.append(
            f"Steps in a row are predicted to take {seconds_text(told.step_seconds)} each: stages begin the next "
            "when they are done. While they measure all begin each step together."
        )
    if story.plan.is_stale:
        return (*notes, f"{STALE.capitalize()}.")
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


def _of_measuring(story: PlanStory) -> list[str]:
    """Say what measured messages count, and what measuring itself takes."""
    notes: list[str] = []
    if any(
        one.name in MESSAGES and one.measured > _LONG * one.predicted for one in differences(story)
    ):
        notes.append(
            "A message counts from when all ranks have come until it is complete. While they compute it waits for a "
            "core, or its turn on the link; that costs the step something only where the result is needed by then."
        )
    seen, usual, predicted = story.measured, story.usual_seconds, story.predicted.step_seconds
    if usual and seen and seen.step_seconds > (1 + _SLOWED) * usual:
        notes.append(
            f"Steps took {seconds_text(usual)} before, where {seconds_text(predicted)} are predicted "
            f"({percent_text(predicted / usual - 1)}): to note when every instruction and message begins and "
            "ends takes cores as well."
        )
    return notes
