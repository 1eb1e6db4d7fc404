"""What people would call a plan of the additive model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import filterfalse

from shardwright.core.compression import SPARSE
from shardwright.core.layout import is_split
from shardwright.core.plan import Plan
from shardwright.core.strategy import GradientSync, Mesh, Strategy
from shardwright.operators.splitting.iteration import PLUS
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.context import Context
from shardwright.planner.model.modes import KEEP
from shardwright.planner.model.parameters import KEEPS
from shardwright.planner.model.problem import Problem

Assignments = tuple[tuple[int, ...], ...]
Placed = tuple[int, tuple[str, ...]]  # an operator, and what splits it, axis by axis
ALONE = "single device"
AXES = ("data", "outer", "tensor")
# Words of a label that say what is split, and into how many stages.
_PARALLEL = re.compile(
    r"single device|.* tensor parallel\)"
    r"|(replicated|activations split|(data|tensor|hybrid|spatial|sequence|context|expert) parallel)( x \d+)+"
)
_STAGES = re.compile(r"^pipeline x \d+|^\d+ stages|^on \d+ groups")
_PIECES = re.compile(r"\d+ microbatches")


def describe(
    problem: Problem, arrangement: Arrangement, assignments: Assignments, parts: int
) -> str:
    """Name a plan of so many stages or chunks of them: its stages, what its axes split, how its parameters
    lie, what runs again."""
    words: list[str] = []
    if arrangement.stages > 1:
        chunks = parts // arrangement.stages
        many = f" x {chunks}" if chunks > 2 else ""
        words.append(f"pipeline x {arrangement.stages} ({arrangement.schedule}{many})")
    placed = {
        (root, problem.domains[root][assignment[problem.config_of[root]]])
        for assignment in set(assignments)
        for root in problem.roots
    }
    words += parallel_words(problem.context, problem.mesh, placed)
    words = words or [ALONE]
    words += _zero_words(_levels(problem, set(assignments)))
    modes = problem.chosen_modes(assignments)
    for mode in dict.fromkeys(modes):
        if mode != KEEP:
            words.append(f"{mode.name} {modes.count(mode)} blocks")
    words += _pieces_words(arrangement.microbatches)
    return with_wire(", ".join(words), problem.context, placed)


def _pieces_words(count: int) -> list[str]:
    return [f"{count} microbatches"] if count > 1 else []


def parallel_words(context: Context, mesh: Mesh, placed: Iterable[Placed]) -> list[str]:
    """Say what operators on a mesh split over its axes: the one called data, and all others."""
    found: dict[str, list[int]] = {}
    for axis, word in _uses(context, mesh, set(placed)).items():
        found.setdefault(word, []).append(mesh.sizes[axis])
    return [f"{word} x {' x '.join(map(str, sizes))}" for word, sizes in found.items()]


def _uses(context: Context, mesh: Mesh, placed: set[Placed]) -> dict[int, str]:
    """Return what every axis of several devices is for."""
    words = {axis: "replicated" for axis, size in enumerate(mesh.sizes) if size > 1}
    used = [axis for axis in words if any(dims[axis] for _, dims in placed)]
    free = [axis for axis in used if mesh.axes[axis] != "data"]
    words |= dict.fromkeys(used, "data parallel")
    if free:
        word = _free_word(context, placed, free, mixes="data" not in mesh.axes)
        words |= dict.fromkeys(free, word)
    return words


def relabelled(context: Context, strategy: Strategy, *, anew: bool = False) -> str:
    """Return a strategy's label, made for another that was changed into it, without what no longer holds.

    Axes with names of their own, such as a grid's, keep what they are called while they split anything;
    ``anew``: they do not.
    """
    said = list(_kept_words(strategy))
    stages = [word for word in said if _STAGES.search(word)]
    words = [word for word in said if word not in stages]
    anew |= {axis for mesh in strategy.meshes for axis in mesh.axes} <= {*AXES, "x"}
    if anew or not any(any(config.dims) for config in strategy.configs):
        words = [*_split_words(context, strategy), *filterfalse(_says_split, words)]
    words += _pieces_words(strategy.pipeline.num_microbatches)
    return ", ".join([*_stage_words(strategy, stages), *words])


def _kept_words(strategy: Strategy) -> Iterator[str]:
    """Yield what a label says but for microbatches, and what runs again where nothing does."""
    for word in strategy.label.split(", "):
        is_again = bool(strategy.recompute_operators) or not word.startswith("recompute (")
        if is_again and not _PIECES.fullmatch(word):
            yield word


def _stage_words(strategy: Strategy, before: Sequence[str]) -> Iterator[str]:
    """Say on how many groups of devices operators lie, as was said before where it is still so."""
    if count := _on_groups(strategy):
        yield from [word for word in before if f" {count} " in f" {word} "] or [
            f"on {count} groups of devices"
        ]


def _on_groups(strategy: Strategy) -> int:
    """Return on how many groups of devices operators lie, 0 where that is one."""
    count = len({mesh.devices for mesh in strategy.meshes})
    return count if count > 1 else 0


def _says_split(word: str) -> bool:
    """Whether a word of a label says what is split."""
    return all(map(_PARALLEL.fullmatch, word.split(" and ")))


def _split_words(context: Context, strategy: Strategy) -> Iterator[str]:
    """Say what is split on each sort of mesh, if anything or operators lie on one group of devices."""
    said: dict[str, None] = {}
    for mesh in strategy.meshes:
        placed = [
            (context.facts.ties.root[index], config.dims)
            for index, config in enumerate(strategy.configs)
            if strategy.meshes[config.mesh].sizes == mesh.sizes
        ]
        said[", ".join(parallel_words(context, mesh, placed)) or ALONE] = None
    split = " and ".join(said)
    if split != ALONE or not _on_groups(strategy):
        yield split


def named_grid(context: Context, strategy: Strategy) -> Strategy:
    """Return a grid's strategy: one in which every operator reads whole parameters goes by another name."""
    if any(
        _role(context, root, _weights(context, root), name) == "tensor"
        for root, dims in placed_by(context, strategy)
        for name in dims
    ):
        return strategy
    return replace(
        strategy, label=relabelled(context, strategy, anew=True) + ", parameters sharded"
    )


def _zero_words(levels: set[int]) -> Iterator[str]:
    """Say how parameters lie at rest."""
    zero = sorted({min(level, 3) for level in levels})
    if zero and zero != [0]:
        yield "ZeRO-" + "/".join(map(str, zero))
    if KEEPS in levels:
        yield "no reshard after forward" + (" in part" if 3 in levels else "")


def placed_by(context: Context, strategy: Strategy) -> set[Placed]:
    """Return what splits the operators of a strategy."""
    root = context.facts.ties.root
    return {(root[index], config.dims) for index, config in enumerate(strategy.configs)}


def with_wire(label: str, context: Context, placed: Iterable[Placed]) -> str:
    """Return a label that says in what gradients are summed over devices, where somebody asked and some
    are."""
    training = context.training
    is_own = training.compressor == "none" and training.gradient_dtype == "parameter"
    if is_own or not any(_sums(context, root, dims) for root, dims in placed):
        return label
    if training.compressor != "none":
        return f"{label}, {packing_words(training.sync)}"
    feedback = " with error feedback" if training.error_feedback else ""
    return f"{label}, gradients in {training.gradient_dtype}{feedback}"


def packing_words(sync: GradientSync) -> str:
    """Say in what gradients are summed that are compressed."""
    words = list[str](sync.compressors)
    shares = [sync.density, *[share for _, how, share in sync.apart if how in SPARSE]]
    shares = shares[1:] if sync.compressor not in SPARSE else shares
    low, high = min(shares, default=1.0), max(shares, default=1.0)
    ends = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    words = [f"{one} of {ends}" if one in SPARSE else one for one in words]
    rest = ", others whole" if sync.compressor == "none" else ""
    return f"summed gradients in {' and '.join(words)}{rest}"


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


def _free_word(
    context: Context, placed: Iterable[Placed], axes: Sequence[int], *, mixes: bool
) -> str:
    """Return by what the operators with weights, or where none of them is split all, are split over
    some axes, whether or not samples and weights mix."""
    roles: dict[bool, set[str]] = {True: set(), False: set()}
    for root, dims in placed:
        weights = _weights(context, root)
        roles[bool(weights)] |= {_role(context, root, weights, dims[axis]) for axis in axes}
    if mixes and {"data", "tensor"} <= roles[True]:
        return "hybrid parallel"
    for known in (roles[True], roles[False]):
        found = [role for role in ("tensor", "spatial", "sequence", "data") if role in known]
        if found:
            return f"{found[0]} parallel"
    return "activations split" if "activations" in roles[False] else "replicated"


def _weights(context: Context, root: int) -> list[int]:
    return context.facts.samples.weights(context.graph, root)


def _sums(context: Context, root: int, dims: Sequence[str]) -> bool:
    """Whether devices have parts of a weight's gradient: an operator is split along what it lacks
    (a bias that joins partial sums has a whole one)."""
    iteration = context.facts.iteration(root)
    return any(
        name not in ("", PLUS, *iteration.inputs[position]) and not iteration.is_reduction(name)
        for position in _weights(context, root)
        for name in dims
    )


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
    return "sequence" if weights else "activations"


def told_apart(plans: Sequence[Plan]) -> list[Plan]:
    """Return plans of which no two share a label: what several have gets a word on what differs."""
    found = list(plans)
    labels = [plan.strategy.label for plan in plans]
    for label in dict.fromkeys(label for label in labels if labels.count(label) > 1):
        places = [place for place, other in enumerate(labels) if other == label]
        words = _telling([plans[place].strategy for place in places])
        for place, word in zip(places, words, strict=True):
            strategy = replace(plans[place].strategy, label=f"{label}, {word}")
            found[place] = replace(plans[place], strategy=strategy)
    return found


def _telling(strategies: Sequence[Strategy]) -> Sequence[str]:
    """Return a word for each that no other has: the first count in which all differ, or a number."""
    for column in zip(*map(_counts, strategies), strict=True):
        if len(set(column)) == len(strategies):
            return column
    return [f"variant {number}" for number in range(1, len(strategies) + 1)]


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
