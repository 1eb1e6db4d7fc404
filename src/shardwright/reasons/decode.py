"""Where a finished strategy stands in the additive model: its arrangement, and every choice it made.

The way back from ``candidates.to_strategy``, for strategies from anywhere (a plan file, a name).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.core.schedules import SCHEDULES
from shardwright.core.strategy import Mesh, ParameterConfig, Strategy
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.context import Context
from shardwright.planner.model.modes import in_modes
from shardwright.planner.model.parameters import num_levels, parameter_config
from shardwright.planner.model.problem import Problem

AXES = ("data", "outer", "tensor")
T = TypeVar("T", str, int)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Decoded:
    """A strategy's arrangement, its problem, what it chose per variable, and where its stages begin.

    ``choices`` has the variables that are decisions (configs, levels, modes); a choice outside the
    problem's domains is left out.
    """

    arrangement: Arrangement
    problem: Problem
    choices: dict[int, int]
    starts: tuple[int, ...]

    @property
    def allowed(self) -> list[NDArray[np.intp]]:
        """Per variable the choices that agree with the strategy."""
        return [
            np.array([self.choices[v]]) if v in self.choices else np.arange(size)
            for v, size in enumerate(self.problem.sizes)
        ]


def decode(context: Context, strategy: Strategy) -> Decoded | None:
    """Return where a strategy stands, or None where it is no point of the additive model."""
    strategy = _without_single_axes(strategy)
    arrangement = _arrangement(strategy)
    starts = _starts(context, strategy)
    if arrangement is None or starts is None:
        return None
    problem = Problem.of(context, arrangement.mesh(0), arrangement.microbatches)
    choices = _configs(problem, strategy) | _levels(problem, strategy) | _modes(problem, strategy)
    return Decoded(arrangement=arrangement, problem=problem, choices=choices, starts=starts)


def _at(places: Sequence[int], row: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(row[place] for place in places)


def _without_single_axes(strategy: Strategy) -> Strategy:
    """Leave out axes of one device, as arrangements do."""
    first = strategy.meshes[0]
    kept = [axis for axis, size in enumerate(first.sizes) if size > 1] or [0]
    if any(mesh.sizes != first.sizes for mesh in strategy.meshes):
        return strategy

    meshes = tuple(
        Mesh(axes=_at(kept, mesh.axes), sizes=_at(kept, mesh.sizes), devices=mesh.devices)
        for mesh in strategy.meshes
    )
    configs = tuple(replace(config, dims=_at(kept, config.dims)) for config in strategy.configs)
    parameters = tuple(
        replace(config, rest=_at(kept, config.rest), optimizer=_at(kept, config.optimizer))
        for config in strategy.parameters
    )
    return replace(strategy, meshes=meshes, configs=configs, parameters=parameters)


def _arrangement(strategy: Strategy) -> Arrangement | None:
    first = strategy.meshes[0]
    sizes = dict(zip(first.axes, first.sizes, strict=True))
    if not set(sizes) <= set(AXES) or SCHEDULES[strategy.pipeline.schedule].chunks:
        return None  # what orders of chunks, and of one's own, keep is told by the order alone
    arrangement = Arrangement(
        stages=len(strategy.meshes),
        data=sizes.get("data", 1),
        outer=sizes.get("outer", 1),
        tensor=sizes.get("tensor", 1),
        microbatches=strategy.pipeline.num_microbatches,
        schedule=strategy.pipeline.schedule,
    )
    same = all(_alike(mesh, arrangement.mesh(s)) for s, mesh in enumerate(strategy.meshes))
    return arrangement if same else None


def _alike(one: Mesh, other: Mesh) -> bool:
    """Whether meshes differ in nothing but the name of a single axis of one device."""
    return (one.sizes, one.devices) == (other.sizes, other.devices) and (
        one.axes == other.axes or one.sizes == (1,)
    )


def _starts(context: Context, strategy: Strategy) -> tuple[int, ...] | None:
    """Return the first block of every stage; None where a stage is no run of whole blocks."""
    stages: list[int] = []
    for first, stop in context.facts.ties.ranges:
        found = {config.mesh for config in strategy.configs[first:stop]}
        if len(found) > 1:
            return None
        stages.append(found.pop())
    starts = tuple(b for b, stage in enumerate(stages) if b == 0 or stage != stages[b - 1])
    return starts if [stages[b] for b in starts] == list(range(len(strategy.meshes))) else None


def _configs(problem: Problem, strategy: Strategy) -> dict[int, int]:
    return {
        problem.config_of[root]: problem.domains[root].index(strategy.configs[root].dims)
        for root in problem.roots
        if strategy.configs[root].dims in problem.domains[root]
    }


def _levels(problem: Problem, strategy: Strategy) -> dict[int, int]:
    context, sizes = problem.context, problem.mesh.sizes
    config_of = dict(zip(context.graph.parameters, strategy.parameters, strict=True))
    found: dict[int, int] = {}
    for tensor, variable in problem.level_of.items():
        reader = context.graph.consumers[tensor][0]
        position = context.graph.operators[reader].inputs.index(tensor)
        use = context.facts.placements(reader, strategy.configs[reader].dims).inputs[position].value
        shape = context.graph.tensors[tensor].shape
        levels = [
            parameter_config(shape, use, sizes, level)
            for level in range(num_levels(problem, tensor))
        ]
        alike = _same(problem, tensor, config_of[tensor])
        level = next((levels.index(one) for one in alike if one in levels), None)
        if level is not None:
            found[variable] = level
    return found


def _same(problem: Problem, tensor: int, config: ParameterConfig) -> Iterator[ParameterConfig]:
    """Yield a config and what the additive model does not tell from it: of one microbatch gradients
    are summed once either way, and what the last block gathers it always keeps."""
    last = tensor in problem.context.facts.read_last
    for keeps in dict.fromkeys((config.keeps and not last, False)):
        yield replace(config, keeps=keeps)
        if problem.num_microbatches == 1:
            yield replace(config, keeps=keeps, sync="step")
            yield replace(config, keeps=keeps, sync="microbatch")


def _modes(problem: Problem, strategy: Strategy) -> dict[int, int]:
    count = len(problem.context.facts.ties.ranges)
    told = [in_modes(problem.context, strategy, [mode] * count) for mode in problem.modes]
    found: dict[int, int] = {}
    for lead, variable in problem.mode_of.items():
        every = [_again(problem, other, lead) for other in told]
        mine = _again(problem, strategy, lead)
        if mine in every:
            found[variable] = every.index(mine)
    return found


def _again(problem: Problem, strategy: Strategy, block: int) -> tuple[object, ...]:
    """Return what a block makes again: all, operators, copies."""
    ties, graph = problem.context.facts.ties, problem.context.graph
    first, stop = ties.ranges[block]
    apart = [
        tensor
        for tensor in strategy.reshard_again
        if any(first <= reader < stop for reader in graph.consumers[tensor])
    ]
    again = [index for index in strategy.recompute_operators if first <= index < stop]
    whole = ties.number[block] in strategy.recompute
    return (True, [], []) if whole else (False, again, apart)
