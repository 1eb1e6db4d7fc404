"""Step after step, with the input fetched one step ahead: against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.program import Kind, Program
from shardwright.planner.cost.feed import input_bytes, input_costs, least_input_seconds
from shardwright.planner.lower import check, lower
from shardwright.planner.lower.feed import fed
from shardwright.planner.simulate import simulate, steady_seconds, with_input
from shardwright.planner.space.samples import find_samples
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor
from shardwright.runtime.inputs import cut
from tests import zoo
from tests.planner.search.models import cluster

pytestmark = pytest.mark.torch
SEEDS = [
    Seed(data=2, zero=3), Seed(data=2, num_microbatches=2), Seed(stages=2, num_microbatches=4),
    Seed(data=2, tensor=2),
]  # fmt: skip


@cache
def lowered() -> list[Program]:
    graph = capture(*zoo.mlp()).graph
    return [lower(graph, seed_strategy(graph, seed)) for seed in SEEDS]


def durations(program: Program, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.1, 1.0, program.num_instructions)


def durations_with(program: Program, seconds: np.ndarray, fetch: float, copy: float) -> np.ndarray:
    """Return the durations of a fed Program."""
    ahead = program.kind[: program.num_instructions - len(seconds)]
    return np.concatenate([np.where(ahead == Kind.FETCH, fetch, copy), seconds])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3), st.integers(0, 99), st.floats(0, 40), st.floats(0, 40))
def test_a_step_takes_the_longer_of_input_and_the_rest(
    which: int, seed: int, fetch: float, copy: float
) -> None:
    program = lowered()[which]
    seconds = durations(program, seed)
    step = simulate(program, seconds).step_seconds
    assert steady_seconds(program, seconds) == pytest.approx(step, rel=1e-9)
    ahead = fed(program)
    both = steady_seconds(ahead, durations_with(ahead, seconds, fetch, copy))
    assert both == pytest.approx(max(step, fetch + copy), rel=1e-9)


@pytest.mark.parametrize("slowdown", [1.0, 1.5])
def test_input_beneath_a_step_slows_nothing_down(slowdown: float) -> None:
    for program in lowered():
        seconds = durations(program, 3)
        step = simulate(program, seconds, overlap_slowdown=slowdown).step_seconds
        ahead = fed(program)
        given_input = durations_with(ahead, seconds, 0.4 * step, 0.4 * step)
        found = steady_seconds(ahead, given_input, overlap_slowdown=slowdown)
        assert found == pytest.approx(step, rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3), st.integers(0, 99), st.floats(0.05, 5), st.floats(10, 1000))
def test_rates_of_a_cluster_give_the_step_and_the_memory_of_a_fed_program(
    which: int, seed: int, rate: float, bandwidth: float
) -> None:
    program, graph = lowered()[which], capture(*zoo.mlp()).graph
    hosts = cluster(2, program.strategy.devices[-1] // 2 + 1)
    where = replace(hosts, input_rate=rate, copy_bandwidth=bandwidth)
    costs = input_costs(program, graph, find_samples(graph), where)
    assert not input_costs(program, graph, find_samples(graph), hosts)
    size = max(graph.tensors[one].shape[0] for one in graph.inputs)
    assert {fetch for fetch, _ in costs.values()} == {size / rate}
    seconds, ahead = durations(program, seed), fed(program)
    given_input = with_input_of(ahead, seconds, costs)
    found = with_input(program, simulate(program, seconds), costs)
    assert steady_seconds(ahead, given_input) == pytest.approx(found.step_seconds, rel=1e-9)
    assert simulate(ahead, given_input).peak_bytes == found.peak_bytes


def with_input_of(
    program: Program, seconds: np.ndarray, costs: dict[int, tuple[float, float]]
) -> np.ndarray:
    """Return the durations of a fed Program, by what meshes are to be given."""
    ahead = np.flatnonzero(np.isin(program.kind, (Kind.FETCH, Kind.COPY))).tolist()
    own = [costs[int(program.group[i])][int(program.kind[i] == Kind.COPY)] for i in ahead]
    return np.concatenate([own, seconds])


def test_devices_of_a_host_copy_their_shards_over_one_bus() -> None:
    graph = capture(*zoo.mlp()).graph
    whole = input_bytes(lower(graph, seed_strategy(graph, Seed())), 0)
    program = lower(graph, seed_strategy(graph, Seed(data=4)))
    for hosts, each in ((1, 4), (2, 2), (4, 1)):
        where = replace(cluster(hosts, each), copy_bandwidth=100.0)
        found = input_costs(program, graph, find_samples(graph), where)
        assert found == {0: (0.0, whole / hosts / 100.0)}


def test_ranks_that_read_their_own_samples_share_the_loaders_of_their_host() -> None:
    graph, samples = capture(*zoo.mlp()).graph, find_samples(capture(*zoo.mlp()).graph)
    size = max(graph.tensors[one].shape[0] for one in graph.inputs)
    shared, alone = 10.0, 4.0
    for seed, hosts, each, rows, on_host in (
        (Seed(), 1, 1, size, size),
        (Seed(data=4), 1, 4, size / 4, size),
        (Seed(data=4), 2, 2, size / 4, size / 2),
        (Seed(data=2, num_microbatches=2), 1, 2, size / 2, size),
        (Seed(tensor=2), 1, 2, size, 2 * size),  # both read all of it
        (Seed(tensor=2), 2, 1, size, size),
    ):
        program = lower(graph, seed_strategy(graph, seed))
        where = cluster(hosts, each)
        for rates, expected in (
            ({"rank_input_rate": alone}, rows / alone),
            ({"host_input_rate": shared}, on_host / shared),
            (
                {"rank_input_rate": alone, "host_input_rate": shared},
                max(rows / alone, on_host / shared),
            ),
        ):
            costs = input_costs(program, graph, samples, replace(where, **rates))
            assert costs == {0: (pytest.approx(expected), 0.0)}
            least = least_input_seconds(size, replace(where, **rates))
            assert least <= expected * (1 + 1e-9)


def test_a_loader_works_while_its_batch_is_copied() -> None:
    """As workers do: a step takes the longer of both, not their sum."""
    program, graph = lowered()[0], capture(*zoo.mlp()).graph
    where = replace(cluster(1, 2), host_input_rate=10.0, copy_bandwidth=100.0)
    samples, size = find_samples(graph), max(graph.tensors[one].shape[0] for one in graph.inputs)
    ((fetch, copy),) = input_costs(program, graph, samples, where).values()
    assert copy > 0
    assert fetch + copy == pytest.approx(max(size / 10.0, copy))


def test_input_in_the_same_step_is_their_sum() -> None:
    """Who does not work ahead waits: the shift alone makes the difference."""
    program = lowered()[0]
    seconds, ahead = durations(program, 1), fed(program)
    at_once = replace(ahead, shift=None)
    step = simulate(program, seconds).step_seconds
    found = steady_seconds(at_once, durations_with(ahead, seconds, 3.0, 2.0))
    assert step < found <= step + 5.0 + 1e-9
    assert found >= 5.0 + seconds[program.kind == Kind.UPDATE].max()


def test_a_fed_program_is_sound_and_trains_alike_in_the_memory_of_one_more_batch() -> None:
    for program in lowered():
        ahead = fed(program)
        check(ahead)
        added = ahead.num_instructions - program.num_instructions
        assert set(ahead.kind[:added]) == {Kind.FETCH, Kind.COPY}
        np.testing.assert_array_equal(ahead.kind[added:], program.kind)
        assert all(ahead.shift_of(index) == -(index < added) for index in range(added + 3))
    assert trained(fed) == trained(lambda program: program)


def trained(change: Callable[[Program], Program]) -> list[float]:
    """Train, and see that the Program holds what is copied for a step, once, and as much again if fed."""
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(num_microbatches=2)))
    changed, optimizer = change(program), partial(torch.optim.SGD, lr=0.1)
    executor = Executor(captured, changed, module, optimizer=optimizer)
    shards = cut(executor._inputs, batch, captured, None)
    held = sum(changed.base_bytes) - sum(program.base_bytes)
    assert held == (changed is not program) * sum(shard.nbytes for shard in shards)
    return [float(step.loss) for step in executor.train([batch] * 3)]
