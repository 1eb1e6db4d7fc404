"""Spatial parallelism: an axis that splits the height or the width of images wherever it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.core.graph import OperatorGraph, TensorSpec
from shardwright.operators.splitting.iteration import PLUS, Iteration

IMAGE_RANK = 4


def spatial_dims(
    graph: OperatorGraph,
    iterations: Sequence[Iteration],
    otherwise: Mapping[int, str],
    pieces: int,
    place: int,
) -> dict[int, str]:
    """Return per operator the dim of an axis that splits tensor dim ``place`` of images.

    Follows that dim from the batch's images (and from class maps, which lack channels). Where an
    operator cannot split it, the images that it makes are split again.
    """
    return follow(graph, iterations, otherwise, pieces, _images(graph, place), place)


def follow(
    graph: OperatorGraph,
    iterations: Sequence[Iteration],
    otherwise: Mapping[int, str],
    pieces: int,
    lying: dict[int, int],
    place: int = -1,
) -> dict[int, str]:
    """Return per operator the dim of an axis that splits the tensors ``lying`` along their dim, and
    what is made of them.

    Operators that have that dim no more, or too little of it, take the dim in ``otherwise``: samples,
    or none; sums pass on where sums arrive. Images that come whole out of an operator (with a dim
    ``place``) count as split again, if ``place`` is not -1.
    """
    partial: set[int] = set()
    dims: dict[int, str] = {}
    for index, operator in enumerate(graph.operators):
        iteration = iterations[index]
        found = iteration.met(operator.inputs, lying)
        known = next((one for one in found if one and iteration.dim(one).splits(pieces)), "")
        sums = [operator.inputs[position] for position in iteration.linear]
        may_pass = otherwise[index] != PLUS or partial.issuperset(sums)
        name = known or (otherwise[index] if may_pass else "")
        dims[index] = name
        split = iteration.handed_on(operator.outputs, name) if name else {}
        if name:
            partial.update(tensor for tensor in operator.outputs if tensor not in split)
        if known:
            lying |= split
        elif found and place >= 0:
            whole = set(operator.outputs) - partial
            lying |= {one: place for one in whole if _is_image(graph.tensors[one], place)}
    return dims


def _images(graph: OperatorGraph, place: int) -> dict[int, int]:
    """Return where the split dim lies in the batch's images and class maps."""
    found: dict[int, int] = {}
    for tensor in graph.inputs:
        spec = graph.tensors[tensor]
        if spec.is_floating and _is_image(spec, place):
            found[tensor] = place
        elif not spec.is_floating and len(spec.shape) == IMAGE_RANK - 1:
            found[tensor] = place - 1
    return found


def _is_image(spec: TensorSpec, place: int) -> bool:
    return len(spec.shape) >= IMAGE_RANK and spec.shape[place] > 1
