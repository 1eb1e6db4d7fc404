"""The values of a Program as one rank holds them during a step.

Every (value, microbatch) has a *slot*, an index into one flat list, so that instructions compiled
once touch no dictionary. In a pipeline that is never flushed every minibatch under way has its own. An alias shares the slot of the value it names. Parameters and buffers are
not here: they outlive the step (see ``parameters``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from shardwright.core.program import Program, data_of

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16,
    "float16": torch.float16, "int64": torch.int64, "int32": torch.int32, "int16": torch.int16,
    "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool,
    "complex64": torch.complex64, "complex128": torch.complex128,
}  # fmt: skip


class Store:
    """Slots, and how to read and write them. Writing to a gradient accumulates."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.program = program
        self.device = device
        self._first: list[int] = []
        self._pieces = program.strategy.pipeline.num_microbatches
        count = 0
        for value in program.values:
            self._first.append(count)
            count += program.ring if value.scope == "microbatch" else program.under_way
        self.data: list[Tensor | None] = [None] * count
        # Whether a gradient's memory is ours alone, so that it may be added to in place: autograd
        # may hand the same tensor, or views of one, to several inputs.
        self.owned: list[bool] = [False] * count

    def root(self, value: int) -> int:
        """Follow aliases to the value that has the data."""
        return data_of(self.program.values, value)

    def slot(self, value: int, microbatch: int) -> int:
        """Return the slot of a value as an instruction of this microbatch sees it, counted over all minibatches
        under way."""
        value = self.root(value)
        if self.program.values[value].scope == "microbatch":
            return self._first[value] + microbatch
        return self._first[value] + max(microbatch, 0) // self._pieces

    def clear(self) -> None:
        """Drop everything that is left."""
        self.data[:] = [None] * len(self.data)

    def reader(self, value: int, microbatch: int) -> Callable[[], Tensor]:
        """Return a function that reads a value; a gradient that nothing has reached is zero."""
        slot, data = self.slot(value, microbatch), self.data
        entry = self.program.values[self.root(value)]
        shape, dtype, device = entry.shape, DTYPES[entry.dtype], self.device

        def read() -> Tensor:
            held = data[slot]
            if held is None:
                return torch.zeros(shape, dtype=dtype, device=device)
            return held

        return read

    def writer(self, value: int, microbatch: int) -> Callable[[Tensor, bool], None]:
        """Return a function that writes (tensor, whether its memory is the slot's alone)."""
        slot, data = self.slot(value, microbatch), self.data
        entry = self.program.values[self.root(value)]
        dtype = DTYPES[entry.dtype]
        if entry.role == "gradient":
            return lambda tensor, owned: self.accumulate(slot, dtype, tensor, owned)

        def write(tensor: Tensor, owned: bool) -> None:
            data[slot] = tensor if tensor.dtype is dtype else tensor.to(dtype)

        return write

    def accumulate_all(self, slots: Iterable[tuple[int, torch.dtype, Tensor]]) -> None:
        """Add tensors, whose memory may be shared, to gradients: those that may be added to in place in one
        call, which is one kernel where a GPU has it."""
        held, added = dict[int, Tensor](), list[Tensor]()
        for slot, dtype, tensor in slots:
            there = self.data[slot]
            if there is None or not self.owned[slot] or slot in held:
                self.accumulate(slot, dtype, tensor, False)
            else:
                held[slot] = there
                added.append(tensor)
        if held:
            torch._foreach_add_(list(held.values()), added)

    def accumulate(self, slot: int, dtype: torch.dtype, tensor: Tensor, owned: bool) -> None:
        """Add to a gradient, out of place as long as its memory may be shared."""
        held = self.data[slot]
        if held is None:
            self.owned[slot] = owned or tensor.dtype is not dtype
            self.data[slot] = tensor if tensor.dtype is dtype else tensor.to(dtype)
        elif self.owned[slot]:
            held.add_(tensor)
        else:
            self.data[slot] = torch.add(held, tensor.to(dtype))
            self.owned[slot] = True
