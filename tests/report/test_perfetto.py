"""The trace file: valid events, ranks as processes, arrows between sends and receives."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from shardwright.report.perfetto import MEASURED_OFFSET, trace_bytes
from shardwright.report.story import Story


def test_every_rank_is_a_process_predicted_and_measured_apart(story: Story) -> None:
    events = json.loads(trace_bytes(story.plans[0]))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[1] == "predicted rank 0 (stage 0)"
    assert names[4] == "predicted rank 3 (stage 1)"
    assert names[MEASURED_OFFSET + 4] == "measured rank 3 (stage 1)"
    assert len(names) == 8


def test_every_instruction_appears_once_per_rank_with_its_times(story: Story) -> None:
    events = json.loads(trace_bytes(story.plans[1]))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert Counter(e["pid"] for e in slices) == {1: 3, 2: 3, 3: 5, 4: 5}
    update = next(e for e in slices if e["name"].endswith("update") and e["pid"] == 3)
    assert (update["ts"], update["dur"]) == (6.75e6, 0.75e6)


def test_arrows_leave_a_slice_and_end_in_one(story: Story) -> None:
    events = json.loads(trace_bytes(story.plans[0]))["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 4  # two pairs of ranks, predicted and measured
    for arrow in (*starts.values(), *ends.values()):
        inside = [
            e
            for e in events
            if e["ph"] == "X"
            and (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])
            and e["ts"] - 1 <= arrow["ts"] <= e["ts"] + e["dur"] + 1
        ]
        assert inside


def test_standing_still_for_another_rank_is_drawn_where_the_device_computes(story: Story) -> None:
    plan = story.plans[0]
    assert plan.measured is not None
    index = np.arange(8)
    begun = np.where(index == 6, 4.8, plan.measured.start)
    seen = replace(plan.measured, begun=begun, waited=np.where(index == 6, 0.5, 0.0))
    events = json.loads(trace_bytes(replace(plan, measured=seen)))["traceEvents"]
    update = next(e for e in events if e["name"].endswith("update") and e["pid"] > MEASURED_OFFSET)
    still = [e for e in events if e.get("cat") == "waiting"]
    assert {(e["tid"], e["dur"]) for e in still} == {(update["tid"], 0.5e6)}
    assert [e["ts"] for e in still] == pytest.approx([4.3e6] * 2)


def test_memory_is_a_counter(story: Story) -> None:
    events = json.loads(trace_bytes(story.plans[0]))["traceEvents"]
    sizes = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert sizes == [4 * 2**20, 9 * 2**20, 5 * 2**20]


def test_input_of_later_steps_has_a_thread_for_each_resource_of_a_host(story: Story) -> None:
    feeding = (("disk:1", "fetching", 2.0), ("host:1", "preparing", 3.0))
    events = json.loads(trace_bytes(replace(story.plans[0], feeding=feeding)))["traceEvents"]
    slices = [e for e in events if e.get("cat") == "input"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [(names[e["pid"], e["tid"]], e["name"], e["dur"]) for e in slices]
    assert found == [
        ("disk", "fetching, for a later step", 2e6),
        ("host", "preparing, for a later step", 3e6),
    ]
    assert {e["pid"] for e in slices}.isdisjoint(
        e["pid"] for e in events if e.get("cat") != "input" and e["ph"] == "X"
    )


def test_a_compressed_trace_holds_the_same_bytes_every_time(story: Story) -> None:
    plain, packed = trace_bytes(story.plans[0]), trace_bytes(story.plans[0], compressed=True)
    assert gzip.decompress(packed) == plain
    assert packed == trace_bytes(story.plans[0], compressed=True)
