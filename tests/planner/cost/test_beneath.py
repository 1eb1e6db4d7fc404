"""Messages beneath products: which product lies beside which message, and what is left of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.cluster import Cluster
from shardwright.core.costs import Cost, CostTable
from shardwright.core.decoder import Decoder
from shardwright.core.program import Kind, Program
from shardwright.files.clusterfile import parse_cluster
from shardwright.planner.cost import collective_seconds, operator_costs, price
from shardwright.planner.cost.beneath import exposed
from shardwright.planner.cost.roofline import Rates
from shardwright.planner.lower import lower
from shardwright.planner.search import Context, Training, as_strategy
from shardwright.planner.space import Seed
from shardwright.runtime.capture.decoder import capture_decoder

pytestmark = pytest.mark.torch

SHAPE = Decoder(
    layers=4, hidden=2048, heads=16, kv_heads=16, head_size=128, ffn=8192, vocab=8192, seq=2048,
    bias=False, positions=False, tied=False,
)  # fmt: skip
WIDTH = 4


def priced(seed: Seed, cluster: Cluster, software: str) -> tuple[Program, np.ndarray]:
    """Return a Program and, by its messages' items, seconds."""
    named = replace(cluster, software=software)
    graph = capture_decoder(SHAPE, 8, "bfloat16")
    context = Context.of(
        graph, named, CostTable(), Training(precision="bfloat16", recompute="none")
    )
    program = lower(graph, as_strategy(context, seed))
    seconds = price(program, graph, named, CostTable()).seconds
    by_item = np.zeros(len(program.messages))
    sent = [i for i, kind in enumerate(program.kind) if kind == Kind.MESSAGE]
    for index in sent:
        by_item[program.item[index]] = seconds[index]
    return program, by_item


def product_seconds(inner: int, outer: int) -> float:
    """Return one product of all tokens with a weight of ``outer x inner`` that lies on one device."""
    graph = capture_decoder(SHAPE, 8, "bfloat16")
    index = next(i for i, o in enumerate(graph.operators) if o.kind == "aten.linear.default")
    cluster = replace(parse_cluster("1xH100"), software="megatron-core")
    rates = Rates(cluster=cluster, precision="bfloat16")
    shapes = ((8, 2048, inner), (outer, inner))
    return operator_costs(graph, index, (shapes, ((8, 2048, outer),)), rates)["forward"].seconds


def activations(program: Program, primitive: str, purpose: str) -> list[int]:
    """Return messages of whole activations between the tensor-parallel regions."""
    size = 8 * 2048 * 2048 * 2
    return [
        number
        for number, one in enumerate(program.messages)
        if (one.primitive, one.purpose, one.bytes) == (primitive, purpose, size)
    ]


def test_a_gather_waits_for_nothing_but_its_last_piece_where_the_product_is_longer() -> None:
    assert exposed(Cost(seconds=8e-3, spread=2e-3), 20e-3, 4) == Cost(seconds=2e-3, spread=5e-4)
    left = exposed(Cost(seconds=8e-3, spread=2e-3), 4e-3, 4)  # of which 3 ms cover
    assert left.seconds == pytest.approx(5e-3)


def test_messages_run_beneath_the_products_that_read_or_make_them() -> None:
    seed, cluster = Seed(tensor=WIDTH, sequence=True), parse_cluster("4xH100")
    program, plain = priced(seed, cluster, "megatron")
    same, beneath = priced(seed, cluster, "megatron-core")
    assert len(same.messages) == len(program.messages)
    # What follows a message forward: all heads' queries, keys and values, or the inner width.
    opening = [product_seconds(2048, 3 * 2048 // WIDTH), product_seconds(2048, 8192 // WIDTH)]
    closing = [product_seconds(2048 // WIDTH, 2048), product_seconds(8192 // WIDTH, 2048)]
    for primitive, beside in (("all_gather", opening), ("reduce_scatter", closing)):
        numbers = activations(program, primitive, "activation")
        assert len(numbers) >= 2 * SHAPE.layers
        alone = plain[numbers[0]]
        wanted = sorted(max(alone - one * (1 - 1 / WIDTH), alone / WIDTH) for one in beside)
        found = sorted(set(np.round(beneath[numbers], 9)))
        for one in wanted:
            assert any(other == pytest.approx(one, rel=1e-3) for other in found)


def test_an_all_reduce_and_what_leaves_a_host_take_what_they_take() -> None:
    for seed, text in (
        (Seed(tensor=WIDTH), "4xH100"),
        (Seed(tensor=WIDTH, sequence=True), "4x1xH100"),
    ):
        _, plain = priced(seed, parse_cluster(text), "megatron")
        _, beneath = priced(seed, parse_cluster(text), "megatron-core")
        assert (plain == beneath).all()


def test_a_product_adds_to_the_gradients_of_earlier_microbatches() -> None:
    """Otherwise each of them is read, and its sum in float32 read and written, by its own pass."""
    added = {}
    for software in ("megatron", "megatron-core"):
        cluster = replace(parse_cluster("1xH100"), software=software)
        graph = capture_decoder(SHAPE, 8, "bfloat16")
        training = Training(precision="bfloat16", recompute="none")
        context = Context.of(graph, cluster, CostTable(), training)
        program = lower(graph, as_strategy(context, Seed(num_microbatches=2)))
        seconds = price(program, graph, cluster, CostTable()).seconds
        backward = program.kind == Kind.BACKWARD
        first, second = (seconds[backward & (program.microbatch == turn)].sum() for turn in (0, 1))
        added[software] = abs(second - first)
    num_bytes = (2 + 4 + 4) * SHAPE.num_parameters
    assert added["megatron"] == pytest.approx(num_bytes / (0.7 * 3.35e12), rel=0.02)
    assert added["megatron-core"] == 0


def test_what_has_an_owner_is_sent_apart_from_all_others() -> None:
    """Parameters and gradients of ZeRO: as many messages as tensors, each with its own latency."""
    cluster, group = parse_cluster("2x4xA100"), tuple(range(8))
    program, apart = priced(Seed(data=8, zero=1), cluster, "internevo")
    several = [number for number, one in enumerate(program.messages) if len(one.sources) > 1]
    assert {program.messages[n].purpose for n in several} == {"parameter", "synchronise"}
    for number in several:
        one = program.messages[number]
        count = len(one.sources)
        each = collective_seconds(one.primitive, one.bytes / count, group, cluster, CostTable())
        assert apart[number] == pytest.approx(count * each.seconds)
