"""A loader that prepares as the user's does and waits for nothing.

Where no file is seen, data cannot be brought into memory. What its data set takes of a core can be taken again without
what it waits for, in as many workers, with the loader's own collate: so steps with data in memory are run, not modelled.
"""

from __future__ import annotations

import copy
import threading
import time
import zlib
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from shardwright.runtime.stalls.account import delay

# Some 20 us of work without Python's lock.
_BLOCK = bytes(1 << 16)
# A thread that asks for Python's lock so often, and gets it so much later on average, finds it kept by who prepares.
_ASKS, _LATE = 1e-3, 1e-3


def rebuilt(batch: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch in containers of its own, of like kinds, with something made of each tensor."""
    if isinstance(batch, torch.Tensor):
        return of_tensor(batch)
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)  # some, as a defaultdict, are not made of what they hold
        for key, value in batch.items():
            made[key] = rebuilt(value, of_tensor)
        return made
    if isinstance(batch, tuple):
        values = [rebuilt(value, of_tensor) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return [rebuilt(value, of_tensor) for value in batch] if isinstance(batch, list) else batch


class _Notes:
    """What was noted of batches, and the samples of the first."""

    def __init__(self) -> None:
        self.spent: list[float] = []
        self.samples: Any = None

    def note(self, seconds: float, samples: Any) -> None:
        """Keep what one batch took."""
        self.spent.append(seconds)
        if self.samples is None:
            self.samples = rebuilt(samples, lambda tensor: tensor)

    def replayed(self, keeps_lock: bool) -> Replayed:
        """Return a data set of batches that take as much."""
        return Replayed(tuple(self.spent), self.samples, keeps_lock)


class Recorded(_Notes):
    """A data set with indices that notes what each batch takes of processors."""

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        begin = time.process_time()
        sample = self.dataset[index]
        self.note(time.process_time() - begin, sample)
        return sample

    def __getitems__(self, indices: list[Any]) -> Any:
        begin, several = time.process_time(), getattr(self.dataset, "__getitems__", None)
        samples = several(indices) if several else [self.dataset[index] for index in indices]
        self.note(time.process_time() - begin, samples)
        return samples


class RecordedStream(IterableDataset[Any], _Notes):
    """The same of a data set without indices, whose samples make batches of ``size``, or are batches (0)."""

    def __init__(self, dataset: Any, size: int) -> None:
        super().__init__()
        self.dataset, self.size = dataset, size

    def __iter__(self) -> Iterator[Any]:
        drawn, samples, taken = iter(self.dataset), list[Any](), 0.0
        while True:
            begin = time.process_time()
            try:
                samples.append(next(drawn))
            except StopIteration:
                return
            taken, sample = taken + time.process_time() - begin, samples[-1]
            if len(samples) >= self.size:
                self.note(taken, samples if self.size else sample)
                samples, taken = [], 0.0
            yield sample


@dataclass(frozen=True)
class Replayed:
    """Batches by number: each takes a core what it took when it was recorded, and is the first one's samples."""

    spent: tuple[float, ...]
    samples: Any
    keeps_lock: bool

    def __getitem__(self, number: int) -> Any:
        end = time.thread_time() + self.spent[number % len(self.spent)]
        samples = rebuilt(self.samples, lambda tensor: tensor)  # a collate may take them apart
        while time.thread_time() < end:
            if not self.keeps_lock:
                zlib.crc32(_BLOCK)
        return samples

    def __getitems__(self, numbers: list[int]) -> Any:
        return self[numbers[0]]


class LockWatch:
    """Whether this thread keeps Python's lock while it works: inside, another asks for it again and again."""

    def __enter__(self) -> LockWatch:
        self._late, self._asked, self._ended = 0.0, 0, threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        begin, without_core = time.perf_counter(), delay()
        while not self._ended.is_set():
            time.sleep(_ASKS)
            self._asked += 1
        spent = time.perf_counter() - begin - (delay() - without_core)
        self._late = spent - self._asked * _ASKS

    @property
    def keeps_lock(self) -> bool:
        return self._late > _LATE * self._asked
