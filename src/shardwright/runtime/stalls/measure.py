"""Measure where a training step waits for its input, by differences between phases.

After Mohan et al. (PVLDB 14(5), 2021, section 4.2): one batch again and again gives the rate of computation, data in
memory add what preparation costs, data out of memory what fetching does. Timers inside a script cannot tell these
apart, and with several ranks one rank's stall looks like another's communication.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch.distributed as dist

from shardwright.core.stalls import ALIKE, LEAST_BATCHES, DataFiles, InputRates, Stalls
from shardwright.errors import InputError
from shardwright.runtime.agreement import gathered
from shardwright.runtime.cores import RANKS, of_host
from shardwright.runtime.loaders import expect_deaths
from shardwright.runtime.stalls import pages
from shardwright.runtime.stalls.account import Account, accounting
from shardwright.runtime.stalls.copies import saved_by_pinning, wait_for_device
from shardwright.runtime.stalls.replay import LockWatch, Recorded, RecordedStream, rebuilt
from shardwright.runtime.stalls.source import Loader, Source, kept

# Steps in front of a measurement: what is made in the first ones (buffers, compiled code) is no part of a rate.
WARM = 3
MOST = 200  # batches of a phase
# Steps with cold and with cached data in turns, the least of each: others may take the cores of one, or of the machine
# for some seconds, which would count as a stall.
TURNS = 2
# The passes over the picked batches: three in this process, two of the loader alone, these turns with the step.
PASSES = 5 + 2 * TURNS
# So often a queue is left to fill, and after so many seconds it is taken to be full.
PAUSES, MOST_PAUSE = 3, 0.5
# Blocked for a larger share of the time in which it prepares, a loader waits for something that is not in our pages.
MATERIAL = 0.05
NO_FILES = (
    "no file was seen to be read, so data could not be put out of memory: what the loader waits without working "
    "counts as fetching; name files or folders with data= (--data) if it reads some"
)
# How a step with data in memory is known, the best first: see Stalls.cached_by.
PHASE, REPLAY, RATES = KNOWN_BY = ("phase", "replay", "rates")

Tell = Callable[[str, float], None]


@dataclass
class _Phases:
    """Seconds of one batch in each phase, of this rank."""

    resident: float = 0.0
    prepare: float = 0.0  # of one worker, without waiting for anything
    cached_alone: float = 0.0
    cold_alone: float = 0.0
    fetched: float = 0.0  # by one process alone, which has a core for itself
    blocked: float = 0.0
    cached: float = 0.0
    cold: float = 0.0
    usual: float = 0.0  # as cold, in the mean of turns
    taken: float = 0.0  # by which a step is longer whose batch lies ready


class Analysis:
    """One analysis; ``run`` does it."""

    def __init__(
        self, loader: Loader, step: Callable[[Any], object], data: Iterable[str], tell: Tell
    ) -> None:
        self.source, self.step, self.tell = Source(loader), step, tell
        self.files = pages.files_under(data)
        self.batch: Any = None
        self.count = self.few = LEAST_BATCHES
        self.notes: list[str] = []
        self.evicted = 0.0
        self.apart = 1.0  # longest over shortest turn of steps
        self.noted: Recorded | RecordedStream | None = None
        self.keeps_lock = False

    def run(self, seconds: float, batches: int | None) -> Stalls:
        """Measure all phases within about so many seconds."""
        times = _Phases()
        expect_deaths()
        self.tell("one batch again and again", 0.0)
        self._begin(seconds, batches)
        times.resident = self._resident()
        self.tell("preparing batches here", 0.2)
        self._probe(times)
        self.tell("the loader alone", 0.4)
        self._alone(times)
        cached_by = self._known_by(times)
        self._train(times, cached_by)
        is_ahead = self.source.workers > 0 or (not self.source.tells_workers and _overlaps(times))
        is_ahead = all(gathered(is_ahead))  # what ranks do together they do as often
        times.taken = self._taken(times) if is_ahead else 0.0
        if cached_by == REPLAY:  # a step is longer by fetching a batch at most
            times.cached = max(times.cached, times.cold - _fetched(times))
        elif cached_by == RATES:
            times.cached = _modelled(times, self.source.workers, is_ahead)
        self.tell("done", 1.0)
        return self._found(times, is_ahead, cached_by)

    # -- phases --------------------------------------------------------------------------------------

    def _begin(self, seconds: float, batches: int | None) -> None:
        """Draw the resident batch and choose how many batches a phase takes."""
        begin = time.perf_counter()
        self.source.pick(1)
        first = list(islice(self.source.some(workers=0), 1))
        if not first:
            raise InputError("the loader gives no batch; pass one that has data")
        self.batch = kept(*first)
        if not self.source.samples_of(self.batch):
            raise InputError(
                "the loader's first batch has no samples, and rates are of samples; see that its data set has some"
            )
        drawn = time.perf_counter()
        for batch in self._again(WARM):
            self.step(batch)
        wait_for_device()
        stepped = (time.perf_counter() - drawn) / WARM
        many, few = (batches, batches) if batches else self._sizes(seconds, drawn - begin, stepped)
        wanted = many + self._skipped + self.source.ahead
        self.source.pick(wanted)
        have = len(self.source.picked) or sum(1 for _ in islice(self.source.whole(), wanted))
        self.count = min(gathered(have))
        self.few = min(self.count, few)
        if self.count < LEAST_BATCHES:
            raise InputError(
                f"the loader gives {self.count} batches, and a rate needs {LEAST_BATCHES}; give it more data or "
                "smaller batches"
            )

    def _sizes(self, seconds: float, drawn: float, stepped: float) -> tuple[int, int]:
        """Return the batches of a pass with workers, where one takes the longer of a step and their share of drawing it,
        and of one in this process."""
        here, workers = drawn + stepped, self.source.workers
        each = max(stepped, drawn / workers) if workers else here
        many, few = (max(LEAST_BATCHES, seconds / PASSES / one) for one in (each, here))
        return int(min(MOST, many)), int(min(MOST, few))

    def _resident(self) -> float:
        given = self._again(self.count)
        _together()
        begin = time.perf_counter()
        for batch in given:
            self.step(batch)
        wait_for_device()
        return (time.perf_counter() - begin) / self.count

    def _again(self, times: int) -> list[Any]:
        """Return the resident batch so many times, in containers of their own: a step may take out what it needs."""
        return [rebuilt(self.batch, lambda tensor: tensor) for _ in range(times)]

    def _probe(self, times: _Phases) -> None:
        """Draw batches in this process, where working and being blocked can be told apart."""
        before = pages.mapped()
        with pages.listening() as opened:
            with LockWatch() as watch:
                look = self._drawn_here(LEAST_BATCHES)
            seen = pages.data_files(set(opened) | (pages.mapped() - before))
            if seen or self.files:  # all that are read later, too
                self._drawn_here(self.count)
                seen = pages.data_files(set(opened) | (pages.mapped() - before))
        self.keeps_lock = watch.keeps_lock
        self.files = self.files or seen
        if self.files:
            self._evict()
        else:
            self.notes.append(NO_FILES)
        first = self._drawn_here(self.few)
        second = self._drawn_here(self.few, record=True)
        times.prepare = min(first.work, second.own, second.work)
        # Without files there is only what was waited for at first; later the loader may have it in memory.
        times.blocked = second.blocked if self.files else first.blocked
        if not self.files and first.blocked < look.blocked / 2:
            times.blocked = look.blocked
        times.cached_alone = second.own
        times.cold_alone = max(first.own, second.own) if self.files else second.own
        times.fetched = max(0.0, first.own - second.own) if self.files else 0.0

    def _drawn_here(self, batches: int, *, record: bool = False) -> Account:
        """Return the seconds of one of so many batches drawn without workers, the first left out."""
        given = self.source.some(workers=0)
        if record:
            given, self.noted = self.source.recorded()
        drawn = iter(given)
        next(drawn, None)
        with accounting() as account:
            got = max(1, sum(1 for _ in islice(drawn, batches - 1)))
        return Account(own=account.own * self.source.lanes / got, work=account.work / got)

    def _alone(self, times: _Phases) -> None:
        """Time the loader with its workers and nobody who computes; one without workers or files was timed before."""
        if not self.source.workers or not self.files:
            return
        self._evict()
        cold, cached = self._rest(self.source.some()), self._rest(self.source.some())
        workers = self.source.workers
        times.cold_alone = max(cold, cached) * workers
        times.cached_alone = cached * workers

    def _known_by(self, times: _Phases) -> str:
        """Return how steps with data in memory are known: where files are not all that is waited for, preparing is
        replayed, and where nobody can do that, only rates tell."""
        if self.files and times.blocked <= MATERIAL * times.cached_alone:
            own = PHASE
        else:
            can = self.source.workers and self.noted is not None and self.noted.spent
            own = REPLAY if can else RATES
        return max(gathered(own), key=KNOWN_BY.index)  # what ranks do together they do alike

    def _train(self, times: _Phases, cached_by: str) -> None:
        """Time steps with data out of memory and in memory, in turns."""
        cold, cached = list[float](), list[float]()
        for turn in range(TURNS):
            self.tell("training with data out of memory, and in memory", 0.5 + 0.4 * turn / TURNS)
            self._evict()
            cold.append(self._with_step(self.source.some()))
            if cached_by == PHASE:  # they are there since
                cached.append(self._with_step(self.source.some()))
            elif cached_by == REPLAY and self.noted is not None:
                given = self.source.replayed(self.noted, self.count, self.keeps_lock)
                cached.append(self._with_step(given))
        times.cold, times.cached = min(cold), min(cached, default=0.0)
        times.usual = statistics.mean(cold)
        self.apart = max(gathered(max(max(each) / min(each) for each in (cold, cached) if each)))

    def _with_step(self, given: Iterable[Any]) -> float:
        _together()
        return self._rest(given, self.step)

    def _taken(self, times: _Phases) -> float:
        """Return by how much a step is longer that takes a batch which lies ready: the loader is left to itself until
        its queue is full, which is emptied while its workers go on."""
        drawn, queued = iter(self.source.some()), max(1, self.source.ahead)
        next(drawn, None)
        spent: list[float] = []
        for place in range(min(PAUSES * queued, self.count - 1)):
            if not place % queued:
                time.sleep(min(MOST_PAUSE, 2 * times.cold_alone * max(1, self.source.prefetch)))
            begin = time.perf_counter()
            for batch in islice(drawn, 1):
                self.step(batch)
            wait_for_device()
            spent.append(time.perf_counter() - begin)
        return max(0.0, statistics.median(spent) - times.resident)

    def _rest(
        self, given: Iterable[Any], step: Callable[[Any], object] = lambda batch: None
    ) -> float:
        """Return the seconds of a batch. Those are left out that were ready before anybody asked, and the last, behind
        which workers have nothing to do: taking a batch is cheaper then.

        Workers that are equally fast deliver together, so both parts are whole rounds of them.
        """
        workers, skipped = max(1, self.source.workers), self._skipped
        if skipped > self.count // 2:
            skipped = self.count // 2 // workers * workers
        rest = self.count - skipped
        rest -= min(self.source.ahead, rest // 2)
        timed = max(1, rest // workers) * workers
        drawn: Iterator[Any] = iter(given)
        for batch in islice(drawn, skipped):
            step(batch)
        wait_for_device()
        begin, got = time.perf_counter(), 0
        for batch in islice(drawn, timed):
            step(batch)
            got += 1
        wait_for_device()
        return (time.perf_counter() - begin) / max(got, 1)

    @property
    def _skipped(self) -> int:
        """Batches in front of those that are timed, in whole rounds of the workers."""
        workers = max(1, self.source.workers)
        return -(-(self.source.ahead + WARM) // workers) * workers

    def _evict(self) -> None:
        if self.files:
            pages.evict(self.files)
            self.evicted = 1 - pages.resident_share(self.files)

    # -- what it means -------------------------------------------------------------------------------

    def _found(self, times: _Phases, is_ahead: bool, cached_by: str) -> Stalls:
        samples, workers = self.source.samples_of(self.batch), self.source.workers
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        cores = _cores(ranks)
        rates = _rates(times, samples, workers, max(1.0, cores / ranks), is_ahead)
        figures = zip(
            *gathered((times.resident, times.cached, times.cold, times.usual, times.taken)),
            strict=True,
        )
        resident, cached, cold, usual, taken = (max(each) for each in figures)
        # What lies ready costs no more than data in memory do.
        taken = min(taken, max(0.0, cached - resident))
        everybody = gathered((rates.compute, rates.prepare, rates.storage))
        compute, prepare, storage = (min(each) for each in zip(*everybody, strict=True))
        size = sum(_size(path) for path in self.files)
        self._doubt()
        return Stalls(
            ranks=ranks,
            workers=workers,
            cores=cores,
            batch_samples=samples,
            steps=self.count,
            resident_seconds=resident,
            cached_seconds=cached,
            cold_seconds=cold,
            usual_seconds=usual,
            rates=InputRates(
                compute=compute,
                prepare=prepare,
                storage=storage,
                crowd=rates.crowd,
                is_ahead=rates.is_ahead,
                taking=taken / samples,
            ),
            files=DataFiles(count=len(self.files), bytes=size, evicted=self.evicted)
            if self.files
            else None,
            dataset_samples=self.source.dataset_samples,
            dataset_bytes=self._dataset_bytes(size),
            prefetch=self.source.prefetch,
            pinning_seconds=max(gathered(saved_by_pinning(self.batch))),
            cached_by=cached_by,
            notes=tuple(self.notes),
        )

    def _doubt(self) -> None:
        """Note what makes figures less exact than they look."""
        error = 0.0 if self.noted is None else _error(self.noted.spent)
        if error > MATERIAL:
            self.notes.append(
                f"batches take unlike times to prepare, so that P is known within {error:.0%} only; more of them "
                "(--batches) tell more"
            )
        if self.apart > ALIKE:
            self.notes.append(
                f"steps that do the same took {self.apart - 1:.0%} longer in one turn than in another, so that stalls are "
                "known no better; end what else runs, unless the data set keeps in memory what it has read"
            )
        if self.files and self.evicted < 0.9:
            self.notes.append(
                f"only {self.evicted:.0%} of the pages could be put out of memory (dirty, mapped by others, or not "
                "yours): waiting for storage is counted too low"
            )

    def _dataset_bytes(self, seen: int) -> int:
        """Return the bytes of the whole data set, taken from the files of the samples that were drawn."""
        drawn = sum(len(one) if isinstance(one, list) else 1 for one in self.source.picked)
        files = len(self.files)
        if not files or not drawn or files < drawn:  # several samples a file: those seen may be all
            return seen
        return round(seen / files * self.source.dataset_samples)


def _error(spent: list[float]) -> float:
    """Return the standard error of a mean, as a share of it."""
    if len(spent) < LEAST_BATCHES or not (mean := statistics.mean(spent)):
        return 0.0
    return statistics.stdev(spent) / mean / math.sqrt(len(spent))


def _overlaps(times: _Phases) -> bool:
    """Return whether loader and step together take less than both in turns: it has threads of its own."""
    both = times.resident + times.cold_alone
    overlap = both - times.cold
    return overlap > max(MATERIAL * both, min(times.resident, times.cold_alone) / 2)


def _rates(times: _Phases, samples: int, workers: int, cores: float, is_ahead: bool) -> InputRates:
    """Return the rates that one batch's seconds of each phase mean; preparing takes cores."""
    workers, fetch = max(1, workers), _fetched(times)
    return InputRates(
        compute=samples / times.resident,
        prepare=_each(samples * min(workers, cores), times.prepare),
        storage=_each(samples * workers, fetch),
        crowd=max(1.0, workers / cores),
        is_ahead=is_ahead,
    )


def _fetched(times: _Phases) -> float:
    """Return the seconds that one worker waits for the data of a batch, 0 where they are too few to be told. Workers
    that outnumber cores are slower with data in memory, too, so that their difference is too small."""
    fetch = max(times.cold_alone - times.cached_alone, times.fetched) + times.blocked
    return fetch if fetch >= MATERIAL / 5 * times.cold_alone else 0.0


def _modelled(times: _Phases, workers: int, is_ahead: bool) -> float:
    """Return the seconds of a step that never waits for storage, where no phase could show it: costs say which
    share of the stall is whose."""

    def stall(fetch: float) -> float:
        made = (fetch + times.prepare) / max(1, workers)
        return max(times.taken, made - times.resident) if is_ahead else made

    whole = stall(_fetched(times))
    share = stall(0.0) / whole if whole > 0 else 0.0
    return times.resident + share * max(0.0, times.cold - times.resident)


def _each(samples: float, seconds: float) -> float:
    return samples / seconds if seconds > 0 else math.inf


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


def _cores(ranks: int) -> int:
    """Return the cores of the hosts of so many ranks, of which each has as many as this one."""
    here = os.environ.get(RANKS, "")
    return len(of_host()) * max(1, ranks // int(here) if here.isdigit() and int(here) else 1)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
