"""The codec: what goes out comes back equal, and what is wrong is refused with its place."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.cluster import Cluster, Device, DeviceKind, Link, Switch
from shardwright.core.codec import MAX_UNFOLDED, decode, dumps, encode
from shardwright.core.costs import CostTable, Record
from shardwright.core.graph import Block, Operator, OperatorGraph, TensorSpec
from shardwright.core.plan import Bound, Frontier, Objective, Plan
from shardwright.core.program import Transform
from shardwright.core.strategy import (
    GradientSync,
    Mesh,
    OperatorConfig,
    ParameterConfig,
    Pipeline,
    Strategy,
)
from shardwright.core.timeline import Timeline

finite = st.floats(min_value=0, max_value=1e12, allow_nan=False)
words = st.text(max_size=12)
dims = st.sampled_from(["", "b", "n", "k"])
layouts = st.sampled_from([(-1,), (0,), (1,)])


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    devices = draw(st.integers(1, 4))
    mesh = Mesh(axes=("d",), sizes=(devices,), devices=tuple(range(devices)))
    configs = draw(st.lists(dims, min_size=1, max_size=20))
    rests = draw(st.lists(layouts, max_size=6))
    return Strategy(
        meshes=(mesh,),
        configs=tuple(OperatorConfig(mesh=0, dims=(name,)) for name in configs),
        parameters=tuple(ParameterConfig(rest=rest, optimizer=(0,)) for rest in rests),
        pipeline=Pipeline(schedule=draw(st.sampled_from(["gpipe", "1f1b"])), num_microbatches=2),
        gradient_sync=GradientSync(buckets=tuple((i,) for i in range(len(rests)))),
        recompute=tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
        label=draw(words),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return Plan(
        strategy=draw(strategies()),
        predicted=Objective(step_seconds=draw(finite), peak_bytes=draw(finite)),
        model=draw(words),
        graph_fingerprint="g",
        cluster_name=draw(words),
        cluster_fingerprint="c",
        costs_fingerprint="k",
        global_batch=draw(st.integers(1, 2**40)),
        method="m",
        seed=0,
        version="1",
        bound=draw(st.none() | st.builds(Bound, step_seconds=finite, gap=finite, model=words)),
        sources=tuple(draw(st.lists(st.tuples(words, finite), max_size=3))),
    )


@given(plans())
def test_a_plan_survives_the_trip_through_json(plan: Plan) -> None:
    assert decode(Plan, json.loads(dumps(encode(plan)))) == plan


@given(plans())
def test_equal_plans_are_written_as_equal_bytes(plan: Plan) -> None:
    again = decode(Plan, json.loads(dumps(encode(plan))))
    assert dumps(encode(again)) == dumps(encode(plan))


@given(
    st.recursive(
        st.none() | st.booleans() | finite | words,
        lambda inner: st.lists(inner) | st.dictionaries(words, inner),
        max_leaves=30,
    )
)
def test_the_layout_of_lines_changes_no_value(tree: object) -> None:
    assert json.loads(dumps(tree)) == tree


def small_graph() -> OperatorGraph:
    tensors = (
        TensorSpec(name="x", shape=(4, 2), dtype="float32", role="input"),
        TensorSpec(name="w", shape=(3, 2), dtype="float32", role="parameter", aliases=("v",)),
        TensorSpec(name="y", shape=(4, 3), dtype="float32", role="activation", producer=0),
    )
    operator = Operator(
        name="y",
        kind="aten.linear",
        inputs=(0, 1),
        input_names=("input", "weight"),
        outputs=(2,),
        attributes=(("a", 1), ("b", 1.0), ("c", -math.inf), ("d", (None, True, "s", (2,)))),
        flops=48.0,
    )
    block = Block(name="all", start=0, stop=1, signature="s")
    return OperatorGraph("g", tensors, (operator,), (block,), 2, ("a note",))


def test_a_graph_keeps_its_fingerprint_and_the_types_of_its_constants() -> None:
    graph = small_graph()
    again = decode(OperatorGraph, json.loads(dumps(encode(graph))))
    assert again == graph
    assert again.fingerprint == graph.fingerprint
    assert [type(v) for _, v in again.operators[0].attributes] == [int, float, float, tuple]


def test_a_transform_keeps_its_constants_and_leaves_out_none() -> None:
    some = (("share", 0.5), ("count", 2), ("limit", math.inf))
    for constants in ((), some):
        one = Transform(
            name="cast", mesh=0, reads=(1, 2), writes=(3, 4), purpose="synchronise",
            constants=constants,
        )  # fmt: skip
        written = json.loads(dumps(encode(one)))
        assert decode(Transform, written) == one
        assert ("constants" in written) == bool(constants)


def test_cluster_costs_and_records_survive_the_trip() -> None:
    link = Link(latency=1e-6, bandwidth=1e9, source="measured")
    kind = DeviceKind(name="c", peak_flops=(("float32", 1e9),), memory_bytes=1, memory_bandwidth=1)
    cluster = Cluster("one", (kind,), (Switch(name="h"),), (Device(kind=0, host=0, link=link),))
    table = CostTable(
        collectives=(("k", ((1.0, 2.0, 0.1),)),), overheads=(("segment_seconds", 1e-5),)
    )
    record = Record(key="k", seconds=1.0, spread=0.1, count=3, environment="e")
    for value in (cluster, table, record):
        assert decode(type(value), json.loads(dumps(encode(value)))) == value


def test_a_timeline_keeps_its_arrays_and_what_was_not_seen() -> None:
    line = Timeline(
        source="measured",
        start=np.array([0.0, math.nan]),
        end=np.array([1.0, math.nan]),
        group=np.array([0, 1], dtype=np.int32),
        memory=(np.array([[0.0, 5.0], [1.0, 6.0]]), np.zeros((0, 2))),
        peak_bytes=(6.0, 0.0),
        step_seconds=1.0,
    )
    again = decode(Timeline, json.loads(dumps(encode(line))))
    np.testing.assert_array_equal(again.start, line.start)
    assert again.group.dtype == np.int32
    assert [part.shape for part in again.memory] == [(2, 2), (0, 2)]


def test_repeated_configs_are_stored_once() -> None:
    mesh = Mesh(axes=("d",), sizes=(1,), devices=(0,))
    configs = (OperatorConfig(mesh=0, dims=("b",)),) * 5000
    written = encode(Strategy(meshes=(mesh,), configs=configs, parameters=()))
    assert written["configs"] == {"distinct": [{"mesh": 0, "dims": ["b"]}], "runs": [[0, 5000]]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step_seconds": "fast"}, "expected a number, found a string"),
        ({"step_seconds": True}, "expected a number"),
        ({"step_seconds": 10**400}, "out of range"),
        ({"step_seconds": -1.0}, "cannot be negative"),
        ({"surprise": 1}, "unknown key 'surprise'"),
    ],
)
def test_a_wrong_field_is_refused_by_name(change: dict[str, object], words: str) -> None:
    good = encode(Objective(step_seconds=1.0, peak_bytes=2.0))
    with pytest.raises(ValueError, match=words):
        decode(Objective, good | change)


def test_runs_that_would_unfold_without_end_are_refused() -> None:
    mesh = Mesh(axes=("d",), sizes=(1,), devices=(0,))
    strategy = Strategy(
        meshes=(mesh,), configs=(OperatorConfig(mesh=0, dims=("b",)),), parameters=()
    )
    written = encode(strategy)
    written["configs"]["runs"] = [[0, MAX_UNFOLDED + 1]]
    with pytest.raises(ValueError, match="more than"):
        decode(Strategy, written)


def test_a_number_json_cannot_hold_is_not_written() -> None:
    with pytest.raises(ValueError, match="no form for nan"):
        encode((math.nan,))


def test_a_frontier_checks_itself_when_it_comes_back() -> None:
    with pytest.raises(ValueError, match="chosen"):
        decode(
            Frontier,
            {
                "plans": [
                    encode(_plan(1.0)),
                ],
                "chosen": 5,
            },
        )


def _plan(seconds: float) -> Plan:
    mesh = Mesh(axes=("d",), sizes=(1,), devices=(0,))
    return Plan(
        strategy=Strategy(meshes=(mesh,), configs=(), parameters=()),
        predicted=Objective(step_seconds=seconds, peak_bytes=1.0),
        model="m",
        graph_fingerprint="g",
        cluster_name="c",
        cluster_fingerprint="c",
        costs_fingerprint="k",
        global_batch=1,
        method="m",
        seed=0,
        version="1",
    )
