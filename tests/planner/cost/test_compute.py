"""Operator times: measured first, the roofline's roofs, its calibration, published runs."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import replace
from importlib import resources

import pytest

from shardwright.core.costs import Cost, CostTable, operator_key
from shardwright.core.graph import Operator, OperatorGraph, TensorSpec
from shardwright.files.clusterfile import parse_cluster, read_cluster
from shardwright.operators.counting.products import Product
from shardwright.operators.counting.work import local_flops
from shardwright.planner.cost import Rates, ShardPrices, operator_costs
from shardwright.planner.cost.kernels import kernels_of
from shardwright.planner.cost.software import sustained
from tests.planner.search.models import Sketch


def graph_of(
    kind: str, shapes: list[tuple[int, ...]], out: tuple[int, ...], **attributes
) -> OperatorGraph:
    tensors = [
        TensorSpec(name=f"t{i}", shape=s, dtype="float32", role="input", needs_gradient=True)
        for i, s in enumerate(shapes)
    ]
    result = TensorSpec(
        name="out", shape=out, dtype="float32", role="activation", producer=0, needs_gradient=True
    )
    operator = Operator(
        name="op",
        kind=kind,
        inputs=tuple(range(len(shapes))),
        input_names=("input", "weight", "bias")[: len(shapes)],
        outputs=(len(shapes),),
        attributes=tuple(attributes.items()),
    )
    return OperatorGraph(
        name="g", tensors=(*tensors, result), operators=(operator,), blocks=(), loss=len(shapes)
    )


def cost(graph: OperatorGraph, rates: Rates, phase: str = "forward") -> Cost:
    shapes = tuple(tensor.shape for tensor in graph.tensors)
    return operator_costs(graph, 0, (shapes[:-1], shapes[-1:]), rates)[phase]


H100 = Rates(cluster=parse_cluster("1xH100"), precision="bfloat16")
LINEAR = graph_of("aten.linear.default", [(4096, 8192), (8192, 8192)], (4096, 8192))


def test_a_large_product_runs_at_a_plausible_share_of_peak():
    flops = 2 * 4096 * 8192 * 8192
    assert 0.45 < flops / cost(LINEAR, H100).seconds / 989e12 < 0.8


def test_backward_of_a_product_costs_twice_its_forward_and_half_that_with_one_gradient():
    ahead = cost(LINEAR, H100).seconds
    assert cost(LINEAR, H100, "backward").seconds == pytest.approx(2 * ahead, rel=0.15)
    tensors = list(LINEAR.tensors)
    tensors[0] = TensorSpec(name="t0", shape=(4096, 8192), dtype="float32", role="input")
    frozen_input = OperatorGraph(
        name="g", tensors=tuple(tensors), operators=LINEAR.operators, blocks=(), loss=2
    )
    assert cost(frozen_input, H100, "backward").seconds == pytest.approx(ahead, rel=0.15)


def weighted(graph: OperatorGraph) -> OperatorGraph:
    """Return a graph whose second input is a parameter."""
    tensors = list(graph.tensors)
    tensors[1] = replace(tensors[1], role="parameter")
    return replace(graph, tensors=tuple(tensors))


def test_a_product_in_8_bits_runs_at_its_own_rate_after_its_operands_are_rounded():
    kind, software = H100.kind, H100.software
    rates = Rates(cluster=parse_cluster("1xH100"), precision="fp8")
    tables = kernels_of(kind.name)
    sizes = {"forward": [(4096, 8192, 8192)], "backward": [(4096, 8192, 8192), (8192, 8192, 4096)]}
    for phase, products, elements in (
        ("forward", 1, (4096 + 8192) * 8192),
        ("backward", 2, (2 * 4096 + 8192 + 4096) * 8192),  # the gradient twice
    ):
        faster = 0.0
        for m, n, k in sizes[phase]:
            rate = tables.product_rate(Product(1, m, n, k), "float8_e4m3fn")
            faster += 2 * m * n * k / sustained(rate, 1979e12, kind.name)
        rounding = 11 * elements / software.memory / kind.memory_bandwidth
        launches = 15 * products * software.gap * kind.launch_seconds
        found = cost(weighted(LINEAR), rates, phase).seconds
        assert found == pytest.approx(faster + rounding + launches, rel=1e-3)
    odd = weighted(graph_of("aten.linear.default", [(4096, 8192), (8184, 8192)], (4096, 8184)))
    assert cost(odd, rates).seconds == cost(odd, H100).seconds  # 8184 does not divide by 16


def rounded_bytes(software: str, phase: str, kernels: int) -> float:
    """Return the bytes that 8 bits add to products, so many kernels' gaps aside."""
    cluster = replace(parse_cluster("1xH100"), software=software)
    rates = Rates(cluster=cluster, precision="fp8")
    tables, found = kernels_of(rates.kind.name), cost(weighted(LINEAR), rates, phase).seconds
    products = {
        "forward": [(4096, 8192, 8192)],
        "backward": [(4096, 8192, 8192), (8192, 8192, 4096)],
    }
    for m, n, k in products[phase]:
        rate = tables.product_rate(Product(1, m, n, k), "float8_e4m3fn")
        found -= 2 * m * n * k / sustained(rate, 1979e12, rates.kind.name)
    found -= kernels * rates.software.gap * rates.kind.launch_seconds
    return found * rates.software.memory * rates.kind.memory_bandwidth


def test_fused_rounding_moves_what_its_kernels_read_and_write():
    """Per element, from what the kernels do: torchao's reads 2 bytes for the largest element, then 2,
    and writes 1; Transformer Engine's reads 2 and writes 1 in each of two layouts."""
    x, weight, made = 4096 * 8192, 8192 * 8192, 4096 * 8192
    for software, phase, kernels, num_bytes in (
        ("compiled", "forward", 1 + 2 * 2, 5 * (x + weight)),
        ("compiled", "backward", 2 + 2 * 3, 5 * (x + weight) + 6 * made),
        ("megatron-core", "forward", 1 + 1, 4 * x),
        ("megatron-core", "backward", 2 + 1, 4 * made),
    ):
        assert rounded_bytes(software, phase, kernels) == pytest.approx(num_bytes, rel=1e-6)


def test_balanced_attention_is_half_the_square_wherever_a_share_lies():
    whole, part = (1, 8, 8192, 128), (1, 8, 2048, 128)
    kind = "aten.scaled_dot_product_attention.default"
    graph = graph_of(kind, [whole, whole, whole], whole, is_causal=True)
    seconds = {}
    for software in ("eager", "megatron-core"):
        cluster = replace(parse_cluster("1xH100"), software=software)
        rates = Rates(cluster=cluster, precision="bfloat16")
        rate = rates.software.attention_share("H100")
        for query in (whole, part):
            shapes = (query, whole, whole)
            found = operator_costs(graph, 0, (shapes, (query,)), rates)["forward"].seconds
            tabled = kernels_of("H100").attention_rate(8, (query[2] * 8192) ** 0.5, 128)
            seconds[software, query[2]] = found * rate * tabled / (4 * 8 * 8192 * 128)
    # Keys per query, of all: half; for the last quarter of the queries 7/8.
    for key, share in {("eager", 8192): 1 / 2, ("megatron-core", 8192): 1 / 2,
                       ("eager", 2048): 7 / 8, ("megatron-core", 2048): 1 / 2}.items():  # fmt: skip
        assert seconds[key] / key[1] == pytest.approx(share, rel=0.02)


def test_an_elementwise_operator_is_bound_by_memory():
    graph = graph_of("aten.relu.default", [(2**28,)], (2**28,))
    assert 0.5 < (2 * 2**28 * 2 / 3.35e12) / cost(graph, H100).seconds < 0.95


def test_a_sum_hands_its_gradient_on_unless_others_add_to_it():
    """A term that is read twice has two gradients, which are read and whose sum is written."""
    alone = graph_of("aten.add.Tensor", [(4096, 8192)] * 2, (4096, 8192))
    again = replace(alone.operators[0], name="again", outputs=(3,))
    twice = replace(
        alone,
        tensors=(*alone.tensors, replace(alone.tensors[2], producer=1)),
        operators=(*alone.operators, again),
    )
    assert cost(alone, H100, "forward").seconds > 0
    assert cost(alone, H100, "backward").seconds == 0
    shapes = ((4096, 8192),) * 3
    seconds = operator_costs(twice, 0, (shapes[:2], shapes[2:]), H100)["backward"].seconds
    assert seconds == pytest.approx(3 * 2 * 4096 * 8192 / (0.55 * 3.35e12), rel=0.05)


def test_a_lookup_reads_only_the_rows_it_returns():
    graph = graph_of("aten.embedding.default", [(10**6, 1024), (64,)], (64, 1024))
    assert cost(graph, H100).seconds < 1e-5


def test_views_cost_nothing_on_a_gpu():
    assert cost(graph_of("aten.view.default", [(2**28,)], (2**14, 2**14)), H100).seconds == 0


def test_a_sixth_of_the_work_never_costs_more():
    shard = graph_of("aten.linear.default", [(4096, 8192), (1024, 8192)], (4096, 1024))
    assert cost(shard, H100).seconds < cost(LINEAR, H100).seconds / 6


def test_a_measurement_wins_and_is_only_valid_for_its_precision():
    shapes = tuple(t.shape for t in LINEAR.tensors)
    key = operator_key(LINEAR, LINEAR.operators[0], shapes[:2], shapes[2:], "forward", "float32")
    table = CostTable(operators=((key, Cost(seconds=42.0, spread=1.0, source="measured")),))
    cluster = parse_cluster("1xH100")
    assert cost(LINEAR, Rates(cluster=cluster, table=table)).seconds == 42.0
    other = cost(LINEAR, Rates(cluster=cluster, table=table, precision="bfloat16"))
    assert other.source == "modelled"


def test_unmeasured_shards_are_scaled_like_the_measured_ones_of_their_kind():
    cluster = read_cluster(
        '[kind.c]\npeak = {float32 = "0.1 TFLOP/s"}\nmemory = "1 GB"\nmemory_bandwidth = "9 GB/s"\n'
        'backend = "cpu"\nlaunch = "0 s"\n[[host]]\nkind = "c"\ndevices = 1\nlink = "2 GB/s"\n'
    )
    small = graph_of("aten.linear.default", [(256, 512), (512, 512)], (256, 512))
    large = graph_of("aten.linear.default", [(512, 512), (512, 512)], (512, 512))
    shapes = tuple(t.shape for t in small.tensors)
    modelled = cost(small, Rates(cluster=cluster)).seconds
    key = operator_key(small, small.operators[0], shapes[:2], shapes[2:], "forward")
    table = CostTable(operators=((key, Cost(seconds=3 * modelled, source="measured")),))
    scaled = cost(large, Rates(cluster=cluster, table=table))
    assert scaled.seconds == pytest.approx(3 * cost(large, Rates(cluster=cluster)).seconds)
    assert scaled.source == "modelled"


@pytest.mark.parametrize("rows", [8, 100, 1000])
def test_what_was_measured_nearby_counts_most(rows: int):
    """Products of few rows wait for memory, which the roofline thinks faster than it is."""
    rates = Rates(cluster=parse_cluster("1xH100"))
    measured = {16: 3.0, 4096: 1.2}
    graphs = {
        n: graph_of("aten.linear.default", [(n, 512), (512, 512)], (n, 512)) for n in measured
    }
    found: list[tuple[str, Cost]] = []
    for n, graph in graphs.items():
        shapes = tuple(t.shape for t in graph.tensors)
        key = operator_key(graph, graph.operators[0], shapes[:2], shapes[2:], "forward")
        seconds = measured[n] * cost(graph, rates).seconds
        found.append((key, Cost(seconds=seconds, source="measured")))
    known = replace(rates, table=CostTable(operators=tuple(found)), ratios={})
    graph = graph_of("aten.linear.default", [(rows, 512), (512, 512)], (rows, 512))
    ratio = cost(graph, known).seconds / cost(graph, rates).seconds
    nearest = min(measured, key=lambda n: abs(math.log(n / rows)))
    assert 1.2 < ratio < 3.0
    assert abs(ratio / measured[nearest] - 1) < 0.2


def test_no_backward_where_no_gradient_flows():
    tensors = tuple(
        TensorSpec(name=t.name, shape=t.shape, dtype=t.dtype, role=t.role, producer=t.producer)
        for t in LINEAR.tensors
    )
    graph = OperatorGraph(name="g", tensors=tensors, operators=LINEAR.operators, blocks=(), loss=2)
    assert cost(graph, H100, "backward").seconds == 0


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "flops"),
    [
        ("linear", ((4, 5, 6), (7, 6)), (4, 5, 7), 2 * 4 * 5 * 6 * 7),
        ("matmul", ((3, 4, 5), (3, 5, 6)), (3, 4, 6), 2 * 3 * 4 * 5 * 6),
        ("conv2d", ((2, 3, 8, 8), (5, 3, 3, 3)), (2, 5, 6, 6), 2 * 2 * 5 * 36 * 27),
        ("einsum", ((4, 5), (5, 6)), (4, 6), 2 * 4 * 5 * 6),
        (
            "gru",
            ((4, 5, 6), (1, 4, 7), (21, 6), (21, 7), (21,), (21,)),
            (4, 5, 7),
            2 * 20 * 21 * 13,
        ),
        ("scaled_dot_product_attention", ((2, 3, 4, 8),) * 3, (2, 3, 4, 8), 4 * 2 * 3 * 4 * 4 * 8),
    ],
)
def test_flops_are_counted_from_shapes(kind, inputs, output, flops):
    assert local_flops(kind, inputs, (output,)) == pytest.approx(flops)


def test_published_v100_products_are_that_much_faster_alone_than_in_a_step():
    text = resources.files("shardwright").joinpath("files/hardware.csv").read_text("utf-8")
    rates = Rates(cluster=parse_cluster("1xV100"), precision="float16")
    ratios = []
    for row in csv.DictReader(text.splitlines()):
        if row["kind"] != "gemm" or not row["name"].startswith("V100"):
            continue
        match = re.match(r"MxNxK (\d+)x(\d+)x(\d+), (\d+) us", row["condition"])
        assert match is not None
        m, n, k, micros = map(int, match.groups())
        graph = graph_of("aten.linear.default", [(m, k), (n, k)], (m, n))
        ratios.append(cost(graph, rates).seconds * 1e6 / micros)
    assert len(ratios) == 80
    middle = sorted(ratios)[40]
    assert 1.1 < middle < 1.5
    assert sum(abs(ratio / middle - 1) < 0.15 for ratio in ratios) > 60


def test_an_operator_has_its_own_price_whatever_was_priced_before() -> None:
    where = parse_cluster("1xH100")
    sketch = Sketch(4)
    x = sketch.outside("x", (4, 64), "input")
    first, second = (sketch.linear(x, 64, f"l{number}") for number in range(2))
    alone = sketch.apply("aten.add.Tensor", {"self": first, "other": second}, (4, 64))
    again = sketch.apply("aten.add.Tensor", {"self": alone, "other": x}, (4, 64))
    # The gradient of what this one reads is added up, since another reads it as well.
    both = sketch.apply("aten.add.Tensor", {"self": alone, "other": again}, (4, 64))
    loss = sketch.apply("aten.sum.default", {"self": both}, ())
    sketch.close_block("all", "")
    graph = OperatorGraph(
        "sums", tuple(sketch.tensors), tuple(sketch.operators), tuple(sketch.blocks), loss
    )
    indices = range(len(graph.operators))
    for order in (indices, indices[::-1]):
        shards = ShardPrices(where, CostTable())
        rates = shards.rates(0, "bfloat16")
        for index in order:
            operator = graph.operators[index]
            shapes = tuple(
                tuple(graph.tensors[tensor].shape for tensor in tensors)
                for tensors in (operator.inputs, operator.outputs)
            )
            found = shards.cost(graph, index, shards.sort(graph, index), shapes, "backward", rates)
            assert found == operator_costs(graph, index, shapes, rates)["backward"], index
