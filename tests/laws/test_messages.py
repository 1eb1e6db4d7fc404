"""Law: in the Program of any legal strategy every message finds its other ends, and nobody waits
for ever. And the check that says so finds what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, sampled_from

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import PARTIAL, REPLICATE
from shardwright.core.program import Kind, Program
from shardwright.operators.splitting.samples import Samples, find_samples
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.proofs import check, check_complete
from shardwright.proofs.check import crews, stuck
from tests.laws.strategies import Shape, random_strategy, shapes, with_wire
from tests.planner.lower.test_lower import transformer_like
from tests.planner.search.models import images, mlp, residual

GRAPHS: dict[str, Callable[[], OperatorGraph]] = {
    "mlp": mlp,
    "residual": residual,
    "images": partial(images, batch=8),
    "transformer": transformer_like,
}
WANTED = 1000 if "SHARDWRIGHT_LAWS" in os.environ else 60


@lru_cache
def graph(name: str) -> tuple[OperatorGraph, Samples]:
    found = GRAPHS[name]()
    return found, find_samples(found)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_program_passes(name: str) -> None:
    @settings(
        max_examples=WANTED // len(GRAPHS) + 1,
        derandomize="SHARDWRIGHT_LAWS" not in os.environ,
        database=None,
        deadline=None,
    )
    @given(shape=shapes(least_ranks=8))
    def law(shape: Shape) -> None:
        found, samples = graph(name)
        strategy = random_strategy(found, samples, shape)
        program = lower(found, with_wire(strategy, shape.seed, "bfloat16"), samples)
        check(program)
        check_complete(program, found)

    law()


def pipeline() -> Program:
    found, _ = graph("transformer")
    return lower(found, seed_strategy(found, Seed(data=2, stages=2, num_microbatches=2)))


def moved(program: Program, source: int, place: int) -> Program:
    """Return the Program with one instruction put before another one."""
    order = [index for index in range(program.num_instructions) if index != source]
    order.insert(order.index(place), source)
    names = ("kind", "group", "item", "microbatch")
    return replace(program, **{name: getattr(program, name)[order] for name in names})


def places(program: Program, kind: Kind, group: int) -> list[int]:
    return [int(i) for i in np.flatnonzero((program.kind == kind) & (program.group == group))]


def test_where_crews_come_through_every_device_does() -> None:
    """Both ways for Programs as they are lowered. Where a receive is put before sends of its mesh,
    crews, which wait for more, may be stuck where devices are not, but never the other way round."""
    verdicts: set[bool] = set()

    @settings(max_examples=WANTED, derandomize=True, database=None, deadline=None)
    @given(name=sampled_from(sorted(GRAPHS)), shape=shapes(least_ranks=8), seed=integers(0, 2**32))
    def law(name: str, shape: Shape, seed: int) -> None:
        found, samples = graph(name)
        program = lower(found, random_strategy(found, samples, shape), samples)
        alone = tuple((device,) for device in program.strategy.devices)
        assert not stuck(program, alone)
        assert not stuck(program, crews(program))
        early = [
            (receive, send)
            for group in range(len(program.meshes))
            for receive in places(program, Kind.RECEIVE, group)
            for send in places(program, Kind.SEND, group)
            if send < receive
        ]
        if early:
            changed = moved(program, *Random(seed).choice(early))
            is_stuck = bool(stuck(changed, alone))
            verdicts.add(is_stuck)
            assert stuck(changed, crews(program)) or not is_stuck

    law()
    assert verdicts == {True, False}


def test_a_message_without_its_other_end_is_found() -> None:
    program = pipeline()
    kind = program.kind.copy()
    kind[places(program, Kind.RECEIVE, 1)[0]] = Kind.UPDATE
    with pytest.raises(ValueError, match="has no other end"):
        check(replace(program, kind=kind))


def test_sends_out_of_order_are_found() -> None:
    program = pipeline()
    first, second = places(program, Kind.SEND, 0)[:2]
    with pytest.raises(ValueError, match="is sent when message"):
        check(moved(program, second, first))


def test_two_stages_that_wait_for_each_other_are_found() -> None:
    program = pipeline()
    send, receive = places(program, Kind.SEND, 0), places(program, Kind.RECEIVE, 0)
    # Stage 0 wants its first gradient before it sends its first activation.
    with pytest.raises(ValueError, match=r"nobody can go on: device 0 .* receive"):
        check(moved(program, receive[0], send[0]))


def without(program: Program, index: int) -> Program:
    """Return the Program without one instruction; what it frees is freed before."""
    names = ("kind", "group", "item", "microbatch")
    columns = {name: np.delete(getattr(program, name), index) for name in names}
    return replace(program, free_offset=np.delete(program.free_offset, max(index, 1)), **columns)


SEEDS = (
    Seed(data=2),
    Seed(data=2, zero=1, num_microbatches=2),
    Seed(data=2, zero=2, num_microbatches=2),
    Seed(data=2, zero=3),
    Seed(data=2, tensor=2),
    Seed(data=2, stages=2, num_microbatches=2, schedule="zb-h1"),
)


def test_a_program_that_lacks_any_instruction_is_found() -> None:
    found, samples = graph("mlp")
    for seed in SEEDS:
        program = lower(found, seed_strategy(found, seed, samples), samples)
        check_complete(program, found)
        missed = list[str]()
        for index in np.flatnonzero(program.kind != Kind.CLIP).tolist():
            try:
                check(without(program, index))
                check_complete(without(program, index), found)
                missed.append(program.describe(index))
            except ValueError:
                pass
        assert missed == []


def test_a_sum_that_nobody_makes_is_found() -> None:
    found, samples = graph("transformer")
    for seed in SEEDS:
        program = lower(found, seed_strategy(found, seed, samples), samples)
        partial_ones = [
            index
            for index, value in enumerate(program.values)
            if value.role == "gradient" and PARTIAL in value.layout
        ]
        assert partial_ones
        for index in partial_ones:
            value = program.values[index]
            summed = tuple(REPLICATE if one == PARTIAL else one for one in value.layout)
            values = list(program.values)
            values[index] = replace(value, layout=summed)
            with pytest.raises(ValueError, match=r"nobody sum|does not turn|sums nothing"):
                check_complete(replace(program, values=tuple(values)), found)
