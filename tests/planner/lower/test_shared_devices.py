"""Meshes that share a device: it computes one thing at a time and holds the bytes of both."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.program import Kind
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space import Part, Seed, place_parts, seed_strategy
from tests.planner.lower.test_lower import transformer_like

COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)


def shared(num_microbatches=1):
    graph = transformer_like()
    half = len(graph.operators) // 2
    parts = [
        Part(devices=(0, 1), operators=tuple(range(half)), seed=Seed(data=2)),
        Part(devices=(1,), operators=tuple(range(half, len(graph.operators))), seed=Seed()),
    ]
    return lower(graph, place_parts(graph, parts, Seed(num_microbatches=num_microbatches)))


@given(st.data())
def test_a_shared_device_computes_one_instruction_at_a_time(data):
    program = shared(data.draw(st.sampled_from([1, 2])))
    count = program.num_instructions
    seconds = np.array(data.draw(st.lists(st.floats(0.1, 5), min_size=count, max_size=count)))
    timeline = simulate(program, seconds)
    busy = [i for i in range(count) if program.kind[i] in COMPUTE]
    spans = sorted((timeline.start[i], timeline.end[i]) for i in busy)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@given(st.data())
def test_equal_meshes_share_their_links(data):
    graph = transformer_like()
    half = len(graph.operators) // 2
    parts = [
        Part(devices=(0, 1), operators=tuple(range(half)), seed=Seed(data=2)),
        Part(devices=(0, 1), operators=tuple(range(half, len(graph.operators))), seed=Seed(data=2)),
    ]
    program = lower(graph, place_parts(graph, parts, Seed()))
    count = program.num_instructions
    # Longer than all else, so that many messages wait to be sent at the same time.
    seconds = np.array(data.draw(st.lists(st.floats(5, 9), min_size=count, max_size=count)))
    seconds[program.kind != Kind.MESSAGE] = 0.01
    timeline = simulate(program, seconds)
    sent = [
        i
        for i in range(count)
        if program.kind[i] == Kind.MESSAGE
        and program.messages[program.item[i]].primitive not in ("slice", "copy")
    ]
    assert {int(program.group[i]) for i in sent} == {0, 1}
    spans = sorted((timeline.start[i], timeline.end[i]) for i in sent)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@given(st.data())
def test_chunks_of_a_device_compute_in_index_order(data):
    """Whichever of its meshes is busy how long, and with no more waits than there are changes of mesh."""
    graph = transformer_like()
    seed = Seed(stages=2, chunks=2, num_microbatches=4, schedule="interleaved")
    program = lower(graph, seed_strategy(graph, seed))
    count = program.num_instructions
    seconds = np.array(data.draw(st.lists(st.floats(0.1, 5), min_size=count, max_size=count)))
    timeline = simulate(program, seconds)
    for device in range(2):
        meshes = [n for n, mesh in enumerate(program.meshes) if device in mesh.devices]
        assert len(meshes) == 2
        mine = np.flatnonzero(np.isin(program.group, meshes) & np.isin(program.kind, COMPUTE))
        assert (timeline.end[mine[:-1]] <= timeline.start[mine[1:]]).all()
        before = {int(b): int(a) for a, b in itertools.pairwise(mine)}
        for index in mine.tolist():
            ends = slice(*program.offset[index : index + 2])
            awaited = [
                one
                for one in program.predecessor[ends].tolist()
                if program.group[one] != program.group[index] and program.kind[one] in COMPUTE
            ]
            assert set(awaited) <= {before.get(index, -1)}


def test_a_shared_device_holds_what_both_meshes_hold():
    program = shared()
    seconds = np.ones(program.num_instructions)
    timeline = simulate(program, seconds)
    first = [rows[0, 1] for rows in timeline.memory]
    assert first == [sum(program.base_bytes)] * 2
    assert timeline.peak_bytes[0] == pytest.approx(timeline.peak_bytes[1])
