"""The drawings of the schedules' guide are what is drawn, and their figures what is replayed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright.core.profile import Bar
from shardwright.core.schedules import SCHEDULES
from shardwright.layerwise.compare import side_by_side
from shardwright.layerwise.ordered import bars
from shardwright.planner.schedule import (
    Replay,
    Room,
    StageTimes,
    folded,
    most_bytes,
    pipeline_order,
    replay,
    search_order,
)
from shardwright.report.lanes import lanes_text
from tests.planner.schedule.drawn import bubble

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "schedules.md"
DRAWN = ("gpipe", "1f1b", "1f1b-so", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-1p", "zb-2p",
         "zb-interleaved", "zb-v", "v-half", "v-min")  # fmt: skip
DEVICES, PIECES, WIDTH = 4, 8, 108


def played(name: str) -> tuple[Replay, list[StageTimes]]:
    """Four devices, eight microbatches, F = I = W = 1 s of a device."""
    chunks = 2 if SCHEDULES[name].chunks else 1
    count = DEVICES * chunks
    stages = [StageTimes(forward=1 / chunks, backward=1 / chunks, weight=1 / chunks)] * count
    crews = tuple(tuple(range(k, count, DEVICES)) for k in range(DEVICES))
    if times := SCHEDULES[name].searched:
        limits, ones = [float(times * DEVICES)] * count, [1.0] * count
        room = Room(limits=limits, kept=ones, left=[0.5] * count)
        lines = search_order(stages, PIECES, room)
        assert lines
    else:
        crews = folded(count) if SCHEDULES[name].folds else crews
        lines = pipeline_order(name, count, PIECES, crews)
    return replay(lines, stages), stages


@pytest.mark.parametrize("name", DRAWN)
def test_the_guide_draws_every_schedule(name):
    found, stages = played(name)
    part, page = stages[0].forward, PAGE.read_text()
    peak = max(most_bytes(found.lines, [part] * len(stages), [part / 2] * len(stages)))
    assert lanes_text(bars(found), WIDTH).rsplit("\n", 1)[0] in page, name
    row = re.search(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
    assert row
    assert f"| {bubble(found, stages):.1%} | {peak:g} |".replace("%", " %") in row[0]


def test_the_guide_draws_a_device_that_does_two_things_at_once():
    stages = [StageTimes(forward=1.0, backward=1.0, weight=1.0)] * DEVICES
    lines, devices, after = side_by_side("fbp-as", [1] * DEVICES, PIECES)
    lanes = bars(replay(lines, stages, devices=devices, after=after))
    assert lanes_text(lanes, WIDTH, beside=2).rsplit("\n", 1)[0] in PAGE.read_text()


def test_the_guide_draws_a_pipeline_that_is_never_flushed():
    """Periods in the middle of many."""
    stages = [StageTimes(forward=1.0, backward=1.0, weight=1.0)] * DEVICES
    found = replay(pipeline_order("1f1b", DEVICES, 20), stages)
    begin, end = 14.0, 41.0
    lanes = [
        [
            Bar(
                b.stage, b.phase, b.microbatch, max(b.start, begin) - begin, min(b.end, end) - begin
            )
            for b in lane
            if b.start < end and b.end > begin
        ]
        for lane in bars(found)
    ]
    assert lanes_text(lanes, WIDTH).rsplit("\n", 1)[0] in PAGE.read_text()
