"""The verbs, used from Python: planning, stopping early, building, refusing."""

from __future__ import annotations

import functools
from inspect import isfunction, signature
from pathlib import Path

import pytest
import torch

import shardwright
from shardwright import api
from shardwright.api import read_frontier
from shardwright.core.plan import Frontier, Plan
from shardwright.errors import InputError, PlanMismatch, ShardwrightError
from shardwright.files.planfile import read_plan, write_plan
from shardwright.reasons import Wish
from shardwright.verbs.request import Job, Request, Watch
from tests.files.test_planfile import make_plan
from tests.zoo import mlp

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("short_climbs")]
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)


@functools.cache
def single_device_plan() -> Plan:
    module, batch = mlp()
    return shardwright.plan(module, "1x1xV100", batch=batch, precision="float64").best


@functools.cache
def planned() -> tuple[Frontier, tuple[float, ...]]:
    """The answer for two devices, at which several tests look, and how far the search was when it told."""
    module, batch = mlp()
    told: list[float] = []
    watch = Watch(tell=lambda _, fraction: told.append(fraction))
    study = api.study(module, "1x2xV100", Request(precision="float64"), watch, batch=batch)
    return study.frontier, tuple(told)


def test_equal_questions_get_equal_answers(tmp_path: Path) -> None:
    module, batch = mlp()
    files = [tmp_path / name for name in ("a.json", "b.json")]
    frontier = shardwright.plan(module, "1x2xV100", batch=batch, precision="float64")
    for file, answer in zip(files, (frontier, planned()[0]), strict=True):
        write_plan(file, answer)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert read_plan(files[0]) == frontier


def test_chains_of_as_many_proposals_give_equal_plans_within_their_time() -> None:
    module, batch = mlp()
    fixed = {"batch": batch, "precision": "float64", "method": "mcmc"}
    found = [shardwright.plan(module, "1x2xV100", proposals=30, **fixed) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].best.method.startswith("MCMC")
    timed = shardwright.plan(module, "1x2xV100", seconds=0.5, **fixed)
    assert timed.best.predicted.step_seconds > 0


def test_chains_that_are_stopped_give_a_whole_plan_and_say_so() -> None:
    module, batch = mlp()
    request = Request(precision="float64", method="mcmc")
    study = api.study(module, "1x2xV100", request, Watch(stop=lambda: True), batch=batch)
    assert not study.is_complete
    assert study.frontier.best.predicted.step_seconds > 0


def test_a_stopped_search_gives_a_whole_plan_and_says_so() -> None:
    module, batch = mlp()
    request = Request(precision="float64")
    watch = Watch(stop=lambda: True)
    study = api.study(module, "1x2xV100", request, watch, batch=batch)
    assert not study.is_complete
    assert study.frontier.best.predicted.step_seconds > 0
    assert len(study.spreads) == len(study.frontier.plans)


def test_progress_is_told_as_fractions() -> None:
    _, told = planned()
    assert told
    assert all(0 <= fraction <= 1 for fraction in told)


def test_a_built_executor_trains_like_plain_pytorch() -> None:
    plan = single_device_plan()
    module, batch = mlp()
    executor = shardwright.build(plan, module, optimizer=ADAM, batch=batch)
    ours = [float(executor.step(batch)) for _ in range(3)]
    executor.close()

    plain, _ = mlp()
    optimizer = ADAM(plain.parameters())
    theirs: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain(**batch)
        loss.backward()
        optimizer.step()
        theirs.append(float(loss.detach()))
    assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("seed_plan", ["", "megatron:2x1"])
def test_a_plan_holds_the_norm_that_it_clips_to(seed_plan: str, tmp_path: Path) -> None:
    module, batch = mlp()
    cluster = "1x2xV100" if seed_plan else "1x1xV100"
    frontier = shardwright.plan(
        module, cluster, batch=batch, precision="float64", clip=0.5, seed_plan=seed_plan
    )
    write_plan(tmp_path / "plan.json", frontier)
    for plan in read_frontier(tmp_path / "plan.json").plans:
        assert (plan.strategy.clips, plan.strategy.max_norm) == (True, 0.5)
    if seed_plan:
        return
    executor = shardwright.build(frontier, module, optimizer=ADAM, batch=batch)
    plain, _ = mlp()
    plain(**batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    executor.step(batch)
    torch.testing.assert_close(executor.gradient_norm, norm)
    executor.close()


@pytest.mark.parametrize("wrong", ["-1.0", "0.5"])
def test_a_plan_file_with_a_norm_that_cannot_be_is_refused(wrong: str, tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json", single_device_plan())
    text = path.read_text()
    assert '"max_norm": 0.0' in text
    path.write_text(text.replace('"max_norm": 0.0', f'"max_norm": {wrong}'))
    with pytest.raises(ShardwrightError, match="max_norm"):
        read_plan(path)


def test_a_plan_says_in_what_gradients_add_up() -> None:
    module, batch = mlp(width=64, depth=6)
    plans = {
        how: shardwright.plan(
            module, "1x2xA100", batch=batch, precision="bfloat16", accumulation=how,
            seed_plan="megatron:2x1",
        ).best
        for how in ("float32", "own")
    }  # fmt: skip
    assert {how: plan.strategy.accumulation for how, plan in plans.items()} == {
        "float32": "float32", "own": "own",
    }  # fmt: skip


def test_a_plan_says_in_what_gradients_travel_and_is_faster_for_it(tmp_path: Path) -> None:
    module, batch = mlp(width=1024, depth=3)
    own, half = [
        shardwright.plan(
            module, "2x1xA100", batch=batch, precision="float32", seed_plan="megatron:2x1",
            gradient_dtype=dtype,
        )
        for dtype in ("parameter", "bfloat16")
    ]  # fmt: skip
    assert half.best.strategy.gradient_sync.dtype == "bfloat16"
    assert half.best.strategy.label == f"{own.best.strategy.label}, gradients in bfloat16"
    assert half.best.predicted.step_seconds < own.best.predicted.step_seconds
    write_plan(tmp_path / "plan.json", half)
    assert read_frontier(tmp_path / "plan.json") == half


def test_any_plan_of_a_frontier_may_be_picked_where_the_simplest_was_recommended() -> None:
    fastest, simplest, smallest = make_plan(1.0, 2.0), make_plan(1.1, 3.0), make_plan(2.0, 1.0)
    frontier = Frontier(plans=(fastest, simplest, smallest), chosen=1)
    assert [read_frontier(frontier, pick).best for pick in range(3)] == [*frontier.plans]


def test_a_pipeline_that_is_never_flushed_is_not_compared(tmp_path: Path) -> None:
    module, batch = mlp()
    frontier = shardwright.plan(module, "1x2xV100", batch=batch, seed_plan="stash:2")
    write_plan(tmp_path / "plan.json", frontier)
    with pytest.raises(InputError, match=r"never flushed; `shardwright run`"):
        api.compare(tmp_path / "plan.json", Job(model="net.py:build"))


def test_a_built_executor_takes_the_short_last_batch_of_a_data_set() -> None:
    module, batch = mlp()
    plain, _ = mlp()
    data = torch.utils.data.TensorDataset(batch["x"].repeat(3, 1)[:20], batch["y"].repeat(3)[:20])
    optimizer = ADAM(plain.parameters())
    executor = shardwright.build(single_device_plan(), module, optimizer=ADAM, batch=batch)
    for x, y in torch.utils.data.DataLoader(data, batch_size=8):  # 8, 8 and 4
        evaluated = float(executor.evaluate((x, y)))
        found = float(executor.step({"x": x, "y": y}))
        optimizer.zero_grad()
        loss = plain(x, y)
        loss.backward()
        optimizer.step()
        assert [evaluated, found] == pytest.approx([float(loss.detach())] * 2, rel=1e-12)
    executor.close()


def test_a_plan_is_not_built_for_another_model() -> None:
    other, batch = mlp(width=32)
    with pytest.raises(PlanMismatch, match="plan again"):
        shardwright.build(single_device_plan(), other, optimizer=ADAM, batch=batch)


def test_a_simulated_plan_repeats_its_own_prediction() -> None:
    module, batch = mlp()
    frontier, _ = planned()
    story = shardwright.simulate(frontier, module, "1x2xV100", batch=batch)
    assert story.predicted.step_seconds == frontier.best.predicted.step_seconds
    assert story.predicted.worst_peak_bytes == frontier.best.predicted.peak_bytes
    assert {row.kind for row in story.operators} >= {"aten.linear.default"}


def test_an_explanation_is_text_with_reason_time_and_operators() -> None:
    module, batch = mlp()
    frontier, _ = planned()
    text = shardwright.explain(frontier, module, "1x2xV100", batch=batch)
    for words in (frontier.best.strategy.label, "Peak memory", "Operators by cost", "linear"):
        assert words in text


def test_coverage_counts_every_operator() -> None:
    module, batch = mlp()
    graph = shardwright.capture(module, batch, precision="float64").graph
    coverage = api.coverage(graph)
    assert coverage.num_operators == len(graph.operators)
    assert coverage.num_with_rule + sum(one.count for one in coverage.replicated) == len(
        graph.operators
    )


def test_a_module_needs_an_example_batch() -> None:
    with pytest.raises(InputError, match="example batch"):
        shardwright.plan(mlp()[0], "1x2xV100")


def test_what_is_of_another_kind_is_named_before_anything_is_done(tmp_path: Path) -> None:
    module, batch = mlp()
    there = tmp_path / "none.toml"
    for says, call in (
        ("torch.nn.Module, not <class", lambda: shardwright.plan(type(module), "1x2xV100", batch=batch)),
        ("torch.nn.Module, not None", lambda: shardwright.capture(None, batch)),
        ("not a Tensor", lambda: shardwright.plan(module, "1x2xV100", batch=batch["x"])),
        ("takes Cluster or text or None as cluster, not 8", lambda: shardwright.plan(module, 8, batch=batch)),
        ("cannot read .*none.toml", lambda: shardwright.plan(module, there, batch=batch)),
        ("Module or what a function makes, not 3", lambda: shardwright.build(single_device_plan(), 3, optimizer=ADAM, batch=batch)),
        ("read_plan takes text or a path as path, not 3", lambda: shardwright.read_plan(3)),
        ("a whole number or None as pick, not '1'", lambda: shardwright.explain(single_device_plan(), module, "1x1xV100", batch=batch, pick="1")),
        ("verify_rules takes Sequence.* as kinds, not 3", lambda: api.verify_rules(3)),
        ("needs a function .* not adamw", lambda: shardwright.build(single_device_plan(), module, optimizer="adamw", batch=batch)),
    ):  # fmt: skip
        with pytest.raises(InputError, match=says):
            call()


class Other:
    """Of no kind that an argument may be."""


def test_every_verb_names_an_argument_of_another_kind_before_it_does_anything() -> None:
    simple = {"str", "int", "float", "bool", "Path", "None"}
    nouns = {"Cluster", "Frontier", "Job", "Plan", "Request", "Trial", "Watch", "Wish", "OperatorGraph"}  # fmt: skip
    asked = set[str]()
    for verb in (getattr(shardwright, name) for name in shardwright.__all__):
        for name, one in signature(verb).parameters.items() if isfunction(verb) else ():
            if {*str(one.annotation).split(" | ")} <= simple | nouns:
                asked.add(f"{verb.__name__} {name}")
                with pytest.raises(InputError, match=rf"{name.replace('_', '.')}.* not <tests"):
                    verb(**{name: Other()})
    assert len(asked) > 60
    assert {
        "read_plan path",
        "run pick",
        "plan cluster",
        "why_not wish",
        "write_plan plans",
    } <= asked


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Request(optimizer="magic"), "optimizer must be one of"),
        (lambda: Request(precision="float8"), "precision must be one of"),
        (lambda: Request(recompute="some"), "recompute must be one of"),
        (lambda: Request(method="luck"), "method must be one of"),
        (lambda: Request(proposals=5), "exact search ends by itself"),
        (lambda: Request(seconds=0.0), "seconds to plan in must be more than 0"),
        (lambda: Request(method="mcmc", seconds=5.0, proposals=5), "either seconds or proposals"),
        (lambda: Request(method="mcmc", proposals=0), "more than 0"),
        (lambda: Request(method="mcmc", mode="curve"), "leave out"),
        (lambda: Request(global_batch=0), "global batch must be between"),
        (lambda: Request(memory_limit="12").memory_bytes, "has no unit"),
        (lambda: Request(memory_limit=float("nan")).memory_bytes, "must be positive"),
        (lambda: Request(clip=-1.0), "finite and not negative"),
        (lambda: Request(clip=float("inf")), "finite and not negative"),
        (lambda: Request(accumulation="bfloat16"), "accumulation must be one of float32, own"),
        (
            lambda: Request(gradient_dtype="int8"),
            "gradient dtype must be one of parameter, float32",
        ),
        (lambda: Job(model="m", clip=float("nan")), "must be finite"),
        (lambda: Job(model="m", steps=0), "takes 1 to .* steps"),
        (lambda: Job(model="m", steps=10**30), "takes 1 to .* steps"),
        (lambda: Job(model="m", learning_rate=float("inf")), "must be finite"),
        (lambda: Job(model="m", resume=True), "--checkpoint-dir"),
        (lambda: Job(model="m", optimizer=3), "optimizer must be one of"),
        (lambda: Wish(tensor="8"), "Wish takes a whole number or None as tensor, not '8'"),
    ],
)
def test_requests_are_checked_when_they_are_made(make: object, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()  # type: ignore[operator]


def test_init_writes_a_cluster_file_that_can_be_planned_for(tmp_path: Path) -> None:
    path = api.init(tmp_path / "cluster.toml")
    cluster, is_local = api.find_cluster(str(path))
    assert cluster.num_devices >= 1
    assert not is_local
    with pytest.raises(InputError, match="exists and is kept"):
        api.init(path)


class WithPenalty(torch.nn.Module):
    """Returns its loss and what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {"loss": y.square().mean() + y.abs().sum(), "size": y.abs().sum(), "y": y}


def test_a_plan_knows_the_outputs_it_reports(tmp_path: Path) -> None:
    module, batch = WithPenalty(), {"x": torch.randn(4, 8)}
    frontier = shardwright.plan(module, "1x1xV100", batch=batch, outputs=("size", "y"))
    assert frontier.best.outputs == ("size", "y")
    write_plan(tmp_path / "plan.json", frontier)
    expected = module(**batch)
    executor = shardwright.build(
        read_plan(tmp_path / "plan.json").best, module, optimizer=ADAM, batch=batch
    )
    executor.step(batch, outputs=("y", "size"))
    for name in ("y", "size"):
        found = executor.outputs[name].to(torch.float32)
        torch.testing.assert_close(found, expected[name].detach())
    executor.step(batch)
    assert executor.outputs == {}
