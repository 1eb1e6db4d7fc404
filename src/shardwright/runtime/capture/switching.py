"""Parameters whose ``requires_grad`` forward switches: off while an actor learns from a critic, and on again.

An exported graph knows nothing of such flags. While one is off, the module holds the parameter detached
instead, so that the graph says where no gradient flows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import CaptureError
from shardwright.runtime.capture.frugal import frugal
from shardwright.runtime.capture.places import running_line
from shardwright.runtime.capture.record import aten


class Switches:
    """The parameters of a module that are switched off, each with the stand-in that the module holds."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.ever = False  # whether any was switched off
        self._own = {id(one): name for name, one in module.named_parameters()}
        holders = (
            (child._parameters, name)
            for child in module.modules()
            for name, tensor in child._parameters.items()
            if tensor is not None
        )
        self._holder, self._place = next(holders, ({}, ""))
        self._first: Tensor | None = None
        self._held: set[int] = set()
        self._off: list[tuple[Tensor, Tensor, str, str]] = []

    def switch(self, tensor: Tensor, is_on: bool) -> bool:
        """Switch a tensor; returns False where that is not for us to do.

        A list of parameters that was made before the trace holds those that the module had then.
        """
        if id(tensor) in self._own:
            tensor = reduce(getattr, self._own[id(tensor)].split("."), self.module)
        place = self._place_off(tensor)
        if place >= 0:
            if is_on:
                original, stand_in, *_ = self._off.pop(place)
                self._put(stand_in, original)
            return True
        # Torch itself gives most tensors a flag as it makes them: what is not held must be told at once.
        if tensor.requires_grad == is_on or (is_on and not self._is_held(tensor)):
            return False
        name = self._put(tensor, tensor)
        if name and is_on:
            raise CaptureError(
                f"forward must not switch requires_grad of a frozen parameter on, but it does so with {_called(name)}: "
                "the first step would train other parameters than the second; set it before building"
            )
        if name:
            stand_in = tensor.detach()
            self._put(tensor, stand_in)
            self._off.append((tensor, stand_in, name, running_line()))
            self.ever = True
        return bool(name)

    def _place_off(self, tensor: Tensor) -> int:
        """Return the place among those that are off of a tensor or its stand-in, or -1."""
        for place, (original, stand_in, *_) in enumerate(self._off):
            if tensor is original or tensor is stand_in:
                return place
        return -1

    def _is_held(self, tensor: Tensor) -> bool:
        """Whether the module holds a tensor, by an index that lasts while its first parameter stays."""
        first = self._holder.get(self._place)
        if first is not self._first:
            self._first = first
            self._held = {id(one) for one in self.module.parameters()}
        return id(tensor) in self._held

    def _put(self, old: Tensor, new: Tensor) -> str:
        """Let the module hold one tensor in place of another; returns its name, "" where it has none."""
        found = ""
        for path, child in self.module.named_modules():
            for name, held in child._parameters.items():
                if held is old:
                    child._parameters[name] = new  # type: ignore[assignment]
                    found = f"{path}.{name}" if path else name
        return found

    @property
    def left(self) -> dict[str, str]:
        """The names of those that are off, and the lines that switched them."""
        return {name: line for _, _, name, line in self._off}

    def end(self) -> None:
        """Let the module hold its own parameters."""
        for original, stand_in, *_ in self._off:
            self._put(stand_in, original)


def check_left(left: Mapping[str, str]) -> None:
    """Complain of parameters that were used with a gradient, or may have been, and are left switched off, each
    with the line that did it."""
    for name, line in left.items():
        raise CaptureError(
            f"forward must not leave requires_grad of a parameter switched off, but it does so with "
            f"{_called(name)}: the first step would train other parameters than the second; set it before "
            "building, or switch it on again",
            place=line,
        )


def _called(name: str) -> str:
    return repr(name.removeprefix("module."))  # what is exported is wrapped


def exported(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a module's exported program, in which parameters are detached while they are switched off."""
    with switched(module) as flags, frugal():
        program = torch.export.export(module, args, kwargs, strict=False)
    used = {node.name for node in program.graph.nodes if any(map(_differentiates, node.users))}
    specs = program.graph_signature.input_specs
    names = {one.target for one in specs if one.arg.name in used}
    check_left({name: line for name, line in flags.left.items() if name in names})
    return program


def _differentiates(user: Any) -> bool:
    return user.target is not aten.detach.default


@contextlib.contextmanager
def switched(module: nn.Module) -> Iterator[Switches]:
    """Let ``module`` hold parameters detached while it switches them off, however it runs."""
    plain: Any = torch._C.TensorBase.requires_grad
    method = torch.Tensor.requires_grad_
    found = Switches(module)

    def write(tensor: Tensor, value: bool) -> None:
        if not found.switch(tensor, bool(value)):
            plain.__set__(tensor, value)

    def called(tensor: Tensor, requires_grad: bool = True) -> Tensor:
        return tensor if found.switch(tensor, requires_grad) else method(tensor, requires_grad)

    torch.Tensor.requires_grad = property(plain.__get__, write)  # type: ignore[assignment]
    torch.Tensor.requires_grad_ = called  # type: ignore[method-assign]
    try:
        yield found
    finally:
        found.end()
        del torch.Tensor.requires_grad, torch.Tensor.requires_grad_
