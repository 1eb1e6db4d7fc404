"""The configs that operators choose from on one mesh, and the least work that any choice leaves."""

from __future__ import annotations

from shardwright.core.strategy import Mesh
from shardwright.operators.splitting.iteration import PLUS
from shardwright.planner.model.context import Context
from shardwright.planner.model.facts import local_shapes
from shardwright.planner.space import choices

Dims = tuple[str, ...]


def domain(context: Context, mesh: Mesh, num_microbatches: int, index: int) -> tuple[Dims, ...]:
    """Return the configs to choose from. The data axis takes the sample dim wherever it can."""
    iteration, sample = context.facts.iteration(index), context.facts.samples.operator_dim[index]
    options = choices(iteration, mesh.sizes, sample, num_microbatches)
    options = _of_what_enters(context, index, options)
    name = context.facts.sample_names[index]
    if context.is_strict and name and "tensor" in mesh.axes:
        place = mesh.axes.index("tensor")
        options = tuple([dims for dims in options if dims[place] != name])
    is_data = mesh.axes[0] == "data" and mesh.sizes[0] > 1
    return _with_samples_split(options, name) if is_data else options


def _of_what_enters(context: Context, index: int, options: tuple[Dims, ...]) -> tuple[Dims, ...]:
    """Leave partial sums out where an operator reads from outside: no such thing enters."""
    operator, tensors = context.graph.operators[index], context.graph.tensors
    linear = context.facts.iteration(index).linear
    if all(tensors[operator.inputs[position]].producer >= 0 for position in linear):
        return options
    return tuple([dims for dims in options if PLUS not in dims])


def _with_samples_split(options: tuple[Dims, ...], name: str) -> tuple[Dims, ...]:
    """Return the configs whose first axis splits the samples, if there are any, else nothing new."""
    split = tuple([dims for dims in options if name and dims[0] == name])
    return split or tuple([dims for dims in options if dims[0] in ("", PLUS)])


def least_seconds(
    context: Context, index: int, options: tuple[Dims, ...], sizes: tuple[int, ...], pieces: int
) -> float:
    """Return the seconds of an operator, forward and backward in one of so many microbatches, split
    as well as it can be over axes of these sizes."""
    return min(work_seconds(context, index, dims, sizes, pieces) for dims in options)


def work_seconds(
    context: Context, index: int, dims: Dims, sizes: tuple[int, ...], pieces: int
) -> float:
    """Return the same of one config."""
    count = 1 if context.facts.is_once(index) else pieces
    local = local_shapes(context.facts, index, dims, sizes, count)
    cost = context.prices.seconds(index, *local)
    return cost.forward + cost.backward


def work_alone(
    context: Context, mesh: Mesh, pieces: int, rounds: tuple[float, float], enough: float
) -> float:
    """Bound the seconds of a step on a mesh from below by the operators' work alone, as well as ``enough``
    asks for.

    ``rounds``: how often a microbatch's work and the step's own count. Work that divides evenly is
    replaced by what the operators' domains really allow, those of a sort together and the longest
    first, until the sum is enough: mostly after a few.
    """
    ties = context.facts.ties
    weights: dict[int, float] = {}
    alike: dict[int, tuple[int, float]] = {}  # one of each sort, and its seconds if it divides
    for index, whole in context.prices.serial_work.items():
        is_once, sort = context.facts.is_once(index), context.prices.sort(index)
        count = ties.times(index) * (rounds[1] if is_once else rounds[0])
        weights[sort] = weights.get(sort, 0.0) + count
        alike[sort] = index, whole / len(mesh.devices) / (1 if is_once else pieces)
    work = {sort: weight * alike[sort][1] for sort, weight in weights.items()}
    total = sum(work.values())
    for sort in sorted(work, key=lambda sort: -work[sort]):
        if total >= enough:
            break
        if weights[sort] > 0:
            index, even = alike[sort]
            options = domain(context, mesh, pieces, index)
            real = least_seconds(context, index, options, mesh.sizes, pieces)
            total += weights[sort] * (real - even)
    return total
