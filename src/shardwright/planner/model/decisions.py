"""What has to be decided on one mesh under one number of microbatches, before anything has a price."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from shardwright.core.strategy import Mesh
from shardwright.planner.model.context import Context
from shardwright.planner.model.domains import Dims, domain
from shardwright.planner.model.facts import Shape, Shapes, local_shapes
from shardwright.planner.model.messages import MessageCosts
from shardwright.planner.model.modes import KEEP, Mode, find_modes
from shardwright.planner.model.terms import Columns, Term


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

    def local(self, index: int, dims: Dims) -> tuple[Shapes, Shapes]:
        """Return the local input and output shapes of an operator."""
        count = 1 if self.context.facts.is_once(index) else self.num_microbatches
        return local_shapes(self.context.facts, index, dims, self.mesh.sizes, count)

    def modes_of(self, block: int) -> tuple[Mode, ...]:
        """Return the modes of a block; only those that have equals choose."""
        return self.modes if self.context.facts.ties.class_of(block) in self.mode_of else (KEEP,)


def _domains(
    context: Context, mesh: Mesh, num_microbatches: int, roots: tuple[int, ...]
) -> dict[int, tuple[Dims, ...]]:
    """Return what each operator chooses from; those of a sort share it."""
    sort = context.prices.sort
    alike = {sort(index): index for index in reversed(roots)}
    found = {s: domain(context, mesh, num_microbatches, index) for s, index in alike.items()}
    return {index: found[sort(index)] for index in roots}
