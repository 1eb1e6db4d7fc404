"""What has to be decided on one mesh under one number of microbatches, before anything has a price."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from shardwright.core.strategy import Mesh
from shardwright.operators.splitting.iteration import PLUS
from shardwright.planner.model.context import Context
from shardwright.planner.model.facts import Shape
from shardwright.planner.model.messages import MessageCosts
from shardwright.planner.model.modes import KEEP, Mode, find_modes
from shardwright.planner.model.terms import Columns, Term
from shardwright.planner.space import choices

Dims = tuple[str, ...]


class Statement:
    """What a problem is stated as: how many values each variable has, the variables of parameters' levels
    by (root) parameter, and the terms; ``tables`` are those worked out for each kind of activations."""

    def __init__(self, sizes: tuple[int, ...], terms: tuple[Term, ...]) -> None:
        self.sizes = list(sizes)
        self.level_of: dict[int, int] = {}
        self.terms = list(terms)
        self.tables: dict[object, dict[object, Columns]] = {}

    def add(self, size: int) -> int:
        """Add a variable and return its index."""
        self.sizes.append(size)
        return len(self.sizes) - 1


@dataclass(frozen=True, eq=False)
class Decisions:
    """A config per (root) operator of ``domains``, and a mode per class of blocks that has equals.

    ``config_of`` and ``mode_of`` are variables by operator and by the class's first block;
    ``choices`` how many values each variable has.
    """

    context: Context
    mesh: Mesh
    num_microbatches: int
    roots: tuple[int, ...]
    domains: dict[int, tuple[Dims, ...]]
    config_of: dict[int, int]
    modes: tuple[Mode, ...]
    mode_of: dict[int, int]
    choices: tuple[int, ...]

    @classmethod
    def of(cls, context: Context, mesh: Mesh, num_microbatches: int) -> Self:
        """List them; equal operators share their domain."""
        ties = context.facts.ties
        roots = tuple(dict.fromkeys(ties.root))
        own = _domains(context, mesh, num_microbatches, roots)
        modes = find_modes(context, mesh)
        leads = [lead for lead, members in ties.classes.items() if len(members) > 1]
        return cls(
            context=context,
            mesh=mesh,
            num_microbatches=num_microbatches,
            roots=roots,
            domains=own,
            config_of={root: variable for variable, root in enumerate(roots)},
            modes=modes,
            mode_of={lead: len(roots) + number for number, lead in enumerate(leads)},
            choices=(*(len(own[i]) for i in roots), *(len(modes) for _ in leads)),
        )

    @cached_property
    def wires(self) -> MessageCosts:
        """The prices of messages on the mesh."""
        return self.context.prices.wires(self.mesh)

    def shape(self, tensor: int, reader: int) -> Shape:
        """Return a tensor's shape before sharding as ``reader`` (or its maker) sees it."""
        whole = self.context.facts.is_once(reader)
        return self.context.facts.shape(tensor, 1 if whole else self.num_microbatches)

    def modes_of(self, block: int) -> tuple[Mode, ...]:
        """Return the modes of a block; only those that have equals choose."""
        return self.modes if self.context.facts.ties.class_of(block) in self.mode_of else (KEEP,)


def _domains(
    context: Context, mesh: Mesh, num_microbatches: int, roots: tuple[int, ...]
) -> dict[int, tuple[Dims, ...]]:
    """Return what each operator chooses from; those of a sort share it."""
    sort = context.prices.sort
    alike = {sort(index): index for index in reversed(roots)}
    found = {s: _domain(context, mesh, num_microbatches, index) for s, index in alike.items()}
    return {index: found[sort(index)] for index in roots}


def _domain(context: Context, mesh: Mesh, num_microbatches: int, index: int) -> tuple[Dims, ...]:
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
            options = _domain(context, mesh, pieces, index)
            seconds = (context.work_seconds(index, dims, mesh.sizes, pieces) for dims in options)
            real = min(seconds)
            total += weights[sort] * (real - even)
    return total
