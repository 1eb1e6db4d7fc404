"""Jobs on one host that train on the same data set: each sample is prepared once an epoch, for all of them.

Searches for hyper-parameters do that, and k jobs that each prepare for themselves have a k-th of the cores each
(Mohan et al., PVLDB 14(5), 2021, section 6.3). There, a job that dies while others wait for what it should prepare
stalls them all. Here whoever is free prepares what comes next, and takes over from who died.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import sys
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwright.caching.board import JOB, WORKER, Board, Staged, Stuck
from shardwright.caching.home import NO_SPACE
from shardwright.caching.parcels import packed, unpacked
from shardwright.errors import InputError, ShardwrightWarning
from shardwright.runtime.lifeline import die_with_launcher
from shardwright.runtime.scratch import claim_multiprocessing

_PAUSES = (5e-4, 0.01)  # seconds of the first and the longest sleep of who waits
_REAP_SECONDS = 0.1  # between looks for the dead, while waiting


class Samples(Protocol):
    """A map-style data set."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def __getitem__(self, index: int) -> Any:
        """Return one, prepared and augmented."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How jobs share what they prepare: ``name``, ``seed``, ``chunk`` and ``depth`` are alike for all of them.

    ``chunk`` samples are prepared and taken at a time, and ``depth`` chunks lie in memory at most. The first epoch
    begins when ``jobs`` jobs are there. ``patience``: seconds without any progress after which nobody waits for a job
    any longer.
    """

    name: str
    seed: int = 0
    chunk: int = 16
    depth: int = 16
    jobs: int = 1
    patience: float = 30.0
    folder: Path | None = None

    def __post_init__(self) -> None:
        if (
            not self.name
            or min(self.chunk, self.depth, self.jobs) < 1
            or not 0 <= self.seed < 1 << 63
            or not self.patience > 0
        ):
            raise InputError(
                "jobs share by a name, at least one sample and one chunk at a time, with a seed from 0 to 2^63 - 1 and "
                f"patience of more than 0 s, not {self}; change it"
            )


class SharedLoader:
    """One job's batches of samples that all jobs of a name share; each iteration is one epoch.

    All samples come once in each epoch, in an order that is new in every epoch and alike for all jobs; batches are
    each job's own. ``workers`` processes prepare, or none: then the job does when it has to wait. Random numbers of
    Python, NumPy and torch that preparing draws are seeded by epoch and chunk, and are the job's own again
    afterwards. ``collate`` makes a batch of a list of samples. ``prepared``, ``taken`` and ``alone`` count chunks
    that this job prepared for all, took, and had to prepare for itself.
    """

    def __init__(
        self,
        dataset: Samples,
        sharing: Sharing,
        *,
        batch_size: int,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] = list,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1 or not len(dataset) or workers < 0:
            raise InputError(
                f"jobs share batches of 1 sample or more of a data set that has some, by 0 workers or more, not batches "
                f"of {batch_size} of {len(dataset)} samples by {workers}; change it"
            )
        self._work = _Work(dataset, sharing)
        self._sharing, self._batch = sharing, batch_size
        self._collate, self._drop = collate, drop_last
        self._board = self._work.board()
        self._board.live(JOB)
        self.prepared = self.taken = self.alone = 0
        self._next, self._is_stuck = 0, False
        context = multiprocessing.get_context("forkserver")
        self._workers: list[BaseProcess] = [
            context.Process(target=_prepare_for_ever, args=(self._work,), daemon=True)
            for _ in range(workers)
        ]
        self._end = weakref.finalize(self, _end, self._board, self._workers, os.getpid())
        if workers:
            claim_multiprocessing()
        for worker in self._workers:
            worker.start()

    def __enter__(self) -> SharedLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the other jobs to themselves."""
        self._end()

    def __len__(self) -> int:
        count = len(self._work.dataset)
        return count // self._batch if self._drop else -(-count // self._batch)

    def __iter__(self) -> Iterator[Any]:
        try:
            first = self._board.begin_epoch(self._next)
            self._is_stuck = False
        except Stuck as error:
            self._do_without(error)
            first = self._next
        self._next = first + self._work.chunks
        held: list[Any] = []
        for chunk in range(first, self._next):
            held += self._any_samples(chunk)
            while len(held) >= self._batch:
                yield self._collate(held[: self._batch])
                del held[: self._batch]
        if held and not self._drop:
            yield self._collate(held)

    def _any_samples(self, chunk: int) -> list[Any]:
        """Return the samples of a chunk, by whatever way there is."""
        if not self._is_stuck:
            try:
                return self._samples(chunk)
            except Stuck as error:
                self._do_without(error)
        self.alone += 1
        return self._copied(chunk)

    def _do_without(self, error: Stuck) -> None:
        """Prepare alone until the next epoch."""
        if not self._is_stuck:
            warnings.warn(
                f"{error}; until then each prepares for itself", ShardwrightWarning, stacklevel=4
            )
        self._is_stuck = True

    def _samples(self, chunk: int) -> list[Any]:
        """Return the samples of a chunk, when somebody has prepared it."""
        board, patience = self._board, _Patience(self._board, self._sharing.patience)
        has_begun = False
        while True:
            try:
                staged = board.look(chunk)
            except LookupError:
                return self._by_itself(chunk)
            if staged is not None:
                return self._take(chunk, staged)
            patience.look()
            has_begun = has_begun or board.begin(self._sharing.jobs, patience.is_over)
            if self._prepares() and self._work.prepare_one(board):
                self.prepared += 1
            elif patience.is_over:
                late = board.put_aside(chunk)
                if not late:
                    return self._by_itself(chunk)
                self._warn(f"{late} job(s) that took nothing")
                patience.begin()
            else:
                patience.sleep()

    def _prepares(self) -> bool:
        return not any(worker.is_alive() for worker in self._workers)

    def _take(self, chunk: int, staged: Staged) -> list[Any]:
        if not staged.length:
            return self._by_itself(chunk)
        data = bytearray(staged.length)
        try:
            with self._board.file_of(staged.slot).open("rb", buffering=0) as file:
                count = file.readinto(data)
        except FileNotFoundError:
            count = 0  # this job was put aside meanwhile
        if count != staged.length or zlib.crc32(data) != staged.check:
            return self._by_itself(chunk)
        self._board.done(chunk)
        self.taken += 1
        return unpacked(data)

    def _by_itself(self, chunk: int) -> list[Any]:
        """Prepare a chunk for this job alone, as it would have been for all."""
        found = self._copied(chunk)
        self._board.done(chunk)
        self.alone += 1
        return found

    def _copied(self, chunk: int) -> list[Any]:
        """Prepare a chunk, made of what it would be made of had another job prepared it."""
        return unpacked(bytearray(b"".join(packed(self._work.samples(chunk)))))

    def _warn(self, whom: str) -> None:
        warnings.warn(
            f"{whom} for {self._sharing.patience:.0f} s prepare for themselves until their next epoch; "
            f"the others of {self._sharing.name!r} go on",
            ShardwrightWarning,
            stacklevel=4,
        )


class _Patience:
    """Waiting that is over when nothing has moved for a while, and looks for the dead meanwhile."""

    def __init__(self, board: Board, seconds: float) -> None:
        self._board, self._seconds = board, seconds
        self._seen: tuple[int, ...] = ()
        self._reap_at = 0.0
        self.begin()

    def begin(self) -> None:
        self._since, self._pause, self.is_over = time.monotonic(), _PAUSES[0], False

    def look(self) -> None:
        now, seen = time.monotonic(), self._board.progress()
        if seen != self._seen:
            self._seen = seen
            self.begin()
        self.is_over = now - self._since > self._seconds
        if now >= self._reap_at:
            self._board.reap()
            self._reap_at = now + _REAP_SECONDS

    def sleep(self) -> None:
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _PAUSES[1])


class _Work:
    """What is to be prepared; workers are given a copy."""

    def __init__(self, dataset: Samples, sharing: Sharing) -> None:
        self.dataset, self.sharing = dataset, sharing
        self.chunks = -(-len(dataset) // sharing.chunk)
        self._order: tuple[int, np.ndarray | None] = (-1, None)

    def board(self) -> Board:
        sharing = self.sharing
        agreed = (len(self.dataset), sharing.chunk, sharing.seed, sharing.depth)
        return Board(sharing.name, agreed, sharing.folder)

    def samples(self, chunk: int) -> list[Any]:
        """Prepare a chunk: the same, whoever does, and other random numbers in every epoch."""
        epoch, part = divmod(chunk, self.chunks)
        seed = self.sharing.seed
        if self._order[0] != epoch:
            draw = np.random.default_rng([seed, epoch])
            self._order = epoch, draw.permutation(len(self.dataset))
        order = self._order[1]
        assert order is not None
        wanted = order[part * self.sharing.chunk : (part + 1) * self.sharing.chunk]
        with _seeded(f"{seed} {chunk}"):
            return [self.dataset[int(index)] for index in wanted]

    def prepare_one(self, board: Board) -> bool:
        """Prepare the next chunk for all jobs, where there is one to prepare."""
        taken = board.take()
        if taken is None:
            return False
        length = check = 0
        try:
            parts = packed(self.samples(taken[1]))
            length, check = _written(board.file_of(taken[0]), parts)
        except Exception as error:  # noqa: BLE001 - each job meets it where it prepares this chunk for itself
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                warnings.warn(
                    f"no room for prepared samples in {board.place}; jobs prepare for themselves what finds none",
                    ShardwrightWarning,
                    stacklevel=2,
                )
        board.stage(*taken, length, check)
        return True


def _written(path: Path, parts: list[bytes | memoryview]) -> tuple[int, int]:
    """Write a file whole or not at all; return its length and checksum."""
    fresh = path.with_suffix(f"{path.suffix}.new")
    length = check = 0
    try:
        with fresh.open("wb") as file:
            for part in parts:
                file.write(part)
                length, check = length + len(part), zlib.crc32(part, check)
        fresh.rename(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    return length, check


@contextmanager
def _seeded(text: str) -> Iterator[None]:
    """Seed the random numbers of Python, NumPy and torch, and give them back as they were."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    torch = sys.modules.get("torch")
    before = random.getstate(), np.random.get_state()
    before_torch = torch.get_rng_state() if torch else None
    random.seed(number)
    np.random.seed(number % 2**32)
    if torch:
        torch.random.default_generator.manual_seed(number)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if torch:
            torch.set_rng_state(before_torch)


def _prepare_for_ever(work: _Work) -> None:
    """Prepare chunks until the job that this process works for is gone."""
    die_with_launcher()
    board = work.board()
    board.live(WORKER)
    pause = _PAUSES[0]
    while True:
        with suppress(Stuck):
            if work.prepare_one(board):
                pause = _PAUSES[0]
                continue
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])


def _end(board: Board, workers: list[BaseProcess], process: int) -> None:
    if os.getpid() != process:  # a forked child
        return
    started = [worker for worker in workers if worker.pid is not None]
    for worker in started:
        worker.kill()
    for worker in started:
        worker.join()
    board.close()
