"""Small changes of a strategy, as local search makes them: one choice drawn anew."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import Layout
from shardwright.core.strategy import GradientSync, OperatorConfig, ParameterConfig, Strategy
from shardwright.operators.splitting.iteration import PLUS, Iteration
from shardwright.operators.splitting.samples import Samples
from shardwright.planner.space.configs import choices, wanted_as
from shardwright.planner.space.rest import shard_further


def redrawn(
    graph: OperatorGraph,
    samples: Samples,
    iterations: list[Iteration],
    strategy: Strategy,
    random: Random,
) -> Strategy:
    """Split one operator otherwise; its parameters lie as it then uses them, sharded further at
    times."""
    index = random.randrange(len(graph.operators))
    config = strategy.configs[index]
    sizes = strategy.meshes[config.mesh].sizes
    sample, pieces = samples.operator_dim[index], strategy.pipeline.num_microbatches
    every = choices(iterations[index], sizes, sample, pieces)
    configs = list(strategy.configs)
    dims = random.choice([dims for dims in every if PLUS not in dims])
    configs[index] = OperatorConfig(mesh=config.mesh, dims=dims)
    parameters = list(strategy.parameters)
    for position, tensor in enumerate(graph.parameters):
        if tensor in graph.operators[index].inputs:
            use = wanted_as(graph, samples, tensor, configs)
            parameters[position] = _kept(graph.tensors[tensor].shape, use, sizes, random)
    return replace(strategy, configs=tuple(configs), parameters=tuple(parameters))


def _kept(
    shape: tuple[int, ...], use: Layout, sizes: tuple[int, ...], random: Random
) -> ParameterConfig:
    finer = shard_further(shape, use, sizes)
    rest, optimizer = random.choice(((use, use), (use, use), (use, finer), (finer, finer)))
    return ParameterConfig(
        rest=rest,
        optimizer=optimizer,
        sync=random.choice(("step", "step", "microbatch")),
        keeps=random.random() < 0.1,
    )


def moved(graph: OperatorGraph, strategy: Strategy, random: Random) -> Strategy:
    """Change what is not an operator's split: what is made again, which gradients travel together,
    or on which mesh one operator runs."""
    what = random.randrange(6)
    if what == 0:
        return replace(strategy, recompute=_toggled(strategy.recompute, len(graph.blocks), random))
    if what == 1:
        dropped = _toggled(strategy.recompute_operators, len(graph.operators), random)
        return replace(strategy, recompute_operators=dropped)
    if what == 2:
        again = _toggled(strategy.reshard_again, len(graph.tensors), random)
        return replace(strategy, reshard_again=again)
    if what == 3:
        starts = _toggled(strategy.segment_starts, len(graph.operators), random)
        return replace(strategy, segment_starts=starts)
    if what == 4:
        trained = [t for t in graph.parameters if graph.tensors[t].needs_gradient]
        bucket = random.sample(trained, min(len(trained), 3))
        return replace(strategy, gradient_sync=GradientSync(buckets=(tuple(bucket),)))
    index = random.randrange(len(graph.operators))
    mesh = strategy.configs[random.randrange(len(graph.operators))].mesh
    configs = list(strategy.configs)
    configs[index] = replace(configs[index], mesh=mesh)
    return replace(strategy, configs=tuple(configs))


def _toggled(chosen: tuple[int, ...], count: int, random: Random) -> tuple[int, ...]:
    return tuple(sorted(set(chosen) ^ {random.randrange(count)}))
