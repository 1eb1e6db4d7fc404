"""The autograd engine, entered once per segment, with as little Python as that takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


def edge_of(output: Tensor) -> GradientEdge | None:
    """Return where a gradient enters the graph of an output, without keeping the output alive."""
    if not output.requires_grad:
        return None
    node = output.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):  # a leaf; a node written in Python
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


def run_backward(
    edges: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    keeps: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of leaves (at least one), None where none flows; the graph is used up, unless
    it ``keeps`` what it holds.

    The same as ``torch.autograd.grad`` without what that checks of its arguments in Python, every
    time: a fifth of a small segment's backward. The engine itself checks shapes and dtypes.
    """
    engine = torch.autograd.Variable._execution_engine
    return engine.run_backward(  # type: ignore[no-any-return]
        tuple(edges), tuple(gradients), keeps, False, tuple(leaves), True, accumulate_grad=False
    )


def by_place(places: Sequence[int], gradients: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
    """Return the gradients that there are, each with its place."""
    pairs = zip(places, gradients, strict=True)
    return [(place, gradient) for place, gradient in pairs if gradient is not None]
