"""The input of training, one step ahead.

A thread of its own draws the next batch from a loader, cuts this rank's shards out of it and copies
them to its device, while the step before computes: so a step takes the longer of input and
computation, not their sum. It holds no more batches than it is told to.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from shardwright.errors import InputError, RunError, ShardwrightError
from shardwright.runtime import inputs
from shardwright.runtime.capture import Captured
from shardwright.runtime.cores import leave_share
from shardwright.runtime.loaders import complaint, expect_deaths, raised
from shardwright.runtime.randomness import TURN
from shardwright.runtime.reading import Batches, Reader, Samples, Walk
from shardwright.runtime.standing import Place

Fetch = Callable[[], tuple[inputs.Batch | inputs.Shards | None, Place | None]]
# How long the end of a loop waits for a loader that is in the middle of a batch.
PATIENCE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """One step of ``Executor.train``.

    ``number`` counts from 1, over the whole training. ``loss`` and ``gradient_norm`` are as ``step``
    and ``Executor.gradient_norm`` have them: tensors, so that nothing waits for a device until somebody
    reads them. ``left`` is the number of the batch that has this loss: the same, but in an asynchronous pipeline,
    where it is an earlier one's, or None while the pipeline fills. ``outputs`` are those that were asked for. ``input_seconds`` is how long the step stood
    still because its batch was not there yet.
    """

    number: int
    left: int | None
    loss: Tensor
    gradient_norm: Tensor | None
    outputs: Mapping[str, Tensor]
    input_seconds: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a step is to be fed with, and how long it waited for it; None at the end of the loader.
    ``place``: where in its data training stands behind it."""

    batch: inputs.Batch | inputs.Shards | None
    seconds: float
    place: Place | None = None


class Copier:
    """Makes of a batch what a step needs: this rank's shards on its device, in memory of their own, so
    that the loader may write its batch again.

    A batch that is not as planned is copied as it is: the step sees to it, or says what is wrong.
    """

    def __init__(
        self, cuts: Sequence[inputs.Cut], captured: Captured, device: torch.device
    ) -> None:
        self.cuts, self.captured, self.device = cuts, captured, device
        self.needed = inputs.needed(cuts, captured)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self) -> None:
        """Be called by the thread that copies: each has a current GPU for itself."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def __call__(self, batch: inputs.Batch | inputs.Part) -> inputs.Batch | inputs.Shards:
        """Copy; returns when it is done."""
        cuts, rows = self.cuts, None
        if isinstance(batch, inputs.Part):
            batch, cuts, rows = batch.batch, self.needed.cuts, len(self.needed.rows or ())
        named = inputs.named(batch, self.captured.batch_names)
        if rows is None and not inputs.is_planned(named, self.captured):
            return {name: _copy(value) for name, value in named.items()}
        cut = partial(inputs.cut, cuts, named, self.captured, rows=rows)
        if self._stream is None:
            return inputs.Shards(_own(cut(self.device), named))
        return inputs.Shards(self._to_gpu(cut(None), self._stream))

    def _to_gpu(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream) -> list[Tensor]:
        """Copy by a stream of its own, from pinned memory: beside the kernels, not between them."""
        host = torch.device("cpu")
        pinned = [t if t.device != host or t.is_pinned() else t.pin_memory() for t in tensors]
        if any(t.device != host for t in pinned):  # made by the current stream of this thread
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            there = [t.to(self.device, non_blocking=True, copy=True) for t in pinned]
        stream.synchronize()  # this thread has time; nobody else waits
        return there


class Feed:
    """Batches of a loader, fetched by a thread while ``ahead`` of them at most wait to be taken; with
    0 there is no thread, and they are fetched when they are asked for.

    ``draws``: whether steps use the generators of the process, so that a loader which may do so too
    must take turns with them. A loader with worker processes of its own draws there.
    """

    def __init__(
        self,
        loader: Batches | Samples,
        copier: Copier,
        *,
        rank: int = 0,
        ahead: int = 1,
        draws: bool = False,
    ) -> None:
        if ahead < 0:
            raise InputError(
                f"batches are fetched 0 or more steps ahead, not {ahead}; 1 hides the input behind "
                "the step before, 0 fetches when a step needs it"
            )
        self._loader: Batches | Samples | None = loader
        self._copier, self._rank, self._ahead = copier, rank, ahead
        takes_turns = draws and ahead > 0 and not loader.num_workers
        self._turn = TURN if takes_turns else contextlib.nullcontext()
        self._iterator: Walk | None = None
        self._number = 0
        self._waiting: deque[Fetch] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        # Here, not in the thread: loaders start their workers and seed themselves at this point.
        loader, self._loader = self._loader, None
        if loader is None:
            raise RuntimeError("a feed can be entered once")
        try:
            self._iterator = iter(loader)
        except Exception as error:  # noqa: BLE001  # whatever a loader raises
            found = self._explained(error)
            raise found from found.__cause__
        expect_deaths()
        if self._ahead:
            self._thread = threading.Thread(target=self._run, name="input", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Fetched]:
        while True:
            begin = time.perf_counter()
            batch, place = self._take()()
            yield Fetched(batch, time.perf_counter() - begin, place)
            if batch is None:
                return

    def close(self) -> None:
        """End the thread, and an iterator that was made here. A loader in the middle of a batch is
        waited for, some seconds at most."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                warnings.warn(
                    f"the loader still makes batch {self._number}, {PATIENCE:.0f} s after training "
                    "ended; it is left to itself",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._thread = None
        else:
            self._end()

    # -- the user's side ---------------------------------------------------------------------------

    def _take(self) -> Fetch:
        """Return what gives the next batch, or raises what the loader raised."""
        if not self._ahead:
            return self._fetch()
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            taken = self._waiting.popleft()
            self._changed.notify_all()
            return taken

    # -- the thread's side -------------------------------------------------------------------------

    def _run(self) -> None:
        """Fetch whenever there is room."""
        leave_share()
        is_over = False
        while not is_over:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._waiting) < self._ahead)
                if self._closed:
                    break
            fetched = self._fetch()
            is_over = isinstance(fetched, _Over)
            with self._changed:
                if not self._closed:
                    self._waiting.append(fetched)
                self._changed.notify_all()
        self._end()

    def _fetch(self) -> Fetch:
        """Draw a batch and copy it; what goes wrong is for the step that would have had it."""
        assert self._iterator is not None  # between entering and the end
        try:
            self._copier.begin()
            with self._turn:
                batch = next(self._iterator)
            ready, place = self._copier(batch), self._iterator.place
            del batch
        except StopIteration:
            return _Over(self._iterator.place)
        except BaseException as error:  # noqa: BLE001  # raised again by who takes it
            return _Over(None, self._explained(error))
        self._number += 1
        return lambda: (ready, place)

    def _explained(self, error: BaseException) -> BaseException:
        where = f"batch {self._number} (from 0) of the loader"
        if isinstance(error, ShardwrightError):
            error.add_note(f"in {where}")
            return error
        # Raised in the thread it is the loader's; without one it may be a handler's of signals.
        ends = self._thread is not None and not isinstance(error, KeyboardInterrupt)
        if not (ends or isinstance(error, Exception)):
            return error
        words = complaint(error, self._rank, where)
        found = RunError(words, rank=self._rank, instruction="input")
        found.__cause__ = error
        return found

    def _end(self) -> None:
        iterator, self._iterator = self._iterator, None
        try:
            if iterator is not None:
                iterator.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever the user's end of it raises
            kind, words, place = raised(error)
            at = f", at {place}" if place else ""
            warnings.warn(
                f"the loader raised {kind} when it was closed behind batch {self._number - 1}: {words}{at}; what was "
                "trained is unharmed, see that it ends by itself",
                RuntimeWarning,
                stacklevel=2,
            )


class Trainee(Protocol):
    """What ``train`` needs of an executor."""

    outputs: dict[str, Tensor]
    reader: Reader
    left: int | None

    @property
    def gradient_norm(self) -> Tensor | None:
        """The last step's, before clipping."""
        ...

    @property
    def steps(self) -> int:
        """How many were taken."""
        ...

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether some rank was, as far as all know without waiting for a device."""
        ...

    def step(self, batch: inputs.Batch | inputs.Shards, outputs: Sequence[str] = ()) -> Tensor:
        """Take a step."""
        ...


def train(executor: Trainee, feed: Feed, outputs: Sequence[str]) -> Iterator[TrainingStep]:
    """Take a step on every batch, and yield it."""
    with feed:
        for fetched in feed:
            loss = None if fetched.batch is None else executor.step(fetched.batch, outputs)
            executor.reader.place = fetched.place
            if loss is None:
                return
            yield TrainingStep(
                number=executor.steps,
                left=executor.left,
                loss=loss,
                gradient_norm=executor.gradient_norm,
                outputs=executor.outputs,
                input_seconds=fetched.seconds,
            )
            if executor.is_asked_to_stop:
                return


@dataclass(frozen=True, slots=True)
class _Over:
    """Takes the place of a batch that there is not; ``place``: behind the last one."""

    place: Place | None
    error: BaseException | None = None

    def __call__(self) -> tuple[None, Place | None]:
        if self.error is not None:
            raise self.error
        return None, self.place


def _own(tensors: Sequence[Tensor], named: Mapping[str, Any]) -> list[Tensor]:
    """Return tensors in no memory of the batch that they were cut from."""
    theirs = {t.untyped_storage().data_ptr() for t in named.values() if isinstance(t, Tensor)}
    return [t.clone() if t.untyped_storage().data_ptr() in theirs else t for t in tensors]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
