"""Files of every kind, damaged as hands, editors and disks do it: read, or refused in one line that names
the file and ends with a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shardwright.errors import InputError
from shardwright.files.algorithmtable import read_algorithms
from shardwright.files.clusterfile import load_cluster
from shardwright.files.iopddl import read_iopddl
from shardwright.files.layergraph import read_layer_graph
from shardwright.files.layertrace import read_layer_trace
from shardwright.files.networks import read_points
from shardwright.files.orderfile import read_order
from shardwright.files.partsfile import read_parts
from shardwright.files.runs import read_runs

TABLE = "layer,algorithm,seconds_us,bytes,batch\na,fft,1,2,32\n"
TWICE = [
    (read_layer_trace, "name,forward_us,forward_ms,backward,bytes\na,1,2,1,4\n", "'forward_us' and 'forward_ms'"),
    (read_layer_trace, "name,forward,backward,bytes,bytes\na,1,2,4,5\n", "'bytes' and 'bytes'"),
    (read_layer_trace, 'name,forward,backward,bytes\n"a,1,2,4\nb,1,2,4\n', "no table"),
    (read_algorithms, TABLE.replace("batch", "seconds_ms"), "'seconds_us' and 'seconds_ms'"),
    (read_algorithms, TABLE.replace("batch", "bytes"), "'bytes' and 'bytes'"),
    (read_algorithms, TABLE.replace("32", "32.5"), "row 2: batch must be a whole number"),
    (read_algorithms, TABLE + '"b,fft,1,2,32\nb,gemm,1,2,32\n', "no table"),
    (read_points, "bytes,seconds\n1,1\n2,2\n" + "3" * 200_000 + ",3\n", "no table"),
    (
        read_layer_graph,
        "a -- L -- forward_compute_time=1, backward_compute_time=2, activation_size=8, parameter_size=64, "
        "activation_size=9\n",
        "line 1: layer 'a' has activation_size twice",
    ),
    (read_iopddl, '{"problem": {"usage_limit": 1, "usage_limit": 2}}', "'usage_limit' occurs twice"),
]  # fmt: skip
TURNS = 250  # of every kind
CLUSTER = """
[kind.core]
peak = { float32 = "50 GFLOP/s" }
memory = "4 GiB"
memory_bandwidth = "10 GB/s"
backend = "cpu"
[[host]]
kind = "core"
devices = 4
link = "5 GB/s"
link_latency = "20 us"
"""
PARTS = """
num_microbatches = 4
schedule = "1f1b"
[[part]]
modules = ["layers.0", "layers.[12]"]
devices = [0, 1]
data = 2
zero = 3
[[part]]
modules = ["head"]
devices = [2, 3]
tensor = 2
"""
GRAPH = """node0 -- L0(x=1) -- forward_compute_time=1.5, backward_compute_time=2.5, activation_size=8.0, parameter_size=64.0
node1 -- L1 -- forward_compute_time=0.5, backward_compute_time=2.5, activation_size=[8.0; 4.0], parameter_size=0.0
\tnode0 -- node1
"""
PROBLEM = """{"problem": {"name": "p", "nodes": {"intervals": [[0, 3], [1, 4]], "costs": [[1, 2], [3, 4, 5]],
"usages": [[1, 5], [2, 6, 3]]}, "edges": {"nodes": [[0, 1]], "costs": [[1, 2, 3, 4, 5, 6]]}, "usage_limit": 9}}"""
RUNS = (
    "id,source_id,model,layers,hidden,heads,seq,gpu,gpus,tp,pp,dp,micro_batch,global_batch,precision,iter_s\n\
a,s,gpt,4,512,8,128,A100-SXM4-80GB,8,2,2,2,1,16,bf16,0.5\n"
)
KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cluster": (load_cluster, CLUSTER),
    "parts": (read_parts, PARTS),
    "order": (read_order, "0F0 0F1 0I0 0W0 0B1\n1F0,1B0,1F1,1I1,1W1 # last\n"),
    "profile": (read_layer_graph, GRAPH),
    "trace": (read_layer_trace, "name,forward_us,backward_us,bytes\nconv.weight,1,2,64\ndata,5,0,0\n"),
    "messages": (read_points, "bytes,seconds\n1024,0.00005\n1048576,0.001\n"),
    "algorithms": (read_algorithms, "layer,algorithm,seconds_ms,bytes,batch\na,fft,1,64,32\na,gemm,2,0,32\n"),
    "iopddl": (read_iopddl, PROBLEM),
    "runs": (read_runs, RUNS),
}  # fmt: skip
WORDS = ("", "x", "\0", "\x1b[31m", "\u202e", "é", "0", "-1", "nan", "inf", "1e400", "2.5", "9" * 5000,
         "9223372036854775808", "true", "[]", "{}", "10 GB/s", "-5 GiB", '"', "[" * 3000, "\u0663")  # fmt: skip


def hurt(text: str, draw: Random) -> bytes:
    """Damage a text in one to four places: its words and marks, or its bytes."""
    words = re.split(r"(\s+|[,=\[\]{}:\"();]|--)", text)
    for _ in range(draw.choice((1, 1, 2, 4))):
        place, other = draw.randrange(len(words)), draw.randrange(len(words))
        match draw.randrange(5):
            case 0:
                del words[place]
            case 1:
                words[place] *= 2
            case 2:
                words[place], words[other] = words[other], words[place]
            case _:
                words[place] = draw.choice(WORDS)
    data = bytearray("".join(words).encode())
    if draw.random() < 0.3:
        place = draw.randrange(len(data))
        data[place : place + draw.choice((0, 1, 9))] = draw.choice(
            (b"\xff\xfe", b"\0", b"", b"\n\n")
        )
    return bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_read_or_refused_in_one_line_with_a_remedy(
    kind: str, tmp_path: Path
) -> None:
    read, text = KINDS[kind]
    path, refused = tmp_path / f"damaged-{kind}.json", 0
    path.write_text(text)
    read(path)
    for turn in range(TURNS):
        data = hurt(text, Random(f"{kind} {turn}"))
        path.write_bytes(data)
        refusal = ""
        try:
            read(path)
        except InputError as error:
            refusal = str(error)
        refused += bool(refusal)
        if refusal:
            said = f"turn {turn}: {refusal}"
            assert path.name in refusal and ";" in refusal, said  # noqa: PT018
            assert len(refusal) < 1500 and refusal.isprintable(), said  # noqa: PT018
    assert refused > 10


def test_what_a_file_says_twice_or_a_quote_swallows_is_refused(tmp_path: Path) -> None:
    for read, text, complaint in TWICE:
        path = tmp_path / "file"
        path.write_text(text)
        with pytest.raises(InputError, match=rf"{re.escape(str(path))}.*{complaint}.*; "):
            read(path)
