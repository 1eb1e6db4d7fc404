"""Threads of ranks on CPUs interrupt no other where they are woken, and keep to cores of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardwright import ddp
from shardwright.planner.space.seeds import Seed
from shardwright.runtime.cores import share
from shardwright.runtime.launch import launch
from shardwright.runtime.world import TorchWorld
from shardwright.stalls import analyse
from tests.runtime.test_stream import made

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux's")

FOUND = """
import os, threading
from shardwright.runtime.cores import wait_when_woken

{before}
waiting = threading.Event()
thread = threading.Thread(target=waiting.wait)
thread.start()
print(wait_when_woken(), os.sched_getscheduler(0), os.sched_getscheduler(thread.native_id))
waiting.set()
"""


def found(before: str = "") -> list[str]:
    """Return what a process says that it did, and the policies of its first thread and of another one."""
    command = [sys.executable, "-c", FOUND.format(before=before)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return ran.stdout.split()


def policies() -> set[int]:
    """Return the policies of this process's threads."""
    dist.all_reduce(torch.ones(1))  # so that gloo has begun its own
    return {os.sched_getscheduler(int(one)) for one in os.listdir("/proc/self/task")}


def begin_anew() -> None:
    """Let all threads of this process be as others are."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def in_a_world_of_the_users_own() -> set[int]:
    begin_anew()
    TorchWorld()
    return policies()


def with_a_hook() -> set[int]:
    begin_anew()
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    ddp.hooks.register(model, ddp.Compression(method="top-k"))
    return policies()


def wrapped() -> set[int]:
    begin_anew()
    ddp.wrap(nn.Sequential(nn.Linear(2, 2), nn.Flatten(0)), torch.ones(1, 2), loss=torch.sum)
    return policies()


def test_threads_that_are_there_wait_as_well():
    assert found() == ["True", str(os.SCHED_BATCH), str(os.SCHED_BATCH)]


def test_a_policy_that_the_user_has_set_stays():
    idle = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    assert found(before=idle) == ["False", str(os.SCHED_IDLE), str(os.SCHED_IDLE)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "body",
    [policies, in_a_world_of_the_users_own, with_a_hook, wrapped],
    ids=lambda one: one.__name__,
)
def test_all_threads_of_a_rank_wait_those_of_gloo_too(body):
    assert launch(body, 2, timeout=60) == [{os.SCHED_BATCH}] * 2


def cores() -> set[int]:
    """Return the cores that this process's threads may run on: all the same."""
    dist.all_reduce(torch.ones(1))
    found = {frozenset(os.sched_getaffinity(int(one))) for one in os.listdir("/proc/self/task")}
    assert len(found) == 1, found
    return set(*found)


has_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 or len(os.sched_getaffinity(0)) != os.cpu_count(),
    reason="needs two cores, and all of the machine's",
)


@pytest.mark.ranks
@has_cores
def test_ranks_share_out_the_cores_that_nobody_has_chosen():
    first, second = launch(cores, 2, timeout=60)
    assert not first & second
    assert first | second == os.sched_getaffinity(0)


class Where(Dataset[int]):
    """Samples that say on how many cores they were prepared."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return len(os.sched_getaffinity(0))


def of_loaders() -> tuple[set[int], int, int, list[str]]:
    """Return the cores of workers, how many the analyser counts, those of this rank, and what torch warns of."""
    with warnings.catch_warnings(record=True) as told:
        loader = DataLoader(Where(), batch_size=4, num_workers=2)
        workers = {int(count) for batch in loader for count in batch}
        counted = analyse(loader, lambda batch: None, batches=8).cores
    return workers, counted, len(os.sched_getaffinity(0)), [str(one.message) for one in told]


@pytest.mark.ranks
@has_cores
def test_workers_of_a_ranks_loader_have_the_cores_of_all():
    every = os.cpu_count() or 1
    ranks = launch(of_loaders, 2, timeout=60)
    assert [one[:2] for one in ranks] == [({every}, every)] * 2
    assert sum(one[2] for one in ranks) == every
    assert not any("This DataLoader will create" in text for one in ranks for text in one[3])


def of_input() -> tuple[set[int], int]:
    """Return on how many cores the thread runs that draws batches ahead, and this rank."""
    found = set[int]()

    def drawing():
        for _ in range(3):
            found.add(len(os.sched_getaffinity(0)))
            yield {"x": torch.zeros(8, 4, dtype=torch.float64)}

    steps = sum(1 for _ in made(plan=Seed(data=2)).train(drawing()))
    assert steps == 3
    return found, len(os.sched_getaffinity(0))


@pytest.mark.ranks
@has_cores
def test_what_draws_ahead_has_the_cores_of_all():
    ranks = launch(of_input, 2, timeout=60)
    assert [one[0] for one in ranks] == [{os.cpu_count()}] * 2
    assert sum(one[1] for one in ranks) == os.cpu_count()


KEPT = """
import os
from shardwright.runtime.cores import keep_to_share

os.sched_setaffinity(0, {chosen})
print(keep_to_share({rank}, {ranks}), sorted(os.sched_getaffinity(0)) == sorted({chosen}))
"""


def kept(chosen: set[int], rank: int, ranks: int) -> list[str]:
    """Return what a process says that it did which may use some cores, and whether it still may."""
    command = [sys.executable, "-c", KEPT.format(chosen=chosen, rank=rank, ranks=ranks)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return ran.stdout.split()


def test_cores_that_somebody_has_chosen_stay_and_more_ranks_than_cores_share_all():
    every = os.sched_getaffinity(0)
    assert kept(every, 0, len(every) + 1) == ["False", "True"]
    assert kept(every, 0, 1) == ["False", "True"]
    if len(every) > 1:
        assert kept({min(every)}, 1, 2) == ["False", "True"]


@given(cores=st.sets(st.integers(0, 500), min_size=1, max_size=200), ranks=st.integers(1, 64))
def test_every_core_is_in_one_share_and_shares_differ_by_one_core(cores: set[int], ranks: int):
    shares = [share(cores, rank, ranks) for rank in range(ranks)]
    assert sorted(core for one in shares for core in one) == sorted(cores)
    sizes = {len(one) for one in shares}
    assert max(sizes) - min(sizes) <= 1
