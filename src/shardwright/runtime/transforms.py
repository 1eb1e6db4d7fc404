"""What transforms do to tensors: one function per name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from shardwright.core.program import Transform, TransformName, Value
from shardwright.runtime.parameters import Parameters
from shardwright.runtime.store import DTYPES, Store
from shardwright.runtime.waiting import Action

# Of the tensors read, and what is to be written: the tensors to write, in memory of their own.
Run = Callable[[Transform, Sequence[Tensor], Sequence[Value]], list[Tensor]]


def transformed(
    transform: Transform, store: Store, parameters: Parameters, microbatch: int
) -> Action:
    """Return the action of a transform in a microbatch; states lie with the ``parameters``."""
    run, values = RUNS[transform.name], store.program.values
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


RUNS: dict[TransformName, Run] = {"cast": _cast, "feedback": _feedback}
