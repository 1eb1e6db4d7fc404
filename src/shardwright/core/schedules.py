"""The schedules of pipelines: one table of their names, and of what follows from a name alone.

Everything that lists, checks or labels schedules reads ``SCHEDULES``. The orders themselves are made
in ``planner.schedule``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NamedSchedule = Literal["1f1b", "gpipe", "1f1b-so", "interleaved"]
ScheduleName = Literal[NamedSchedule, "custom"]
ScheduleKind = Literal["pipedream", "gpipe", "1f1b-sno", "1f1b-so", "1f1b-as", "fbp-as"]
Executes = Literal["overlapped", "exposed", "streaming"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One schedule.

    ``title`` is what people call it. ``program``: its name in strategies, "" where only profiles
    of layers are planned for it. ``profile``: whether they are. While ``behind`` stages come after
    one, that holds ``per_stage * behind + at_end`` microbatches at most, all of them where
    ``per_stage`` is None; with ``chunks`` several stages share their devices, and that is told by the
    order alone. ``posts``: receives are actions of the order, ahead of their use. ``executes``: what becomes of transfers in the closed forms: hidden, not hidden, or
    streamed while computing.
    """

    title: str
    program: ScheduleName | Literal[""] = ""
    profile: bool = False
    per_stage: int | None = 1
    at_end: int = 1
    chunks: bool = False
    posts: bool = False
    flushes: bool = True
    executes: Executes = "overlapped"


SCHEDULES: dict[str, Schedule] = {
    "pipedream": Schedule(title="PipeDream's 1F1B, asynchronous", profile=True, flushes=False),
    "1f1b-so": Schedule(
        title="1F1B with a doubled warm-up", program="1f1b-so", profile=True, per_stage=2, posts=True
    ),
    "1f1b-sno": Schedule(title="1F1B", program="1f1b", profile=True, executes="exposed"),
    "gpipe": Schedule(title="GPipe", program="gpipe", profile=True, per_stage=None),
    "1f1b-as": Schedule(title="1F1B, streamed", profile=True, executes="streaming"),
    "fbp-as": Schedule(
        title="forward and backward side by side, streamed", profile=True, per_stage=2, at_end=2
    ),
    "1f1b": Schedule(title="1F1B", program="1f1b", executes="exposed"),
    "interleaved": Schedule(
        title="interleaved 1F1B", program="interleaved", per_stage=2, chunks=True, posts=True
    ),
    "custom": Schedule(title="an order of one's own", program="custom", per_stage=None,
                       chunks=True, posts=True),
}  # fmt: skip
# What strategies may name, and what profiles of layers are planned for.
NAMED: tuple[NamedSchedule, ...] = ("1f1b", "gpipe", "1f1b-so", "interleaved")
PLANNED: tuple[ScheduleKind, ...] = (
    "pipedream", "1f1b-so", "1f1b-sno", "gpipe", "1f1b-as", "fbp-as",
)  # fmt: skip


def in_flight(name: str, behind: int, most: int) -> int:
    """Return how many of ``most`` microbatches' activations a stage holds at most, where ``behind``
    stages come after it.

    Raises ValueError where only the order tells.
    """
    schedule = SCHEDULES[name]
    if schedule.chunks:
        raise ValueError(f"what {name} keeps depends on its order; ask planner.schedule.held")
    if schedule.per_stage is None:
        return most
    held = schedule.per_stage * behind + schedule.at_end
    return min(most, held) if schedule.flushes else held
