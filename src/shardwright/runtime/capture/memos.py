"""What functions of a model remember outside of it: tensors that are made while it is traced hold no values, and whoever
finds them there afterwards would compute with nothing."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from shardwright.runtime.capture.places import defined_at

_Memo = functools._lru_cache_wrapper


@contextlib.contextmanager
def clean_memos(module: nn.Module) -> Iterator[None]:
    """Let functions and classes of a model remember nothing of what runs within: ``lru_cache`` that took
    something up forgets all, and in globals, attributes of classes and their dictionaries what is there no tensors of
    a trace are left."""
    kinds = {kind for child in module.modules() for kind in type(child).__mro__}
    own = [kind for kind in kinds if defined_at(kind)]
    homes = {id(home): home for kind in own for home in _homes(kind)}.values()
    before = [dict(vars(home)) for home in homes]
    memos = {id(memo): memo for home in homes for memo in _memos(vars(home))}.values()
    misses = [memo.cache_info().misses for memo in memos]
    try:
        yield
    finally:
        for memo, count in zip(memos, misses, strict=True):
            if memo.cache_info().misses != count:
                memo.cache_clear()
        for home, old in zip(homes, before, strict=True):
            _forget(home, old)


def _homes(kind: type) -> list[Any]:
    """Return where a class's functions keep what they share: the class, and the file it is in."""
    return [kind, *([sys.modules[kind.__module__]] if kind.__module__ in sys.modules else [])]


def _memos(held: Any) -> Iterator[_Memo[Any]]:
    """Yield what is remembered by name, or by what a function refers to."""
    for value in list(held.values()):
        if isinstance(value, _Memo):
            yield value
        elif isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # not filled yet
                    if isinstance(cell.cell_contents, _Memo):
                        yield cell.cell_contents


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
