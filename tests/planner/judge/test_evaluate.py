"""Verdicts on deep graphs: as if everything were lowered, and by blocks where gradients merge."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.costs import CostTable, link_label
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import GradientSync
from shardwright.planner.judge.evaluate import evaluate, merge, run
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search.named import as_strategy
from shardwright.planner.space import Seed
from shardwright.planner.space.seeds import capped_sync
from tests.planner.search.models import Sketch, cluster, mlp, residual

DEPTH = 40
SEEDS = (
    Seed(data=4),
    Seed(data=2, tensor=2, zero=1, num_microbatches=2),
    Seed(data=4, zero=3, recompute=True),
    Seed(data=2, stages=2, num_microbatches=2),
)


@pytest.mark.parametrize("build", [mlp, residual])
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
def test_a_deep_graph_is_judged_as_if_all_of_it_were_lowered(build, seed) -> None:
    context = Context.of(
        build(depth=DEPTH), cluster(2, 2), CostTable(), Training(precision="bfloat16")
    )
    strategy = as_strategy(context, seed)
    found, known = evaluate(context, strategy, 0.5), run(context, strategy, 0.5)[2]
    assert context.facts.folder.fold(strategy) is not None
    assert found.strategy is strategy
    assert (found.objective, found.stage_bytes, found.sources, found.least_seconds) == (
        known.objective,
        known.stage_bytes,
        known.sources,
        known.least_seconds,
    )


def test_gradients_of_a_deep_graph_travel_by_blocks_where_that_is_faster() -> None:
    context = Context.of(mlp(depth=DEPTH), cluster(2, 2), CostTable(), Training())
    alone = replace(as_strategy(context, Seed(data=4)), gradient_sync=GradientSync())
    evaluation = evaluate(context, alone)
    merged = merge(context, evaluation)
    assert merged.seconds < evaluation.seconds
    blocks = GradientSync(method="block", buckets=context.facts.spreader.buckets)
    by_blocks = evaluate(context, replace(alone, gradient_sync=blocks))
    # Blocks together, or better still where starting that many messages is felt.
    assert merged.seconds <= by_blocks.seconds < evaluation.seconds


@pytest.mark.parametrize("depth", [8, DEPTH])
def test_messages_that_hide_but_hold_the_ranks_that_compute_are_sent_together(depth: int) -> None:
    graph, two = mlp(depth=depth), cluster(1, 2)
    seed = Seed(data=2)
    context = Context.of(graph, two, CostTable(), Training())
    step = evaluate(context, as_strategy(context, seed)).seconds
    group = f"1x2|{link_label(two, (0, 1))}"
    size = float(sum(graph.tensors[tensor].bytes for tensor in graph.parameters))
    flat = {"held": step / 40, "stolen": 0.0, "waited": step / 30}
    lines = {what: ((1.0, least, 0.0), (size, least, 0.0)) for what, least in flat.items()}
    lines["collective"] = ((1.0, 0.0, 0.0), (size, step / 20, 0.0))
    table = CostTable(
        collectives=tuple((f"{what}|all_reduce|{group}", line) for what, line in lines.items()),
        overheads=((f"hiding|{group}", step / 40),),
    )
    held = Context.of(graph, two, table, Training())
    blocks = evaluate(held, as_strategy(held, seed))
    merged = merge(held, blocks)
    assert merged.seconds < blocks.seconds
    assert len(merged.strategy.gradient_sync.buckets) < len(held.facts.spreader.buckets)
    capped = blocks.strategy.gradient_sync.carrying(capped_sync(graph))
    as_torch = evaluate(held, replace(blocks.strategy, gradient_sync=capped))
    assert merged.seconds < 1.02 * as_torch.seconds


def shared_weight(width: int = 64, depth: int = 2) -> OperatorGraph:
    """Pairs of linear layers with one weight."""
    sketch = Sketch(16)
    x = sketch.outside("x", (16, width), "input")
    y = sketch.outside("y", (16,), "input", "int64")
    for layer in range(depth):
        weight = sketch.outside(f"weight{layer}", (width, width), "parameter")
        for _ in range(2):
            inputs = {"input": x, "weight": weight}
            x = sketch.apply("aten.linear.default", inputs, (16, width))
        sketch.close_block(f"layer{layer}", "layer")
    return sketch.finish("shared", sketch.linear(x, 8, "head"), y)


def test_a_parameter_with_gradients_in_two_layouts_is_in_one_bucket() -> None:
    context = Context.of(shared_weight(), cluster(2, 2), CostTable(), Training())
    made = as_strategy(context, Seed(data=2, tensor=2))
    configs = list(made.configs)
    for opening in (
        0,
        2,
    ):  # the first of each pair splits the weight's rows, the second its columns
        configs[opening] = replace(configs[opening], dims=("b", "n"))
        configs[opening + 1] = replace(configs[opening + 1], dims=("b", "k"))
    made = replace(made, configs=tuple(configs), gradient_sync=GradientSync())
    sync = merge(context, evaluate(context, made)).strategy.gradient_sync
    named = [tensor for bucket in sync.buckets for tensor in bucket]
    assert sync.method == "optimal"
    assert sorted(named) == sorted(context.graph.parameters)
