"""What einsum copies: a contraction of two tensors is one batched product of matrices, for which their dims are put in order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from shardwright.core.graph import Operator, OperatorGraph
from shardwright.operators.derivatives import Saved, Shapes
from shardwright.operators.equation import Names, dims
from shardwright.operators.keeping.recurrent import number_bytes


@dataclass(frozen=True)
class Contraction:
    """Which of the two operands, and whether the result's gradient, lie otherwise than the product wants them."""

    left: bool
    right: bool
    gradient: bool


def other_factors(needs: tuple[bool, ...]) -> tuple[int, ...]:
    """A product keeps each factor whose partner wants a gradient."""
    if len(needs) == 1:
        return ()
    return tuple(mine for mine, partner in ((0, 1), (1, 0)) if needs[partner])


def kept_of_einsum(graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
    """Each factor whose partner wants a gradient, or its copy."""
    kept, size = other_factors(needs), number_bytes(graph, operator)
    found = contraction_of(graph, operator)
    is_copied = (found.left, found.right) if found is not None else (False, False)
    copies = [place for place in kept if is_copied[place]]
    original = tuple(place for place in kept if not is_copied[place])
    return original, (), lambda i, _o: size * sum(math.prod(i[place]) for place in copies)


def contraction_of(graph: OperatorGraph, operator: Operator) -> Contraction | None:
    """Return what an operator of the graph copies."""
    shapes = tuple(graph.tensors[tensor].shape for tensor in operator.inputs)
    return contraction(str(operator.attribute("equation", "")), shapes)


def contraction(equation: str, shapes: Shapes) -> Contraction | None:
    """Return what torch copies of operands that lie in order; None where they are no two, one has a dim twice, or nothing
    is contracted.

    Matrices are ``b m k`` and ``b k n``: dims of both that stay, of one, and those summed over, each in the result's order.
    """
    terms, made = dims(equation, [len(shape) for shape in shapes]) or ([], ())
    if len(terms) != 2 or any(len(set(term)) < len(term) for term in terms):
        return None
    sizes = [dict(zip(term, shape, strict=True)) for term, shape in zip(terms, shapes, strict=True)]
    left, right = (_wide(one) for one in sizes)
    summed = sorted((left & right) - set(made))
    if not summed:
        return None
    groups = left & right, left - right, right - left
    both, rows, columns = (sorted(group & set(made), key=made.index) for group in groups)
    return Contraction(
        left=_is_copied(terms[0], sizes[0], (both, rows, summed)),
        right=_is_copied(terms[1], sizes[1], (both, summed, columns)),
        gradient=_is_copied(made, sizes[0] | sizes[1], (both, rows, columns)),
    )


def _wide(sizes: dict[str, int]) -> frozenset[str]:
    return frozenset(name for name, size in sizes.items() if size > 1)


def _is_copied(term: Names, sizes: dict[str, int], groups: tuple[list[str], ...]) -> bool:
    """Whether some group's dims cannot be seen as one, since others lie between them or they lie in another order."""
    names = [name for name in term if sizes[name] > 1]
    strides = {
        name: math.prod(sizes[one] for one in names[at + 1 :]) for at, name in enumerate(names)
    }
    return any(
        strides.get(outer, 0) != strides.get(inner, 0) * sizes[inner]
        for group in groups
        for outer, inner in pairwise(group)
    )
