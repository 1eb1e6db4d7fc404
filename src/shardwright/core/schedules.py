"""The schedules of pipelines: one table of their names, and of what follows from a name alone.

Everything that lists, checks or labels schedules reads ``SCHEDULES``. The orders themselves are made
in ``planner.schedule``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

SplitName = Literal["zb-h1", "zb-h2", "zb-interleaved", "zb-v", "v-half", "v-min"]
NamedSchedule = Literal["1f1b", "gpipe", "1f1b-so", "interleaved", "looped-bfs", SplitName]
ScheduleName = Literal[NamedSchedule, "custom"]
ScheduleKind = Literal[
    "pipedream", "gpipe", "1f1b-sno", "1f1b-so", "1f1b-as", "fbp-as", "interleaved", "looped-bfs",
    SplitName, "zb-1p", "zb-2p", "custom",
]  # fmt: skip
Executes = Literal["overlapped", "exposed", "streaming"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One schedule.

    ``title`` is what people call it. ``program``: its name in strategies, "" where only profiles
    of layers are planned for it. ``profile``: whether they are. While ``behind`` stages come after
    one, that holds ``per_stage * behind + at_end`` microbatches at most, all of them where
    ``per_stage`` is None; with ``chunks`` several stages share their devices, and that is told by the
    order alone. ``posts``: receives are actions of the order, ahead of their use. ``splits``: the
    backward is two actions, I and W. ``folds``: chunks lie as a V, the first device has the first and
    the last. ``streams``: transfers run while layers
    compute. ``searched``: the order follows from times, and may hold so many times 1F1B's activations.
    ``idle``: microbatches that a device idles for each other device, F, I and W being equally long
    (Narayanan et al., 2021; Qi et al., 2024; 2024b).
    ``executes``: what becomes of transfers in the closed forms: hidden, not hidden, or streamed while
    computing.
    """

    title: str
    program: ScheduleName | Literal[""] = ""
    profile: bool = False
    per_stage: int | None = 1
    at_end: int = 1
    chunks: bool = False
    posts: bool = False
    splits: bool = False
    folds: bool = False
    searched: int = 0
    flushes: bool = True
    streams: bool = False
    idle: float = 1.0
    executes: Executes = "overlapped"


SCHEDULES: dict[str, Schedule] = {
    "pipedream": Schedule(title="PipeDream's 1F1B, asynchronous", profile=True, flushes=False),
    "1f1b-so": Schedule(
        title="1F1B with a doubled warm-up", program="1f1b-so", profile=True, per_stage=2, posts=True
    ),
    "1f1b-sno": Schedule(title="1F1B", program="1f1b", profile=True, executes="exposed"),
    "gpipe": Schedule(title="GPipe", program="gpipe", profile=True, per_stage=None),
    "1f1b-as": Schedule(title="1F1B, streamed", profile=True, streams=True, executes="streaming"),
    "fbp-as": Schedule(
        title="forward and backward side by side, streamed", profile=True, per_stage=2, at_end=2, streams=True
    ),
    "1f1b": Schedule(title="1F1B", program="1f1b", executes="exposed"),
    "interleaved": Schedule(
        title="interleaved 1F1B", idle=1 / 2, program="interleaved", profile=True, per_stage=2, chunks=True, posts=True
    ),
    "looped-bfs": Schedule(title="GPipe of chunks, looped breadth-first", program="looped-bfs", profile=True,
                           per_stage=None, chunks=True, posts=True),
    "zb-h1": Schedule(title="zero bubble, memory of 1F1B", idle=1 / 3, program="zb-h1", profile=True, splits=True, posts=True),
    "zb-h2": Schedule(
        title="zero bubble, twice the warm-up", idle=0.0, program="zb-h2", profile=True, per_stage=2, splits=True, posts=True
    ),
    "zb-interleaved": Schedule(title="interleaved, backward split", idle=0.0, program="zb-interleaved", profile=True,
                               per_stage=2, chunks=True, splits=True, posts=True),
    "zb-1p": Schedule(title="zero bubble searched, memory of 1F1B", profile=True, splits=True, searched=1),
    "zb-2p": Schedule(title="zero bubble searched, twice that memory", profile=True, splits=True, searched=2),
    "zb-v": Schedule(title="zero bubble on a V", idle=0.0, program="zb-v", profile=True, chunks=True, splits=True,
                     folds=True, posts=True),
    "v-half": Schedule(title="V of half the memory", idle=1 / 2, program="v-half", profile=True, chunks=True, splits=True,
                       folds=True, posts=True),
    "v-min": Schedule(title="V of a third of the memory", idle=2 / 3, program="v-min", profile=True, chunks=True, splits=True,
                      folds=True, posts=True),
    "custom": Schedule(title="an order of one's own", program="custom", profile=True, per_stage=None,
                       chunks=True, posts=True),
}  # fmt: skip
# What strategies may name; what profiles of layers are planned for by closed forms, by a replay of
# the order, and where none is named: those of the first that run on GPUs.
NAMED: tuple[NamedSchedule, ...] = get_args(NamedSchedule)
_PROFILED = cast(tuple[ScheduleKind, ...], tuple(n for n, s in SCHEDULES.items() if s.profile))
PLANNED: tuple[ScheduleKind, ...] = tuple(
    n for n in _PROFILED if not (SCHEDULES[n].chunks or SCHEDULES[n].splits)
)
REPLAYED: tuple[ScheduleKind, ...] = tuple(
    n for n in _PROFILED if n not in PLANNED and n != "custom"
)
# Whose order follows from times: measured ones of profiles, predicted ones of models.
SEARCHED: tuple[str, ...] = tuple(n for n, s in SCHEDULES.items() if s.searched)
EXPLORED: tuple[ScheduleKind, ...] = tuple(n for n in PLANNED if SCHEDULES[n].program)


def refusal(name: str) -> str:
    """Say why a schedule cannot train, or "" where it can or is unknown."""
    if name not in SCHEDULES or SCHEDULES[name].program or name in SEARCHED:
        return ""
    why = "it streams transfers while layers compute, which the executor's devices do not"
    if name == "fbp-as":
        why += ", and runs a forward and a backward side by side on one"
    remedy = f"choose {', '.join((*NAMED, *SEARCHED))}"
    if not SCHEDULES[name].flushes:
        why, remedy = "models have it by what it does with late weights", "choose stash"
    return f"schedule {name} is planned and simulated for profiles of layers only (plan --profile): {why}; {remedy}"


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
