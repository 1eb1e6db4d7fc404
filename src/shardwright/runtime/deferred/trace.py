"""What a factory does to its tensors, as data: the operators that made and wrote each storage.

Views leave no trace: a tensor is a window (``Ref``) on a storage. To know a storage's bytes at some
time, the steps that led to them are enough, and usually few: the last whole overwrite and what came
after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor as a window on a storage; offset and strides in elements."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor on a storage with values."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operator as it ran, tensors as refs; or, without one, a seed of the default generator.

    ``reads``, ``writes`` and ``makes`` are storages; of those in ``overwrites`` nothing that was
    there before is left. ``is_random``: draws of the default generator. ``state``: of the
    generator which the factory passed, before it drew; of a seed the state that it set.
    """

    func: Any = None
    args: Any = ()
    kwargs: Any = field(default_factory=dict[str, Any])
    outputs: tuple[Ref, ...] = ()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    makes: frozenset[int] = frozenset()
    overwrites: frozenset[int] = frozenset()
    is_random: bool = False
    state: Tensor | None = None


_NOTHING: Mapping[int, int] = {}


class Trace:
    """Steps in order, and by storage those that changed it."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.random: list[int] = []  # steps that draw of the default generator, or seed it
        self.bytes: dict[int, int] = {}
        self.constants: dict[int, Tensor] = {}  # values that came from outside
        self._changed: dict[int, list[int]] = defaultdict(list)

    def append(self, step: Step) -> None:
        """Add the next step."""
        number = len(self.steps)
        if step.is_random or step.func is None:
            self.random.append(number)
        for storage in step.writes | step.makes:
            self._changed[storage].append(number)
        self.steps.append(step)

    def last_change(self, storage: int) -> int:
        """Return the last step that changed a storage, -1 if none did."""
        return self._changed[storage][-1] if self._changed[storage] else -1

    def chain(
        self, wanted: Iterable[tuple[int, int]], known: Mapping[int, int] = _NOTHING
    ) -> list[int]:
        """Return, in order, the steps that give storages as they are before a step: ``wanted`` are
        pairs of both. Of the ``known`` ones the bytes before a step are at hand."""
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()
        open_ = list(wanted)
        while open_:
            storage, before = open_.pop()
            if (storage, before) in seen:
                continue
            seen.add((storage, before))
            for number in reversed(self._changed[storage]):
                if number >= before:
                    continue
                if number < known.get(storage, 0):
                    break
                step = self.steps[number]
                if number not in found:
                    found.add(number)
                    kept = (step.reads | step.writes) - step.overwrites
                    open_ += [(one, number) for one in kept]
                if storage in step.overwrites or storage in step.makes:
                    break
        return sorted(found)
