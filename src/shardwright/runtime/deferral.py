"""Products whose backward is split: the gradient of what they read at once, that of their parameters later.

Each runs as a function of its own for autograd, around a graph of its own. Backward of the segment asks
that graph for the gradients of its data, and puts it aside with the gradient that came in; W asks it
for those of the parameters. Either way autograd computes only what is asked for, so nothing is computed
twice, and what neither needs is gone after the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from shardwright.runtime.engine import by_place, edge_of, run_backward


@dataclass(frozen=True, slots=True)
class Later:
    """One product whose parameters still lack their gradients."""

    edges: list[GradientEdge]
    gradients: list[Tensor]
    parameters: list[Tensor]
    places: list[int]  # of the parameters among the segment's inputs

    def run(self) -> list[tuple[int, Tensor]]:
        """Return the gradients of its parameters, by place."""
        with _there(self.parameters):
            found = run_backward(self.edges, self.gradients, self.parameters)
        return by_place(self.places, found)


@contextmanager
def _there(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Give convolutions' weights that were released storage for a while: torch takes views of them for
    their gradients, whose values it never reads. Not-a-number would show if it did."""
    gone = [
        one
        for one in parameters
        if one.dim() > 2 and not one.untyped_storage().size() and one.numel()
    ]
    for one in gone:
        last = sum((n - 1) * step for n, step in zip(one.shape, one.stride(), strict=True))
        one.untyped_storage().resize_(int(one.storage_offset() + last + 1) * one.itemsize)
        one.data.fill_(torch.nan)  # unseen by autograd, which would take it for another value
    try:
        yield
    finally:
        for one in gone:
            one.untyped_storage().resize_(0)


@dataclass(slots=True)
class Aside:
    """What the products of a segment put aside while its backward runs."""

    pending: list[Later] = field(default_factory=list[Later])

    def take(self) -> list[Later]:
        """Return what was put aside, and begin anew."""
        taken, self.pending = self.pending, []
        return taken


@dataclass(frozen=True, slots=True)
class Product:
    """A call whose parameters wait: ``run`` makes its results of its operands, ``places`` say by position
    which of the segment's inputs a parameter is."""

    run: Callable[[Sequence[Any]], Any]
    places: dict[int, int]
    aside: Aside


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Product, *operands: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        inner = [
            one.detach().requires_grad_(one.requires_grad) if isinstance(one, Tensor) else one
            for one in operands
        ]
        with torch.enable_grad():
            results = product.run(inner)
        several = isinstance(results, tuple)
        ctx.product, ctx.inner = product, inner
        ctx.edges = [edge_of(one) for one in (results if several else (results,))]
        ctx.set_materialize_grads(False)
        return tuple([one.detach() for one in results]) if several else results.detach()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        product, inner = ctx.product, ctx.inner
        found: list[Tensor | None] = [None] * len(inner)
        pairs = [(e, g) for e, g in zip(ctx.edges, incoming, strict=True) if g is not None]
        if pairs:
            edges, gradients = [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
            wanted = [p for p, one in enumerate(inner) if is_trained(one)]
            data = [p for p in wanted if p not in product.places]
            if data:
                leaves = [inner[p] for p in data]
                made = run_backward(edges, gradients, leaves, keeps=True)
                for place, gradient in zip(data, made, strict=True):
                    found[place] = gradient
            later = [p for p in wanted if p in product.places]
            places = [product.places[p] for p in later]
            product.aside.pending.append(Later(edges, gradients, [inner[p] for p in later], places))
        return None, *found


def is_trained(one: Any) -> bool:
    """Whether it is a tensor that wants a gradient."""
    return isinstance(one, Tensor) and one.requires_grad


def run_split(product: Product, *operands: Any) -> Any:
    """Return the results of a product, its backward split; as it is where no graph is kept."""
    if not torch.is_grad_enabled():
        return product.run(operands)
    return _Split.apply(product, *operands)
