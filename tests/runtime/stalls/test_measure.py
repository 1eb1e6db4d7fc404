"""Analyses of loaders whose costs are known and far apart. How exact the figures are, benchmarks/stalls.py says."""

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from shardwright.errors import InputError
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
    found = looked_at(Items(fetch=fetch, prepare=prepare), compute, workers)
    assert found.rates.binding(0.0) == binding
    waits = {
        "fetching": found.fetch_stall,
        "preparation": found.prep_stall,
        "computation": found.resident_seconds,
    }
    assert max(waits, key=lambda name: waits[name]) == binding
    assert (found.batch_samples, found.workers, found.dataset_samples) == (2, workers, 64)


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


def on_a_rank(rank, store, seconds, found):
    dist.init_process_group("gloo", f"file://{store}", world_size=2, rank=rank)
    data = [torch.zeros(4)] * 20
    seen = analyse(data, lambda batch: time.sleep(seconds[rank]), batches=8)
    found.put((seen.ranks, seen.resident_seconds, seen.cold_seconds, seen.rates.compute))


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


def test_any_iterable_will_do():
    found = analyse(lambda: (torch.zeros(3) for _ in range(20)), lambda batch: None, batches=8)
    assert (found.batch_samples, found.workers, found.steps) == (3, 0, 11)


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([], {}, "gives no batch"),
        ([1, 2, 3], {}, "gives 3 batches, and a rate needs 8"),
        ([1] * 20, {"seconds": 0}, "positive number of seconds"),
        ([1] * 20, {"batches": 7}, "8 batches or more"),
        ([1] * 20, {"data": ["/nowhere/at/all"]}, "no file or folder /nowhere/at/all"),
    ],
)
def test_what_cannot_be_analysed_is_refused(loader, options, message):
    with pytest.raises(InputError, match=message):
        analyse(loader, lambda batch: None, **options)
