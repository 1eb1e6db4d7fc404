"""Pipelines of any schedule of the table, of stages that are cut anyhow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from shardwright.core.schedules import SCHEDULES
from shardwright.planner.schedule import Replay, StageTimes, folded, pipeline_order
from shardwright.planner.schedule.pipeline import Line
from shardwright.planner.search.bounds import least_looped_rounds, least_rounds

SECONDS = st.sampled_from([0.0, 0.0, 1.0, 2.0]) | st.floats(0.0, 4.0)


class Drawn(NamedTuple):
    """Orders of the workers, what each stage takes, the seconds that the bound says all of its work takes at least,
    and the share of what is done once that it adds."""

    lines: Sequence[Line]
    stages: list[StageTimes]
    least_seconds: float
    share: float


def draw_pipeline(data: Any, schedule: str, devices: int, m: int, most_chunks: int) -> Drawn:
    """Draw chunks next to empty, backwards that are all W, or none of it."""
    entry = SCHEDULES[schedule]
    chunks = 2 if entry.folds else data.draw(st.integers(1, most_chunks)) if entry.chunks else 1
    count = devices * chunks
    stages = [
        StageTimes(
            forward=data.draw(SECONDS), backward=data.draw(SECONDS), weight=data.draw(SECONDS)
        )
        for _ in range(count)
    ]
    crews = tuple(tuple(range(k, count, devices)) for k in range(devices))
    lines = pipeline_order(schedule, count, m, folded(count) if entry.folds else crews)
    rounds, share = least_rounds(devices, m, schedule)
    if schedule in ("interleaved", "looped-bfs"):
        rounds = least_looped_rounds(devices, m, chunks)
    work = sum(stage.forward + stage.backward + stage.weight for stage in stages)
    return Drawn(lines, stages, rounds * work, share)


def bubble(found: Replay, stages: Sequence[StageTimes]) -> float:
    """Return the share of the span in which the busiest worker idles."""
    busiest = max(sum(stages[a.mesh].seconds(a.phase) for a in line) for line in found.lines)
    return 1 - busiest / found.span
