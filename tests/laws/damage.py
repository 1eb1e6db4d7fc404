"""Damage to plans: what a slip of the hand, another version or a bad disk makes of a strategy.

Damage is done to the JSON of a plan file, where a digit stands for many operators at once (see
``core.codec``), or to one choice of the strategy itself.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import FLAT, PARTIAL, REPLICATE, inner
from shardwright.core.strategy import Mesh, OperatorConfig, ParameterConfig, Pipeline, Strategy
from shardwright.operators.splitting import iterate
from shardwright.operators.splitting.iteration import PLUS

PLACEMENTS = (REPLICATE, PARTIAL, 0, 1, 2, 3, inner(0), inner(1), FLAT)
MICROBATCHES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 32, 10**6, 10**18)
NUMBERS = (-2, -1, 0, 1, 2, 3, 7, 10**9, 2**62)


def damaged_tree(tree: Any, random: Random) -> Any:
    """Return a strategy's JSON with one leaf changed, or one entry of a list there twice or no
    more."""
    if isinstance(tree, dict) and tree:
        key = random.choice(sorted(tree))
        return {**tree, key: damaged_tree(tree[key], random)}
    if isinstance(tree, list) and tree:
        place = random.randrange(len(tree))
        what = random.random()
        if what < 0.05:
            return [*tree[:place], *tree[place + 1 :]]
        if what < 0.1:
            return [*tree[:place], tree[place], *tree[place:]]
        if what < 0.15:
            return random.sample(tree, len(tree))
        return [*tree[:place], damaged_tree(tree[place], random), *tree[place + 1 :]]
    return _damaged_leaf(tree, random)


def _damaged_leaf(leaf: Any, random: Random) -> Any:
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, int):
        return random.choice((leaf + 1, leaf - 1, -leaf, random.choice(NUMBERS)))
    if isinstance(leaf, str):
        return random.choice(
            ("", "+", "b", "s", "k", "n", leaf + "x", "1f1b", "gpipe", "step", "microbatch", "own")
        )
    return random.choice(([], [0], [0, 1], [random.choice(NUMBERS)]))


def damaged(graph: OperatorGraph, strategy: Strategy, random: Random) -> Strategy:
    """Return a strategy with one choice changed to what may or may not be legal. Raises ValueError
    where not even the nouns can say it."""
    return random.choice(KINDS)(graph, strategy, random)


def _dims(graph: OperatorGraph, strategy: Strategy, random: Random) -> Strategy:
    """Split one operator otherwise."""
    index = random.randrange(len(graph.operators))
    config = strategy.configs[index]
    names = [dim.name for dim in iterate(graph, index).dims]
    dims = list(config.dims)
    if dims:
        dims[random.randrange(len(dims))] = random.choice(("", PLUS, "zz", *names, *names))
    return _with_config(strategy, index, replace(config, dims=tuple(dims)))


def _mesh_of(graph: OperatorGraph, strategy: Strategy, random: Random) -> Strategy:
    """Run one operator, or all from it on, elsewhere."""
    index = random.randrange(len(graph.operators))
    mesh = random.randrange(len(strategy.meshes) + 1)
    stop = random.choice((index + 1, len(graph.operators)))
    configs = [
        replace(config, mesh=mesh) if index <= place < stop else config
        for place, config in enumerate(strategy.configs)
    ]
    return replace(strategy, configs=tuple(configs))


def _layout(graph: OperatorGraph, strategy: Strategy, random: Random) -> Strategy:
    """Keep one parameter otherwise."""
    place = random.randrange(len(strategy.parameters))
    config = strategy.parameters[place]
    name = random.choice(("rest", "optimizer"))
    layout = list(getattr(config, name))
    what = random.random()
    if what < 0.1:
        layout.append(REPLICATE)
    elif what < 0.2 or not layout:
        layout = layout[:-1]
    else:
        layout[random.randrange(len(layout))] = random.choice(PLACEMENTS)
    changed = {name: tuple(layout)}
    if random.random() < 0.3:
        changed = {"rest": tuple(layout), "optimizer": tuple(layout)}
    return _with_parameter(strategy, place, replace(config, **changed))


def _kept(graph: OperatorGraph, strategy: Strategy, random: Random) -> Strategy:
    """Synchronise or keep one parameter, or all, otherwise."""
    place, chosen = random.randrange(len(strategy.parameters)), random.random() < 0.3
    sync, keeps = random.choice(("step", "microbatch")), random.random() < 0.6
    parameters = [
        replace(one, sync=sync, keeps=keeps) if chosen or number == place else one
        for number, one in enumerate(strategy.parameters)
    ]
    return replace(strategy, parameters=tuple(parameters))


def _pipeline(graph: OperatorGraph, strategy: Strategy, random: Random) -> Strategy:
    """Cut the batch otherwise."""
    return replace(
        strategy,
        pipeline=Pipeline(
            schedule=random.choice(("gpipe", "1f1b")), num_microbatches=random.choice(MICROBATCHES)
        ),
    )


def _mesh(graph: OperatorGraph, strategy: Strategy, random: Random) -> Strategy:
    """Change a mesh: its shape, its devices, their order, or the order of the meshes."""
    place = random.randrange(len(strategy.meshes))
    mesh = strategy.meshes[place]
    what = random.randrange(6)
    if what == 0:
        mesh = replace(mesh, sizes=tuple(reversed(mesh.sizes)))
    elif what == 1:
        mesh = replace(mesh, devices=tuple(random.sample(mesh.devices, len(mesh.devices))))
    elif what == 2:
        mesh = replace(mesh, devices=tuple(random.sample(range(5), len(mesh.devices))))
    elif what == 3:
        mesh = replace(mesh, axes=tuple(reversed(mesh.axes)))
    elif what == 4:
        width = len(mesh.devices)
        mesh = Mesh(axes=(*mesh.axes, "more"), sizes=(*mesh.sizes, 1), devices=mesh.devices[:width])
    else:
        return replace(strategy, meshes=tuple(reversed(strategy.meshes)))
    meshes = (*strategy.meshes[:place], mesh, *strategy.meshes[place + 1 :])
    return replace(strategy, meshes=meshes)


def _again(graph: OperatorGraph, strategy: Strategy, random: Random) -> Strategy:
    """Make other things again, end other segments, or merge other gradients."""
    names = ("recompute", "recompute_operators", "reshard_again", "segment_starts")
    name = random.choice(names)
    count = random.choice((len(graph.blocks), len(graph.operators), len(graph.tensors)))
    chosen = random.choices(range(-1, count + 1), k=random.randint(1, 4))
    if random.random() < 0.3:
        bucket = tuple(random.choices(graph.parameters, k=2))
        sync = replace(strategy.gradient_sync, buckets=(bucket, *strategy.gradient_sync.buckets))
        return replace(strategy, gradient_sync=sync)
    return replace(strategy, **{name: tuple(chosen)})


def _swapped(graph: OperatorGraph, strategy: Strategy, random: Random) -> Strategy:
    """Give one operator or parameter what belongs to another."""
    if random.random() < 0.5:
        one, other = (random.randrange(len(strategy.configs)) for _ in range(2))
        return _with_config(strategy, one, strategy.configs[other])
    one, other = (random.randrange(len(strategy.parameters)) for _ in range(2))
    return _with_parameter(strategy, one, strategy.parameters[other])


KINDS = (_dims, _dims, _mesh_of, _layout, _layout, _kept, _pipeline, _mesh, _again, _swapped)


def _with_config(strategy: Strategy, index: int, config: OperatorConfig) -> Strategy:
    configs = (*strategy.configs[:index], config, *strategy.configs[index + 1 :])
    return replace(strategy, configs=configs)


def _with_parameter(strategy: Strategy, place: int, config: ParameterConfig) -> Strategy:
    parameters = (*strategy.parameters[:place], config, *strategy.parameters[place + 1 :])
    return replace(strategy, parameters=parameters)
