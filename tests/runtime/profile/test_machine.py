"""The local machine as a cluster, and collectives between real processes."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from shardwright.core.compression import Packing
from shardwright.core.costs import ADD, PACK, PACK_DENSITIES, collective_key, update_key
from shardwright.files.clusterfile import read_cluster, write_cluster
from shardwright.planner.cost import collective_seconds
from shardwright.planner.cost.burden import message_burden
from shardwright.planner.cost.transforms import pack_cost
from shardwright.runtime.profile import (
    Probe,
    detect,
    local_environment,
    measure_collectives,
    num_local_devices,
)
from shardwright.runtime.profile.collectives import PRIMITIVES
from shardwright.runtime.profile.machine import memory_bytes
from shardwright.verbs.records import build_costs

KNOWN = {"peak_flops": 1e11, "memory_bandwidth": 1e10, "overlap_slowdown": 1.5}


@pytest.mark.torch
def test_known_rates_give_the_same_cluster_every_time():
    cluster = detect(KNOWN)
    assert cluster == detect(KNOWN)
    assert cluster.num_devices == num_local_devices()
    assert cluster.overlap_slowdown == 1.5
    assert read_cluster(write_cluster(cluster)) == cluster


@pytest.mark.torch
def test_devices_share_the_machines_memory():
    cluster = detect(KNOWN)
    if cluster.kind_of(0).backend == "cuda":
        pytest.skip("GPUs have their own memory")
    whole = cluster.kind_of(0).memory_bytes * cluster.num_devices
    assert 0.99 * memory_bytes() <= whole <= memory_bytes()


@pytest.mark.torch
def test_the_environment_names_what_timings_depend_on():
    text = local_environment(3)
    assert torch.__version__ in text
    assert "processes 3" in text


@pytest.mark.ranks
def test_rates_of_an_unknown_machine_are_measured():
    cluster = detect()
    kind = cluster.kind_of(0)
    assert 1e8 < kind.flops_for("float32") < 1e16
    assert 1e8 < kind.memory_bandwidth < 1e14


@pytest.mark.ranks
def test_collectives_of_two_ranks_fill_the_cost_table():
    cluster = read_cluster(
        '[kind.c]\npeak = {float32 = "1 TFLOP/s"}\nmemory = "1 GB"\nmemory_bandwidth = "9 GB/s"\n'
        'backend = "cpu"\n[[host]]\nkind = "c"\ndevices = 2\nlink = "2 GB/s"\n'
    )
    seen: list[tuple[int, int]] = []
    records = measure_collectives(
        cluster,
        (0, 1),
        environment="e",
        probe=Probe(sizes=(1024, 4096)),
        budget_seconds=8.0,  # on cores that other tests share
        progress=lambda done, total: seen.append((done, total)),
    )
    table = build_costs(records, "e")
    for primitive in PRIMITIVES:
        points = table.collective_map[collective_key(primitive, 1, 2, "loopback")]
        assert [point[0] for point in points] == [1024, 4096]
        assert collective_seconds(primitive, 1024, (0, 1), cluster, table).source == "measured"
    names = {f"{what}_seconds" for what in ("segment", "begin", "message", "part", "update")} | {
        "process_bytes"
    }
    sizes, one, none = [
        [point[0] for point in table.collective_map[update_key(states)]] for states in (2, 1, 0)
    ]
    assert sizes == one == none
    assert sizes == sorted(sizes)
    assert len(sizes) > 3
    assert [point[0] for point in table.collective_map[ADD]] == sizes
    kind = cluster.kind_of(0)
    for name in [f"{way}{what}" for way in get_args(Packing) for what in ("", " sum")]:
        densities = PACK_DENSITIES if name.startswith("top-k") else (1.0,)
        lines = [
            table.collective_map[f"{PACK}|{name}" + (f"|{one:g}" if one < 1 else "")]
            for one in densities
        ]
        least = 0.0
        for density, points in zip(densities, lines, strict=True):
            elements = [point[0] for point in points]
            assert elements == sorted(set(elements))
            assert len(elements) > 2
            found = pack_cost(name, int(elements[-1]), 4, kind, table, density).seconds
            least = max(least, *(point[1] for point in points))
            assert found == pytest.approx(least)
    of_ranks = {f"{what}|1x2|loopback" for what in ("skew", "hiding")}
    assert names | of_ranks | {"overlap_slowdown"} == set(table.overhead_map)
    assert table.overhead_map["overlap_slowdown"] == 1.0  # what is lost is known by message
    for primitive in PRIMITIVES:
        burden = message_burden(primitive, 1024, (0, 1), cluster, table)
        assert 0 < burden.held < burden.hiding
        assert burden.stolen > 0
    assert table.overhead_map["process_bytes"] > 2**20
    assert seen
