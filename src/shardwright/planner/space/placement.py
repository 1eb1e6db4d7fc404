"""Strategies whose operators run on different devices and at different degrees: the O of SOAP.

A *part* is a set of operators on devices of their own. Parts may share devices, and parts that do
not depend on each other run at the same time: branches, experts, the layers of a recurrent model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Mesh, OperatorConfig, Pipeline, Strategy
from shardwright.operators.splitting import iterate
from shardwright.operators.splitting.iteration import PLUS
from shardwright.operators.splitting.samples import Samples, find_samples
from shardwright.planner.space.configs import summed_over
from shardwright.planner.space.seeds import Seed, seed_strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Operators that share a mesh: its devices, and how they split the work by ``seed``.

    The seed's data, context and tensor degrees must multiply to the number of devices; of the rest, ZeRO and
    sequence parallelism count here, microbatches and schedule belong to the whole.
    """

    devices: tuple[int, ...]
    operators: tuple[int, ...]
    seed: Seed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePart:
    """A part by the names of its modules, as in ``module.named_modules()``; ``*`` and ``?`` stand
    for any letters, and a name means all that is inside it."""

    devices: tuple[int, ...]
    modules: tuple[str, ...]
    seed: Seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A strategy asked for part by part; ``whole`` as in ``place_parts``, ``name`` for people.

    ``order`` takes the place of the schedule (``core.strategy.Pipeline``): mesh k is that of part k.
    """

    name: str
    parts: tuple[ModulePart, ...]
    whole: Seed
    order: tuple[str, ...] = ()


def place_modules(
    graph: OperatorGraph, placement: Placement, samples: Samples | None = None
) -> Strategy:
    """Return the strategy of a placement.

    Of several names that fit an operator's module the longest wins, a plain one before a pattern.
    Operators outside all of them run where their inputs come from, else where they are read.
    Raises ValueError where a name fits nothing, and as ``place_parts`` does.
    """
    owner = _owners_by_module(graph, placement.parts)
    parts = [
        Part(
            devices=part.devices,
            operators=tuple(index for index, mine in enumerate(owner) if mine == number),
            seed=part.seed,
        )
        for number, part in enumerate(placement.parts)
    ]
    return place_parts(graph, parts, placement.whole, samples, placement.order)


def place_parts(
    graph: OperatorGraph, parts: Sequence[Part], whole: Seed, samples: Samples | None = None,
    order: tuple[str, ...] = (),
) -> Strategy:  # fmt: skip
    """Return the strategy in which every part runs on its own devices.

    Parts are listed in the order of the data's way: none may feed an earlier one. ``whole`` gives
    microbatches, schedule (unless there is an ``order``), recomputation and precision. Raises ValueError where an operator belongs
    to no part or to two, feeds an earlier part, or a part's degrees do not match its devices.
    """
    samples = samples or find_samples(graph)
    owner = _owners(graph, parts)
    _check_order(graph, owner)
    strategies = [_alone(graph, part, whole, samples) for part in parts]
    configs = [
        OperatorConfig(mesh=number, dims=strategies[number].configs[index].dims)
        for index, number in enumerate(owner)
    ]
    for index in range(len(configs)):
        configs[index] = _without_foreign_sums(graph, configs, index)
    base = seed_strategy(graph, replace(whole, data=1, tensor=1, stages=1), samples)
    pipeline = base.pipeline
    if order:
        pieces = pipeline.num_microbatches
        pipeline = Pipeline(schedule="custom", num_microbatches=pieces, order=order)
    return replace(
        base,
        meshes=tuple(
            Mesh(axes=one.meshes[0].axes, sizes=one.meshes[0].sizes, devices=part.devices)
            for one, part in zip(strategies, parts, strict=True)
        ),
        configs=tuple(configs),
        parameters=tuple(
            _home(graph, tensor, owner, strategies).parameters[position]
            for position, tensor in enumerate(graph.parameters)
        ),
        pipeline=pipeline,
        label=_label(parts, pipeline),
    )


def _label(parts: Sequence[Part], pipeline: Pipeline) -> str:
    """Say what lies where, and in which order microbatches go through it, where there are several."""
    schedule, num_microbatches = pipeline.schedule, pipeline.num_microbatches
    where = "; ".join(f"{part.seed.label} on {','.join(map(str, part.devices))}" for part in parts)
    if num_microbatches == 1:
        return where
    order = "an order of one's own" if schedule == "custom" else schedule
    return ", ".join(
        [where, *([order] if len(parts) > 1 else []), f"{num_microbatches} microbatches"]
    )


def _without_foreign_sums(
    graph: OperatorGraph, configs: Sequence[OperatorConfig], index: int
) -> OperatorConfig:
    """Let partial sums pass only where they are made on the same mesh: sums arrive whole."""
    config, iteration = configs[index], iterate(graph, index)
    dims = list(config.dims)
    axes = [axis for axis, name in enumerate(config.dims) if name == PLUS]
    for position in iteration.linear if axes else ():
        tensor = graph.operators[index].inputs[position]
        for axis in set(axes) - set(summed_over(graph, configs, index, tensor, axes)):
            dims[axis] = ""
    return replace(config, dims=tuple(dims))


def _alone(graph: OperatorGraph, part: Part, whole: Seed, samples: Samples) -> Strategy:
    seed = replace(
        part.seed,
        stages=1,
        num_microbatches=whole.num_microbatches,
        schedule=whole.schedule,
        recompute=False,
        precision=whole.precision,
    )
    degrees = (seed.data, seed.context, seed.tensor)
    if math.prod(degrees) != len(part.devices):
        raise ValueError(
            "data x context x tensor must be a part's number of devices, but "
            f"{' x '.join(map(str, degrees))} is not {len(part.devices)}; change the degrees or the "
            "devices"
        )
    return seed_strategy(graph, seed, samples)


def _owners(graph: OperatorGraph, parts: Sequence[Part]) -> list[int]:
    owner = [-1] * len(graph.operators)
    for number, part in enumerate(parts):
        for index in part.operators:
            if owner[index] >= 0:
                raise ValueError(
                    f"operator {graph.operators[index].name} belongs to parts {owner[index]} and "
                    f"{number}; name it in one"
                )
            owner[index] = number
    if -1 in owner:
        name = graph.operators[owner.index(-1)].name
        raise ValueError(f"operator {name} belongs to no part; add it to one")
    return owner


def _check_order(graph: OperatorGraph, owner: Sequence[int]) -> None:
    for index, operator in enumerate(graph.operators):
        for tensor in operator.inputs:
            spec = graph.tensors[tensor]
            producer = spec.producer
            # What is not trained is made wherever it is read.
            if spec.needs_gradient and owner[producer] > owner[index] and producer >= 0:
                raise ValueError(
                    f"operator {graph.operators[producer].name} of part {owner[producer]} feeds "
                    f"{operator.name} of part {owner[index]}, but data goes from earlier parts to "
                    "later ones; list the parts in another order, or split the second one"
                )


def _owners_by_module(graph: OperatorGraph, parts: Sequence[ModulePart]) -> list[int]:
    names = [(name, number) for number, part in enumerate(parts) for name in part.modules]
    used: set[tuple[str, int]] = set()
    owner = [-1] * len(graph.operators)
    for index, operator in enumerate(graph.operators):
        fits = {one: _fit(one[0], operator.module) for one in names}
        fits = {one: fit for one, fit in fits.items() if fit[0]}
        used.update(fits)
        if fits:
            owner[index] = max(fits, key=lambda one: fits[one])[1]
    _check_used(graph, [one for one in names if one not in used])
    return _fill(graph, owner)


def _check_used(graph: OperatorGraph, idle: Sequence[tuple[str, int]]) -> None:
    if idle:
        name, number = idle[0]
        known = ", ".join(sorted({one.module.split(".")[0] for one in graph.operators} - {""}))
        raise ValueError(
            f"{name!r} of part {number} names no module with operators; the outermost are "
            f"{known or 'none'}"
        )


def _fit(name: str, module: str) -> tuple[int, bool, int]:
    """Return how many names of a module's path a pattern covers (0: none), whether without
    wildcards, and its length: the order in which patterns win."""
    path = module.split(".") if module else []
    for depth in range(1, len(path) + 1):
        if fnmatchcase(".".join(path[:depth]), name):
            return depth, not any(letter in name for letter in "*?["), len(name)
    return 0, False, 0


def _fill(graph: OperatorGraph, owner: list[int]) -> list[int]:
    """Give the operators that are named nowhere to the parts around them."""
    for index in range(len(owner)):
        if owner[index] < 0:
            owner[index] = max([owner[maker] for maker in graph.makers(index)], default=-1)
    for index in reversed(range(len(owner))):
        if owner[index] < 0:
            owner[index] = min((owner[reader] for reader in graph.readers(index)), default=0)
    return [max(number, 0) for number in owner]


def _home(
    graph: OperatorGraph, tensor: int, owner: Sequence[int], strategies: Sequence[Strategy]
) -> Strategy:
    """Return the strategy of the part that keeps a parameter: the first one that reads it."""
    readers = graph.consumers[tensor]
    return strategies[min((owner[reader] for reader in readers), default=0)]
