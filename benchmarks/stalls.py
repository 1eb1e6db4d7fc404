"""How exact the stall analyser is: loaders whose costs are known, found beside given.

    python benchmarks/stalls.py [--seconds 8] [--workers 0,1,2,4] [--ranks 1] [--unseen] [--files]

Items sleep to fetch and keep a core busy to prepare (with and, one of the unseen, without Python's lock free); the step sleeps.
What a sleep, an item's work and a step take by themselves is measured beside it, and stalls are what plain loops lose, in turns
before and after the analysis, the least of each: over a resident batch (T1), over a loader that fetches nothing (T2), over the
whole one (T3).
Rates should be within 5 %, stalls within 10 % (of themselves, or of half a step where they are less), and what binds right in
every case, on an idle machine. ``+`` is how much longer T2 was in the longest turn.
With two ranks every figure is that of the slower, whose step takes a tenth longer.
``--unseen``: loaders of other makes instead, which no estimate was fitted to.
``--files``: items are files that sleep where their page is not in memory, as on a slow disk, so that phases show what is
only modelled where nothing is seen to be read.
The last line is what measuring adds to a step, which should be 2 % at most.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import multiprocessing
import os
import queue
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from shardwright.core.stalls import InputRates
from shardwright.runtime.lifeline import die_with_launcher
from shardwright.runtime.stalls.pages import PAGE, evict
from shardwright.stalls import analyse

BATCH = 4
# Seconds of an item to fetch and prepare, and of a step.
COSTS = {
    "fetching": (0.008, 0.002, 0.006),
    "preparation": (0.002, 0.006, 0.006),
    "computation": (0.002, 0.002, 0.040),
}
CHUNK = bytes(20_000)  # some 20 us of work without the lock
TURNS = 15  # of what measuring costs
LOOP_TURNS, LOOP_SECONDS = 2, 0.7  # of plain loops, before an analysis and after it


def even(index: int) -> float:
    return 1.0


def jittered(index: int) -> float:
    return random.Random(index).uniform(0.2, 1.8)


def tailed(index: int) -> float:
    """Return a factor with a mean of 1, and one in twenty of 10."""
    return 10.0 if random.Random(index).random() < 0.05 else 0.526


Spread = Callable[[int], float]


class Items(Dataset):
    """Items of known costs. They work as decoders do, without Python's lock, or else holding it all the time."""

    def __init__(
        self,
        fetch: float,
        prepare: float,
        spreads: tuple[Spread, Spread] = (even, even),
        is_python: bool = False,
    ) -> None:
        self.fetch, self.prepare, self.spreads, self.is_python = fetch, prepare, spreads, is_python
        self.folder = ""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.folder or self.fetch:
            self.wait(index)
        end = time.thread_time() + self.prepare * self.spreads[1](index)
        while time.thread_time() < end:
            if not self.is_python:
                hashlib.sha256(CHUNK)
        return torch.tensor([float(index)])

    def wait(self, index: int) -> None:
        """Sleep as long as an item's bytes take; its file, where there is one, is slow only where its page is not in memory."""
        if not self.folder:
            time.sleep(self.fetch * self.spreads[0](index))
            return
        file, data = os.open(f"{self.folder}/{index}", os.O_RDONLY), bytearray(PAGE)
        try:
            os.preadv(file, [data], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            time.sleep(self.fetch * self.spreads[0](index))
            os.preadv(file, [data], 0)
        finally:
            os.close(file)

    def remember(self) -> None:
        """Have all files in memory."""
        for index in range(len(self) if self.folder else 0):
            Path(self.folder, str(index)).read_bytes()

    def forget(self) -> None:
        """Put all files out of memory."""
        if self.folder:
            evict(f"{self.folder}/{index}" for index in range(len(self)))


class Stream(IterableDataset):
    """The same without indices; workers share them out."""

    def __init__(self, items: Items) -> None:
        self.items = items

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return map(self.items.__getitem__, range(first, len(self.items), step))


def in_turns(items: Items) -> Iterator[torch.Tensor]:
    """Yield batches as a plain generator does."""
    for place in range(0, len(items), BATCH):
        yield torch.stack([items[place + one] for one in range(BATCH)])


def by_thread(items: Items) -> Iterator[torch.Tensor]:
    """Yield batches that a thread makes ahead."""
    ready: queue.Queue[torch.Tensor] = queue.Queue(2)
    ended = threading.Event()

    def work() -> None:
        for batch in in_turns(items):
            while not ended.is_set():
                try:
                    ready.put(batch, timeout=0.1)
                    break
                except queue.Full:
                    pass
            if ended.is_set():
                return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            yield ready.get()
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True)
class Case:
    """A loader made of items, with so many workers; ``costs`` as in COSTS."""

    name: str
    costs: tuple[float, float, float]
    make: Callable[[Items], Any]
    workers: int = 0
    batch: int = BATCH
    is_ahead: bool = False
    spreads: tuple[Spread, Spread] = (even, even)
    is_python: bool = False
    folder: str = ""

    def items(self, *, fetches: bool = True) -> Items:
        fetch = self.costs[0] if fetches else 0.0
        items = Items(fetch, self.costs[1], self.spreads, self.is_python)
        items.folder = self.folder
        return items


def torch_case(
    name: str, costs: tuple[float, float, float], workers: int, batch: int = BATCH, **options: Any
) -> Case:
    spreads = options.pop("spreads", (even, even))
    wrap, is_python = options.pop("wrap", lambda items: items), options.pop("is_python", False)

    def make(items: Items) -> DataLoader:
        return DataLoader(wrap(items), batch_size=batch, num_workers=workers, **options)

    return Case(name, costs, make, workers, batch, workers > 0, spreads, is_python)


def unseen() -> list[Case]:
    """Return loaders of many makes."""
    fetching, preparing, computing = COSTS.values()
    return [
        torch_case("jitter", (0.004, 0.001, 0.006), 2, spreads=(jittered, jittered)),
        torch_case("tail", (0.001, 0.003, 0.004), 2, spreads=(even, tailed)),
        torch_case("tail ahead", (0.001, 0.001, 0.020), 1, spreads=(tailed, even)),
        torch_case("batch 32", (0.0005, 0.0005, 0.010), 1, 32, shuffle=True),
        torch_case("persistent", preparing, 2, persistent_workers=True, prefetch_factor=1),
        torch_case("stream", fetching, 2, wrap=Stream),
        torch_case("three", (0.002, 0.003, 0.004), 3),
        torch_case("python", preparing, 2, is_python=True),
        Case("generator", (0.003, 0.001, 0.010), lambda items: lambda: in_turns(items)),
        Case("thread", fetching, lambda items: lambda: by_thread(items), is_ahead=True),
        Case("thread idle", computing, lambda items: lambda: by_thread(items), is_ahead=True),
    ]


# -- what is known ---------------------------------------------------------------------------------


def apart(case: Case) -> tuple[float, float]:
    """Return what fetching an item and its work take by themselves: sleeping late, reading the disk and collating included."""
    items, late = case.items(), 0.0
    items.forget()
    for index in range(40):
        begin, work = time.perf_counter(), time.thread_time()
        items.wait(index)
        late += time.perf_counter() - begin
        if not items.folder:  # a sleep's own work is in that of an item below, a cold page's is not
            late -= time.thread_time() - work
        late -= items.fetch * case.spreads[0](index)
    items.remember()
    factors = [case.spreads[0](index) for index in range(400)]
    drawn = iter(DataLoader(items, batch_size=case.batch))
    next(drawn)
    begin = time.thread_time()
    got = sum(1 for _ in islice(drawn, max(3, 80 // case.batch)))
    worked = (time.thread_time() - begin) / got / case.batch
    drawn_factors = [case.spreads[1](index) for index in range(case.batch, case.batch * (got + 1))]
    worked += items.prepare * (
        statistics.mean(map(case.spreads[1], range(400))) - statistics.mean(drawn_factors)
    )
    return items.fetch * statistics.mean(factors) + late / 40, worked


def looped(
    loader: Iterable[Any] | Callable[[], Iterable[Any]],
    step: Callable[[Any], object],
    skip: int = 0,
) -> float:
    """Return the seconds of a batch of a plain loop; a single batch is used again and again."""
    if dist.is_initialized():
        dist.barrier()
    if isinstance(loader, list):
        drawn: Iterator[Any] = itertools.cycle(loader)
    else:
        drawn = iter(loader() if callable(loader) else loader)
    for batch in islice(drawn, skip):
        step(batch)
    begin, got = time.perf_counter(), 0
    for batch in drawn:
        step(batch)
        got += 1
        if got >= 12 and got % 4 == 0 and time.perf_counter() - begin > LOOP_SECONDS:
            break
    return (time.perf_counter() - begin) / got


def slowest(*own: float) -> list[float]:
    """Return each of the ranks' greatest."""
    found = torch.tensor(own, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def turn(case: Case, step: Callable[[Any], object]) -> list[float]:
    """Return the seconds of a step with one batch again and again, without fetching, and whole."""
    skip, seconds = 3 * max(1, case.workers) + 4, [looped([None], step)]
    for fetches in (False, True):
        items = case.items(fetches=fetches)
        items.forget() if fetches else items.remember()
        seconds.append(looped(case.make(items), step, skip))
    return slowest(*seconds)


def row(case: Case, seconds: float, step: Callable[[Any], object], ranks: int) -> str:
    """Return errors of rates and stalls."""
    fetch, prepare = slowest(*apart(case))
    turns = [turn(case, step) for _ in range(LOOP_TURNS)]
    found = analyse(case.make(case.items()), step, seconds=seconds)
    turns += [turn(case, step) for _ in range(LOOP_TURNS)]
    compute, cached, whole = map(min, zip(*turns, strict=True))  # other programs only lengthen
    longer_by = max(one[1] for one in turns) / cached - 1
    workers, cores = max(1, case.workers), found.cores / ranks
    known = InputRates(
        compute=case.batch / compute,
        prepare=min(workers, cores) / prepare,
        storage=workers / fetch,
        crowd=max(1.0, workers / cores),
        is_ahead=case.is_ahead,
    )
    stalls = max(0.0, cached - compute), max(0.0, whole - max(cached, compute))
    errors = [
        found.rates.compute / known.compute - 1,
        found.rates.prepare / known.prepare - 1,
        found.rates.storage / known.storage - 1,
        *(
            (one - other) / max(other, whole / 2)
            for one, other in zip((found.prep_stall, found.fetch_stall), stalls, strict=True)
        ),
    ]
    right = "right" if found.rates.binding(0.0) == known.binding(0.0) else "WRONG"
    if right == "WRONG" and found.rates.binding(0.0) in known.nearly_binding(0.0):
        right = f"as long as {known.binding(0.0)}"
    columns = " ".join(f"{error * 100:+6.1f}%" for error in errors)
    given = f"{compute * 1e3:5.1f} {cached * 1e3:5.1f} +{longer_by:5.1%} {whole * 1e3:5.1f}"
    told = f"{found.resident_seconds * 1e3:5.1f} {found.cached_seconds * 1e3:5.1f} {found.cold_seconds * 1e3:5.1f}"
    return (
        f"{ranks:5d} {case.workers:7d} {case.name:>12} {columns}  {given}  {told}  "
        f"{found.cached_by}, {found.rates.binding(0.0)}, {right}"
    )


def look(
    rank: int,
    ranks: int,
    store: str,
    workers: list[int],
    seconds: float,
    others: bool,
    folder: str,
) -> None:
    """Analyse every loader on one rank of several; the first one tells. Each rank has files of its own."""
    die_with_launcher()
    # Workers begin as a script's do; a process that was spawned spawns its own, each of which imports torch.
    multiprocessing.set_start_method("fork", force=True)
    if folder:
        folder = f"{folder}/{rank}"
        os.mkdir(folder)
        for index in range(4000):
            Path(folder, str(index)).write_bytes(bytes(PAGE))
        os.sync()  # what is dirty stays in memory
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{store}", world_size=ranks, rank=rank)
    known = [torch_case(name, costs, n) for n, (name, costs) in product(workers, COSTS.items())]
    for case in unseen() if others else known:
        case = replace(case, folder=folder)
        wait = case.costs[2] * (1.1 if rank else 1.0)
        told = row(case, seconds, lambda batch, wait=wait: time.sleep(wait), ranks)
        if not rank:
            print(told, flush=True)


# -- what measuring costs --------------------------------------------------------------------------


def files(folder: str) -> Callable[[], Iterator[torch.Tensor]]:
    """Return a loader of small files: each that is opened is heard of while the analyser listens."""
    for number in range(800):
        with open(f"{folder}/{number}", "wb") as file:
            file.write(bytes(4096))

    def loader() -> Iterator[torch.Tensor]:
        for first in range(0, 800, BATCH):
            data = bytearray()
            for number in range(first, first + BATCH):
                with open(f"{folder}/{number}", "rb") as file:
                    data += file.read()
            yield torch.frombuffer(data, dtype=torch.float32)

    return loader


def overhead() -> str:
    """Return what steps of an analysis take beside the same without one: processor time of a step of some 0.2 ms that
    reads files, the least of all turns at each place, so that neither other programs nor their caches count. How
    far two plain loops are apart says how sharp that is."""
    seconds: dict[str, list[list[float]]] = {"before": [], "analysed": [], "after": []}
    with tempfile.TemporaryDirectory() as folder:
        loader, weights, stamps = files(folder), torch.randn(128, 128), list[float]()
        os.sync()  # what is dirty stays in memory

        def step(batch: torch.Tensor) -> None:
            for _ in range(4):
                weights.mm(weights)
            stamps.append(time.thread_time())

        for _ in range(TURNS):
            for name, found in seconds.items():
                stamps.clear()
                if name == "analysed":
                    count = analyse(loader, step, batches=150).steps
                    # A phase with data out of memory, as in the plain loops; the last has them in memory.
                    spent = stamps[-2 * count : -count]
                else:
                    evict(f"{folder}/{number}" for number in range(800))
                    for batch in islice(loader(), 150):
                        step(batch)
                    spent = stamps[:]
                found.append([b - a for a, b in itertools.pairwise(spent[20:150])])
    least = {name: sum(map(min, zip(*turns, strict=True))) for name, turns in seconds.items()}
    plain = (least["before"] + least["after"]) / 2
    return (
        f"a step takes {least['analysed'] / plain - 1:+.2%} of its processor time while it is analysed (two plain loops "
        f"differ by {abs(least['after'] - least['before']) / plain:.2%}; least of {TURNS} turns, a step of "
        f"{plain / 129 * 1e6:.0f} us that opens {BATCH} files)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of one analysis")
    parser.add_argument("--workers", default="0,1,2,4")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--unseen", action="store_true", help="loaders of other makes")
    parser.add_argument("--files", action="store_true", help="items are files of a slow disk")
    chosen = parser.parse_args()
    if chosen.workers:
        print(
            f"{'ranks':>5} {'workers':>7} {'case':>12} {'G':>7} {'P':>7} {'S':>7} {'prep':>7} {'fetch':>7}  "
            f"{'T1':>5} {'T2':>5} {'':>7} {'T3':>5}  {'found':>5} {'':>11}  how T2 is known, what binds"
        )
    workers = [int(one) for one in chosen.workers.split(",") if one]
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        kept = folder if chosen.files else ""
        words = chosen.ranks, store, workers, chosen.seconds, chosen.unseen, kept
        context = multiprocessing.get_context("spawn")
        # None is another's child, whose work would count as its parent's.
        ranks = [context.Process(target=look, args=(rank, *words)) for rank in range(chosen.ranks)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    if chosen.ranks == 1:
        print(overhead())


if __name__ == "__main__":
    main()
