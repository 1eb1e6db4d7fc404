"""Analyses of loaders whose costs are known and far apart. How exact the figures are, benchmarks/stalls.py says."""

import multiprocessing
import os
import queue
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardwright.errors import InputError
from shardwright.runtime.stalls.measure import Analysis, _fetched, _modelled, _Phases
from shardwright.stalls import analyse
from shardwright.verbs.request import Watch


class Items(Dataset):
    def __init__(self, folder=None, fetch=0.0, prepare=0.0, samples=64):
        self.folder, self.fetch, self.prepare, self.samples = folder, fetch, prepare, samples
        for index in range(samples if folder else 0):
            path = folder / f"{index}.bin"
            path.write_bytes(os.urandom(5000))
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        if self.folder:
            (self.folder / f"{index}.bin").read_bytes()
        time.sleep(self.fetch)
        end = time.thread_time() + self.prepare
        while time.thread_time() < end:
            pass
        return torch.tensor([float(index)])


def looked_at(items, compute, workers=0, **options):
    loader = DataLoader(items, batch_size=2, num_workers=workers, shuffle=True)
    return analyse(loader, lambda batch: time.sleep(compute), batches=8, **options)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("costs", "binding"),
    [
        ((0.006, 0.0003, 0.0003), "fetching"),
        ((0.0003, 0.006, 0.0003), "preparation"),
        ((0.0003, 0.0003, 0.030), "computation"),
    ],
)
def test_what_binds_is_found(costs, binding, workers):
    fetch, prepare, compute = costs
    # Others may take the cores of one analysis, not of three.
    tries = (looked_at(Items(fetch=fetch, prepare=prepare), compute, workers) for _ in range(3))
    found = next((one for one in tries if most_waited_for(one) == {binding}), None)
    assert found is not None
    assert (found.batch_samples, found.workers, found.dataset_samples) == (2, workers, 64)


def most_waited_for(found):
    """Return what binds by the rates, and what takes most of a step."""
    waits = {
        "fetching": found.fetch_stall,
        "preparation": found.prep_stall,
        "computation": found.resident_seconds,
    }
    return {found.rates.binding(0.0), max(waits, key=lambda name: waits[name])}


def test_files_are_seen_and_put_out_of_memory(tmp_path):
    told: list[float] = []
    watch = Watch(tell=lambda what, share: told.append(share))
    found = looked_at(Items(tmp_path), 0.001, watch=watch)
    assert found.files is not None
    drawn = found.steps * 2
    assert found.files.count == drawn
    assert found.files.bytes == drawn * 5000
    assert found.dataset_bytes == 64 * 5000
    assert told[0] == 0.0
    assert told[-1] == 1.0
    named = looked_at(Items(tmp_path), 0.001, data=[tmp_path])
    assert named.files is not None
    assert named.files.count == 64


def test_a_loader_without_files_says_so():
    assert "no file was seen" in looked_at(Items(), 0.001).notes[0]


class Kept(Items):
    """Samples that are waited for once, and then lie in the data set's own memory."""

    def __init__(self):
        super().__init__()
        self.kept = set()

    def __getitem__(self, index):
        time.sleep(0 if index in self.kept else 0.005)
        self.kept.add(index)
        return torch.zeros(1)


def test_what_is_waited_for_once_is_waited_for():
    assert looked_at(Kept(), 0.001).rates.storage <= 1.2 / 0.005


class Stream(IterableDataset):
    """Samples that sleep; each worker has its own."""

    def __init__(self, fetch: float, samples: int) -> None:
        self.fetch, self.samples = fetch, samples

    def __iter__(self):
        for index in range(self.samples):
            time.sleep(self.fetch)
            yield torch.tensor([float(index)])


def test_what_a_worker_of_a_stream_waits_counts_once_for_each_worker():
    loader = DataLoader(Stream(0.01, 16), batch_size=2, num_workers=2)
    found = analyse(loader, lambda batch: None, batches=8)
    assert found.rates.storage == pytest.approx(2 / 0.01, rel=0.2)
    assert found.rates.binding(0.0) == "fetching"


def by_thread(seconds):
    """Batches of a thread that makes them ahead."""
    ready = queue.Queue(2)

    def work():
        for _ in range(40):
            time.sleep(seconds)
            ready.put(torch.zeros(2))
        ready.put(None)

    threading.Thread(target=work, daemon=True).start()
    return iter(ready.get, None)


def one_by_one(seconds):
    for _ in range(40):
        time.sleep(seconds)
        yield torch.zeros(2)


@pytest.mark.parametrize(("make", "is_ahead"), [(by_thread, True), (one_by_one, False)])
def test_a_loader_with_threads_of_its_own_is_seen_to_work_ahead(make, is_ahead):
    found = analyse(lambda: make(0.008), lambda batch: time.sleep(0.01), batches=8)
    assert (found.rates.is_ahead, found.workers) == (is_ahead, 0)
    # Who cannot count its threads recommends no number of them.
    assert ("workers" in [knob.name for knob in found.knobs()]) is not is_ahead


class HandedOver:
    """A loader with a worker, whose batches take the step's own time to be taken."""

    num_workers = 1

    def __iter__(self):
        for _ in range(40):
            time.sleep(0.015)
            yield torch.zeros(2)


def test_taking_a_batch_that_lies_ready_is_no_waiting_for_storage():
    found = analyse(HandedOver(), lambda batch: time.sleep(0.02), batches=8)
    assert found.rates.binding(0.0) == "computation"
    assert found.fetch_stall < found.prep_stall / 4
    assert found.prep_stall > 0.0075  # half of it: whoever else is busy takes some of the rest


@pytest.mark.parametrize(
    ("workers", "is_ahead", "cached"),
    [
        (0, False, 5 + 20 * 16 / 20),  # in turns: 16 ms of preparing, 4 of waiting
        (
            0,
            True,
            5 + 20 * 11 / 15,
        ),  # one that works ahead: 11 ms are not hidden without waiting, 15 with it
        (2, True, 5 + 20 * 3 / 5),
        (8, True, 5 + 20),  # nothing but taking a batch, wherever data are
    ],
)
def test_a_stall_that_no_phase_shows_is_shared_out_by_what_each_part_costs(
    workers, is_ahead, cached
):
    times = _Phases(
        resident=5.0, prepare=16.0, cached_alone=20.0, cold_alone=20.0, blocked=4.0, cold=25.0,
        taken=0.5,
    )  # fmt: skip
    assert _modelled(times, workers, is_ahead) == pytest.approx(cached)


def test_workers_that_outnumber_cores_fetch_as_slowly_as_one():
    """Four of 32 ms of fetching and 8 of work on two cores: 40 ms of a worker with cold data, 16 with data in memory."""
    crowded = _Phases(prepare=8.0, cached_alone=16.0, cold_alone=40.0, fetched=32.0)
    assert _fetched(crowded) == pytest.approx(32.0)
    # A disk that gives four less than one shows in their own difference.
    assert _fetched(replace(crowded, cold_alone=60.0)) == pytest.approx(44.0)


def on_a_rank(rank, store, seconds, found):
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # of hosts of their own
    dist.init_process_group("gloo", f"file://{store}", world_size=2, rank=rank)
    data = [torch.zeros(4)] * 20
    seen = analyse(data, lambda batch: time.sleep(seconds[rank]), batches=8)
    found.put(
        (seen.ranks, seen.resident_seconds, seen.cold_seconds, seen.rates.compute, seen.cores)
    )


def test_of_several_ranks_the_slowest_counts(tmp_path):
    context, seconds = multiprocessing.get_context("fork"), (0.001, 0.02)
    queue = context.Queue()
    ranks = [
        context.Process(target=on_a_rank, args=(rank, tmp_path / "store", seconds, queue))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    one, other = (queue.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join()
    assert one == other
    assert one[0] == 2
    assert min(one[1:3]) >= seconds[1]
    assert one[3] <= 4 / seconds[1]
    assert one[4] == 2 * len(os.sched_getaffinity(0))


def test_a_step_may_take_its_batch_apart():
    data = [{"x": torch.zeros(3), "labels": torch.zeros(3)} for _ in range(20)]

    def step(batch):
        batch.pop("labels")

    assert analyse(lambda: map(dict, data), step, batches=8).batch_samples == 3


def test_any_iterable_will_do():
    found = analyse(lambda: (torch.zeros(3) for _ in range(20)), lambda batch: None, batches=8)
    assert (found.batch_samples, found.workers, found.steps) == (3, 0, 11)
    assert analyse([None] * 20, lambda batch: None, batches=8).batch_samples == 1


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([], {}, "gives no batch"),
        ([torch.zeros(0, 4)] * 20, {}, "batch has no samples"),
        ([1, 2, 3], {}, "gives 3 batches, and a rate needs 8"),
        ([1] * 20, {"seconds": 0}, "positive number of seconds"),
        ([1] * 20, {"batches": 7}, "8 batches or more"),
        ([1] * 20, {"batches": 10**20}, "at most 1,000,000"),
        ([1] * 20, {"data": ["/nowhere/at/all"]}, "no file or folder '/nowhere/at/all'"),
        ([1] * 20, {"data": [""]}, "no file or folder ''"),
    ],
)
def test_what_cannot_be_analysed_is_refused(loader, options, message):
    with pytest.raises(InputError, match=message):
        analyse(loader, lambda batch: None, **options)


def test_behind_the_last_batch_that_is_timed_workers_have_more_to_do():
    """Taking a batch is cheaper while they rest."""
    loader = DataLoader(Items(samples=200), batch_size=2, num_workers=2, prefetch_factor=3)
    analysis = Analysis(loader, lambda batch: None, (), lambda what, share: None)
    analysis._begin(1.0, 8)
    drawn = iter(range(analysis.count))
    analysis._rest(drawn)
    assert len(list(drawn)) >= analysis.source.ahead == 6


def test_what_disturbs_one_turn_of_steps_is_no_stall():
    turn, steps = 11, 0

    def step(batch):
        nonlocal steps
        steps += 1
        # The first with the loader, after the few on one batch and a phase of them.
        time.sleep(0.02 if 3 + turn < steps <= 3 + 2 * turn else 0.001)

    found = analyse([torch.zeros(2)] * 20, step, batches=8)
    assert found.steps == turn
    assert found.fetch_stall + found.prep_stall < 0.01
    assert found.usual_seconds > 0.01  # 20 ms and 1 ms: what comes again in training
    assert any("longer in one turn" in note for note in found.notes)
