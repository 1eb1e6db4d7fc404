"""Loaders that prepare again and wait for nothing: what is noted of a data set, and what a batch of it takes then."""

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardwright.runtime.stalls.replay import LockWatch, Replayed
from shardwright.runtime.stalls.source import Source


class Items(Dataset):
    """Samples of growing cost, in dicts."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        end = time.thread_time() + index * 1e-4
        while time.thread_time() < end:
            pass
        return {"x": torch.tensor([float(index)]), "label": index}


class Stream(IterableDataset):
    def __iter__(self):
        return map(Items().__getitem__, range(12))


def apart(samples):
    """Take samples apart, as collates of others do."""
    return torch.stack([sample.pop("x") for sample in samples])


@pytest.mark.parametrize("data", [Items(), Stream()])
def test_batches_take_what_was_noted_and_are_collated_as_the_users(data):
    source = Source(DataLoader(data, batch_size=4, collate_fn=apart))
    source.pick(3)
    given, noted = source.recorded()
    assert [len(batch) for batch in given] == [4, 4, 4]
    assert noted is not None
    for spent, indices in zip(noted.spent, (range(4), range(4, 8), range(8, 12)), strict=True):
        assert spent >= sum(indices) * 1e-4
    again = list(source.replayed(noted, 5, keeps_lock=False))
    first = torch.arange(4.0)[:, None]
    assert all(torch.equal(batch, first) for batch in again)
    assert len(again) == 5


def test_samples_without_batches_are_replayed_as_such():
    source = Source(DataLoader(Items(), batch_size=None))
    source.pick(3)
    given, noted = source.recorded()
    assert len(list(given)) == 3
    assert noted is not None
    assert [one["label"] for one in source.replayed(noted, 2, keeps_lock=True)] == [0, 0]


@pytest.mark.parametrize("keeps_lock", [True, False])
def test_a_batch_takes_a_core_as_long_as_it_did(keeps_lock):
    data = Replayed((0.02, 0.01), [1], keeps_lock)
    begin = time.thread_time()
    assert [data[number] for number in range(3)] == [[1]] * 3
    assert time.thread_time() - begin >= 0.05


def test_who_keeps_pythons_lock_is_told_from_who_leaves_it():
    numbers = list(range(10**6))
    with LockWatch() as kept:
        for _ in range(3):  # each keeps it for some 50 ms
            sorted(numbers, key=int.bit_count)
    with LockWatch() as free:
        time.sleep(0.1)
    assert kept.keeps_lock
    assert not free.keeps_lock
