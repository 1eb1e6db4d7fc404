"""Where measurements are taken: each device by a process of its own, or not at all."""

from __future__ import annotations

import time

import pytest
import torch

from shardwright.core.cluster import Cluster
from shardwright.errors import InputError
from shardwright.files.clusterfile import read_cluster
from shardwright.runtime.profile.collectives import (
    Job,
    Probe,
    measure_collectives,
    places_of,
    timed,
)
from shardwright.runtime.profile.machine import (
    METHOD,
    detect,
    local_environment,
    measure_machine,
    own_device,
)
from tests.runtime.test_ticks import Queue

pytestmark = pytest.mark.torch


def cluster_of(backend: str, count: int) -> Cluster:
    return read_cluster(
        '[kind.c]\npeak = {float32 = "1 TFLOP/s"}\nmemory = "1 GB"\nmemory_bandwidth = "9 GB/s"\n'
        f'backend = "{backend}"\n[[host]]\nkind = "c"\ndevices = {count}\nlink = "2 GB/s"\n'
    )


def test_each_rank_measures_on_its_own_device() -> None:
    assert [own_device("cuda", rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [own_device("cpu", rank) for rank in range(2)] == ["cpu", "cpu"]
    assert places_of(cluster_of("cuda", 4), (1, 3), gpus=4) == ("cuda:1", "cuda:3")
    assert places_of(cluster_of("cpu", 2), (0, 1), gpus=0) == ("cpu", "cpu")
    job = Job(ranks=2, probe=Probe(), budget_seconds=1.0, places=("cuda:1", "cuda:3"))
    assert job.place(1) == torch.device("cuda", 3)


def test_messages_of_gpus_that_are_not_here_are_not_measured_on_the_cpu_instead() -> None:
    with pytest.raises(InputError, match=r"\[0, 3\] torch can use 2 here; .*--measure never"):
        places_of(cluster_of("cuda", 4), (0, 3), gpus=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")
def test_measuring_gpus_is_refused_without_them() -> None:
    with pytest.raises(InputError, match="torch can use 0 here"):
        measure_collectives(cluster_of("cuda", 2), (0, 1), environment="e")
    assert local_environment(2).endswith(METHOD)  # so what was measured on CPUs stays known


def test_runs_are_timed_as_the_device_gets_to_them() -> None:
    queue = Queue()
    timing = timed(lambda: queue.work(0.25), 5, queue)
    assert (timing.seconds, timing.spread, timing.count) == (0.25, 0.0, 5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch can use no two GPUs here")
def test_two_gpus_talk_by_nccl_and_give_rates_of_their_own() -> None:
    probe, begin = Probe(sizes=(1024, 2**20)), time.perf_counter()
    found = measure_collectives(detect(), (0, 1), environment="e", probe=probe, budget_seconds=5.0)
    assert len(found) == 2 * len(probe.primitives)  # nothing of their host
    assert all(0 < record.seconds < time.perf_counter() - begin for record in found)
    rates = {record.key: record.seconds for record in measure_machine(2)}
    assert rates["overhead|peak_flops"] > 1e12
