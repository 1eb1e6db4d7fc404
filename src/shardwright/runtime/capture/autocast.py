"""Regions of ``torch.autocast`` inside forward, with their casts written out.

Export keeps operators as they were called, and leaves to autocast what they are computed in. Which tensors of a call it casts, and to what, is not published: it is seen by making the
call once on tensors without storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.runtime.capture.lying import memory_of
from shardwright.runtime.capture.record import (
    Recorder,
    Unsupported,
    Value,
    aten,
    map_values,
    tensors_in,
)
from shardwright.runtime.capture.spellings import CASTS, COPIES, RESHAPES

# Made of other operators in its kernel, which casts are not seen of without storage.
_CAST_BELOW = frozenset({aten.bilinear.default, aten._trilinear.default})


@dataclass(eq=False)
class Region:
    """Where autocast is on. ``kept`` are casts of parameters, which are made once; whether a model has
    switched that off, export does not say."""

    recorder: Recorder
    device: str
    dtype: torch.dtype
    kept: dict[Value, Value]

    def casts_of(
        self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> dict[Value, Value]:
        """Emit the casts of a call's tensors; return what each of those becomes."""
        given = dict.fromkeys([*tensors_in(args), *tensors_in(list(kwargs.values()))])
        if not given or target in RESHAPES | CASTS | COPIES:
            return {}
        if target.namespace != "aten" or target in _CAST_BELOW:
            raise Unsupported(f"{target} in a torch.autocast region")
        casts = self._watched(target, args, kwargs, list(given)).casts
        if casts and target._schema.is_mutable:
            raise Unsupported(f"{target} in a torch.autocast region, which casts what it writes")
        tensors = list(given)
        return {tensors[place]: self._cast(tensors[place], dtype) for place, dtype in casts.items()}

    def _cast(self, value: Value, dtype: torch.dtype) -> Value:
        if value in self.kept and dtype == self.dtype:
            return self.kept[value]
        made = self.recorder.emit(aten.to.dtype, value, dtype)
        is_parameter = value.producer < 0 and value.meta.requires_grad
        if is_parameter and torch.is_grad_enabled() and dtype == self.dtype:
            self.kept[value] = made
        return made

    def _watched(
        self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], given: list[Value]
    ) -> _Casts:
        with FakeTensorMode(), torch.no_grad():
            stand_ins = {one: _like(one.meta, self.device) for one in given}
            called = [map_values(one, stand_ins.__getitem__) for one in args]
            named = {key: map_values(one, stand_ins.__getitem__) for key, one in kwargs.items()}
            watch = _Casts(list(stand_ins.values()))
            with torch.autocast(self.device, dtype=self.dtype, cache_enabled=False), watch:
                target(*called, **named)
        if not watch.is_clear():
            raise Unsupported(f"what torch.autocast casts inside {target}")
        return watch


def entered(
    recorder: Recorder,
    around: Sequence[Region | None],
    device: str,
    dtype: Any,
    is_enabled: bool,
    _: Any,
) -> Region | None:
    """Return the region that begins inside others, None for one that switches autocast off."""
    if not is_enabled:
        return None
    kept = next((one.kept for one in around if one), {})  # until the outermost region ends
    return Region(recorder, device, dtype or torch.get_autocast_dtype(device), kept)


@contextlib.contextmanager
def flat_regions() -> Iterator[None]:
    """Let export mark where regions of autocast and of no gradients begin and end, instead of making
    graphs of their own of them: those lose a region without gradients inside one of autocast."""
    passes = (replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass)
    before = [getattr(one, name) for one, name in zip(passes, _PASSES, strict=True)]
    for one, name in zip(passes, _PASSES, strict=True):
        setattr(one, name, lambda graph, signature: (graph, signature))
    try:
        yield
    finally:
        for one, name, plain in zip(passes, _PASSES, before, strict=True):
            setattr(one, name, plain)


_PASSES = ("replace_autocast_with_hop_pass", "replace_set_grad_with_hop_pass")


class _Casts(TorchDispatchMode):
    """Notes which of some tensors (by place) a call casts before anything else is done with them."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.places = {memory_of(one): place for place, one in enumerate(given)}
        self.casts: dict[int, torch.dtype] = {}
        self._used: set[int] = set()
        self._is_inside = False
        self._alive: list[Any] = []  # or another tensor's memory would be taken for a given one's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sources = [memory_of(one) for one in _tensors((args, kwargs))]
        results = _tensors(result)
        self._alive += results
        if func is aten._to_copy.default and results[0].dtype != args[0].dtype:
            self._note(sources[0], results[0].dtype)
        elif not (sources and all(memory_of(one) in sources for one in results)):  # no mere view
            self._used.update(self.places[one] for one in sources if one in self.places)
        return result

    def _note(self, source: int, dtype: torch.dtype) -> None:
        place = self.places.get(source)
        if place is None or self.casts.setdefault(place, dtype) != dtype:
            self._is_inside = True

    def is_clear(self) -> bool:
        """Whether all casts are of the given tensors, each of which is then used as it was cast."""
        return not self._is_inside and not self._used & self.casts.keys()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _like(meta: Tensor, device: str) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
