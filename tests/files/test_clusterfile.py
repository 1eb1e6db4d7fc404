"""Cluster files: units, presets, shorthands, round trips, one clear complaint per mistake."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.core.cluster import Cluster, Device, DeviceKind, Link, Switch
from shardwright.errors import InputError
from shardwright.files.clusterfile import (
    commented_template,
    load_cluster,
    parse_cluster,
    read_cluster,
    write_cluster,
)
from shardwright.files.units import read_quantity, write_quantity

GOOD = '[[host]]\nkind = "H100"\ndevices = 2\n'


@pytest.mark.parametrize(
    ("text", "quantity", "value"),
    [
        ("25 Gbit/s", "bandwidth", 25e9 / 8),
        ("25 Gb/s", "bandwidth", 25e9 / 8),
        ("450 GB/s", "bandwidth", 450e9),
        ("80 GiB", "bytes", 80 * 1024**3),
        ("80 GB", "bytes", 80e9),
        ("3.6 USD/h", "price", 1e-3),
        ("5 us", "seconds", 5e-6),
        ("312 TFLOP/s", "flops", 312e12),
        ("1.5e2 ms", "seconds", 0.15),
    ],
)
def test_quantities_are_read_into_si_units(text, quantity, value):
    assert read_quantity(text, quantity) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("value", [1 / 3, 450e9, 0.1 + 0.2, 2.0**0.5 * 1e9, 2e-30, 0.0])
def test_written_quantities_read_back_exactly(value):
    assert read_quantity(write_quantity(value, "bandwidth"), "bandwidth", zero=True) == value


def test_shorthand_builds_hosts_and_devices_from_published_numbers():
    cluster = parse_cluster("8x8xH100")
    hosts = [switch for switch in cluster.switches if switch.is_host]
    assert (len(hosts), cluster.num_devices) == (8, 64)
    assert cluster.kind_of(0).flops_for("bfloat16") == 989e12
    assert cluster.devices[0].link.bandwidth == 450e9
    assert cluster.devices[0].link.source == "published"
    assert hosts[0].link is not None
    assert hosts[0].link.bandwidth == 3200e9 / 8
    assert any("DGX H100" in note for note in cluster.notes)


@pytest.mark.parametrize(
    ("kind", "low", "high"),  # GiB that PyTorch names as capacity when it runs out of memory
    [("A100", 79.1, 79.4), ("H100", 79.1, 79.4), ("H200", 139.7, 139.9), ("B200", 178.3, 178.4)],
)
def test_a_devices_memory_is_what_its_driver_reports_not_decimal_gigabytes(kind, low, high):
    assert low < parse_cluster(f"8x{kind}").kind_of(0).memory_bytes / 2**30 < high


def test_the_software_of_gpus_is_a_named_fact_of_the_file():
    text = """software = "compiled"\n[[host]]\nkind = "H100"\ndevices = 2\n"""
    cluster = read_cluster(text)
    assert cluster.software == "compiled"
    assert read_cluster(write_cluster(cluster)) == cluster
    # A plan belongs to devices and topology; what runs on them only changes what is predicted.
    assert cluster.fingerprint == parse_cluster("2xH100").fingerprint
    with pytest.raises(InputError, match=r"software: .*'eager'.*not 'fast'"):
        read_cluster(text.replace("compiled", "fast"))


def test_kinds_that_no_device_is_of_change_nothing():
    cpu = """
[kind.old]
peak = { float32 = "1 TFLOP/s" }
memory = "8 GiB"
memory_bandwidth = "50 GB/s"
backend = "cpu"
"""
    assert read_cluster(GOOD + cpu) == read_cluster(GOOD)
    assert read_cluster(GOOD + cpu).backend == "cuda"


def test_two_numbers_mean_devices_of_one_host():
    cluster = parse_cluster("4xA100")
    assert cluster.num_devices == 4
    assert len(cluster.switches) == 1
    assert cluster.kind_of(0).name == "A100-SXM4-80GB"


@pytest.mark.parametrize("text", ["8x aws-p5.48xlarge", "AWS p5.48xlarge x 8", "8xp5.48xlarge"])
def test_node_presets_are_found_by_any_spelling(text):
    cluster = parse_cluster(text)
    assert cluster.num_devices == 64
    assert cluster.dollars_per_second((0, 8)) * 3600 == pytest.approx(2 * 98.32)


UNEQUAL = """
name = "mixed"
overlap_slowdown = 1.25
[kind.mine]
peak = { float32 = "30 TFLOP/s" }
memory = "24 GiB"
memory_bandwidth = "0.9 TB/s"
backend = "cpu"
launch = "1 us"
[[switch]]
name = "rack"
uplink = "100 Gbit/s"
[[host]]
name = "a"
address = "10.0.0.1"
switch = "rack"
uplink = "25 Gbit/s"
uplink_latency = "0 s"
price = "3.2 USD/h"
[[host.device]]
kind = "A100"
count = 2
[[host.device]]
kind = "mine"
link = "31 GB/s"
[[host]]
name = "b"
preset = "DGX H100"
"""


def test_unequal_hosts_and_devices_are_described():
    cluster = read_cluster(UNEQUAL)
    assert [cluster.kind_of(d).name for d in range(4)] == [
        "A100-SXM4-80GB",
        "A100-SXM4-80GB",
        "mine",
        "H100-SXM5-80GB",
    ]
    assert cluster.path_to_root(cluster.devices[0].host) == (2, 1, 0)
    assert cluster.switches[2].dollars_per_second * 3600 == pytest.approx(3.2)


@pytest.mark.parametrize("text", [UNEQUAL, GOOD, commented_template()])
def test_written_clusters_read_back_equal(text):
    cluster = read_cluster(text)
    assert read_cluster(write_cluster(cluster)) == cluster


def test_a_cluster_is_written_in_one_pass_over_its_devices():
    """However many hosts there are, which took a second for 5,000."""

    class Devices(tuple[Device, ...]):
        passes = 0

        def __iter__(self):
            Devices.passes += 1
            return super().__iter__()

    cluster = read_cluster(UNEQUAL)
    looked_at = replace(cluster, devices=Devices(cluster.devices))
    Devices.passes = 0
    assert write_cluster(looked_at) == write_cluster(cluster)
    assert Devices.passes == 1


def test_a_measured_cluster_with_odd_names_and_numbers_reads_back_equal():
    kind = DeviceKind(
        name='cpu "x"\\\n', peak_flops=(("float32", 1e11 / 3),), memory_bytes=1e9 / 7,
        memory_bandwidth=1e10 / 3, backend="cpu", launch_seconds=1e-6 / 3, source="measured",
    )  # fmt: skip
    link = Link(latency=1e-5 / 7, bandwidth=3e9 / 7, source="measured")
    cluster = Cluster(
        name="here",
        kinds=(kind,),
        switches=(Switch(name="host"),),
        devices=(Device(kind=0, host=0, link=link),) * 2,
        overlap_slowdown=1 / 0.9,
        input_rate=1000 / 7,
        rank_input_rate=100 / 7,
        host_input_rate=500 / 7,
        host_fetch_rate=700 / 7,
        rank_batch_seconds=1e-3 / 7,
        host_cores=2 / 7,
        copy_bandwidth=1e10 / 7,
    )
    assert read_cluster(write_cluster(cluster)) == cluster


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["host", "needed"]),
        ("host = 3", ["host"]),
        ("[[host]", ["TOML"]),
        ("a = " + "[" * 100_000, ["deep"]),
        ("a = " + "9" * 10_000, ["TOML"]),
        (GOOD + 'lnk = "5 GB/s"', ["unknown key", "host[0].lnk", "did you mean 'link'"]),
        (GOOD + 'link = "-5 GB/s"', ["host[0].link", "-5 GB/s", "more than 0"]),
        (GOOD + 'link = "5"', ["host[0].link", "no unit", "Gbit/s"]),
        (GOOD + "link = 5", ["host[0].link", "5", "unit"]),
        (GOOD + 'link = "5 Gbits/s"', ["Gbits/s", "did you mean 'Gbit/s'"]),
        (GOOD + 'link = "1e999 GB/s"', ["host[0].link", "at most"]),
        (GOOD + 'price = "-1 USD/h"', ["host[0].price", "0 or more"]),
        ('[[host]]\nkind = "H100"\ndevices = 0', ["host[0].devices", "1", "0"]),
        ('[[host]]\nkind = "H100"\ndevices = true', ["host[0].devices", "integer"]),
        ('[[host]]\nkind = "H100"\ndevices = 99999999999999999999', ["host[0].devices", "131072"]),
        ('[[host]]\nkind = "H10O"\ndevices = 1', ["host[0].kind", "H10O", "did you mean"]),
        ('[[host]]\npreset = "DGX H10"', ["host[0].preset", "did you mean 'DGX H100'"]),
        ('[[host]]\nkind = "H100"', ["host[0].devices"]),
        ((GOOD + 'name = "a"\nuplink = "1 GB/s"\n') * 2, ["'a'", "twice"]),
        (GOOD + "count = 2", ["host[0].uplink", "Gbit/s"]),
        (GOOD + 'switch = "r"\nuplink = "1 GB/s"\ncount = 2', ["host[0].switch", "'r'"]),
        ("overlap_slowdown = nan\n" + GOOD, ["overlap_slowdown"]),
        ('[kind.a]\nmemory = "3 GB"\n' + GOOD, ["kind.a.peak", "needed"]),
        ('[[host]]\nname = "x"\n[[host.device]]\nkind = "mine"', ["host[0].kind", "mine"]),
    ],
)  # fmt: skip
def test_each_mistake_gets_one_complaint_naming_file_key_value_and_remedy(text, parts):
    with pytest.raises(InputError) as caught:
        read_cluster(text, "my.toml")
    message = str(caught.value)
    assert message.startswith("my.toml: ")
    assert [part for part in parts if part not in message] == []
    assert len(message) < 1500


WHOLE = """
name = "c"
overlap_slowdown = 1.2
software = "eager"
notes = ["n"]
[kind.mine]
peak = { float32 = "30 TFLOP/s" }
memory = "24 GiB"
memory_bandwidth = "900 GB/s"
backend = "cuda"
launch = "5 us"
[[switch]]
name = "rack"
uplink = "1600 Gbit/s"
[[host]]
name = "one"
count = 2
switch = "rack"
uplink = "25 Gbit/s"
price = "3 USD/h"
[[host.device]]
kind = "mine"
count = 2
link = "31 GB/s"
[[host]]
name = "two"
preset = "AWS p5.48xlarge"
"""
OTHERS = """1 -1 0 2.5 1e400 nan true "" "x" "one" "rack" "-3 GiB" "5" "5 parsec" "1e99 GB/s" [] [1] {} {a=1}
99999999999999999999 "\\u001b[31m" [[1],[2]] """.split()


def test_every_refusal_names_file_place_and_remedy():
    lines, refused = WHOLE.strip().splitlines(), 0
    draw = random.Random(0)
    for turn in range(600):
        place = draw.randrange(len(lines))
        key, equals, _ = lines[place].partition(" = ")
        other = draw.choice([*OTHERS, '"' + "y" * 5000 + '"'])
        changed = [
            [], [lines[place]] * 2, [f"{key}{equals}{other}"], [f"{key}x{equals}{other}"],
            [f"[{key}]"], [lines[place][: len(lines[place]) // 2]],
        ][turn % 6]  # fmt: skip
        text = "\n".join([*lines[:place], *changed, *lines[place + 1 :]])
        message = refusal(text)
        if message:
            refused += 1
            assert re.match(r"file: .+; \w.{5,}", message), message
            assert len(message) < 1510, message
            assert message.isprintable(), message
    assert refused > 300


def refusal(text: str) -> str:
    """Return how a cluster file is refused, "" where it is not."""
    try:
        read_cluster(text, "file")
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "text",
    ["0xH100", "8x0xH100", "999999999x999999999xH100", "foo", "2x2xP40", "8x8xH1O0", "local", ""],
)
def test_bad_shorthands_are_refused(text):
    with pytest.raises(InputError, match=r"; \w|; did|: name one"):
        parse_cluster(text)


def test_missing_binary_and_huge_files_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="cannot read"):
        load_cluster(tmp_path / "no.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        load_cluster(tmp_path / "binary.toml")
    (tmp_path / "huge.toml").write_bytes(b"#" * (5 * 2**20))
    with pytest.raises(InputError, match="at most"):
        load_cluster(tmp_path / "huge.toml")
    with pytest.raises(InputError):
        load_cluster(tmp_path)
