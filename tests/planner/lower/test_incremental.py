"""Lowering from what was lowered before, without torch: joined pieces, and compiled loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import FLAT
from shardwright.core.program import Kind, Program
from shardwright.core.strategy import GradientSync, ParameterConfig, Strategy, SyncEvery
from shardwright.operators.splitting import find_samples, iterate
from shardwright.planner.lower import lower
from shardwright.planner.lower.incremental import IncrementalLowering
from shardwright.planner.space import Seed, seed_strategy
from shardwright.proofs import check
from tests.laws.columns import columns
from tests.laws.moves import redrawn
from tests.planner.search.models import Sketch, images, mlp, residual

SEEDS = (
    Seed(data=4),
    Seed(data=2, tensor=2),
    Seed(data=2, tensor=2, zero=3, num_microbatches=2),
    Seed(data=2, stages=2, num_microbatches=2, zero=2),
    Seed(tensor=2, stages=2, num_microbatches=4, schedule="gpipe"),
    Seed(data=2, stages=2, zero=1, num_microbatches=4, schedule="zb-h1", precision="bfloat16"),
    Seed(data=2, tensor=2, zero=1, num_microbatches=4, precision="bfloat16"),
)


def tied(batch: int = 8, width: int = 16) -> OperatorGraph:
    """Four equal layers, of which the first, third and fourth share one weight."""
    sketch = Sketch(batch)
    x = sketch.outside("x", (batch, width), "input")
    y = sketch.outside("y", (batch,), "input", "int64")
    shared = sketch.outside("shared.weight", (width, width), "parameter")
    own = sketch.outside("own.weight", (width, width), "parameter")
    for layer, weight in enumerate((shared, own, shared, shared)):
        x = sketch.apply("aten.linear.default", {"input": x, "weight": weight}, (batch, width))
        x = sketch.apply("aten.relu.default", {"self": x}, (batch, width))
        sketch.close_block(f"layer{layer}", "layer")
    return sketch.finish("tied", sketch.linear(x, 8, "head"), y)


def built(build: Callable[..., OperatorGraph], seed: Seed) -> OperatorGraph:
    """Return a graph in the dtype that a seed trains in."""
    graph = build(batch=8)
    tensors = [
        replace(one, dtype=seed.precision) if one.is_floating else one for one in graph.tensors
    ]
    return replace(graph, tensors=tuple(tensors))


def test_a_draft_that_lasts_is_not_asked_for_sums_in_another_dtype() -> None:
    seed = SEEDS[-1]
    graph = built(residual, seed)
    strategy = seed_strategy(graph, seed)
    lowering = IncrementalLowering(graph, find_samples(graph))
    for how in ("float32", "own", "float32"):
        one = replace(strategy, accumulation=how)
        assert columns(lowering.lower(one)) == columns(lower(graph, one))


def sharded_within(graph: OperatorGraph, count: int, sync: SyncEvery) -> Strategy:
    """Data parallelism over hosts and within them, the optimizer's state sharded within them only."""
    found = seed_strategy(graph, Seed(data=2, tensor=2, num_microbatches=count))
    whole = ParameterConfig(rest=(-1, -1), optimizer=(-1, 0), sync=sync)
    return replace(
        found,
        configs=tuple(replace(one, dims=(one.dims[0],) * 2) for one in found.configs),
        parameters=(whole,) * len(found.parameters),
    )


@pytest.mark.parametrize("build", [residual, mlp])
@pytest.mark.parametrize(("count", "sync"), [(1, "step"), (2, "step"), (2, "microbatch")])
def test_gradients_cross_a_free_second_axis_while_the_backward_runs(build, count, sync) -> None:
    graph = build(width=512)
    strategy = sharded_within(graph, count, sync)
    program = lower(graph, strategy)
    check(program)
    across = [
        index
        for index in np.flatnonzero(program.kind == Kind.MESSAGE).tolist()
        for message in (program.messages[int(program.item[index])],)
        if message.purpose == "synchronise" and message.axes == (0,)
    ]
    last = int(np.flatnonzero(program.kind == Kind.BACKWARD)[-1])
    assert len([index for index in across if index < last]) >= len(across) // 2 > 0
    assert columns(IncrementalLowering(graph, find_samples(graph)).lower(strategy)) == columns(
        program
    )


def bucketed(graph: OperatorGraph, strategy: Strategy, random: Random) -> Strategy:
    """Let some gradients travel together."""
    trained = [tensor for tensor in graph.parameters if graph.tensors[tensor].needs_gradient]
    bucket = tuple(random.sample(trained, min(len(trained), 3)))
    return replace(strategy, gradient_sync=GradientSync(buckets=(bucket,)))


def made(act: Callable[[Strategy], Program], strategy: Strategy) -> object:
    """Return what comes of a strategy, None where it is refused."""
    try:
        return columns(act(strategy))
    except ValueError:
        return None


@pytest.mark.parametrize("build", [tied, residual, images])
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
def test_a_program_joined_from_pieces_is_the_program(build, seed) -> None:
    graph, random = built(build, seed), Random(3)
    samples, lowering = find_samples(graph), IncrementalLowering(graph, find_samples(graph))
    iterations = [iterate(graph, index) for index in range(len(graph.operators))]
    strategy, lowered = seed_strategy(graph, seed, samples), 0
    for number in range(24):
        other = redrawn(graph, samples, iterations, strategy, random)
        other = bucketed(graph, other, random) if number % 6 == 5 else other
        known = made(lambda s: lower(graph, s, samples), other)
        found = made(lowering.lower, other)  # also of what is refused, perhaps half way
        if known is None:
            continue
        assert found == known
        lowered += 1
        strategy = strategy if number % 4 == 3 else other
    assert lowered >= 4


def test_flat_shards_are_gathered_once_for_all_meshes_that_read_them() -> None:
    graph = tied()
    strategy = seed_strategy(graph, Seed(data=2, stages=5, num_microbatches=2))
    flat = ParameterConfig(rest=(FLAT,), optimizer=(FLAT,))
    at = graph.parameters.index(next(t for t in graph.parameters if len(graph.consumers[t]) > 1))
    parameters = (*strategy.parameters[:at], flat, *strategy.parameters[at + 1 :])
    strategy = replace(strategy, parameters=parameters)
    program = lower(graph, strategy)
    gathers = [
        item
        for kind, item, microbatch in zip(
            program.kind.tolist(), program.item.tolist(), program.microbatch.tolist(), strict=True
        )
        if kind == Kind.MESSAGE and microbatch < 0
        and program.messages[item].primitive == "all_gather"
    ]  # fmt: skip
    sent = [one for one in program.messages if one.purpose == "parameter" and one.destination >= 0]
    assert len(sent) == 2
    assert len(gathers) == 1
    again = IncrementalLowering(graph, find_samples(graph)).lower(strategy)
    assert columns(again) == columns(program)
