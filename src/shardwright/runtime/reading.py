"""What ``train`` reads: which samples come next, which of them this rank needs, and where it left off.

A data set with indices is read in an order that follows from a seed and the number of the epoch alone. So ranks agree
without a word, each reads only the samples that its shards are cut from, and a checkpoint that holds an epoch and a
number of samples is exact on any number of ranks. Any other loader is iterated as it is, by every rank.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from shardwright.errors import InputError, ShardwrightWarning
from shardwright.runtime import inputs
from shardwright.runtime.byvalue import handed
from shardwright.runtime.randomness import place_seed, splitmix64
from shardwright.runtime.standing import BATCHES, KEY, SAMPLES, STATE, Place, taken_from

OPTIONS = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "worker_init_fn",
)  # of a DataLoader, to be kept
OF_WORKERS = ("timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")
AGAIN = "pass that one, or train(loader, resume=False) to begin its epoch anew"


class Reader:
    """An executor's place in its data, and how it gets at what comes next."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.place: Place | None = None
        self._is_loaded = False
        self._loaded_seed: int | None = None
        self._made: Samples | None = None

    def beside(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint is to hold besides tensors: a script's own, and the place where there is one."""
        return {**extra} if self.place is None else {**extra, KEY: asdict(self.place)}

    def restore(self, extra: dict[str, Any], directory: Path) -> dict[str, Any]:
        """Take the place out of what a checkpoint held, for the next loader; return the rest."""
        self.place = taken_from(extra, directory)
        self._is_loaded = self.place is not None
        if self.place is not None and self.place.of == SAMPLES:
            self._loaded_seed = self.place.seed
        return extra

    def open(
        self, loader: Any, needed: inputs.Needed, *, shard: bool | None, resume: bool
    ) -> Batches | Samples:
        """Return the batches to come; of a data set with indices, only what this rank needs of each."""
        given = _sampled(loader)
        if given is None:
            return Batches(self, loader, resume)
        shards = given.is_shardable if shard is None else shard
        if self._made is None or self._made.loader is not loader or self._made.shards != shards:
            self._made = Samples(self, loader, given, needed, shards)
        self._made.resume = resume
        return self._made

    def start(self, of: str, size: int = 0, seed: int = 0, *, resume: bool) -> Place:
        """Return where to begin: behind what a checkpoint was saved after, or with the next epoch."""
        seed = seed if self._loaded_seed is None else self._loaded_seed
        known, fresh = self.place, Place(of=of, size=size, seed=seed)
        if known is None:
            return fresh
        if not self._is_loaded or not resume:
            was_left = not self._is_loaded and known.done > 0 and known.epochs == known.epoch
            self._is_loaded = False
            return replace(fresh, epoch=known.epochs + was_left)
        if known.of != of:
            raise InputError(
                f"the checkpoint has the place of a loader of {known.of}, but this one is of {of}; {AGAIN}"
            )
        if known.size != size:
            raise InputError(
                f"the checkpoint stands behind {known.done} of {known.size} samples, but this data set has {size}; "
                f"{AGAIN}"
            )
        self._is_loaded = False
        return replace(fresh, epoch=known.epochs) if known.epochs > known.epoch else known


class _Again:
    """What a function returns that has to be called for every pass."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def loader_of(given: Any) -> Any:
    """Return what a script names as its loader: that itself, or what it makes when it is called."""
    if given is None:
        raise InputError(
            "a loader is an iterable of batches, a data set, or makes one when called, not None; name one"
        )
    if isinstance(given, Iterable) or hasattr(given, "__getitem__") or not callable(given):
        return given
    made = given()
    if not isinstance(made, Iterable) and not hasattr(made, "__getitem__"):
        raise InputError(
            f"the loader's function returned {type(made).__name__}; it must return an iterable of batches, or a data set"
        )
    return _Again(given) if isinstance(made, Iterator) else made


def as_read(loader: Any, batch: int, rows: int) -> Any:
    """Return a loader as a rank that needs the first so many of ``batch`` samples reads it: of a data set with indices
    these alone, each with random numbers of its own; any other as it is."""
    given, needed = _sampled(loader), inputs.Needed(batch, tuple(range(rows)))
    if given is None:
        return loader
    return Samples(Reader(0), loader, given, needed, given.is_shardable).reading(0)


def is_shared_out(loader: Any) -> bool:
    """Whether ranks read only the samples of a loader that they need, where they are not told otherwise."""
    given = _sampled(loader)
    return given is not None and given.is_shardable


# -- loaders as they are ---------------------------------------------------------------------------


class Batches:
    """A loader that is iterated whole by every rank."""

    def __init__(self, reader: Reader, loader: Any, resume: bool) -> None:
        if not isinstance(loader, Iterable):
            raise InputError(
                f"train takes an iterable of batches or a data set, but not {type(loader).__name__}; pass a "
                "DataLoader, a data set with indices, a generator or a list"
            )
        self.reader, self.loader, self.resume = reader, cast(Iterable[Any], loader), resume
        self.num_workers = getattr(loader, "num_workers", 0)

    def __iter__(self) -> Walk:
        loader = self.loader
        if isinstance(loader, Iterator):  # it has no beginning: who made it says where it stands
            self.reader.start(BATCHES, resume=False)
            self.reader.place = None
            return Walk(iter(loader), None)
        has_state = _has_state(loader)
        start = self.reader.start(STATE if has_state else BATCHES, resume=self.resume)
        if has_state and start.state is not None:
            cast(Any, loader).load_state_dict(copy.deepcopy(start.state))
        iterator = iter(loader)
        if start.done and not has_state:
            self._skip(iterator, start.done)

        def after(count: int) -> Place:
            state = copy.deepcopy(cast(Any, loader).state_dict()) if has_state else None
            return replace(start, done=start.done + count, state=state)

        def at_end(count: int) -> Place:
            return replace(after(count), epoch=start.epoch + 1, done=0)

        return Walk(iterator, after, at_end)

    def _skip(self, iterator: Iterator[Any], count: int) -> None:
        warnings.warn(
            f"the loader ({type(self.loader).__name__}) has no state to be put where the checkpoint was saved: its "
            f"first {count} batches are drawn and dropped. That is exact where it gives the same again; a "
            "DataLoader over a data set with indices needs none of it, nor does a loader with state_dict",
            ShardwrightWarning,
            stacklevel=5,
        )
        found = sum(1 for _ in itertools.islice(iterator, count))
        if found < count:
            raise InputError(
                f"the checkpoint stands behind {count} batches, but this loader has {found}; {AGAIN}"
            )


class Walk:
    """One pass over a loader. ``place``: behind the batch that it gave last, or behind the pass."""

    def __init__(
        self,
        iterator: Iterator[Any],
        after: Callable[[int], Place] | None,
        at_end: Callable[[int], Place] | None = None,
    ) -> None:
        self._iterator, self._after, self._at_end = iterator, after, at_end
        self._count = 0
        self.place: Place | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self._at_end is not None:
                self.place = self._at_end(self._count)
            raise
        self._count += 1
        if self._after is not None:
            self.place = self._after(self._count)
        return batch

    def close(self) -> None:
        """Close an iterator that was made here."""
        close = getattr(self._iterator, "close", None)
        if self._after is not None and callable(close):
            close()


def _has_state(loader: object) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


# -- data sets with indices ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Given:
    """A data set with indices, and how its user wants it read."""

    dataset: Any
    options: Mapping[str, Any]
    batch: int | None = None  # None: the plan's
    drops_last: bool = False
    shuffles: bool = True
    seed: int | None = None  # None: the executor's

    @property
    def is_shardable(self) -> bool:
        """Whether a batch of some of the samples is a part of the batch of all."""
        return self.options["collate_fn"] in (default_collate, default_convert)


def _sampled(loader: Any) -> Given | None:
    """Return what there is to read by indices, None where a loader has to be iterated."""
    if isinstance(loader, DataLoader):
        return _of_torch(cast("DataLoader[Any]", loader))
    is_torch = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    has_both = hasattr(loader, "__getitem__") and hasattr(loader, "__len__")
    if not has_both or (isinstance(loader, Iterable) and not is_torch):
        return None
    return Given(loader, {"collate_fn": default_collate, "num_workers": 0})


def _of_torch(given: DataLoader[Any]) -> Given | None:
    """Return the same of torch's loader, where it reads each sample once, in order or shuffled."""
    sampler: Any = given.sampler
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise InputError(
            f"train gives each rank its samples of the global batch, but a DistributedSampler for "
            f"{sampler.num_replicas} replicas has taken them apart before; use shuffle=True and the global batch size"
        )
    if not _reads_each_once(given) or _has_state(given):
        return None
    by_batch: Any = given.batch_sampler
    names = (*OPTIONS, *OF_WORKERS) if given.num_workers else OPTIONS
    generator = given.generator or getattr(sampler, "generator", None)
    return Given(
        given.dataset,
        {name: getattr(given, name) for name in names},
        by_batch.batch_size,
        by_batch.drop_last,
        type(sampler) is RandomSampler,
        None if generator is None else generator.initial_seed(),
    )


def _reads_each_once(given: DataLoader[Any]) -> bool:
    """Whether a loader's samplers are torch's, for all samples of its data set in order or shuffled."""
    dataset, sampler = cast(Any, given.dataset), cast(Any, given.sampler)
    if type(sampler) not in (RandomSampler, SequentialSampler) or not hasattr(dataset, "__len__"):
        return False
    is_whole = type(given.batch_sampler) is BatchSampler and len(sampler) == len(dataset)
    return is_whole and not getattr(sampler, "replacement", False)


class Samples:
    """A data set's samples, of each batch only what this rank needs; every pass is an epoch."""

    def __init__(
        self, reader: Reader, loader: Any, given: Given, needed: inputs.Needed, shards: bool
    ) -> None:
        self.reader, self.loader, self.given, self.shards = reader, loader, given, shards
        self.resume = True
        self.num_workers: int = given.options["num_workers"]
        self.size = len(given.dataset)
        if not self.size:
            raise InputError("a data set to train on has samples, but this one is empty; fill it")
        self._seed = reader.seed if given.seed is None else given.seed
        rows = needed.rows if shards and needed.rows is not None else tuple(range(needed.batch))
        self._order = _Order(self.size, given, needed.batch, rows)
        self._has_parts = len(rows) < needed.batch
        self._loader: DataLoader[Any] | None = None

    def __iter__(self) -> Walk:
        start = self.reader.start(SAMPLES, self.size, self._seed, resume=self.resume)
        self._order.start = start
        iterator = iter(self.reading(start.seed))
        batch = self._order.batch

        def after(count: int) -> Place:
            return replace(start, done=min(start.done + count * batch, self.size))

        def at_end(count: int) -> Place:
            del count  # the rest of a batch that is dropped is done, too
            return replace(start, done=self.size)

        return Walk(self._parts(iterator, start.done), after, at_end)

    def _parts(self, iterator: Iterator[Any], done: int) -> Iterator[Any]:
        """Say of a batch that it is a part, where it is: all are that are as long as planned."""
        for batch in iterator:
            is_part = self._has_parts and self._order.is_planned(done)
            done += self._order.batch
            yield inputs.Part(batch) if is_part else batch

    def reading(self, seed: int) -> DataLoader[Any]:
        """Return torch's loader of it, one and the same for all epochs: workers may stay."""
        if self._loader is None:
            options = dict(self.given.options)
            collate = options.pop("collate_fn")
            self._loader = DataLoader(
                _Seeded(self.given.dataset, seed),
                batch_sampler=cast(Any, self._order),
                collate_fn=cast(Any, _Collate(collate, seed)),
                generator=torch.Generator().manual_seed(seed),  # not the process's own
                **options,
            )
        return self._loader


class _Order:
    """Lists of (epoch, index), a batch each, from where an epoch is to begin."""

    def __init__(self, size: int, given: Given, planned: int, rows: tuple[int, ...]) -> None:
        self.size, self.given, self.planned, self.rows = size, given, planned, rows
        self.batch = given.batch or planned
        self.start = Place(of=SAMPLES)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, order = self.start.epoch, self._order()
        for first in range(self.start.done, self.size, self.batch):
            picked = [int(index) for index in order[first : first + self.batch]]
            if len(picked) < self.batch and self.given.drops_last:
                return
            if self.is_planned(first):
                picked = [picked[row] for row in self.rows]
            yield [(epoch, index) for index in picked]

    def is_planned(self, first: int) -> bool:
        """Whether the batch from here on is as long as planned; what is not is read whole."""
        return min(self.batch, self.size - first) == self.planned

    def _order(self) -> Sequence[int]:
        """Return the order of the epoch: torch's DistributedSampler has the same."""
        if not self.given.shuffles:
            return range(self.size)
        draw = torch.Generator().manual_seed(self.start.seed + self.start.epoch)
        return cast(Sequence[int], torch.randperm(self.size, generator=draw).numpy())


class _Seeded(Dataset[Any]):
    """A data set whose random numbers are those of the epoch and the sample: who prepares it, and what was prepared
    before, changes nothing. One with ``__getitems__`` draws by the first sample of what it is asked for."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], Any]:
        if not keys:
            return keys, []
        several = getattr(self.dataset, "__getitems__", None)
        with _own_random_numbers():
            if several is not None:
                _seed(self.seed, *keys[0])
                return keys, several([index for _, index in keys])
            return keys, [self._one(*key) for key in keys]

    def _one(self, epoch: int, index: int) -> Any:
        _seed(self.seed, epoch, index)
        return self.dataset[index]


class _Collate:
    """Makes a batch, with random numbers of its own."""

    def __init__(self, collate: Callable[[Any], Any], seed: int) -> None:
        self.collate, self.seed = collate, seed

    def __call__(self, drawn: tuple[list[tuple[int, int]], Any]) -> Any:
        keys, samples = drawn
        if not keys:  # a rank that needs no sample
            return {}
        with _own_random_numbers():
            _seed(self.seed, *keys[0], 1)
            batch = self.collate(samples)
        return handed(batch) if get_worker_info() else batch


def _seed(*what: int) -> None:
    number = splitmix64(place_seed(what[0], what[1:]))
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Give the generators of Python, NumPy and torch back as they were; a worker's are nobody else's."""
    if get_worker_info():
        yield
        return
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
