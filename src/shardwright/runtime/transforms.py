"""What transforms do to tensors: one function per name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from shardwright.core.program import Transform, TransformName, Value
from shardwright.runtime import factors, packing
from shardwright.runtime.parameters import Parameters
from shardwright.runtime.segment import Site
from shardwright.runtime.store import DTYPES, Store
from shardwright.runtime.waiting import Action

# Of the tensors read, and what is to be written: the tensors to write, in memory of their own.
Run = Callable[[Transform, Sequence[Tensor], Sequence[Value]], list[Tensor]]


def transformed(
    transform: Transform, store: Store, parameters: Parameters, microbatch: int
) -> Action:
    """Return the action of a transform in a microbatch; states lie with the ``parameters``."""
    run, values = RUNS[transform.name], store.program.values
    transform = with_place(transform, parameters.sites[transform.mesh])
    states = parameters.states
    readers = [
        partial(states.__getitem__, value) if value in states else store.reader(value, microbatch)
        for value in transform.reads
    ]
    writers = [
        parameters.writer(value) if value in states else store.writer(value, microbatch)
        for value in transform.writes
    ]
    results = [values[value] for value in transform.writes]

    def work() -> None:
        made = run(transform, [read().detach() for read in readers], results)
        for write, tensor in zip(writers, made, strict=True):
            write(tensor, True)

    return work


def _cast(
    transform: Transform, tensors: Sequence[Tensor], results: Sequence[Value]
) -> list[Tensor]:
    del transform
    return [
        tensor.to(DTYPES[result.dtype]) for tensor, result in zip(tensors, results, strict=True)
    ]


def _feedback(
    transform: Transform, tensors: Sequence[Tensor], results: Sequence[Value]
) -> list[Tensor]:
    half, sent = len(tensors) // 2, list[Tensor]()
    for gradient, residual, result in zip(tensors, tensors[half:], results[:half]):
        residual.add_(gradient)
        sent.append(residual.to(DTYPES[result.dtype]))
        residual.sub_(sent[-1])
    return [*sent, *tensors[half:]]


def with_place(transform: Transform, site: Site) -> Transform:
    """Return a transform that knows this rank's place along the axes that it names."""
    axes = dict(transform.constants).get("axes")
    if not isinstance(axes, tuple):
        return transform
    place = 0
    for axis in axes:
        at = int(str(axis))
        place = place * site.mesh.sizes[at] + site.coordinate[at]
    return replace(transform, constants=(*transform.constants, ("place", place)))


RUNS: dict[TransformName, Run] = {
    "cast": _cast,
    "feedback": _feedback,
    "top-k": partial(packing.packed, packing.pack_largest),
    "int8": partial(packing.packed, packing.pack_levels),
    "1-bit": partial(packing.packed, packing.pack_signs),
    "top-k sum": partial(packing.summed, packing.add_largest),
    "int8 sum": partial(packing.summed, packing.add_levels),
    "1-bit sum": partial(packing.summed, packing.add_signs),
    "merge": packing.merge,
    "take back": packing.take_back,
    "left factor": factors.left_factor,
    "right factor": factors.right_factor,
    "factor sum": factors.factor_sum,
}
