"""Copies of modules whose functions use the copy.

``copy.deepcopy`` leaves functions as they are. A hook, a forward that was put in another's place, or an
activation that a module holds as a lambda would go on using the parameters of the module that was copied:
in a graph those are constants.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.capture.lying import memory_of

_dispatch: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]


def copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module, functions that close over something with copies of that.

    Results of earlier calls that it has kept are copied without their history.
    """
    with _copied(types.FunctionType, _function), _copied(Tensor, _tensor):
        return copy.deepcopy(module, memo)


Home = tuple[int, torch.Size]


def home_of(tensor: Tensor) -> Home:
    """Return what is equal for two tensors that are one in memory."""
    return memory_of(tensor), tensor.shape


def held_by(module: nn.Module) -> dict[Home, str]:
    """Return the name of every parameter and buffer by its home, of tied ones the first."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {home_of(tensor): name for name, tensor in reversed(named)}


@contextlib.contextmanager
def _copied(kind: type, copier: Any) -> Iterator[None]:
    before = _dispatch.get(kind)
    _dispatch[kind] = copier
    try:
        yield
    finally:
        if before is None:
            del _dispatch[kind]
        else:
            _dispatch[kind] = before


def _function(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    cells, defaults = function.__closure__ or (), function.__defaults__ or ()
    held = [*(_content(cell) for cell in cells), *defaults]
    if not any(_may_change(one) for one in held):
        return function
    empty = tuple(types.CellType() for _ in cells)
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, None, empty
    )
    memo[id(function)] = copied  # before what it closes over, which may hold it
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    copied.__defaults__ = tuple(_attempt(one, memo) for one in defaults)
    for cell, new in zip(cells, empty, strict=True):
        if (content := _content(cell)) is not _NOTHING:
            new.cell_contents = _attempt(content, memo)
    return copied


_NOTHING = object()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return _NOTHING


def _may_change(held: Any) -> bool:
    return (
        held is not _NOTHING
        and not isinstance(
            held,
            (type, types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float, complex),
        )
        and held is not None
    )


def _attempt(held: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(held, memo)
    except Exception:  # noqa: BLE001 - what cannot be copied (a lock, a file) is shared
        return held


def _tensor(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if tensor.is_leaf:
        return tensor.__deepcopy__(memo)
    with torch.no_grad():
        memo[id(tensor)] = tensor.detach().clone()
    return memo[id(tensor)]
