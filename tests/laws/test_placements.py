"""Law: operators on any devices, at degrees of their own, train as one process does."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Kind, Program
from shardwright.core.strategy import Strategy
from shardwright.planner.lower import lower
from shardwright.planner.space import Part, Seed, place_parts
from shardwright.proofs import check
from tests.laws.models import OPTIMIZER, Model, model, plain
from tests.laws.test_training import FACTOR, WANTED
from tests.runtime.equivalence import assert_close
from tests.runtime.rehearsed import train_rehearsed

pytestmark = [pytest.mark.torch, pytest.mark.slow]

EXAMPLES = {
    "mlp": 3, "cnn": 2, "inception": 2, "gpt": 3, "bert": 2, "lstm_translation": 2, "vit": 1,
    "mixtral": 1,
}  # fmt: skip


def examples(count: int) -> settings:
    """So many examples, the same ones in every run unless a number was asked for."""
    return settings(
        max_examples=round(count * FACTOR),
        derandomize=WANTED == 0,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
    )


def random_parts(one: Model, seed: int) -> Strategy:
    """Cut the operators into ranges, each on random devices of up to six, which may be shared."""
    random, graph = Random(seed), one.captured.graph
    pieces = random.choice((1, 2))
    cuts = sorted(random.sample(range(1, len(graph.operators)), random.choice((1, 2, 3))))
    parts: list[Part] = []
    for start, stop in zip([0, *cuts], [*cuts, len(graph.operators)], strict=True):
        width = random.choice((1, 2, 3, 4))
        degrees = random.choice((Seed(data=width), Seed(tensor=width), Seed(context=width)))
        zero = random.choice((0, 0, 1, 3))
        devices = tuple(random.sample(range(6), width))
        split = Seed(data=degrees.data, tensor=degrees.tensor, context=degrees.context, zero=zero)
        parts.append(Part(devices=devices, operators=tuple(range(start, stop)), seed=split))
    whole = Seed(
        num_microbatches=pieces,
        schedule=random.choice(("gpipe", "1f1b")),
        recompute=random.random() < 0.3,
    )
    return place_parts(graph, parts, whole, one.samples)


def holds(name: str, seed: int) -> None:
    """Train a model on random devices and compare every rank with plain PyTorch."""
    one = model(name)
    strategy = random_parts(one, seed)
    check(lower(one.captured.graph, strategy, one.samples))
    runs, _ = train_rehearsed(one.captured, strategy, one.module, one.batch, OPTIMIZER)
    for run in runs:
        assert_close(run, plain(name, False), f"{strategy.label}, {seed}", one.tolerance)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_placement_trains_as_one_process(name: str) -> None:
    @examples(EXAMPLES[name])
    @given(seed=st.integers(0, 2**30))
    def law(seed: int) -> None:
        holds(name, seed)

    law()


def assert_updates_wait(graph: OperatorGraph, program: Program) -> None:
    """An update comes after all that is done to the gradients it reads: by what waits for what, and by
    the order on every resource."""

    def home(tensor: int) -> int:
        return min(program.strategy.configs[reader].mesh for reader in graph.consumers[tensor])

    last, queued = dict[int, int](), list[set[int]]()
    for index, resource in enumerate(program.resource.tolist()):
        queued.append({last[resource]} if resource in last else set())
        last[resource] = index
    for update in np.flatnonzero(program.kind == Kind.UPDATE):
        before, left = set[int](), [int(update)]
        while left:
            index = left.pop()
            rows = slice(program.offset[index], program.offset[index + 1])
            fresh = (set(program.predecessor[rows].tolist()) | queued[index]) - before
            before |= fresh
            left += fresh
        for index in np.flatnonzero(np.isin(program.kind, (Kind.MESSAGE, Kind.RECEIVE))):
            message = program.messages[program.item[index]]
            results = [program.values[value] for value in message.results]
            read = any(one.mesh == home(one.tensor) == program.group[update] for one in results)
            if message.purpose == "synchronise" and read:
                assert int(index) in before, f"update {update} does not wait for {index}"


@pytest.mark.parametrize("name", ["gpt", "bert", "lstm_translation", "mixtral"])
def test_updates_wait_for_all_that_is_added_to_gradients(name: str) -> None:
    @examples(8)
    @given(seed=st.integers(0, 2**30))
    def law(seed: int) -> None:
        one = model(name)
        graph = one.captured.graph
        assert_updates_wait(graph, lower(graph, random_parts(one, seed), one.samples))

    law()


def test_a_parameter_that_was_sent_is_updated_before_all_have_taken_it() -> None:
    holds("gpt", 5426)
