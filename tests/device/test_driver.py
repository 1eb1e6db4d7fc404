"""What a driver sees beside tensors: counted by hand from NCCL's documented sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.cluster import Cluster, Device, DeviceKind, Link, Switch
from shardwright.device.driver import CONNECTION, MIB, communicator_bytes, context_bytes
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from tests.planner.lower.test_lower import transformer_like

KIND = DeviceKind(
    name="G", peak_flops=(("float32", 1e12),), memory_bytes=2**34, memory_bandwidth=1e12
)
NEAR, FAR = Link(latency=0.0, bandwidth=300e9), Link(latency=0.0, bandwidth=50e9)


def cluster(hosts: int, each: int) -> Cluster:
    switches = [Switch(name="net", is_host=False)]
    switches += [Switch(name=f"h{n}", parent=0, link=FAR) for n in range(hosts)]
    devices = [Device(kind=0, host=1 + n // each, link=NEAR) for n in range(hosts * each)]
    return Cluster(name="c", kinds=(KIND,), switches=tuple(switches), devices=tuple(devices))


def channels(seed: Seed, on: Cluster, mesh: int = 0) -> float:
    """Return how many channels' buffers there are; three connections each."""
    program = lower(graph := transformer_like(), seed_strategy(graph, seed))
    return communicator_bytes(program, on, mesh) / (3 * CONNECTION)


def test_a_connection_has_buffers_for_three_protocols() -> None:
    assert pytest.approx(9.19, abs=0.01) == CONNECTION / MIB


def test_channels_follow_the_slowest_link_of_each_group() -> None:
    assert channels(Seed(), cluster(1, 1)) == 0
    assert channels(Seed(data=2), cluster(1, 2)) == 300 / 12.5
    assert channels(Seed(data=2), cluster(2, 1)) == 50 / 12.5
    # Tensor axis within hosts, data axis between them.
    assert channels(Seed(data=2, tensor=2), cluster(2, 2)) == 24 + 4


def test_stages_have_a_communicator_with_each_neighbour() -> None:
    seed, on = Seed(stages=2, num_microbatches=2), cluster(1, 2)
    assert channels(seed, on) == channels(seed, on, 1) == 24


def test_kernels_once_loaded_all_at_once() -> None:
    on = cluster(1, 1)
    assert context_bytes(on) == context_bytes(on, "2024-05") == 2**29
    assert context_bytes(on, "2021-10") / 2**30 == pytest.approx(1.3)


def test_cpus_have_neither() -> None:
    on = replace(cluster(1, 2), kinds=(replace(KIND, backend="cpu"),))
    assert context_bytes(on) == 0
    assert channels(Seed(data=2), on) == 0
