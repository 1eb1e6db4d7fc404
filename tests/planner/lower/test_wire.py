"""Gradients in another dtype on the wire: what is lowered, how many bytes travel, what it costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Kind, Program
from shardwright.core.strategy import Strategy, WireDtype, wire_dtype
from shardwright.planner.cost import price
from shardwright.planner.cost.roofline import memory_seconds
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.proofs import check
from tests.laws.columns import columns
from tests.planner.search.models import cluster, mlp

WHERE = cluster(1, 2)


def planned(seed: Seed, dtype: WireDtype) -> tuple[OperatorGraph, Program]:
    """Return a model and its Program with gradients in a dtype on the wire."""
    graph = mlp()
    program = lower(graph, travelling(seed_strategy(graph, seed), dtype))
    check(program)
    return graph, program


def travelling(strategy: Strategy, dtype: WireDtype) -> Strategy:
    """Return a strategy with gradients in a dtype on the wire."""
    return replace(strategy, gradient_sync=replace(strategy.gradient_sync, dtype=dtype))


def sent(program: Program) -> int:
    """Return the bytes that one device gives to messages which synchronise gradients."""
    items = Counter(program.item[np.isin(program.kind, (Kind.MESSAGE, Kind.SEND))].tolist())
    return sum(
        count * program.messages[item].bytes
        for item, count in items.items()
        if program.messages[item].purpose == "synchronise"
        and program.messages[item].primitive not in ("slice", "copy")
    )


@pytest.mark.parametrize(("zero", "times"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_every_gradient_travels_in_the_dtype_that_was_asked_for(zero: int, times: int) -> None:
    seed = Seed(data=2, zero=zero, num_microbatches=2 if zero >= 2 else 1)
    graph, program = planned(seed, "bfloat16")
    numel = sum(graph.tensors[tensor].numel for tensor in graph.parameters)
    assert sent(program) == 2 * numel * times
    assert sent(planned(seed, "parameter")[1]) == 4 * numel * times
    for transform in program.transforms:
        ends = {program.values[value].dtype for value in transform.reads}
        assert ends ^ {program.values[value].dtype for value in transform.writes} == {
            "float32", "bfloat16",
        }  # fmt: skip


def test_the_parameters_own_dtype_is_what_nobody_asked_for() -> None:
    seed = Seed(data=2, stages=2, zero=2, num_microbatches=2)
    known = planned(seed, "parameter")[1]
    assert not known.transforms
    assert columns(planned(seed, "float32")[1]) == columns(known)


@pytest.mark.parametrize("own", ["complex64", "int64"])
def test_what_is_not_real_travels_as_it_is(own: str) -> None:
    assert wire_dtype("bfloat16", own) == own


def test_a_cast_comes_just_before_its_message_and_costs_what_passes_the_memory() -> None:
    graph, program = planned(Seed(data=2), "float16")
    prices = price(program, graph, WHERE, CostTable())
    memory = simulate(program, prices.seconds).memory[0]
    assert (memory[:, 1] > 0).all()
    kind = WHERE.kinds[0]
    for index in np.flatnonzero(program.kind == Kind.TRANSFORM).tolist():
        transform = program.transforms[int(program.item[index])]
        numel = sum(np.prod(program.values[value].shape) for value in transform.reads)
        started = len(transform.reads) * kind.launch_seconds
        expected = memory_seconds(6.0 * numel, kind) + started
        assert prices.seconds[index] == pytest.approx(expected, rel=1e-12)
        if program.values[transform.writes[0]].dtype == "float16":
            following = program.messages[int(program.item[index + 1])]
            assert program.kind[index + 1] == Kind.MESSAGE
            assert set(following.sources) == set(transform.writes)
            assert (
                index in program.predecessor[program.offset[index + 1] : program.offset[index + 2]]
            )


def test_half_the_bytes_are_on_the_wire_for_less_time() -> None:
    slow = cluster(2, 1)
    times = dict[str, float]()
    for dtype in ("parameter", "bfloat16"):
        graph, program = planned(Seed(data=2), dtype)
        prices = price(program, graph, slow, CostTable())
        times[dtype] = float(prices.seconds[~program.computes].sum())
    assert times["bfloat16"] < times["parameter"]
