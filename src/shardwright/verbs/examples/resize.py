"""Random shapes from an example call: every size gets another one, everywhere it stands.

Nothing is known of the operator: whether an integer argument is a size or something else is left to
chance, and torch refuses the calls that make no sense. What it takes is a valid call, and a rule
must hold for all of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from shardwright.core.example import Call, Drawn, as_list

SIZES = (2, 3, 4, 6, 8, 9, 12)
MOST_ELEMENTS = 2**13  # of a tensor
LARGE_SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15)


def resized(call: Call, random: Random, *, distinct: bool = False) -> Call:
    """Return the call at random sizes, which ``distinct`` keeps apart from each other."""
    tensors = [value for value in _leaves(call) if isinstance(value, Drawn)]
    sizes = {size for one in tensors if one.draw != "given" for size in one.shape if size > 1}
    listed = {entry for value in (*call.args, *call.kwargs.values()) for entry in _integers(value)}
    sizes -= set(call.fixed)
    listed -= set(call.fixed)
    basic = sorted(size for size in sizes | listed if not any(_factors(size, sizes | listed)))
    # Indices must stay within what they index: some kernels do not look.
    has_indices = any(one.draw in ("integer", "given") for one in tensors)
    new: dict[int, int] = {}
    for size in basic:
        sizes_left = [
            other
            for other in (LARGE_SIZES if distinct else SIZES)
            if (other >= size or not has_indices) and not (distinct and other in new.values())
        ]
        new[size] = random.choice(sizes_left or [size])
    for size in sorted((sizes | listed) - set(basic)):
        left, right = next(iter(_factors(size, sizes | listed)))
        new[size] = new[left] * new[right]
    return Call(
        tuple(_change(value, new, random) for value in call.args),
        {name: _change(value, new, random) for name, value in call.kwargs.items()},
    )


def is_small(call: Call) -> bool:
    """Whether all tensors, and those that lists of integers ask for, are quickly worked on."""
    shapes = [value.shape for value in _leaves(call) if isinstance(value, Drawn)]
    listed = [tuple(_integers(value)) for value in (*call.args, *call.kwargs.values())]
    return all(math.prod(shape) <= MOST_ELEMENTS for shape in (*shapes, *listed))


def _change(value: Any, new: Mapping[int, int], random: Random) -> Any:
    """Give a tensor its new sizes, and with one chance in two an argument as well."""
    if isinstance(value, Drawn):
        if value.draw == "given":
            return value
        shape = tuple(new.get(size, size) for size in value.shape)
        return Drawn(value.draw, shape, new.get(value.high, value.high))
    items = as_list(value)
    if items is not None and any(isinstance(item, Drawn) for item in items):
        return [_change(item, new, random) for item in items]
    return _map(value, new) if random.random() < 0.5 else value


def _map(value: Any, new: Mapping[int, int]) -> Any:
    items = as_list(value)
    if items is not None:
        return [_map(item, new) for item in items]
    return new.get(value, value) if type(value) is int else value


def _factors(size: int, known: set[int]) -> Iterator[tuple[int, int]]:
    for factor in sorted(known):
        if 1 < factor < size and size % factor == 0 and size // factor in known:
            yield factor, size // factor


def _integers(value: Any) -> list[int]:
    """Return the sizes in a list of integers, such as a shape."""
    return [item for item in as_list(value) or () if type(item) is int and item > 1]


def _leaves(call: Call) -> Iterator[Any]:
    for value in (*call.args, *call.kwargs.values()):
        items = as_list(value)
        yield from (value,) if items is None else items
