"""Asynchronous pipelines come into a frontier where they are allowed, and take nobody's place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import REPLICATE
from shardwright.core.plan import Frontier, Objective
from shardwright.core.strategy import Strategy
from shardwright.planner.model.training import Training
from shardwright.planner.search import Limits, begun, search
from shardwright.planner.search.loop import run
from shardwright.planner.search.named import as_strategy
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.proposers.late import late
from shardwright.planner.space import Seed, check_strategy
from shardwright.report.text import frontier_table
from tests.planner.search.models import Sketch, cluster, mlp

pytestmark = pytest.mark.usefixtures("short_climbs")

GRAPH = mlp(depth=5)
MACHINE = cluster(1, 3, flops=1e10, near=1e9, far=1e8)


def frontier(
    staleness: int,
    training: Training = Training(),  # noqa: B008
    machine: Cluster = MACHINE,
) -> Frontier:
    limits = Limits(staleness=staleness, max_candidates=4)
    return search(GRAPH, machine, CostTable(), training=training, limits=limits)


def test_asynchronous_plans_are_there_only_where_they_are_allowed_and_beside_all_others() -> None:
    without, found = frontier(0), frontier(2)
    assert all(plan.strategy.pipeline.is_flushed for plan in without.plans)
    late = [plan for plan in found.plans if plan.predicted.staleness]
    assert late
    for plan in late:
        assert plan.predicted.staleness == len(plan.strategy.meshes) - 1 <= 2
        assert plan.bound is None
        assert any("losses are near those of synchronous training" in note for note in plan.notes)
    # What is synchronous is neither dropped for them nor chosen otherwise.
    assert [p.predicted for p in found.plans if not p.predicted.staleness] == [
        p.predicted for p in without.plans
    ]
    bounds = [[p.bound for p in one.plans if not p.predicted.staleness] for one in (without, found)]
    assert bounds[0] == bounds[1]
    header = [str(column.header) for column in frontier_table(found).columns]
    assert "updates late" in header
    assert "updates late" not in [str(one.header) for one in frontier_table(without).columns]


def test_where_an_optimizer_tells_nothing_ahead_weights_are_stashed() -> None:
    found = frontier(3, Training(optimizer_states=0, clips=True, max_norm=1.0))
    late = [plan for plan in found.plans if plan.predicted.staleness]
    assert {plan.strategy.pipeline.staleness for plan in late} == {"stash"}
    for plan in found.plans:
        clips_apart = any("each stage clips its own gradients" in note for note in plan.notes)
        assert clips_apart == (plan in late)


def test_stages_may_have_several_devices() -> None:
    """Those that the search makes, and synchronous pipelines made asynchronous; the fastest uses all of them."""
    fast = cluster(1, 4, flops=1e9, near=1e11, far=1e10)
    found = frontier(1, machine=fast)
    late = [plan.strategy for plan in found.plans if plan.predicted.staleness]
    sizes = {tuple(len(mesh.devices) for mesh in one.meshes) for one in late}
    assert (2, 2) in sizes
    for one in late:
        assert len(one.devices) == sum(len(mesh.devices) for mesh in one.meshes)
        assert f"{len(one.meshes)} stages asynchronous, {one.pipeline.staleness}" in one.label
        assert "ZeRO" not in one.label
        assert "microbatch" not in one.label


def test_with_more_stages_than_late_gradients_are_allowed_weights_are_double_buffered() -> None:
    slow = cluster(1, 4, flops=1e9, near=1e11, far=1e10)
    found = frontier(1, Training(optimizer_states=0), slow)
    late = [plan for plan in found.plans if plan.strategy.pipeline.staleness == "2bw"]
    assert late
    for plan in late:
        pipeline, stages = plan.strategy.pipeline, len(plan.strategy.meshes)
        assert plan.predicted.staleness == plan.strategy.staleness == 1
        assert 2 < stages <= pipeline.num_microbatches
        assert f"{pipeline.num_microbatches} microbatches" in plan.strategy.label
        assert any("one update late, whatever" in note for note in plan.notes)


def twins(batch: int = 8, width: int = 16, depth: int = 3) -> OperatorGraph:
    """Two inputs through the same layers one after the other, every layer of each a block."""
    sketch = Sketch(batch)
    y = sketch.outside("y", (batch,), "input", "int64")
    known: dict[str, int] = {}
    ends: list[int] = []
    for side in ("left", "right"):
        x = sketch.outside(side, (batch, width), "input")
        for layer in range(depth):
            name = f"layer{layer}.weight"
            if name not in known:
                known[name] = sketch.outside(name, (width, width), "parameter")
            inputs = {"input": x, "weight": known[name]}
            x = sketch.apply("aten.linear.default", inputs, (batch, width))
            x = sketch.apply("aten.relu.default", {"self": x}, (batch, width))
            sketch.close_block(f"{side}{layer}", "layer")
        ends.append(x)
    x = sketch.apply(
        "aten.add.Tensor", dict(zip(("self", "other"), ends, strict=True)), (batch, width)
    )
    return sketch.finish("twins", sketch.linear(x, 8, "head"), y)


def looked_at(pool: Pool) -> list[Strategy]:
    """Propose what is late; return all that a pool looked at, which can be run."""
    run(pool, late)
    strategies = [one.strategy for one in pool.evaluations]
    for one in strategies:
        check_strategy(pool.context.graph, one, pool.context.facts.samples)
    return strategies


def test_no_parameter_that_two_stages_read_is_updated_late() -> None:
    """Their gradients would have to meet."""
    pool = begun(twins(), MACHINE, CostTable(), limits=Limits(staleness=2))
    assert looked_at(pool) == []
    assert any("is used by stages 0, 1" in why for why in pool.refused)


def test_what_a_pipeline_shards_is_whole_where_it_is_never_flushed() -> None:
    pool = begun(GRAPH, cluster(1, 4), CostTable(), limits=Limits(staleness=1))
    sharded = as_strategy(pool.context, Seed(stages=2, data=2, zero=3, num_microbatches=2))
    pool.try_out(sharded)
    made = [one for one in looked_at(pool) if one.configs == sharded.configs and one != sharded]
    assert made
    for one in made:
        assert not one.pipeline.is_flushed
        assert {config.rest for config in one.parameters} == {(REPLICATE,)}


def test_less_late_is_better() -> None:
    late = Objective(step_seconds=1.0, peak_bytes=1.0, staleness=3)
    assert replace(late, staleness=2).dominates(late)
    assert not replace(late, step_seconds=0.5).dominates(replace(late, staleness=0))
    with pytest.raises(ValueError, match="negative"):
        replace(late, staleness=-1)
