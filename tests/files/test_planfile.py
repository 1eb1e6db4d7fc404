"""The plan file's border: good files come back equal, every other file gives one clear error."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.core.cluster import Cluster, Device, DeviceKind, Link, Switch
from shardwright.core.graph import Operator, OperatorGraph, TensorSpec
from shardwright.core.layout import inner
from shardwright.core.plan import Frontier, Objective, Plan, digest_of
from shardwright.core.strategy import Mesh, OperatorConfig, ParameterConfig, Strategy, WireDtype
from shardwright.errors import InputError, PlanMismatch, ShardwrightError
from shardwright.files.planfile import (
    MAX_FILE_BYTES,
    Origin,
    check_fits,
    read_graph,
    read_plan,
    read_plan_file,
    write_graph,
    write_plan,
)


def make_graph(width: int = 2) -> OperatorGraph:
    tensors = (
        TensorSpec(name="x", shape=(4, width), dtype="float32", role="input"),
        TensorSpec(name="w", shape=(6, width), dtype="float32", role="parameter"),
        TensorSpec(name="y", shape=(4, 6), dtype="float32", role="activation", producer=0),
    )
    operator = Operator(
        name="y", kind="aten.linear", inputs=(0, 1), input_names=("input", "weight"), outputs=(2,)
    )
    return OperatorGraph("model", tensors, (operator,), (), 2)


def make_cluster(devices: int = 2) -> Cluster:
    kind = DeviceKind(name="c", peak_flops=(("float32", 1e9),), memory_bytes=1, memory_bandwidth=1)
    device = Device(kind=0, host=0, link=Link(latency=0, bandwidth=1e9))
    return Cluster("one", (kind,), (Switch(name="h"),), (device,) * devices)


def make_plan(seconds: float = 1.0, peak: float = 2.0) -> Plan:
    mesh = Mesh(axes=("d",), sizes=(2,), devices=(0, 1))
    strategy = Strategy(
        meshes=(mesh,),
        configs=(OperatorConfig(mesh=0, dims=("b",)),),
        parameters=(ParameterConfig(rest=(-1,), optimizer=(0,)),),
    )
    return Plan(
        strategy=strategy,
        predicted=Objective(step_seconds=seconds, peak_bytes=peak),
        model="model",
        graph_fingerprint=make_graph().fingerprint,
        cluster_name="one",
        cluster_fingerprint=make_cluster().fingerprint,
        costs_fingerprint="k",
        global_batch=4,
        method="m",
        seed=0,
        version="1",
    )


def make_frontier() -> Frontier:
    return Frontier(plans=(make_plan(1.0, 2.0), make_plan(2.0, 1.0)), chosen=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def test_a_plan_and_a_frontier_come_back_equal(path: Path) -> None:
    for plans in (make_plan(), make_frontier()):
        write_plan(path, plans)
        assert read_plan(path, make_graph(), make_cluster()) == plans


def test_origin_and_cluster_travel_with_the_plan(path: Path) -> None:
    origin = Origin(model="hf:gpt2", seq=128)
    write_plan(path, make_frontier(), origin=origin, cluster=make_cluster())
    document = read_plan_file(path)
    assert (document.origin, document.cluster) == (origin, make_cluster())


def test_a_graph_comes_back_equal(path: Path) -> None:
    write_graph(path, make_graph())
    assert read_graph(path) == make_graph()


def test_a_plan_for_another_model_says_what_differs(path: Path) -> None:
    write_plan(path, make_plan())
    with pytest.raises(PlanMismatch, match=r"plan\.json: .*graph: plan model .* plan again"):
        read_plan(path, make_graph(width=3))


def test_a_plan_for_another_cluster_says_what_differs(path: Path) -> None:
    write_plan(path, make_plan())
    with pytest.raises(PlanMismatch, match="devices: plan 2, here 1"):
        read_plan(path, cluster=make_cluster(devices=1))


def test_a_plan_that_names_missing_tensor_dims_is_refused() -> None:
    graph = make_graph()
    plan = make_plan()
    strategy = plan.strategy
    bad = Strategy(
        meshes=strategy.meshes,
        configs=strategy.configs,
        parameters=(ParameterConfig(rest=(7,), optimizer=(0,)),),
    )
    values = {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
    with pytest.raises(PlanMismatch, match="cannot lie as"):
        check_fits(Plan(**(values | {"strategy": bad})), graph)


def test_inner_shards_and_kept_parameters_come_back_and_must_fit(path: Path) -> None:
    plan = make_plan()
    kept = ParameterConfig(rest=(inner(1),), optimizer=(inner(1),), keeps=True)
    strategy = replace(plan.strategy, parameters=(kept,))
    write_plan(path, replace(plan, strategy=strategy))
    assert read_plan(path, make_graph()) == replace(plan, strategy=strategy)
    wrong = replace(strategy, parameters=(replace(kept, rest=(inner(2),)),))
    write_plan(path, replace(plan, strategy=wrong))
    with pytest.raises(
        PlanMismatch, match=r"plan\.json: the plan does not fit its model: .*cannot lie as"
    ):
        read_plan(path, make_graph())


def test_predictions_for_a_strategy_that_was_changed_since_are_stale(path: Path) -> None:
    plan = make_plan()
    assert not plan.is_stale  # files that do not say are taken at their word
    write_plan(path, replace(plan, predicted_for=digest_of(plan.strategy)))
    read = read_plan(path)
    assert isinstance(read, Plan)
    assert not read.is_stale
    label = replace(read, strategy=replace(read.strategy, label="ours"))
    assert not label.is_stale  # a name changes no figure
    text = path.read_text()
    for old, new in (('"num_microbatches": 1', '"num_microbatches": 2'), ('"b"', '"n"')):
        assert old in text
        path.write_text(text.replace(old, new))
        changed = read_plan(path)
        assert isinstance(changed, Plan)
        assert changed.is_stale
        assert changed.strategy.label == f"{plan.strategy.label} (changed since)"
        assert changed.marked() == changed


def test_files_that_named_a_dtype_nobody_read_mean_the_parameters_own(path: Path) -> None:
    """Schema 1 had ``"dtype": "float32"`` there whatever travelled; digests were made of it."""
    plan = make_plan()
    before = replace(plan, predicted_for="be54f137479531b1")
    write_plan(path, before)
    text = path.read_text()
    assert '"dtype"' not in text.split('"gradient_sync"')[1].split("}")[0]
    old = re.sub(r'("gradient_sync": \{)', r'\1"dtype": "float32", ', text)
    assert old != text
    path.write_text(old)
    read = read_plan(path)
    assert read == before
    assert isinstance(read, Plan)
    assert read.strategy.gradient_sync.dtype == "parameter"
    assert not read.is_stale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_gradients_travel_in_comes_back_and_outdates_what_was_predicted(
    path: Path, dtype: WireDtype
) -> None:
    plan = make_plan()
    sync = replace(plan.strategy.gradient_sync, dtype=dtype)
    other = replace(plan, strategy=replace(plan.strategy, gradient_sync=sync))
    write_plan(path, other)
    assert read_plan(path) == other
    assert replace(other, predicted_for=digest_of(plan.strategy)).is_stale
    assert not replace(other, predicted_for=digest_of(other.strategy)).is_stale
    said = f'"wire_dtype": "{dtype}"'
    assert said in path.read_text()
    path.write_text(path.read_text().replace(said, '"wire_dtype": "int8"'))
    with pytest.raises(InputError, match=r"wire_dtype: expected one of"):
        read_plan(path)


@pytest.mark.parametrize("samples", [0, -4, 2**40])
def test_a_batch_of_no_or_too_many_samples_is_refused(path: Path, samples: int) -> None:
    write_plan(path, replace(make_plan(), global_batch=samples))
    with pytest.raises(InputError, match="a step has 1 to 2,147,483,648 samples"):
        read_plan(path)


def test_more_forwards_than_an_order_is_made_of_are_refused(path: Path) -> None:
    plan = make_plan()
    meshes = plan.strategy.meshes[:1] * 4096
    pipeline = replace(plan.strategy.pipeline, num_microbatches=4096)
    write_plan(
        path, replace(plan, strategy=replace(plan.strategy, meshes=meshes, pipeline=pipeline))
    )
    with pytest.raises(InputError, match=r"at most 262,144 forwards, .* 4,096 and 4,096; make"):
        read_plan(path)


def test_numbers_of_a_cluster_that_nothing_can_be_calculated_with_are_refused(path: Path) -> None:
    write_plan(path, make_plan(), cluster=make_cluster())
    whole = json.loads(path.read_text())
    switch = {"parent": 0, "link": {"latency": 1, "bandwidth": 1, "source": "modelled"}}
    whole["cluster"]["switches"].append(whole["cluster"]["switches"][0] | switch)

    def leaves(tree: Any, *place: str | int) -> Iterator[tuple[str | int, ...]]:
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in pairs:
            if isinstance(value, float):
                yield (*place, key)
            elif isinstance(value, dict | list):
                yield from leaves(value, *place, key)

    for *above, last in leaves(whole["cluster"]):
        for wrong in (-1.0, 1e-200, 1e200):
            damaged = copy.deepcopy(whole)
            parent = damaged["cluster"]
            for key in above:
                parent = parent[key]
            parent[last] = wrong
            path.write_text(json.dumps(damaged))
            with pytest.raises(InputError, match="cluster"):
                read_plan(path)


@pytest.mark.parametrize("name", ["recompute_operators", "segment_starts"])
def test_operators_that_are_not_there_are_refused(name: str) -> None:
    graph, plan = make_graph(), make_plan()
    last = len(graph.operators) - 1
    check_fits(replace(plan, strategy=replace(plan.strategy, **{name: (last,)})), graph)
    for wrong in (-1, last + 1):
        strategy = replace(plan.strategy, **{name: (wrong,)})
        with pytest.raises(InputError, match=f"{name} names operators outside 0..{last}"):
            check_fits(replace(plan, strategy=strategy), graph)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"schedule": "1f1b"', '"schedule": "2f2b"', r"schedule: expected one of .*, found '2f2b'"),
        ("[[0, 1]]", "[[1, 1]]", r"configs.runs: an index is 0 to 0 and .* a run is \[1, 1\]"),
        ('"devices": [0, 1]', '"devices": [1, 1]', r"needs that many .*, not \(1, 1\)"),
        ('"kind": "plan"', '"kind": "plant"', r"kind: .*, not 'plant'"),
    ],
)
def test_a_refusal_says_the_value(path: Path, old: str, new: str, said: str) -> None:
    write_plan(path, make_plan())
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=said + ".*; write the file again"):
        read_plan(path)


def test_another_schema_version_is_named(path: Path) -> None:
    write_plan(path, make_plan())
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 99'))
    with pytest.raises(PlanMismatch, match="schema 99"):
        read_plan(path)


def test_a_graph_file_is_not_a_plan(path: Path) -> None:
    write_graph(path, make_graph())
    with pytest.raises(InputError, match="holds a graph"):
        read_plan(path)


HOSTILE = {
    "empty": b"",
    "not text": b"\xff\xfe\x00",
    "a number": b"7",
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "deep inside": b'{"format":"shardwright","schema":1,"kind":"plan","content":{"a":'
    + b"[" * 900
    + b"]" * 900
    + b"}}",
    "many digits": b'{"format":"shardwright","schema":' + b"9" * 100_000 + b"}",
    "huge float": b'{"format":1e999999}',
    "not a number": b'{"format":NaN}',
    "twice": b'{"format":"shardwright","format":"shardwright"}',
    "extra": b'{"format":"shardwright","schema":1,"kind":"plan","content":{},"run":"rm"}',
    "wrong kind": b'{"format":"shardwright","schema":1,"kind":"pickle","content":{}}',
    "pickle": b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.",
    "no plans": b'{"format":"shardwright","schema":1,"kind":"frontier","content":{"plans":[]}}',
    "wide integer": b'{"format":"shardwright","schema":1,"kind":"frontier","content":'
    b'{"plans":[],"chosen":99999999999999999999}}',
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_gives_one_clear_error(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"plan\.json") as caught:
        read_plan(path)
    assert len(str(caught.value)) < 700
    assert "\n" not in str(caught.value).replace(str(path), "")


def test_a_file_beyond_the_size_limit_is_not_read(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InputError, match="at most"):
        read_plan(path)


def test_a_missing_file_and_a_folder_give_input_errors(tmp_path: Path) -> None:
    for place in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match="cannot read"):
            read_plan(place)


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        write_plan(tmp_path / "plan.json", make_plan())
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


@settings(
    max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.data())
def test_a_damaged_file_never_raises_anything_else(path: Path, data: st.DataObject) -> None:
    write_plan(path, make_frontier(), cluster=make_cluster())
    body = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        body = body[: data.draw(st.integers(0, len(body)))]
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(0, len(body) - 1)))
        piece = data.draw(
            st.sampled_from([b"", b"9", b"-", b"[", b"}", b'"', b"null", b"1e999", b"\xff"])
        )
        body[place : place + data.draw(st.integers(0, 3))] = piece
    path.write_bytes(bytes(body))
    _read_or_refuse(path)


LEAVES = [None, True, -1, 0, 2**62, 10**30, 1e308, "x", [], {}, [[0, 10**18]], [{}], "\u0000"]


@settings(
    max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.data())
def test_any_value_in_any_place_never_raises_anything_else(path: Path, data: st.DataObject) -> None:
    write_plan(path, make_frontier(), cluster=make_cluster())
    tree = json.loads(path.read_text())
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or data.draw(st.integers(0, 4)) == 0:
            node[key] = data.draw(st.sampled_from(LEAVES))
            break
        node = node[key]
    path.write_text(json.dumps(tree))
    _read_or_refuse(path)


def _read_or_refuse(path: Path) -> None:
    try:
        read_plan(path)
        read_plan(path, make_graph(), make_cluster())
    except ShardwrightError:
        pass
