"""What people would call a plan of the additive model."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.planner.search.additive.context import Context
from shardwright.planner.search.additive.modes import KEEP
from shardwright.planner.search.additive.parameters import KEEPS
from shardwright.planner.search.additive.problem import Problem
from shardwright.planner.search.arrangements import Arrangement
from shardwright.planner.space.iteration import PLUS

Assignments = tuple[tuple[int, ...], ...]


def describe(problem: Problem, arrangement: Arrangement, assignments: Assignments) -> str:
    """Name a plan: its stages, what its axes split, how its parameters lie, what runs again."""
    words: list[str] = []
    if arrangement.stages > 1:
        words.append(f"pipeline x {arrangement.stages} ({arrangement.schedule})")
    if arrangement.data > 1:
        words.append(f"data parallel x {arrangement.data}")
    free = [size for size in (arrangement.outer, arrangement.tensor) if size > 1]
    if free:
        word = _free_word(problem, set(assignments), len(free))
        words.append(f"{word} x {' x '.join(map(str, free))}")
    if not words:
        words.append("single device")
    levels = _levels(problem, set(assignments))
    zero = sorted({min(level, 3) for level in levels})
    if zero and zero != [0]:
        words.append("ZeRO-" + "/".join(map(str, zero)))
    if KEEPS in levels:
        words.append("some weights kept" if 3 in levels else "weights kept")
    modes = problem.chosen_modes(assignments)
    for mode in dict.fromkeys(modes):
        if mode != KEEP:
            words.append(f"{mode.name} {modes.count(mode)} blocks")
    if arrangement.microbatches > 1:
        words.append(f"{arrangement.microbatches} microbatches")
    return ", ".join(words)


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
    """Return by what the operators with parameters are split over the last axes."""
    context = problem.context
    roles = {
        _role(context, root, name)
        for root in problem.roots
        if any(
            context.graph.tensors[tensor].role == "parameter"
            for tensor in context.graph.operators[root].inputs
        )
        for assignment in assignments
        for name in problem.domains[root][assignment[problem.config_of[root]]][-num_axes:]
    }
    if problem.mesh.axes[0] != "data" and {"data", "tensor"} <= roles:
        return "hybrid parallel"
    found = [role for role in ("tensor", "spatial", "data") if role in roles]
    return f"{found[0]} parallel" if found else "replicated"


def _role(context: Context, root: int, name: str) -> str:
    """Return what an axis is to an operator that splits a dim of this name over it."""
    is_convolution = ".conv" in context.graph.operators[root].kind
    if name in ("", PLUS):
        return ""
    if name == context.sample_names[root]:
        return "data"
    if is_convolution and name in context.iteration(root).inputs[0][2:]:
        return "spatial"
    return "tensor"
