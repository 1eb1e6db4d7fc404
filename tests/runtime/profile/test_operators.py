"""Operator measurements: the operator on its local shapes, every key answered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.core.costs import operator_key
from shardwright.core.graph import OperatorGraph
from shardwright.errors import RunError
from shardwright.operators.counting.work import has_backward
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.profile import Setting, Wanted, measure_operators
from shardwright.runtime.profile.layouts import lay_out
from shardwright.runtime.profile.passes import time_in_passes
from shardwright.runtime.profile.shards import Overload, Request, make_shard
from shardwright.runtime.workers import run_workers
from shardwright.verbs.measure import keys_of
from shardwright.verbs.records import build_costs
from tests import zoo

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def whole(graph: OperatorGraph) -> list[Request]:
    return [
        (
            index,
            tuple(graph.tensors[t].shape for t in operator.inputs),
            tuple(graph.tensors[t].shape for t in operator.outputs),
        )
        for index, operator in enumerate(graph.operators)
    ]


def wanted(graph: OperatorGraph, runs: list[list[Request]]) -> Wanted:
    keys = {key for run in runs for request in run for key in keys_of(graph, request, "float32")}
    return Wanted(runs=tuple(map(tuple, runs)), keys=frozenset(keys))


def captured(name: str, **options: object) -> Captured:
    module, batch = getattr(zoo, name)(dtype=torch.float32, **options)
    return capture(module, batch)


MODELS = [
    "mlp",
    "gpt",
    "bert",
    "cnn",
    "llama",
    "t5",
    "vit",
    "resnet",
    "mixtral",
    "lstm_translation",
]


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_of_a_model_can_be_timed_forward_and_backward(name: str):
    model = captured(name)
    graph = model.graph
    made = {r[0]: make_shard(model, r, "cpu", "float32") for r in whole(graph)}
    known = {index: shard for index, shard in made.items() if shard is not None}
    assert [i for i in made.keys() - known.keys() if graph.operators[i].outputs] == []
    timings = time_in_passes([list(known.values())], 0.05, lambda done, of: None)
    failed: list[str] = []
    for index, shard in known.items():
        ahead, back = (timings.get(key) for key in shard.keys)
        operator = graph.operators[index]
        wants = any(graph.tensors[t].needs_gradient for t in operator.outputs)
        if ahead is None or ahead.seconds <= 0 or (back is None and wants):
            failed.append(operator.kind)
    assert failed == []


def test_requests_become_records_under_the_planners_keys():
    model = captured("gpt", width=16, depth=1)
    graph = model.graph
    requests = whole(graph)
    setting = Setting(environment="e", concurrency=2)
    records = measure_operators(model, wanted(graph, [requests] * 2), setting, budget_seconds=0.5)
    table = build_costs(records, "e")
    for index, inputs, outputs in requests:
        operator = graph.operators[index]
        key = operator_key(graph, operator, inputs, outputs, "forward")
        assert table.operator_map[key].seconds > 0, operator.kind
        if has_backward(graph, operator):
            assert operator_key(graph, operator, inputs, outputs, "backward") in table.operator_map
    assert len({record.key for record in records}) == len(records)


def test_operators_of_a_model_that_outgrows_caches_have_records_of_their_own():
    """A layer of a deep model finds nothing of it in the caches, of a shallow one all."""
    shallow, deep = (captured("mlp", batch=8, width=512, depth=depth) for depth in (1, 10))
    assert [one.graph.outgrows_caches for one in (shallow, deep)] == [False, True]
    first = [operator.kind for operator in deep.graph.operators].index("aten.linear.default")
    request = (first, ((8, 512), (512, 512), (512,)), ((8, 512),))
    usual = make_shard(shallow, request, "cpu", "float32")
    assert usual is not None
    setting, asked = Setting(environment="e"), wanted(deep.graph, [[request]])
    records = measure_operators(deep, asked, setting, budget_seconds=1.0)
    assert {one.key for one in records} == {f"{key}|from memory" for key in usual.keys}


def test_shards_of_an_operator_run_on_their_local_shapes():
    model = captured("mlp", batch=8, width=16)
    index = next(i for i, o in enumerate(model.graph.operators) if o.kind.startswith("aten.linear"))
    shard = make_shard(model, (index, ((4, 16), (8, 16), (8,)), ((4, 8),)), "cpu", "float32")
    assert shard is not None
    assert [operand.shape for operand in shard.operands] == [(4, 16), (8, 16), (8,)]
    assert time_in_passes([[shard]], 0.1, lambda done, of: None).keys() == {*shard.keys}


def test_another_precision_has_another_key_and_dtype():
    model = captured("mlp")
    request = whole(model.graph)[0]
    half, full = (make_shard(model, request, "cpu", p) for p in ("bfloat16", "float32"))
    assert half is not None
    assert full is not None
    assert half.operands[0].dtype == "bfloat16"
    assert half.keys[0] != full.keys[0]


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).permute(2, 0, 1).transpose(0, 1).reshape(-1).sum()


def test_operands_have_the_strides_that_transposes_left():
    module, x = Transposed(), torch.rand(3, 4, 5)
    model = capture(module, {"x": x})
    index = [o.kind for o in model.graph.operators].index("aten.reshape.default")
    request = whole(model.graph)[index]
    shard = make_shard(model, request, "cpu", "float32", lay_out(model, "cpu"))
    assert shard is not None
    expected = x.permute(2, 0, 1).transpose(0, 1)
    assert shard.operands[0].make("cpu").stride() == expected.stride()


def test_overloads_are_found_again_by_name():
    for overload in (torch.ops.aten.add.Tensor, torch.ops.aten.linear.default):
        assert Overload(name=str(overload)).find() is overload


def test_a_failing_worker_is_reported_with_its_reason():
    with pytest.raises(RunError, match=r"process 0 failed.*no attribute 'nowhere'"):
        run_workers("tests.runtime.profile.jobs:nowhere", [None], timeout_seconds=60)


def test_a_worker_that_takes_too_long_is_stopped():
    with pytest.raises(RunError, match="longer than 0 s"):
        run_workers("tests.runtime.profile.jobs:killed_or_waiting", [None], timeout_seconds=0.1)


def test_a_worker_that_somebody_stopped_is_named():
    with pytest.raises(
        RunError, match=r"measuring process 0 \(process \d+\) was stopped, as SIGSTOP"
    ):
        run_workers("tests.runtime.profile.jobs:stopped", [None], timeout_seconds=8)


def test_ctrl_c_is_left_to_the_process_that_wanted_the_measurements():
    found = run_workers("tests.runtime.profile.jobs:interrupted", [None], timeout_seconds=60)
    assert found == ["measured"]


def test_a_worker_that_is_killed_ends_those_that_wait_for_it():
    with pytest.raises(RunError, match="process 1 was killed by SIGHUP; run the command again"):
        run_workers(
            "tests.runtime.profile.jobs:killed_or_waiting", [None, None], timeout_seconds=60
        )


def test_workers_end_once_they_are_asked_to_stop(tmp_path, monkeypatch):
    file = tmp_path / "process"
    monkeypatch.setenv("ENDLESS_FILE", str(file))
    found = run_workers(
        "tests.runtime.profile.jobs:endless", [None], timeout_seconds=100, stop=file.exists
    )
    assert found == []
    assert not Path(f"/proc/{file.read_text()}").exists()
