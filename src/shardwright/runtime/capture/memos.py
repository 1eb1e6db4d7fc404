"""What functions of a model remember outside of it: tensors that are made while it is traced hold no values, and whoever
finds them there afterwards would compute with nothing."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from shardwright.runtime.capture.places import is_models_own

_Memo = functools._lru_cache_wrapper


@contextlib.contextmanager
def clean_memos(module: nn.Module) -> Iterator[None]:
    """Let functions and classes of a model remember nothing of what runs within: ``lru_cache`` that took
    something up forgets all, and in globals, attributes of classes and their dictionaries what is there no tensors of
    a trace are left."""
    found = homes(module)
    before = [dict(vars(home)) for home in found]
    misses = [(memo, memo.cache_info().misses) for memo in _memos(found)]
    try:
        yield
    finally:
        for memo, count in misses:
            if memo.cache_info().misses != count:
                memo.cache_clear()
        for home, old in zip(found, before, strict=True):
            _forget(home, old)


def homes(module: nn.Module) -> list[Any]:
    """Return the model's own classes and the files that they are in, where its functions keep what they share."""
    kinds = {kind for child in module.modules() for kind in type(child).__mro__}
    own = [kind for kind in kinds if is_models_own(kind)]
    files = {kind.__module__: sys.modules.get(kind.__module__) for kind in own}
    return [*own, *(file for file in files.values() if file is not None)]


def _memos(homes: Sequence[Any]) -> list[_Memo[Any]]:
    """Return what remembers by name, or is what a function refers to."""
    values = [value for home in homes for value in vars(home).values()]
    cells = [
        cell for one in values if isinstance(one, FunctionType) for cell in one.__closure__ or ()
    ]
    for cell in cells:
        with contextlib.suppress(ValueError):  # not filled yet
            values.append(cell.cell_contents)
    return list({id(one): one for one in values if isinstance(one, _Memo)}.values())


def _forget(home: Any, old: dict[str, Any]) -> None:
    for name, value in list(vars(home).items()):
        if isinstance(value, dict) and not name.startswith("__"):
            for key in [key for key, one in list(value.items()) if _is_traced(one)]:
                del value[key]
        elif _is_traced(value):
            if name in old:
                setattr(home, name, old[name])
            else:
                delattr(home, name)


def _is_traced(value: Any) -> bool:
    if not isinstance(value, tuple | list):
        return isinstance(value, FakeTensor | FunctionalTensor)
    return any(isinstance(one, FakeTensor | FunctionalTensor) for one in pytree.tree_leaves(value))
