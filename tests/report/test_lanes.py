"""Drawings of orders say when every action runs."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest

from shardwright.core.profile import Bar
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.report.lanes import lanes_of, lanes_svg, lanes_text
from tests.planner.search.models import mlp

LANES = (
    (Bar(0, "F", 0, 0.0, 1.0), Bar(0, "I", 0, 3.0, 4.0), Bar(0, "W", 0, 4.0, 5.0)),
    (Bar(1, "F", 0, 1.0, 2.0), Bar(1, "I", 0, 2.0, 3.0), Bar(1, "W", 0, 3.0, 4.0)),
)


def test_letters_are_times():
    rows = lanes_text(LANES, 20).splitlines()
    assert rows[0] == "  0 F0==........I0--W0~~"
    assert rows[1] == "  1 ....F0==I0--W0~~...."
    assert rows[2].endswith("letters are 5.00 s; F forward, I input gradient, W weight gradient")


def test_a_picture_has_a_bar_for_every_action_at_its_time():
    tree = ET.fromstring(lanes_svg(LANES))  # our own text
    name = "{http://www.w3.org/2000/svg}"
    bars = [r for r in tree.iter(f"{name}rect") if r.find(f"{name}title") is not None]
    assert [bar.find(f"{name}title").text for bar in bars][:2] == [
        "forward of microbatch 0 on stage 0", "input gradient of microbatch 0 on stage 0",
    ]  # fmt: skip
    lefts = [float(bar.get("x")) for bar in bars]
    unit = lefts[3] - lefts[0]
    assert [round((left - lefts[0]) / unit) for left in lefts] == [0, 3, 4, 1, 2, 3]
    assert not re.search("script|href", lanes_svg(LANES))


@pytest.mark.parametrize("mode", ["stash", "2bw"])
def test_minibatches_of_a_pipeline_without_a_flush_take_turns_on_its_devices(mode):
    graph = mlp(depth=5)
    pieces = 4 if mode == "2bw" else 1
    program = lower(
        graph, seed_strategy(graph, Seed(stages=4, staleness=mode, num_microbatches=pieces))
    )
    seconds = np.random.default_rng(1).uniform(1, 2, program.num_instructions)
    lanes = lanes_of(program, simulate(program, seconds))
    assert len(lanes) == 4
    for lane in lanes:
        assert sorted((b.phase, b.microbatch) for b in lane) == sorted(
            (phase, number) for phase in "FB" for number in range(8 * pieces)
        )
        for one, other in pairwise(lane):
            assert one.end <= other.start + 1e-9


def test_an_empty_order_draws_nothing():
    assert lanes_text(()).count("\n") == 0
    ET.fromstring(lanes_svg(()))
