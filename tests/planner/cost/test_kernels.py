"""Measured tables of GPU kernels: what they were read from, between points and outside."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from shardwright.core.cluster import SOFTWARE
from shardwright.core.graph import DTYPE_BYTES
from shardwright.files.clusterfile import parse_cluster
from shardwright.operators.counting.products import Product
from shardwright.planner.cost import Rates
from shardwright.planner.cost.kernels import kernels_of
from shardwright.planner.cost.software import PROFILES, sustained
from tests.planner.cost.test_compute import cost, graph_of

H200 = Rates(cluster=parse_cluster("1xH200"), precision="bfloat16")
PEAKS = {"A100-SXM4-80GB": 312e12, "H100-SXM5-80GB": 989e12, "H200-SXM": 989e12,
         "B200-SXM": 2250e12, "GB200-SXM": 2500e12, "L40S": 362e12}  # fmt: skip


def test_the_tables_are_small_and_say_where_they_come_from():
    path = resources.files("shardwright.planner.cost").joinpath("gpu_tables.npz")
    with path.open("rb") as file:
        assert len(file.read()) < 3 * 2**20
    with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
        said = json.loads(str(data["about"]))
    assert "Apache-2.0" in said["licence"]
    assert set(said["tables"]) == {"A100", "H100", "H200", "B200", "GB200", "L40S"}


@pytest.mark.parametrize("name", PEAKS)
def test_no_product_beats_the_peak_and_large_ones_reach_half_of_it(name: str):
    tables = kernels_of(name)
    assert tables is not None
    for size in (64, 300, 1024, 5000, 8192, 40000, 10**6):
        rate = tables.product_rate(Product(1, size, 4096, 4096), "bfloat16")
        assert rate is not None
        assert rate < PEAKS[name]
    large = tables.product_rate(Product(1, 8192, 8192, 8192), "bfloat16")
    assert large is not None
    assert large > 0.5 * PEAKS[name]


# Seconds in the source's own rows (SGLang 0.5.10 on A100, vLLM 0.24.0 on H100), other frameworks near.
@pytest.mark.parametrize(
    ("name", "m", "n", "k", "flop_share"),
    [("A100-SXM4-80GB", 1024, 4096, 4096, 0.54), ("A100-SXM4-80GB", 4096, 1024, 4096, 0.54),
     ("H100-SXM5-80GB", 256, 4096, 4096, 0.45), ("H100-SXM5-80GB", 1024, 1024, 4096, 0.53)],
)  # fmt: skip
def test_a_product_that_was_measured_has_its_measured_rate(name, m, n, k, flop_share):
    tables = kernels_of(name)
    assert tables is not None
    rate = tables.product_rate(Product(1, m, n, k), "bfloat16")
    assert rate == pytest.approx(flop_share * PEAKS[name], rel=0.1)


def test_below_the_table_the_time_stays_and_beyond_it_the_rate():
    tables = kernels_of("H100-SXM5-80GB")
    assert tables is not None

    def rate(rows: float) -> float:
        return tables.product_rate(Product(1, rows, 4096, 4096), "bfloat16") or 0.0

    assert 64 / rate(64) == pytest.approx(8 / rate(8))
    assert rate(2**17) == pytest.approx(rate(2**15))


def test_few_rows_for_each_expert_cost_more_a_row():
    tables = kernels_of("H100-SXM5-80GB")
    assert tables is not None
    sizes = (4, 16, 64, 256, 1024, 4096)
    best, usual = (
        [tables.grouped_share(rows, made_by) for rows in sizes] for made_by in ("cutlass", "triton")
    )
    for shares in (best, usual):
        assert shares == sorted(shares)
        assert shares[0] < 0.1
    assert usual[-1] < 0.8 < best[-1] < 1.1


def test_a_step_never_holds_more_than_a_product_reaches_alone_or_the_power_allows():
    for alone in (0.1, 0.4, 0.8):
        kept = sustained(alone * 989e12, 989e12, "H100-SXM5-80GB") / 989e12
        assert kept < min(alone, 0.6)
    assert sustained(0.1 * 989e12, 989e12, "H100-SXM5-80GB") == pytest.approx(98.9e12, rel=0.01)


def test_every_profile_of_a_cluster_has_its_constants():
    assert set(PROFILES) == set(SOFTWARE)


def test_a_chain_of_elementwise_operators_is_cheaper_compiled_and_a_product_is_not():
    chain = graph_of("aten.silu.default", [(2**24,)], (2**24,))
    product = graph_of("aten.linear.default", [(4096, 4096), (4096, 4096)], (4096, 4096))
    seconds = {}
    for name in ("eager", "compiled"):
        rates = Rates(cluster=replace(parse_cluster("1xH100"), software=name), precision="bfloat16")
        seconds[name] = (cost(chain, rates).seconds, cost(product, rates).seconds)
    assert seconds["compiled"][0] <= seconds["eager"][0]
    assert seconds["compiled"][1] == pytest.approx(seconds["eager"][1], rel=0.05)
    traffic = 2 * 2**24 * DTYPE_BYTES["bfloat16"]
    assert seconds["compiled"][0] > traffic / 3.35e12


@pytest.mark.parametrize(
    ("words", "width", "slower"), [(50257, 768, 4.8), (50264, 770, 4.8), (50264, 768, 1)]
)
def test_rows_that_start_anywhere_are_read_number_by_number(words: int, width: int, slower: float):
    odd = graph_of("aten.linear.default", [(16384, width), (words, width)], (16384, words))
    even = graph_of("aten.linear.default", [(16384, 768), (50264, 768)], (16384, 50264))
    for phase in ("forward", "backward"):
        ratio = cost(odd, H200, phase).seconds / cost(even, H200, phase).seconds
        assert ratio == pytest.approx(slower, rel=0.35)
    whole = replace(H200, precision="float32")
    assert cost(odd, whole).seconds == pytest.approx(cost(even, whole).seconds, rel=0.02)


def test_statistics_of_channels_take_longer_than_their_bytes():
    shape = (64, 256, 56, 56)
    norm = graph_of("aten.batch_norm.default", [shape, (256,), (256,)], shape)
    relu = graph_of("aten.relu.default", [shape], shape)
    assert 4 < cost(norm, H200).seconds / cost(relu, H200).seconds < 6
