"""Split vocabularies and experts: what is sent, to the byte, and that nothing else changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.core.program import Message, Program
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.proofs import check
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor
from tests import zoo
from tests.runtime.equivalence import Factory, assert_equivalent, captured_of
from tests.runtime.strategies import named

pytestmark = pytest.mark.torch
BATCH, LENGTH, CLASSES, FLOAT = 8, 8, 256, 8
EXPERTS, CAPACITY, WIDTH, LAYERS = 4, 4, 16, 2
TIED = partial(zoo.gpt, tied=True, length=LENGTH)


def lowered(factory: Factory, seed: Seed) -> Program:
    graph = captured_of(factory)[2].graph
    program = lower(graph, seed_strategy(graph, seed))
    check(program)
    return program


def activations(program: Program, primitive: str) -> list[Message]:
    return [
        message
        for message in program.messages
        if message.primitive == primitive and message.purpose in ("activation", "gradient")
    ]


class Called(TorchDispatchMode):
    """Notes the names of the operators that are called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_device_with_all_classes_makes_no_sums_of_blocks() -> None:
    module, batch = TIED()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed()))
    executor = Executor(captured, program, module, optimizer=partial(torch.optim.SGD, lr=0.1))
    with Called() as called:
        executor.step(batch)
    executor.close()
    assert "_log_softmax" in called.names
    assert "amax" not in called.names, "the greatest score of each row is for sums of blocks"


@pytest.mark.parametrize("tensor", [2, 4])
def test_of_split_scores_only_the_sums_of_blocks_are_sent(tensor: int) -> None:
    program = lowered(TIED, Seed(tensor=tensor))
    (gathered,) = activations(program, "all_gather")
    blocks = 32
    assert gathered.bytes == BATCH * LENGTH * blocks * FLOAT
    scores = (BATCH, LENGTH, CLASSES // tensor)
    graph = captured_of(TIED)[2].graph
    wide = {t for t, spec in enumerate(graph.tensors) if spec.shape == (BATCH, LENGTH, CLASSES)}
    shapes = {value.shape for value in program.values if value.tensor in wide}
    assert shapes == {scores}, "no device ever holds the scores of all classes"


def test_tied_weights_stay_split_by_vocabulary() -> None:
    graph = captured_of(TIED)[2].graph
    (table,) = (t for t in graph.parameters if graph.tensors[t].shape[0] == CLASSES)
    program = lowered(TIED, Seed(tensor=4))
    shapes = {value.shape[0] for value in program.values if value.tensor == table}
    assert shapes == {CLASSES // 4}


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_reach_their_experts_by_all_to_all(ranks: int) -> None:
    program = lowered(zoo.switching, Seed(expert=ranks))
    messages = activations(program, "all_to_all")
    # To the experts and back, forward and backward.
    assert len(messages) == 4 * LAYERS
    each = EXPERTS * BATCH * CAPACITY * WIDTH * FLOAT // ranks
    assert {message.bytes for message in messages} == {each}
    assert not activations(program, "all_gather")


@pytest.mark.ranks
def test_two_ranks_of_split_vocabularies_and_experts_train_as_one_process() -> None:
    assert_equivalent(2, partial(zoo.gpt, tied=True, length=LENGTH), named(Seed(tensor=2)))
    experts = named(Seed(expert=2, num_microbatches=2, zero=1))
    assert_equivalent(2, zoo.switching, experts, processes=True)


@pytest.mark.ranks
def test_four_ranks_of_split_experts_train_as_one_process() -> None:
    seeds = (
        Seed(expert=4), Seed(expert=2, tensor=2), Seed(data=2, expert=2, zero=3),
        Seed(expert=2, tensor=2, experts_over=("tensor",)),
        Seed(data=2, tensor=2, sequence=True, experts_over=("tensor",)),
    )  # fmt: skip
    assert_equivalent(4, zoo.switching, named(*seeds))
