"""What transforms do to tensors: one function per name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwright.core.compression import INDEX_BYTES
from shardwright.core.program import Transform, TransformName, Value
from shardwright.runtime.compression import largest, quantised, signs, unsigned
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


Pack = Callable[[Tensor, int], tuple[Tensor, Tensor]]
Sum = Callable[[Tensor, Tensor], Tensor]


def _packed(
    pack: Pack, transform: Transform, tensors: Sequence[Tensor], results: Sequence[Value]
) -> list[Tensor]:
    """Add gradients to their residuals, and pack what these are then; what that loses stays in them."""
    del transform
    half = len(tensors) // 2
    triples = zip(tensors, tensors[half:], results[:half])
    return [*(_packed_one(pack, *triple) for triple in triples), *tensors[half:]]


def _packed_one(pack: Pack, gradient: Tensor, residual: Tensor, result: Value) -> Tensor:
    owed = (residual + gradient).view(-1)
    message, lost = pack(owed, math.prod(result.shape))
    # Where a gradient is not finite all ranks learn of it, and nothing is owed because of it.
    residual.copy_(torch.where(owed.isfinite().all(), lost, residual.view(-1)).view_as(residual))
    return message


def _summed(
    add: Sum, transform: Transform, tensors: Sequence[Tensor], results: Sequence[Value]
) -> list[Tensor]:
    """Add up what all ranks packed, in their order: all have equal bits."""
    said = dict(transform.constants)
    dtype, made = DTYPES[str(said["dtype"])], list[Tensor]()
    for tensor, result in zip(tensors, results, strict=True):
        total = torch.zeros(math.prod(result.shape), dtype=dtype, device=tensor.device)
        for message in tensor.view(int(str(said["ranks"])), -1):
            total = add(total, message)
        made.append(total.view(result.shape))
    return made


def _pack_largest(owed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    indices = largest(owed, size // (owed.itemsize + INDEX_BYTES))
    values = owed[indices]
    message = torch.cat([values.view(torch.uint8), indices.to(torch.int32).view(torch.uint8)])
    return message, owed.index_fill(0, indices, 0)


def _add_largest(total: Tensor, message: Tensor) -> Tensor:
    count = len(message) // (total.itemsize + INDEX_BYTES)
    bits, places = message.split([count * total.itemsize, count * INDEX_BYTES])
    indices = places.clone().view(torch.int32)
    return total.index_add_(0, indices, bits.clone().view(total.dtype))


def _pack_levels(owed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    del size
    codes, level = quantised(owed)
    return torch.cat([codes.view(torch.uint8), level.view(torch.uint8)]), owed - codes * level


def _add_levels(total: Tensor, message: Tensor) -> Tensor:
    codes, bits = message.split([len(total), total.itemsize])
    return total.add_(codes.view(torch.int8) * bits.clone().view(total.dtype))


def _pack_signs(owed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    del size
    bits, means = signs(owed)
    message = torch.cat([bits, means.view(torch.uint8)])
    return message, owed - unsigned(bits, means, len(owed))


def _add_signs(total: Tensor, message: Tensor) -> Tensor:
    bits, means = message.split([len(message) - 2 * total.itemsize, 2 * total.itemsize])
    return total.add_(unsigned(bits, means.clone().view(total.dtype), len(total)))


RUNS: dict[TransformName, Run] = {
    "cast": _cast,
    "feedback": _feedback,
    "top-k": partial(_packed, _pack_largest),
    "int8": partial(_packed, _pack_levels),
    "1-bit": partial(_packed, _pack_signs),
    "top-k sum": partial(_summed, _add_largest),
    "int8 sum": partial(_summed, _add_levels),
    "1-bit sum": partial(_summed, _add_signs),
}
