"""Containers that hold results of the last call only: features that hooks keep for a loss, read by the
same call that made them.

Such a container changes with every call and yet carries nothing on. That is seen by a call which finds
random numbers in the place of what the last one has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import CaptureError
from shardwright.runtime.capture.keeping import PLAIN, Attribute


def remade(
    twin: nn.Module, attributes: Sequence[Attribute], repeats: Callable[[], bool]
) -> set[Attribute]:
    """Return the attributes that every call makes anew before it reads them.

    ``repeats`` calls the module again and says whether it does as it did: it must find other numbers
    in these attributes, and leave as many.
    """
    held = {one: vars(twin.get_submodule(one[0])).get(one[1]) for one in attributes}
    found = {one: outline(value) for one, value in held.items() if spoil(value)}
    try:
        is_same = bool(found) and repeats()
    except CaptureError:
        return set()
    return {one for one, before in found.items() if is_same and outline(held[one]) == before}


def outline(value: Any) -> Any:
    """Return what a container holds, with shapes and dtypes in the place of tensors."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return [(key, outline(item)) for key, item in value.items()]
    if isinstance(value, (list, deque, tuple)):
        return [outline(item) for item in value]
    return value if isinstance(value, PLAIN) else id(value)


def spoil(value: Any) -> bool:
    """Put random numbers in the place of all tensors that a list or dict holds; says whether it held
    some, and nothing but such and plain values."""
    if not isinstance(value, (list, deque, dict)):
        return False
    numbers = torch.Generator().manual_seed(1)
    states = [_spoil(value, place, numbers) for place in _places(value)]
    return any(states) and None not in states


def _places(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value)))


def _spoil(value: Any, place: Any, numbers: torch.Generator) -> bool | None:
    """Spoil one item; says whether there was something to spoil, None where that cannot be done."""
    item = value[place]
    if isinstance(item, PLAIN):
        return False
    if not isinstance(item, Tensor):
        return spoil(item) or None
    if not item.is_floating_point():
        return None
    value[place] = torch.rand(item.shape, generator=numbers, dtype=item.dtype)
    return True
