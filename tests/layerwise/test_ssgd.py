"""Iterations of synchronous SGD on traces of layers, against the closed forms and every grouping."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.layertrace import LayerTrace, TracedLayer
from shardwright.layerwise.ssgd import EXCHANGES, SPARSE, Network, predict, selection

RATE = 1e-9


def trace_of(
    layers: list[tuple[float, float, int]],
    fetch: float = 0.0,
    copy: float = 0.0,
    update: float = 0.0,
) -> LayerTrace:
    rows = [
        TracedLayer(name=f"{place}", forward_seconds=f, backward_seconds=b, bytes=size)
        for place, (f, b, size) in enumerate(layers)
    ]
    return LayerTrace(
        name="drawn",
        layers=tuple(rows),
        fetch_seconds=fetch,
        copy_seconds=copy,
        update_seconds=update,
    )


def network_of(workers: int, latency: float = 0.01, per_byte: float = 1e-6) -> Network:
    def dense(size: float) -> float:
        return latency + per_byte * size if workers > 1 else 0.0

    return Network(
        workers=workers, dense=dense, sparse=dict.fromkeys(SPARSE, dense), select=selection(RATE),
        density=0.1,
    )  # fmt: skip


def published(trace: LayerTrace, network: Network, exchange: str) -> float:
    """Sum an iteration up as in Shi et al., ICPADS 2018: (3), (4) and (5)."""
    forward = sum(one.forward_seconds for one in trace.layers)
    clock, free = forward, 0.0
    total = 0.0
    for layer in reversed(trace.layers):
        clock += layer.backward_seconds
        if not layer.bytes or network.workers == 1:
            continue
        seconds = network.dense(layer.bytes)
        if exchange in SPARSE:
            count = layer.bytes / 4
            clock += RATE * count * math.log2(max(count, 2))
            seconds = network.dense(max(1, int(0.1 * count)))
        total += seconds
        free = max(free, clock) + seconds
    ended = clock + total if exchange == "naive" else max(clock, free)
    given = trace.fetch_seconds + trace.copy_seconds
    return max(given, ended + trace.update_seconds)


seconds = st.floats(0.0, 0.1)
drawn = st.lists(st.tuples(seconds, seconds, st.integers(0, 100_000)), min_size=1, max_size=7)


@given(
    layers=drawn, fetch=seconds, copy=seconds, update=seconds, workers=st.sampled_from([1, 2, 16])
)
def test_iterations_are_those_of_the_closed_forms(layers, fetch, copy, update, workers):
    trace, network = trace_of(layers, fetch, copy, update), network_of(workers)
    for exchange in ("naive", "wait-free", *SPARSE):
        found = predict(trace, network, exchange)
        assert found.seconds == pytest.approx(
            published(trace, network, exchange), rel=1e-9, abs=1e-12
        )
        assert found.single_seconds == pytest.approx(published(trace, network_of(1), "naive"))


@given(layers=drawn, latency=st.floats(0.0, 0.1))
def test_merged_messages_end_first_of_all_groupings(layers, latency):
    trace, network = trace_of(layers), network_of(4, latency)
    merged = predict(trace, network, "merged")
    order = [i for i in reversed(range(len(layers))) if layers[i][2]]
    shortest = math.inf
    for cuts in itertools.product((False, True), repeat=max(len(order) - 1, 0)):
        groups: list[list[int]] = [order[:1]] if order else []
        for index, is_cut in zip(order[1:], cuts, strict=True):
            groups.append([index]) if is_cut else groups[-1].append(index)
        free = 0.0
        for group in groups:
            ready = sum(f for f, _, _ in layers) + sum(b for _, b, _ in layers[group[-1] :])
            free = max(free, ready) + network.dense(sum(layers[i][2] for i in group))
        shortest = min(shortest, max(free, sum(f + b for f, b, _ in layers)))
    assert merged.seconds == pytest.approx(shortest)
    for other in ("naive", "wait-free", "mg-wfbp"):
        assert merged.seconds <= predict(trace, network, other).seconds * (1 + 1e-9)


def test_the_published_rule_merges_too_much_where_latency_is_large():
    """Shi, Chu, Li, INFOCOM 2019: layers ready at 1, 2 and 3, ten bytes each, a = 1.5, b = 1."""
    trace = trace_of([(0.0, 1.0, 10)] * 3)
    network = network_of(4, 1.5, 1.0)
    assert predict(trace, network, "mg-wfbp").seconds == pytest.approx(34.5)
    assert predict(trace, network, "merged").seconds == pytest.approx(34.0)


def test_what_is_told_of_an_iteration_adds_up():
    trace = trace_of(
        [(0.01, 0.02, 40_000), (0.01, 0.02, 0), (0.01, 0.02, 80_000)], 0.03, 0.01, 0.005
    )
    network = network_of(8)
    found = predict(trace, network, "wait-free")
    assert found.messages == ((2,), (0,))
    assert found.network_seconds == pytest.approx(0.02 + 0.12)
    # The last layer's message ends at 0.05 + 0.09, the first's, ready at 0.09, 0.05 later.
    assert found.exposed_seconds == pytest.approx(0.14 + 0.05 - 0.09)
    assert found.seconds == pytest.approx(0.19 + 0.005)
    assert found.speedup == pytest.approx(8 * 0.095 / 0.195)
    assert found.efficiency == pytest.approx(0.095 / 0.195)
    assert found.binding == "network"
    slow = trace_of([(0.01, 0.02, 4)], fetch=0.3)
    assert predict(slow, network_of(2, 1e-6, 0.0), "merged").binding == "input"
    assert [one for one in EXCHANGES if predict(slow, network_of(1), one).messages] == []
