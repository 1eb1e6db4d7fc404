"""The drawings of the schedules' guide are what is drawn, and their figures what is replayed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright.core.schedules import SCHEDULES
from shardwright.layerwise.ordered import bars
from shardwright.planner.schedule import StageTimes, folded, most_bytes, pipeline_order, replay
from shardwright.report.lanes import lanes_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "schedules.md"
DRAWN = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2",
         "zb-interleaved", "zb-v", "v-half", "v-min")  # fmt: skip
DEVICES, PIECES = 4, 8


def drawn(name: str) -> tuple[str, float, float]:
    """Four devices, eight microbatches, F = I = W = 1 s of a device; the drawing, the share that
    the busiest device idles, and the most that a device keeps, W keeping half."""
    chunks = 2 if SCHEDULES[name].chunks else 1
    count = DEVICES * chunks
    stages = [StageTimes(forward=1 / chunks, backward=1 / chunks, weight=1 / chunks)] * count
    crews = tuple(tuple(range(k, count, DEVICES)) for k in range(DEVICES))
    lines = pipeline_order(name, count, PIECES, folded(count) if SCHEDULES[name].folds else crews)
    found = replay(lines, stages)
    peak = max(most_bytes(lines, [1 / chunks] * count, [0.5 / chunks] * count))
    return lanes_text(bars(found), 108), found.bubble(stages), peak


@pytest.mark.parametrize("name", DRAWN)
def test_the_guide_draws_every_schedule(name):
    text, bubble, peak = drawn(name)
    page = PAGE.read_text()
    assert text.rsplit("\n", 1)[0] in page, name
    row = re.search(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
    assert row
    assert f"| {bubble:.1%} | {peak:g} |".replace("%", " %") in row[0]
