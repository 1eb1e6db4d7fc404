"""Step after step, with the input fetched one step ahead: against closed forms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.program import INPUT_KINDS, Kind, Program
from shardwright.layerwise.steady import steady_seconds
from shardwright.operators.splitting import find_samples
from shardwright.planner.cost.feed import (
    Feeding,
    input_bytes,
    input_costs,
    input_words,
    least_input_seconds,
)
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate, with_input
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.proofs import check
from shardwright.runtime.executor import Executor
from shardwright.runtime.inputs import cut
from tests import zoo
from tests.planner.search.models import cluster
from tests.planner.simulate.fed import fed
from tests.runtime.equivalence import captured_of

pytestmark = pytest.mark.torch
SEEDS = [
    Seed(data=2, zero=3), Seed(data=2, num_microbatches=2), Seed(stages=2, num_microbatches=4),
    Seed(data=2, tensor=2),
]  # fmt: skip


@cache
def lowered() -> list[Program]:
    graph = captured_of(zoo.mlp)[2].graph
    return [lower(graph, seed_strategy(graph, seed)) for seed in SEEDS]


def durations(program: Program, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.1, 1.0, program.num_instructions)


def given_to(program: Program, kinds: dict[Kind, float], hosts: int = 1) -> list[Feeding]:
    """Return input that takes so long on each host, whatever is read."""
    meshes = tuple(mesh for mesh in range(len(program.meshes)) if input_bytes(program, mesh))
    return [
        Feeding(kind=kind, host=host, meshes=meshes, seconds=seconds)
        for host in range(hosts)
        for kind, seconds in kinds.items()
    ]


def durations_with(feeding: Sequence[Feeding], seconds: np.ndarray) -> np.ndarray:
    """Return the durations of a fed Program."""
    return np.concatenate([[one.seconds for one in feeding], seconds])


@given(
    st.integers(0, 3), st.integers(0, 99), st.integers(1, 2),
    st.dictionaries(st.sampled_from(INPUT_KINDS[:-1]), st.floats(0, 40)), st.floats(0, 40),
)  # fmt: skip
def test_a_step_takes_the_longest_of_what_brings_input_and_the_rest(
    which: int, seed: int, hosts: int, others: dict[Kind, float], copy: float
) -> None:
    """Each is somebody else's work for another step: none is added to another."""
    program = lowered()[which]
    seconds = durations(program, seed)
    step = simulate(program, seconds).step_seconds
    assert steady_seconds(program, seconds) == pytest.approx(step, rel=1e-9)
    in_order = {kind: others[kind] for kind in INPUT_KINDS if kind in others} | {Kind.COPY: copy}
    feeding = given_to(program, in_order, hosts)
    found = steady_seconds(fed(program, feeding), durations_with(feeding, seconds))
    assert found == pytest.approx(max(step, *in_order.values()), rel=1e-9)


@pytest.mark.parametrize("slowdown", [1.0, 1.5])
def test_input_beneath_a_step_slows_nothing_down(slowdown: float) -> None:
    for program in lowered():
        seconds = durations(program, 3)
        step = simulate(program, seconds, overlap_slowdown=slowdown).step_seconds
        feeding = given_to(program, dict.fromkeys(INPUT_KINDS, 0.9 * step))
        given_input = durations_with(feeding, seconds)
        found = steady_seconds(fed(program, feeding), given_input, overlap_slowdown=slowdown)
        assert found == pytest.approx(step, rel=1e-9)


@given(st.integers(0, 3), st.integers(0, 99), st.floats(0.05, 5), st.floats(10, 1000))
def test_rates_of_a_cluster_give_the_step_and_the_memory_of_a_fed_program(
    which: int, seed: int, rate: float, bandwidth: float
) -> None:
    program, graph = lowered()[which], captured_of(zoo.mlp)[2].graph
    hosts = cluster(2, program.strategy.devices[-1] // 2 + 1)
    where = replace(hosts, input_rate=rate, copy_bandwidth=bandwidth)
    feeding = input_costs(program, graph, find_samples(graph), where)
    assert not input_costs(program, graph, find_samples(graph), hosts)
    size = max(graph.tensors[one].shape[0] for one in graph.inputs)
    assert {one.seconds for one in feeding if one.kind == Kind.DRAW} == {size / rate}
    seconds, ahead = durations(program, seed), fed(program, feeding)
    given_input = durations_with(feeding, seconds)
    found = with_input(program, simulate(program, seconds), feeding)
    assert steady_seconds(ahead, given_input) == pytest.approx(found.step_seconds, rel=1e-9)
    assert simulate(ahead, given_input).peak_bytes == found.peak_bytes


def test_devices_of_a_host_copy_their_shards_over_one_bus() -> None:
    graph = captured_of(zoo.mlp)[2].graph
    whole = input_bytes(lower(graph, seed_strategy(graph, Seed())), 0)
    program = lower(graph, seed_strategy(graph, Seed(data=4)))
    for hosts, each in ((1, 4), (2, 2), (4, 1)):
        where = replace(cluster(hosts, each), copy_bandwidth=100.0)
        (found,) = input_costs(program, graph, find_samples(graph), where)
        assert (found.resource, found.seconds) == ("copy:0", whole / hosts / 100.0)


def test_ranks_that_read_their_own_samples_share_the_loaders_of_their_host() -> None:
    graph, samples = captured_of(zoo.mlp)[2].graph, find_samples(captured_of(zoo.mlp)[2].graph)
    size = max(graph.tensors[one].shape[0] for one in graph.inputs)
    shared, alone, disk = 10.0, 4.0, 7.0
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
        rates = {
            "rank_input_rate": alone, "rank_batch_seconds": 0.3, "host_input_rate": shared, "host_fetch_rate": disk,
        }  # fmt: skip
        expected = {
            "loader:0": rows / alone + 0.3, "host:0": on_host / shared, "disk:0": on_host / disk,
            "copy:0": 0.0,
        }  # fmt: skip
        found = input_costs(program, graph, samples, replace(where, **rates))
        assert {one.resource: one.seconds for one in found} == pytest.approx(expected)
        assert [one.kind for one in found] == list(INPUT_KINDS)
        least = least_input_seconds(size, replace(where, **rates))
        assert least <= max(expected.values()) * (1 + 1e-9)


def test_stages_of_one_host_share_its_resources_and_those_of_two_do_not() -> None:
    """The first stage reads the inputs, the last the labels: of one host both keep the same disk."""
    graph, program = captured_of(zoo.mlp)[2].graph, lowered()[2]
    size = max(graph.tensors[one].shape[0] for one in graph.inputs)
    assert all(input_bytes(program, mesh) for mesh in (0, 1))
    for hosts, each, expected in (
        (1, 2, [("disk:0", 2 * size / 10.0)]),
        (2, 1, [("disk:0", size / 10.0), ("disk:1", size / 10.0)]),
    ):
        where = replace(cluster(hosts, each), host_fetch_rate=10.0)
        found = input_costs(program, graph, find_samples(graph), where)
        assert [(o.resource, o.seconds) for o in found if o.kind == Kind.FETCH] == expected


def test_what_binds_is_named_with_what_helps() -> None:
    graph, program, where = captured_of(zoo.mlp)[2].graph, lowered()[0], cluster(1, 2)
    for rate, words in (
        ("host_fetch_rate", "storage takes"),
        ("host_input_rate", "cores takes"),
        ("rank_input_rate", "loader takes"),
    ):
        slow = replace(where, copy_bandwidth=1e12, **{rate: 1.0})
        feeding = input_costs(program, graph, find_samples(graph), slow)
        assert words in input_words(slow, feeding, 1.0, (0, 1))
        assert "what devices compute" in input_words(slow, feeding, 1e6, (0, 1))


def test_input_in_the_same_step_is_their_sum() -> None:
    """Who does not work ahead waits: the shift alone makes the difference."""
    program = lowered()[0]
    seconds, feeding = durations(program, 1), given_to(program, {Kind.FETCH: 3.0, Kind.COPY: 2.0})
    at_once = replace(fed(program, feeding), shift=None)
    step = simulate(program, seconds).step_seconds
    found = steady_seconds(at_once, durations_with(feeding, seconds))
    assert step < found <= step + 5.0 + 1e-9
    assert found >= 5.0 + seconds[program.kind == Kind.UPDATE].max()


def test_a_fed_program_is_sound_and_trains_alike_in_the_memory_of_one_more_batch() -> None:
    for program in lowered():
        ahead = wholly_fed(program)
        check(ahead)
        added = ahead.num_instructions - program.num_instructions
        assert list(ahead.kind[:added]) == list(INPUT_KINDS)
        np.testing.assert_array_equal(ahead.kind[added:], program.kind)
        shifts = [ahead.shift_of(index) for index in range(added + 3)]
        assert shifts == [-4, -3, -2, -1, 0, 0, 0]
    assert trained(wholly_fed) == trained(lambda program: program)


def wholly_fed(program: Program) -> Program:
    return fed(program, given_to(program, dict.fromkeys(INPUT_KINDS, 1.0)))


def trained(change: Callable[[Program], Program]) -> list[float]:
    """Train, and see that the Program holds what is copied for a step, once, and as much again if fed."""
    module, batch, captured = captured_of(zoo.mlp)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(num_microbatches=2)))
    changed, optimizer = change(program), partial(torch.optim.SGD, lr=0.1)
    executor = Executor(captured, changed, copy.deepcopy(module), optimizer=optimizer)
    shards = cut(executor._inputs, batch, captured, None)
    held = sum(changed.base_bytes) - sum(program.base_bytes)
    assert held == (changed is not program) * sum(shard.nbytes for shard in shards)
    return [float(step.loss) for step in executor.train([batch] * 3)]
