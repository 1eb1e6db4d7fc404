"""Collective times: the paper's table against step-by-step sums, measured points, links."""

from __future__ import annotations

import csv
from importlib import resources

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwright.core.costs import CostTable, collective_key
from shardwright.files.clusterfile import parse_cluster, read_cluster
from shardwright.planner.cost import collective_seconds
from shardwright.planner.cost.collective import interpolate, on_the_wire

NOTHING = CostTable()
HOSTS = parse_cluster("4x8xH100")
RINGS = parse_cluster("8xV100")  # no measured tables
PRIMITIVES = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "transfer",
    "slice",
    "copy",
]


@given(
    primitive=st.sampled_from(PRIMITIVES),
    sizes=st.tuples(st.integers(0, 2**34), st.integers(0, 2**34)),
    count=st.integers(2, 32),
    concurrent=st.integers(1, 8),
)
@example(primitive="all_gather", sizes=(547, 1), count=2, concurrent=1)  # rounded down in a table
def test_modelled_seconds_never_fall_with_bytes(primitive, sizes, count, concurrent):
    small, large = (
        collective_seconds(primitive, size, tuple(range(count)), HOSTS, NOTHING, concurrent).seconds
        for size in sorted(sizes)
    )
    assert 0 <= small <= large


@given(
    times=st.lists(st.floats(1e-6, 1), min_size=1, max_size=6),
    sizes=st.tuples(st.floats(1, 1e9), st.floats(1, 1e9)),
)
def test_measured_seconds_never_fall_with_bytes_however_noisy(times, sizes):
    points = tuple((4.0 ** (5 + i), t, 0.1 * t) for i, t in enumerate(times))
    small, large = (interpolate(points, size) for size in sorted(sizes))
    assert small.seconds <= large.seconds * (1 + 1e-12)
    assert small.source == "measured"
    assert small.spread >= 0


def test_measured_points_are_returned_exactly_and_lines_drawn_between_and_beyond():
    points = ((1000.0, 1e-3, 1e-4), (3000.0, 2e-3, 2e-4), (5000.0, 6e-3, 3e-4))
    read = [interpolate(points, size).seconds for size in (10, 1000, 2000, 3000, 4000, 5000, 7000)]
    assert read == pytest.approx([1e-3, 1e-3, 1.5e-3, 2e-3, 4e-3, 6e-3, 10e-3])


def test_messages_larger_than_all_that_were_measured_pass_no_faster_than_those():
    """Two hosts at 1 Gbit/s took 17.5 ms for 1 MiB, 38.4 ms for 4 MiB, and 9.6 to 10.8 ms a MiB of 16 MiB."""
    mib = float(2**20)
    points = ((1024.0, 0.3e-3, 1e-4), (mib, 17.5e-3, 1e-3), (4 * mib, 38.4e-3, 1e-3))
    assert on_the_wire(points, 2 * mib) == interpolate(points, 2 * mib)
    found = on_the_wire(points, 16 * mib)
    assert found.seconds == pytest.approx(4 * 38.4e-3, rel=0.01)
    assert found.spread == pytest.approx(1e-3 * 4, rel=0.01)
    steeper = ((1024.0, 1e-4, 0.0), (mib, 1e-3, 0.0), (4 * mib, 7e-3, 0.0))
    assert on_the_wire(steeper, 16 * mib) == interpolate(steeper, 16 * mib)
    assert on_the_wire(points[:1], mib) == interpolate(points[:1], mib)


def test_a_measurement_of_the_group_beats_the_model():
    cluster = read_cluster(
        '[kind.c]\npeak = {float32 = "1 TFLOP/s"}\nmemory = "1 GB"\nmemory_bandwidth = "9 GB/s"\n'
        'backend = "cpu"\n[[host]]\nkind = "c"\ndevices = 4\nlink = "2 GB/s"\n'
    )
    key = collective_key("all_reduce", 1, 2, "loopback")
    table = CostTable(collectives=((key, ((1024.0, 7e-3, 1e-3), (4096.0, 8e-3, 1e-3))),))
    cost = collective_seconds("all_reduce", 1024, (0, 1), cluster, table)
    assert (cost.seconds, cost.spread, cost.source) == (7e-3, 1e-3, "measured")
    assert collective_seconds("all_reduce", 1024, (0, 1, 2, 3), cluster, table).source == "modelled"


def test_large_messages_take_the_ring_bound_of_the_slowest_link():
    size, group = 2**32, tuple(range(32))
    seconds = collective_seconds("all_reduce", size, group, HOSTS, NOTHING).seconds
    wire = 2 * 31 / 32 * size / min(450e9, 400e9)
    assert wire < seconds < 1.6 * wire


def test_a_group_within_one_host_is_faster_than_one_across_hosts():
    near = collective_seconds("all_reduce", 2**28, tuple(range(8)), HOSTS, NOTHING).seconds
    far = collective_seconds("all_reduce", 2**28, tuple(range(0, 32, 4)), HOSTS, NOTHING, 4).seconds
    assert near < far


def test_groups_that_share_an_uplink_share_its_bandwidth():
    group = (0, 8, 16, 24)
    alone, shared = (
        collective_seconds("all_reduce", 2**32, group, HOSTS, NOTHING, n).seconds for n in (1, 8)
    )
    assert shared > 4 * alone


def test_all_gather_and_reduce_scatter_are_each_half_an_all_reduce_for_large_messages():
    parts = [
        collective_seconds(p, 2**33, tuple(range(8)), RINGS, NOTHING).seconds
        for p in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    assert parts[0] + parts[1] == pytest.approx(parts[2], rel=0.01)


def test_switches_that_reduce_make_an_all_reduce_cheaper_than_its_two_halves():
    parts = [
        collective_seconds(p, 2**29, tuple(range(8)), HOSTS, NOTHING).seconds
        for p in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    assert parts[2] < 0.85 * (parts[0] + parts[1])


@pytest.mark.parametrize("primitive", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("kind", ["A100", "H100", "H200", "B200", "L40S"])
def test_measured_collectives_cost_more_with_bytes_and_reach_no_more_than_the_links(
    kind: str, primitive: str
):
    node = parse_cluster(f"8x{kind}")
    sizes = [2.0**power for power in range(6, 36)]
    times = [
        collective_seconds(primitive, s, tuple(range(8)), node, NOTHING).seconds for s in sizes
    ]
    assert times == sorted(times)
    moved = {"all_reduce": 1.0}.get(primitive, 7 / 8)  # bytes over each link, reduced in switches
    assert sizes[-1] * moved / times[-1] < node.devices[0].link.bandwidth


def test_a_group_of_one_or_an_empty_message_costs_nothing():
    assert collective_seconds("all_reduce", 2**20, (3,), HOSTS, NOTHING).seconds == 0
    assert collective_seconds("all_reduce", 0, (0, 1), HOSTS, NOTHING).seconds == 0


def test_hosts_under_one_rack_share_the_racks_uplink():
    host = (
        '[[host]]\nname = "{0}"\nkind = "H100"\ndevices = 1\nuplink = "50 GB/s"\nswitch = "{1}"\n'
    )
    rack = '[[switch]]\nname = "{0}"\nuplink = "50 GB/s"\n'
    text = rack.format("r") + rack.format("q")
    text += "".join(host.format(f"h{i}", "r" if i < 2 else "q") for i in range(4))
    cluster = read_cluster(text)
    inside = collective_seconds("all_to_all", 2**32, (0, 1), cluster, NOTHING).seconds
    across = collective_seconds("all_reduce", 2**32, (0, 1, 2, 3), cluster, NOTHING).seconds
    ring = 2 * 3 / 4 * 2**32 / 50e9
    assert inside == pytest.approx(2**32 / 2 / 45e9, rel=0.05)
    assert across > 1.9 * ring


def test_eight_a100_all_reduce_is_within_a_quarter_of_the_published_measurement():
    node = parse_cluster("8xA100")
    published = {1: 92.8e-6, 8: 134.3e-6, 64: 579.9e-6, 1024: 8193.0e-6}
    for mebibytes, seconds in published.items():
        cost = collective_seconds("all_reduce", mebibytes * 2**20, tuple(range(8)), node, NOTHING)
        assert cost.seconds == pytest.approx(seconds, rel=0.25), mebibytes


def measured_shares(name: str) -> dict[tuple[float, int], float]:
    """Return what SimAI's measurements reach of the nominal bandwidth, by MiB and hosts of eight."""
    return {
        (
            float(row["condition"].split()[0]),
            int(row["condition"].split()[2].split("Node")[0]),
        ): float(row["value"])
        for row in hardware_rows()
        if row["name"] == name
    }


def hardware_rows() -> list[dict[str, str]]:
    text = resources.files("shardwright.files").joinpath("hardware.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def test_a_ring_over_many_hosts_waits_for_every_device_as_measured():
    """Of 8 x 400 Gbit/s a host. Nothing was fitted to these."""
    shares = measured_shares("SimAI nic_ratio")
    for hosts in (8, 16, 32, 64, 128):
        cluster, group = parse_cluster(f"{hosts}x8xH100"), tuple(range(8 * hosts))
        for mebibytes in (32, 128, 512, 2048, 8192):
            size = mebibytes * 2**20
            seconds = collective_seconds("all_gather", size, group, cluster, NOTHING).seconds
            reached = size * (len(group) - 1) / len(group) / seconds / 400e9
            assert reached == pytest.approx(shares[mebibytes, hosts], rel=0.4), (hosts, mebibytes)


def test_devices_without_a_switch_reach_the_links_between_themselves_only():
    measured = {
        int(row["condition"][0]): float(row["value"]) * 1e9
        for row in hardware_rows()
        if row["name"] == "V100 node" and "512 MiB" in row["condition"]
    }
    size = 2**29
    for count, rate in measured.items():
        group = tuple(range(count))
        seconds = collective_seconds("all_reduce", size, group, RINGS, NOTHING).seconds
        assert 2 * (count - 1) / count * size / seconds == pytest.approx(rate, rel=0.05), count
    of_four, of_sixteen = (
        collective_seconds("all_reduce", size, (0, 1), parse_cluster(text), NOTHING).seconds
        for text in ("4xV100", "16xV100")
    )
    pair = 2 * 25e9  # two of six links, in hosts of four
    assert 0.85 < size / of_four / pair < 0.95
    assert of_sixteen < of_four / 2
