"""What enters a graph from outside: parameters, buffers, the batch, constants."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.graph import DTYPE_BYTES, TensorSpec
from shardwright.errors import CaptureError
from shardwright.runtime.capture.assemble import Entry, dtype_name
from shardwright.runtime.capture.copying import Home, held_by, home_of
from shardwright.runtime.capture.places import held_at
from shardwright.runtime.capture.prepare import LossOnly, tied_names
from shardwright.runtime.capture.record import Recorder, Unsupported
from shardwright.runtime.capture.variables import Variable

PREFIX = "module."


class Entries:
    """Everything that enters from outside, tied tensors once. A batch may use names of the module's."""

    def __init__(
        self,
        wrapper: LossOnly,
        module: nn.Module,
        batch: Mapping[str, Tensor],
        recorder: Recorder,
    ) -> None:
        self.names, self.twin = wrapper.names, wrapper.module
        self.module, self.batch, self.recorder = module, batch, recorder
        self.entries: dict[tuple[bool, str], tuple[Entry, Variable]] = {}
        self.owners = tied_names(self.twin)

    def variable(self, spec: Any, program: Any) -> Any:
        """Return the variable of one placeholder."""
        kind = spec.kind.name
        if kind == "USER_INPUT":
            return self.input(self.names[spec.arg.name])
        path = spec.target.removeprefix(PREFIX)
        if kind in ("PARAMETER", "BUFFER"):
            return self.owned(path)
        if kind == "CONSTANT_TENSOR":
            return self._constant(path, program.constants[spec.target])
        raise Unsupported(f"an entry of kind {kind}")

    def input(self, name: str) -> Variable:
        """Return the variable of a batch tensor."""
        return self._enter(name, self.batch[name], "input")

    def owned(self, path: str) -> Variable:
        """Return the variable of a parameter or buffer, by any of its names."""
        aliases = self.owners[path]
        tensor = _attribute(self.twin, aliases[0])
        role = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        return self._enter(aliases[0], tensor, role, aliases[1:])

    def constant(self, name: str, tensor: Tensor) -> Variable:
        """Return the variable of a tensor that is known now."""
        return self._enter(name, tensor, "constant", constant=tensor)

    @cached_property
    def _of_twin(self) -> dict[Home, str]:
        return held_by(self.twin)

    @cached_property
    def _of_module(self) -> dict[Home, str]:
        return held_by(self.module)

    def _constant(self, path: str, lifted: Tensor) -> Variable:
        """Return the variable of what a trace found nowhere else: a parameter that a function of the model holds,
        or a constant. Complain of one that is still the module's own, which a graph would freeze."""
        home = home_of(lifted)
        if home in self._of_twin:
            return self.owned(self._of_twin[home])
        if home in self._of_module:
            raise CaptureError(
                f"forward must take its parameters from the module it is given, but {self._of_module[home]!r} "
                "comes from a function or a global that holds the model itself; take it from self, or pass it on"
            )
        original = _attribute(self.module, path)
        tensor = original if isinstance(original, Tensor) else lifted
        return self.constant(path, tensor.detach())

    def _enter(
        self,
        name: str,
        tensor: Tensor,
        role: Any,
        aliases: tuple[str, ...] = (),
        constant: Tensor | None = None,
    ) -> Variable:
        key = (role == "input", name)
        if key not in self.entries:
            value = self.recorder.enter(tensor)
            is_frozen = role == "parameter" and not tensor.requires_grad
            spec = TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=self._known_dtype(name, tensor.dtype),
                role=role,
                needs_gradient=role == "parameter" and tensor.requires_grad,
                aliases=aliases,
            )
            variable = Variable(
                value,
                buffer=value if role == "buffer" or is_frozen else None,
                parameter=name if role == "parameter" else "",
            )
            self.entries[key] = (Entry(value=value, spec=spec, constant=constant), variable)
        return self.entries[key][1]

    def _known_dtype(self, name: str, dtype: torch.dtype) -> str:
        text = dtype_name(dtype)
        if text not in DTYPE_BYTES:
            raise CaptureError(
                f"tensor {name!r} has dtype {text}; use one of {', '.join(DTYPE_BYTES)}",
                place="" if name in self.batch else held_at(self.module, name),
            )
        return text

    def ordered(self, written: Collection[str]) -> list[Entry]:
        """Return parameters and buffers in the module's order, then the batch, then constants.

        Frozen parameters that forward has ``written`` are buffers: no optimizer holds them, and every
        device has them whole.
        """
        for name in self.batch:
            self.input(name)
        found = [one for one, _ in self.entries.values()]
        found = [
            replace(one, spec=replace(one.spec, role="buffer")) if _is_of(one, written) else one
            for one in found
        ]
        rank = {"parameter": 0, "buffer": 1, "input": 2, "constant": 3}
        return sorted(found, key=lambda one: rank[one.spec.role])


def _is_of(entry: Entry, written: Collection[str]) -> bool:
    return entry.spec.role == "parameter" and entry.spec.name in written


def _attribute(module: nn.Module, path: str) -> Any:
    return reduce(lambda value, part: getattr(value, part, None), path.split("."), module)
