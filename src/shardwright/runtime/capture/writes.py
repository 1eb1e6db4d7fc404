"""What a run has written: into a model, of which trained parameters must not be and are found with the line, and
into what modules are given."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.errors import CaptureError
from shardwright.runtime.capture.counting import Flops, memories_of, written_by
from shardwright.runtime.capture.keeping import untouched_numbers
from shardwright.runtime.capture.lying import memory_of


def tensors_in(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers by name."""
    return [*module.named_parameters(), *module.named_buffers()]


def put_back(twin: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write values back into parameters and buffers that still have their shapes."""
    with torch.no_grad():
        for name, tensor in tensors_in(twin):
            if name in values and values[name].shape == tensor.shape:
                tensor.copy_(values[name])


@dataclass(frozen=True)
class Snapshot:
    """Parameters and buffers of a module: their values and their memory."""

    values: Mapping[str, Tensor]
    memory: Mapping[str, torch.UntypedStorage]

    @classmethod
    def of(cls, module: nn.Module) -> Snapshot:
        """Take one."""
        held = tensors_in(module)
        values = {name: tensor.detach().clone() for name, tensor in held}
        return cls(values, {name: tensor.untyped_storage() for name, tensor in held})

    def differs(self, name: str, tensor: Tensor, written: Container[int]) -> bool:
        """Whether a tensor was written since, also with what stood there (a bias of zeros that follows one).
        ``written`` are the memories that operators have written."""
        now = memory_of(tensor)
        is_written = now in written or now != self.memory[name]._cdata
        return is_written or not _same_values(self.values[name], tensor.detach())


def written_parameters(
    twin: nn.Module, before: Snapshot, written: Container[int], batch: Mapping[str, Any]
) -> frozenset[str]:
    """Return the frozen parameters that a run on the batch has written; complain, where a model writes it,
    of one that is trained."""
    found: set[str] = set()
    for name, parameter in twin.named_parameters():
        is_known = name in before.values and not isinstance(parameter, FakeTensor)
        if is_known and before.differs(name, parameter, written):
            if not parameter.requires_grad:
                found.add(name)
                continue
            error = CaptureError(
                "forward must not write parameters, which shards and optimizers hold, but it writes "
                f"{name!r}; write it after executor.step, or freeze it before building "
                "(requires_grad_(False)) where nothing trains it"
            )
            put_back(twin, before.values)
            modes = _Assigned(parameter, error), _Written(parameter, error)
            with torch.random.fork_rng(), untouched_numbers(), modes[0], modes[1]:
                twin(**batch)
            raise error
    return frozenset(found)


def _same_values(before: Tensor, after: Tensor) -> bool:
    same = before.shape == after.shape and torch.equal(before.isnan(), after.isnan())
    return same and torch.equal(before.nan_to_num(), after.nan_to_num())


class Arguments:
    """What modules write of what they are given, and whether anybody uses it once they are done."""

    def __init__(self, counted: Flops) -> None:
        self._counted = counted
        self._begun: list[list[int]] = []
        self._written: dict[str, list[tuple[StorageWeakRef, int]]] = {}

    def enter(self, given: Sequence[Tensor]) -> None:
        """See what a module is called with."""
        self._begun.append([_version(one) for one in given])

    def leave(self, path: str, given: Sequence[Tensor]) -> None:
        """See what the call has made of it."""
        for tensor, before in zip(given, self._begun.pop(), strict=True):
            if _version(tensor) != before:
                # Weak: what is held would count as kept.
                found = ((StorageWeakRef(one), self._counted.count) for one in memories_of(tensor))
                self._written.setdefault(path, []).extend(found)

    @property
    def written(self) -> frozenset[str]:
        """The modules that write what they are given."""
        return frozenset(self._written)

    @property
    def shown(self) -> frozenset[str]:
        """Those of them whose writes are used behind them: that would not be seen of an operator."""
        return frozenset(
            path
            for path, found in self._written.items()
            for memory, count in found
            if self._counted.used.get(memory.cdata, 0) > count
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Written(TorchDispatchMode):
    """Raises an error where an operator writes the memory of a parameter."""

    def __init__(self, parameter: Tensor, error: CaptureError) -> None:
        super().__init__()
        self.storage, self.error = memory_of(parameter), error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = written_by(func, args, kwargs or {})
        if any(memory_of(one) == self.storage for one in written):
            raise self.error
        return func(*args, **(kwargs or {}))


class _Assigned(TorchFunctionMode):
    """Raises an error where a parameter is given other memory."""

    def __init__(self, parameter: Tensor, error: CaptureError) -> None:
        super().__init__()
        self.parameter, self.error = parameter, error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__ and args[0] is self.parameter:  # type: ignore[attr-defined]
            raise self.error
        return func(*args, **(kwargs or {}))
