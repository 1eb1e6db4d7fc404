"""What a plan belongs to: devices, memory and topology, not how fast they were measured to be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.cluster import Cluster, Device, DeviceKind, Link, Switch

KIND = DeviceKind(
    name="c", peak_flops=(("float32", 1e9),), memory_bytes=1e9, memory_bandwidth=1e9, backend="cpu"
)
DEVICE = Device(kind=0, host=1, link=Link(latency=1e-5, bandwidth=1e9))
HOST = Switch(name="h", parent=0, link=Link(latency=1e-5, bandwidth=1e9))
ROOT = Switch(name="root", is_host=False)
CLUSTER = Cluster("c", (KIND,), (ROOT, HOST, HOST), (DEVICE, replace(DEVICE, host=2)))
FAST = Link(latency=0.0, bandwidth=9e9, source="measured")


@pytest.mark.parametrize(
    "other",
    [
        replace(CLUSTER, overlap_slowdown=1.7, notes=("measured",), name="d"),
        replace(
            CLUSTER, kinds=(replace(KIND, peak_flops=(("float32", 3e9),), launch_seconds=1.0),)
        ),
        replace(CLUSTER, devices=tuple(replace(one, link=FAST) for one in CLUSTER.devices)),
        replace(CLUSTER, switches=(ROOT, HOST, replace(HOST, name="i", address="a", link=FAST))),
    ],
    ids=["overlap", "rates", "links", "names"],
)
def test_what_is_measured_and_what_hosts_are_called_is_the_same_cluster(other: Cluster) -> None:
    assert other.fingerprint == CLUSTER.fingerprint


@pytest.mark.parametrize(
    "other",
    [
        replace(CLUSTER, kinds=(replace(KIND, memory_bytes=2e9),)),
        replace(CLUSTER, kinds=(replace(KIND, name="d"),)),
        replace(CLUSTER, devices=CLUSTER.devices[:1]),
        replace(CLUSTER, devices=(DEVICE, DEVICE)),
        replace(CLUSTER, switches=(ROOT, HOST, replace(HOST, parent=1))),
    ],
    ids=["memory", "kind", "devices", "hosts", "tree"],
)
def test_other_devices_memory_or_topology_are_another_cluster(other: Cluster) -> None:
    assert other.fingerprint != CLUSTER.fingerprint
