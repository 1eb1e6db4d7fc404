"""Records to cost tables, and steps to dollars."""

from __future__ import annotations

import pytest

from shardwright.core.costs import Record
from shardwright.core.strategy import Mesh, Strategy
from shardwright.files.clusterfile import parse_cluster
from shardwright.verbs.records import build_costs


def record(key: str, seconds: float, when: str = "1", environment: str = "here") -> Record:
    return Record(
        key=key, seconds=seconds, spread=0.5, count=3, environment=environment, measured_at=when
    )


def test_records_become_operators_points_in_order_of_size_and_overheads():
    table = build_costs(
        [
            record("collective|all_reduce|1x2|loopback|4096", 2.0),
            record("collective|all_reduce|1x2|loopback|512", 1.0),
            record("overhead|segment_seconds", 1e-5),
            record("operator|forward|aten.relu|2:float32|g|2|", 3.0),
        ],
        "here",
    )
    key = "collective|all_reduce|1x2|loopback"
    assert table.collective_map[key] == ((512.0, 1.0, 0.5), (4096.0, 2.0, 0.5))
    assert table.overhead_map == {"segment_seconds": 1e-5}
    (cost,) = table.operator_map.values()
    assert (cost.seconds, cost.spread, cost.source) == (3.0, 0.5, "measured")


def test_the_newest_record_wins_and_other_environments_do_not_count():
    records = [
        record("overhead|a", 2.0, when="2026-02"),
        record("overhead|a", 1.0, when="2026-01"),
        record("overhead|a", 9.0, when="2026-03", environment="there"),
        record("something|else", 1.0),
    ]
    assert build_costs(records, "here").overheads == (("a", 2.0),)


def test_the_order_of_records_does_not_change_the_table():
    records = [record(f"overhead|{name}", 1.0) for name in "cab"]
    assert (
        build_costs(records, "here").fingerprint == build_costs(records[::-1], "here").fingerprint
    )


def test_whole_hosts_are_paid_for():
    cluster = parse_cluster("2x p5.48xlarge")
    mesh = Mesh(axes=("data",), sizes=(2,), devices=(0, 8))
    strategy = Strategy(meshes=(mesh,), configs=(), parameters=())
    assert cluster.dollars_per_second(strategy.devices) * 3600.0 == pytest.approx(2 * 98.32)
