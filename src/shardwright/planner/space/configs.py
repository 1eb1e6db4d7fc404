"""Legal configs of an operator, and the layouts in which tensors are made and wanted that follow from configs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwright.core.graph import OperatorGraph
from shardwright.core.halo import Halo, Halos
from shardwright.core.layout import PARTIAL, REPLICATE, Layout
from shardwright.core.strategy import OperatorConfig
from shardwright.operators.splitting import iterate
from shardwright.operators.splitting.iteration import PLUS, Dim, Iteration, pieces_by_dim
from shardwright.operators.splitting.samples import Samples


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a tensor lies and where its gradient lies, as one operator sees them, and the rows of
    neighbouring shards that it needs besides."""

    value: Layout
    gradient: Layout
    halos: Halos = ()


@dataclass(frozen=True, slots=True)
class Placements:
    """The layouts of an operator's tensors under one config."""

    inputs: tuple[Pair, ...]
    outputs: tuple[Pair, ...]


@lru_cache(maxsize=2**16)
def placements(iteration: Iteration, dims: tuple[str, ...]) -> Placements:
    """Derive all layouts from an assignment of mesh axes to dim names (see ``Iteration``).

    Equal calls share one answer: layers repeat, and so do strategies.
    """
    inputs = tuple(
        _pair(
            [_input(iteration, position, name) for name in dims],
            _halos(iteration, dims) if position == 0 else (),
        )
        for position in range(len(iteration.inputs))
    )
    outputs = tuple(_pair([_output(names, name) for name in dims]) for names in iteration.outputs)
    return Placements(inputs, outputs)


def _pair(columns: list[tuple[int, int]], halos: Halos = ()) -> Pair:
    values = tuple(value for value, _ in columns)
    return Pair(values, tuple(gradient for _, gradient in columns), halos)


def _halos(iteration: Iteration, dims: Sequence[str]) -> Halos:
    return tuple(
        Halo(
            dim=iteration.inputs[0].index(window.dim),
            axes=tuple(axis for axis, name in enumerate(dims) if name == window.dim),
            before=window.before,
            after=window.after,
            fill=window.fill,
        )
        for window in iteration.windows
        if window.dim in dims
    )


def _input(iteration: Iteration, position: int, name: str) -> tuple[int, int]:
    if name == "":
        return REPLICATE, REPLICATE
    if name == PLUS:
        is_linear = position in iteration.linear
        return (PARTIAL, REPLICATE) if is_linear else (REPLICATE, PARTIAL)
    names = iteration.inputs[position]
    if name in names:
        return names.index(name), names.index(name)
    return REPLICATE, PARTIAL


def _output(names: tuple[str, ...], name: str) -> tuple[int, int]:
    if name == "":
        return REPLICATE, REPLICATE
    if name != PLUS and name in names:
        return names.index(name), names.index(name)
    return PARTIAL, REPLICATE


def choices(
    iteration: Iteration, axis_sizes: tuple[int, ...], sample: str = "", num_microbatches: int = 1
) -> tuple[tuple[str, ...], ...]:
    """Return every legal assignment of the mesh axes, the replicated one first.

    A dim may be split by several axes while its size divides; ``sample`` names the dim that the
    microbatches already cut. An axis of one device is always "".
    """
    known = _dims(iteration, sample, num_microbatches)
    options = [_names(iteration, size, known) for size in axis_sizes]
    return tuple(
        [
            names
            for names in itertools.product(*options)
            if len(set(names)) == len(names) or _divides(names, axis_sizes, known)
        ]
    )


def is_choice(
    iteration: Iteration,
    dims: tuple[str, ...],
    axis_sizes: tuple[int, ...],
    sample: str = "",
    num_microbatches: int = 1,
) -> bool:
    """Whether an assignment of the mesh axes is among the ``choices``."""
    known = _dims(iteration, sample, num_microbatches)
    named = all(
        name in _names(iteration, size, known) for name, size in zip(dims, axis_sizes, strict=True)
    )
    return named and _divides(dims, axis_sizes, known)


def _names(iteration: Iteration, size: int, known: dict[str, Dim]) -> list[str]:
    """Return what one axis of a size may be assigned to."""
    if size == 1:
        return [""]
    names = [
        dim.name for dim in iteration.dims if dim.splits(size) and known[dim.name].splits(size)
    ]
    return ["", *names, PLUS] if iteration.linear else ["", *names]


def _dims(iteration: Iteration, sample: str, num_microbatches: int) -> dict[str, Dim]:
    """Return the dims by name, as large as they are in one microbatch."""
    return {
        dim.name: replace(dim, size=dim.size // num_microbatches) if dim.name == sample else dim
        for dim in iteration.dims
    }


def _divides(
    assignment: tuple[str, ...], axis_sizes: tuple[int, ...], dims: dict[str, Dim]
) -> bool:
    pieces = pieces_by_dim(assignment, axis_sizes)
    return all(dims[name].splits(count) for name, count in pieces.items())


def made_as(graph: OperatorGraph, tensor: int, configs: Sequence[OperatorConfig]) -> Layout:
    """Return the layout in which the producer of a tensor leaves it."""
    producer = graph.tensors[tensor].producer
    place = graph.operators[producer].outputs.index(tensor)
    return placements(iterate(graph, producer), configs[producer].dims).outputs[place].value


def wanted_as(
    graph: OperatorGraph, samples: Samples, tensor: int, configs: Sequence[OperatorConfig]
) -> Layout:
    """Return the layout in which the first reader of a tensor wants it; whole where nobody reads it."""
    readers = graph.consumers[tensor]
    if not readers:
        return (REPLICATE,) * len(configs[0].dims)
    reader = readers[0]
    place = graph.operators[reader].inputs.index(tensor)
    return placements(samples.iterations[reader], configs[reader].dims).inputs[place].value


def summed_over(
    graph: OperatorGraph,
    configs: Sequence[OperatorConfig],
    index: int,
    tensor: int,
    axes: Sequence[int],
) -> list[int]:
    """Return over which of these axes a tensor comes to an operator as a partial sum: only one that
    is made on the same mesh does."""
    producer = graph.tensors[tensor].producer
    if producer < 0 or configs[producer].mesh != configs[index].mesh:
        return []
    layout = made_as(graph, tensor, configs)
    return [axis for axis in axes if layout[axis] == PARTIAL]
