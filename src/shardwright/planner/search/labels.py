"""What people would call a plan of the additive model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shardwright.core.layout import is_split
from shardwright.core.plan import Plan
from shardwright.core.strategy import Strategy
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.context import Context
from shardwright.planner.model.modes import KEEP
from shardwright.planner.model.parameters import KEEPS
from shardwright.planner.model.problem import Problem
from shardwright.planner.model.training import Training
from shardwright.planner.space.iteration import PLUS
from shardwright.planner.space.samples import State

Assignments = tuple[tuple[int, ...], ...]


def describe(problem: Problem, arrangement: Arrangement, assignments: Assignments) -> str:
    """Name a plan: its stages, what its axes split, how its parameters lie, what runs again."""
    words: list[str] = []
    if arrangement.stages > 1:
        words.append(f"pipeline x {arrangement.stages} ({arrangement.schedule})")
    if arrangement.data > 1:
        is_cut = any(
            problem.domains[root][assignment[problem.config_of[root]]][0]
            for assignment in set(assignments)
            for root in problem.roots
        )
        words.append(f"{'data parallel' if is_cut else 'replicated'} x {arrangement.data}")
    free = [size for size in (arrangement.outer, arrangement.tensor) if size > 1]
    if free:
        word = _free_word(problem, set(assignments), len(free))
        words.append(f"{word} x {' x '.join(map(str, free))}")
    words = words or ["single device"]
    words += _zero_words(_levels(problem, set(assignments)))
    modes = problem.chosen_modes(assignments)
    for mode in dict.fromkeys(modes):
        if mode != KEEP:
            words.append(f"{mode.name} {modes.count(mode)} blocks")
    if arrangement.microbatches > 1:
        words.append(f"{arrangement.microbatches} microbatches")
    many = arrangement.stages * arrangement.data * math.prod(free)
    return with_dtype(", ".join(words), problem.context.training, many)


def _zero_words(levels: set[int]) -> Iterator[str]:
    """Say how parameters lie at rest."""
    zero = sorted({min(level, 3) for level in levels})
    if zero and zero != [0]:
        yield "ZeRO-" + "/".join(map(str, zero))
    if KEEPS in levels:
        yield "no reshard after forward" + (" in part" if 3 in levels else "")


def with_dtype(label: str, training: Training, num_devices: int) -> str:
    """Return a label that says in what gradients travel between devices, where somebody asked."""
    if num_devices == 1:
        return label
    if training.compressor != "none":
        share = f" of {training.density:g}" if training.compressor == "top-k" else ""
        return f"{label}, summed gradients in {training.compressor}{share}"
    if training.gradient_dtype == "parameter":
        return label
    feedback = " with error feedback" if training.error_feedback else ""
    return f"{label}, gradients in {training.gradient_dtype}{feedback}"


def _levels(problem: Problem, assignments: Iterable[tuple[int, ...]]) -> set[int]:
    """Return the levels of the parameters, those aside that no level would change."""
    graph = problem.context.graph
    biggest = max((graph.tensors[t].numel for t in problem.level_of), default=0)
    return {
        assignment[variable]
        for assignment in assignments
        for tensor, variable in problem.level_of.items()
        if graph.tensors[tensor].numel * 16 >= biggest
    }


def _free_word(problem: Problem, assignments: Iterable[tuple[int, ...]], num_axes: int) -> str:
    """Return by what the operators with weights, or where none of them is split all, are split over
    the last axes."""
    context = problem.context
    roles: dict[bool, set[str]] = {True: set(), False: set()}
    for root in problem.roots:
        weights = _weights(context, root)
        roles[bool(weights)] |= {
            _role(context, root, weights, name)
            for assignment in assignments
            for name in problem.domains[root][assignment[problem.config_of[root]]][-num_axes:]
        }
    if problem.mesh.axes[0] != "data" and {"data", "tensor"} <= roles[True]:
        return "hybrid parallel"
    for known in (roles[True], roles[False]):
        found = [role for role in ("tensor", "spatial", "sequence", "data") if role in known]
        if found:
            return f"{found[0]} parallel"
    return "replicated"


def _weights(context: Context, root: int) -> list[int]:
    """Return at which positions an operator reads what is trained and knows no samples."""
    graph, state = context.graph, context.facts.samples.state
    return [
        position
        for position, tensor in enumerate(graph.operators[root].inputs)
        if state[tensor] is State.FREE and graph.tensors[tensor].needs_gradient
    ]


def _role(context: Context, root: int, weights: list[int], name: str) -> str:
    """Return what an axis is to an operator that splits a dim of this name over it."""
    iteration = context.facts.iteration(root)
    if name in ("", PLUS):
        return ""
    if name == context.facts.sample_names[root]:
        return "data"
    if any(name in iteration.inputs[position] for position in weights):
        return "tensor"
    if ".conv" in context.graph.operators[root].kind and name in iteration.inputs[0][2:]:
        return "spatial"
    return "sequence" if weights else "tensor"


def told_apart(plans: Sequence[Plan]) -> list[Plan]:
    """Return plans of which no two share a label: what several have gets a word on what differs."""
    found = list(plans)
    labels = [plan.strategy.label for plan in plans]
    for label in dict.fromkeys(label for label in labels if labels.count(label) > 1):
        places = [place for place, other in enumerate(labels) if other == label]
        columns = zip(*[_counts(plans[place].strategy) for place in places], strict=True)
        numbers = [f"variant {number}" for number in range(1, len(places) + 1)]
        words = next((column for column in columns if len(set(column)) == len(places)), numbers)
        for place, word in zip(places, words, strict=True):
            strategy = replace(plans[place].strategy, label=f"{label}, {word}")
            found[place] = replace(plans[place], strategy=strategy)
    return found


def _counts(strategy: Strategy) -> list[str]:
    """Return counts in which strategies of one label may differ, those first that say most."""
    counts = {
        "parameters sharded": sum(any(map(is_split, one.rest)) for one in strategy.parameters),
        "optimizer states sharded": sum(
            any(map(is_split, one.optimizer)) for one in strategy.parameters
        ),
        "operators split": sum(any(config.dims) for config in strategy.configs),
        "operators run again": len(strategy.recompute_operators),
        "blocks run again": len(strategy.recompute),
        "gradient messages": len(strategy.gradient_sync.buckets),
    }
    return [f"{what}: {count}" for what, count in counts.items()]
