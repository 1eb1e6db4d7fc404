"""The loader under analysis: the whole of it, or the same few batches again and again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from shardwright.errors import InputError
from shardwright.runtime.stalls.replay import Recorded, RecordedStream, rebuilt

Loader = Iterable[Any] | Callable[[], Iterable[Any]]


@dataclass
class Source:
    """A loader whose first batches can be drawn several times.

    Of torch's DataLoader over a dataset with indices these are fixed lists of indices, so that it draws equal
    items whether it shuffles or not. Anything else is iterated anew.
    """

    loader: Loader
    picked: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        given = cast(object, self.loader)
        if isinstance(given, str) or not (isinstance(given, Iterable) or callable(given)):
            raise InputError(
                f"a loader is an iterable of batches or a function that returns one, not "
                f"{type(given).__name__}; pass a DataLoader, a list, or the function that makes it"
            )
        whole = self.whole()
        if iter(whole) is whole and not callable(given):
            raise InputError(
                f"the loader is a {type(given).__name__}, which gives its batches once; pass the function "
                "that makes it, so that its first batches can be timed several times"
            )
        self._torch = whole if isinstance(whole, DataLoader) else None

    def whole(self) -> Iterable[Any]:
        """Return the loader as the user iterates it."""
        given = cast(object, self.loader)
        if isinstance(given, Iterable):
            return given
        made = cast(Callable[[], Any], given)()
        if not isinstance(made, Iterable):
            raise InputError(
                f"the loader's function returned {type(made).__name__}; it must return an iterable of batches"
            )
        return made

    @property
    def workers(self) -> int:
        """Processes or threads that prepare batches, as far as the loader says."""
        found = getattr(self.whole() if self._torch is None else self._torch, "num_workers", 0)
        return found if isinstance(found, int) and found > 0 else 0

    @property
    def tells_workers(self) -> bool:
        """Whether how many work ahead is known: a loader that is not torch's may have threads of its own."""
        return self._torch is not None or self.workers > 0

    @property
    def lanes(self) -> int:
        """How many work at once where batches are drawn "without workers": those of a loader that is not torch's stay."""
        return 1 if self._torch is not None else max(1, self.workers)

    @property
    def can_pick(self) -> bool:
        """Whether items are drawn by index."""
        return self._torch is not None and not isinstance(self._torch.dataset, IterableDataset)

    @property
    def dataset_samples(self) -> int:
        """Samples of an epoch, 0 where nobody can tell."""
        try:
            return len(cast(Any, self._torch).dataset)
        except (AttributeError, TypeError, NotImplementedError):
            return 0

    @property
    def ahead(self) -> int:
        """Batches that may wait to be taken when measuring begins."""
        return self.workers * self.prefetch

    @property
    def prefetch(self) -> int:
        """Batches of each worker that may wait, 0 where nobody can tell."""
        if self._torch is None or not self._torch.num_workers:
            return 0
        return self._torch.prefetch_factor or 2

    def samples_of(self, batch: Any) -> int:
        """Return how many samples a batch has: as many as were asked for, where that is known. A collate of one's own
        may leave images as they are, whose first dim is a number of colours."""
        if self.picked and isinstance(self.picked[0], list):
            return len(self.picked[0])
        size = None if self._torch is None else self._torch.batch_size
        return size or samples_of(batch)

    def pick(self, batches: int) -> None:
        """Fix the first so many batches, fewer where the loader has fewer."""
        if self.can_pick and self._torch is not None:
            by_batch = self._torch.batch_sampler
            drawn = self._torch.sampler if by_batch is None else by_batch
            self.picked = list(itertools.islice(iter(drawn), batches))

    def some(self, *, workers: int | None = None) -> Iterable[Any]:
        """Return the picked batches as a loader with this many workers, its own number by default; of what has no
        indices, all of them."""
        given = self._torch
        if given is None or (not self.picked and (workers is None or self.can_pick)):
            return self.whole()
        return self._loader(given.dataset, given.num_workers if workers is None else workers)

    def recorded(self) -> tuple[Iterable[Any], Recorded | RecordedStream | None]:
        """Return the picked batches drawn in this process, and what notes their costs, if anything can."""
        given = self._torch
        if given is None:
            return self.whole(), None
        size = given.batch_size or 0
        noted = Recorded(given.dataset) if self.can_pick else RecordedStream(given.dataset, size)
        return self._loader(noted, 0), noted

    def replayed(
        self, noted: Recorded | RecordedStream, batches: int, keeps_lock: bool
    ) -> DataLoader[Any]:
        """Return so many batches that take what was noted and wait for nothing, by as many workers as the loader has."""
        given, data = cast(DataLoader[Any], self._torch), noted.replayed(keeps_lock)
        # A worker's own start belongs to the data set that is not there.
        options = {**self._options(given.num_workers), "worker_init_fn": None}
        if given.batch_size is None and given.batch_sampler is None:
            return DataLoader(cast(Any, data), batch_size=None, sampler=range(batches), **options)
        numbers = [[number] for number in range(batches)]
        return DataLoader(cast(Any, data), batch_sampler=numbers, **options)

    def _options(self, workers: int) -> dict[str, Any]:
        """Return what all loaders like the user's are made with."""
        given = cast(DataLoader[Any], self._torch)
        options: dict[str, Any] = {
            "num_workers": workers,
            "collate_fn": given.collate_fn,
            "pin_memory": given.pin_memory,
            "timeout": given.timeout if workers else 0,
            "worker_init_fn": given.worker_init_fn,
        }
        if workers:
            options["multiprocessing_context"] = given.multiprocessing_context
            options["prefetch_factor"] = given.prefetch_factor
        return options

    def _loader(self, dataset: Any, workers: int) -> DataLoader[Any]:
        given, options = cast(DataLoader[Any], self._torch), self._options(workers)
        if not self.can_pick:
            return DataLoader(
                dataset, batch_size=given.batch_size, drop_last=given.drop_last, **options
            )
        if given.batch_sampler is None:
            return DataLoader(dataset, batch_size=None, sampler=self.picked, **options)
        return DataLoader(dataset, batch_sampler=self.picked, **options)


def samples_of(batch: Any) -> int:
    """Return how many samples a batch seems to have: the length of its first tensor, of itself if it is a list."""
    for tensor in tensors_of(batch):
        if tensor.dim():
            return tensor.shape[0]
    return len(batch) if isinstance(batch, Sequence) and batch else 1


def kept(batch: Any) -> Any:
    """Return a batch whose tensors nobody else writes, pinned where they were."""
    return rebuilt(batch, _copied)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.detach().clone()
    return made.pin_memory() if tensor.is_pinned() else made


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_of(value)
