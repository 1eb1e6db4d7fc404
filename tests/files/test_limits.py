"""Files that are too large, too deep or bombs: refused by a stated limit before they are parsed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.errors import InputError
from shardwright.files.clusterfile import load_cluster
from shardwright.files.iopddl import read_iopddl
from shardwright.files.layergraph import read_layer_graph
from shardwright.files.limits import parse_toml, unzipped
from shardwright.files.partsfile import read_parts
from shardwright.files.planfile import read_graph, read_plan, write_plan
from shardwright.files.runs import read_runs
from tests.files.test_planfile import make_plan

# What took minutes or gigabytes is refused in well under a second.
pytestmark = pytest.mark.timeout(30)

MIB = 2**20
HEAD = b'{"format":"shardwright","schema":1,"kind":"frontier","content":'
PART = '[[part]]\nmodules = ["a"]\ndevices = [0]\n'
# Made when they are asked for: some are 60 MiB, and every worker reads all tests.
TOML = {
    "large": lambda: "#" * 60 * MIB,
    "deep keys": lambda: "a." * 100_000 + "a = 1",
    "deep tables": lambda: "[" + "a." * 100_000 + "a]",
    "deep inline keys": lambda: 'part = [{"a"' + ' . "a"' * 50_000 + " = 1}]",
    "deep lists": lambda: "a = " + "[" * 100_000,
    "digits": lambda: "num_microbatches = " + "9" * 100_000,
    "hexadecimal digits": lambda: "num_microbatches = 0x" + "f" * 100_000,
    "hexadecimal text": lambda: PART + "zero = 0x" + "f" * 90,
}
JSON = {
    "large": lambda: HEAD + b"1" * 65 * MIB,
    "lists": lambda: HEAD + b"[" + b"[]," * 20 * MIB + b"1]}",
    "objects": lambda: HEAD + b"[" + b'{"a":1},' * 7 * MIB + b"1]}",
    "deep": lambda: HEAD + b'{"a":' * 100_000,
    "digits": lambda: HEAD + b"9" * 100_000 + b"}",
    "plans": lambda: HEAD + b'{"plans":[' + b"{}," * 100_000 + b"{}]}}",
}


def refused(read: Callable[[Path], object], path: Path, data: bytes | str) -> str:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(InputError) as caught:
        read(path)
    message = str(caught.value)
    assert path.name in message
    assert len(message) < 800
    return message


@pytest.mark.parametrize("read", [load_cluster, read_parts])
@pytest.mark.parametrize("name", TOML)
def test_toml_of_any_size_or_depth_is_one_message(read, name: str, tmp_path: Path) -> None:
    refused(read, tmp_path / "file.toml", TOML[name]())


@pytest.mark.parametrize("read", [read_plan, read_graph, read_iopddl])
@pytest.mark.parametrize("name", JSON)
def test_json_of_any_size_or_depth_is_one_message(read, name: str, tmp_path: Path) -> None:
    refused(read, tmp_path / "file.json", JSON[name]())


@pytest.mark.parametrize("read", [read_layer_graph, read_runs])
@pytest.mark.parametrize(
    ("text", "times"), [(b"a", 60 * MIB), (b"a", 900_000), (b"\t", 900_000), (b"a=[", 200_000)]
)
def test_lines_of_any_length_are_one_message(read, text: bytes, times: int, tmp_path: Path) -> None:
    refused(read, tmp_path / "file.txt", text * times)


def test_more_parts_than_any_file_needs_are_refused(tmp_path: Path) -> None:
    assert "at most" in refused(read_parts, tmp_path / "parts.toml", PART * 100_000)
    assert "at most 1024" in refused(read_parts, tmp_path / "parts.toml", PART * 1025)


def test_more_microbatches_than_any_step_needs_are_refused(tmp_path: Path) -> None:
    text = f"num_microbatches = {10**18}\n{PART}"
    assert "num_microbatches" in refused(read_parts, tmp_path / "parts.toml", text)


def test_runs_that_would_unfold_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, make_plan())
    body = json.loads(path.read_text())
    body["content"]["strategy"]["configs"]["runs"] = [[0, 900_000]]
    content = {"chosen": 0, "plans": [body["content"]] * 500}
    body |= {"kind": "frontier", "content": content}
    assert "at most 1,000,000 entries" in refused(read_plan, path, json.dumps(body))


def test_a_gzip_bomb_is_counted_and_not_kept(tmp_path: Path) -> None:
    bomb = gzip.compress(b" " * 257 * MIB, 1)
    assert len(bomb) < 2 * MIB
    assert "256 MiB unzipped" in refused(read_iopddl, tmp_path / "problem.json.gz", bomb)


@pytest.mark.parametrize("cut", [3, 30, -3])
def test_a_cut_gzip_stream_is_refused_and_a_whole_one_comes_back(cut: int) -> None:
    data = bytes(range(256)) * 100
    packed = gzip.compress(data)
    assert unzipped(packed, len(data), "a file") == data
    with pytest.raises(ValueError, match="at most"):
        unzipped(packed, len(data) - 1, "a file")
    with pytest.raises(ValueError, match="gzip stream"):
        unzipped(packed[:cut], len(data), "a file")


def test_dots_of_texts_and_comments_are_no_nesting() -> None:
    dots = ".".join("abcdefghijklmnopqrstuvwxyz")
    text = f"modules = [\"{dots}\", '{dots}'] # {dots}\n[a.b.c]\nd.e = 1\n"
    assert parse_toml(text) == {"modules": [dots, dots], "a": {"b": {"c": {"d": {"e": 1}}}}}


def test_hosts_by_the_ten_thousand_are_read_in_seconds(tmp_path: Path) -> None:
    hosts = (
        '[[host]]\ncount = 40_000\nkind = "H100"\ndevices = 1\nuplink = "1 GB/s"\nswitch = "rack"\n'
    )
    path = tmp_path / "cluster.toml"
    path.write_text(f'[[switch]]\nname = "rack"\nuplink = "9 GB/s"\n{hosts}')
    assert load_cluster(path).num_devices == 40_000
