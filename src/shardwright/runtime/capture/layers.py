"""Lists of layers in which one is made as the other, a model without most of them, and whether its calls are the whole's."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from torch import nn

from shardwright.runtime.capture.blocks import parameter_shapes

# Fewer layers than this are exported faster than they are compared.
DEEP = 64

# Children of a list that are exported: the first, two that are alike for certain, so that what recording makes of
# them can be compared, too, and the last.
FIRST = 3

# Children that a layer may be of, one after the other, such as a linear map, a norm and an activation.
_MOST_CHILDREN = 8


@dataclass(frozen=True)
class Layers:
    """Equal layers, each of some children of one list: its path, and the names in it of those that are exported, and
    repeated.

    Numbers by which a layer picks a part of a tensor may count on from layer to layer: ``strides`` says by how
    much those do that do, in the order of their calls, and ``ends`` those that the last layer has of these.
    """

    path: str
    kept: tuple[tuple[str, ...], ...]
    repeated: tuple[tuple[str, ...], ...]
    strides: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    def of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the paths of one."""
        return tuple([f"{self.path}.{name}".lstrip(".") for name in names])


def place_in(layer: tuple[str, ...], path: str) -> tuple[int, str] | None:
    """Return in which of a layer's children a path leads, and how it goes on there; None for one that leads elsewhere."""
    for number, child in enumerate(layer):
        if f"{path}.".startswith(f"{child}."):
            return number, path[len(child) :]
    return None


def deep_lists(module: nn.Module) -> tuple[Layers, ...]:
    """Return the longest run in every list of layers whose children are of equal classes, their parameters of equal
    shapes; of lists within such a run none."""
    found: list[Layers] = []
    for path, child in module.named_modules():
        if len(child._modules) >= DEEP and not any(_is_within(path, one) for one in found):
            found += _longest(path, child)
    return tuple(found)


def _is_within(path: str, layers: Layers) -> bool:
    return any(place_in(layers.of(one), path) for one in (*layers.kept, *layers.repeated))


def _longest(path: str, held: nn.Module) -> list[Layers]:
    names, children = tuple(held._modules), [*held._modules.values()]
    looks = [parameter_shapes(one) if one is not None else None for one in children]
    best, longest = list[Layers](), DEEP - 1
    for size in range(1, _MOST_CHILDREN + 1):
        first, count = _longest_run(looks, size)
        stop = first + count * size
        few = {*map(id, children[first:stop])}
        if count <= longest or len(few) < stop - first or None in looks[first:stop]:
            continue
        layers = [names[start : start + size] for start in range(first, stop, size)]
        best, longest = (
            [Layers(path, (*layers[:FIRST], layers[-1]), tuple(layers[FIRST:-1]))],
            count,
        )
    return best


def _longest_run(looks: Sequence[Any], size: int) -> tuple[int, int]:
    """Return where the most groups of ``size`` that look alike begin, and how many there are."""
    best, start = (0, 0), 0
    for stop in range(1, len(looks) + 1):
        if stop - start >= size:
            best = max(best, (start, (stop - start) // size), key=itemgetter(1))
        if stop < len(looks) and stop - start >= size and looks[stop] != looks[stop - size]:
            start = stop - size + 1
    return best


@contextlib.contextmanager
def shortened(module: nn.Module, lists: Sequence[Layers]) -> Iterator[None]:
    """Let a module be without the layers that are repeated."""
    held = [module.get_submodule(layers.path) for layers in lists]
    before = [one._modules for one in held]
    for one, layers, children in zip(held, lists, before, strict=True):
        away = {name for layer in layers.repeated for name in layer}
        one._modules = {name: child for name, child in children.items() if name not in away}
    try:
        yield
    finally:
        for one, children in zip(held, before, strict=True):
            one._modules = children


class Unclear(Exception):
    """Something that calls alone do not tell."""


@dataclass(slots=True)
class Part:
    """What is called in one layer, or before all: calls, and beside each the numbers by which it picks.

    ``behind``: how many lists of layers have ended where it does, if it stays when most layers are left out and later
    ones may read what it makes, else -1.
    """

    behind: int
    calls: list[Any] = field(default_factory=list[Any])
    numbers: list[list[int]] = field(default_factory=list[list[int]])

    def counted(self, count: int | None = None) -> list[int]:
        """Return the numbers of its first calls, or all."""
        return [*itertools.chain.from_iterable(self.numbers[:count])]


@dataclass(frozen=True)
class Written:
    """What one run calls: before all layers, and in those of each list, these in the order in which they run."""

    before: Part
    lists: dict[int, list[Part]]
    growth: dict[int, list[int]]


def stood_for(lists: Sequence[Layers], whole: Written, few: Written) -> tuple[Layers, ...]:
    """Return the lists as they run, with how numbers count on, where few have the calls of the whole. Raises Unclear."""
    if whole.before != few.before or list(whole.lists) != list(few.lists):
        raise Unclear
    return tuple(
        _counted_on(lists[number], parts, few.lists[number], whole.growth[number])
        for number, parts in whole.lists.items()
    )


def _counted_on(
    layers: Layers, parts: Sequence[Part], few: Sequence[Part], growth: list[int]
) -> Layers:
    """Return a list with how its numbers count on; ``growth`` says it from any of its layers to the next."""
    *first, last = few
    ends, count = _ends(first[-1], last, growth), len(parts) - 1 - FIRST
    further = [stride * count for stride in ends]
    further += [0] * (len(last.counted()) - len(further))
    expected = [one + more for one, more in zip(last.counted(), further, strict=True)]
    is_alike = parts[:FIRST] == first and parts[-1].calls == last.calls
    if not is_alike or parts[-1].counted() != expected:
        raise Unclear
    strides, ending = (tuple(filter(None, grown)) for grown in (growth, ends))
    return replace(layers, strides=strides, ends=ending)


def _ends(like: Part, last: Part, growth: list[int]) -> list[int]:
    """Return by how much the numbers count on of those calls of the last layer that others have, too."""
    pairs = zip(like.calls, last.calls, strict=False)
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return growth[: len(like.counted(alike))]
