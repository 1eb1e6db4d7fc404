"""What is dropped after forward is made again before the backward that needs it, and only that."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.program import Kind, Program
from shardwright.core.strategy import Recomputation
from shardwright.planner.cost.recomputation import copies_kept, with_recomputation
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space import Seed, seed_strategy
from shardwright.proofs import check
from tests.planner.lower.test_lower import transformer_like

LAYERS = 3
AGAIN = (Kind.RECOMPUTE, Kind.BACKWARD)
GRAPH = transformer_like(layers=LAYERS)
SPLIT = Seed(tensor=2, sequence=True)


def recomputing(name: Recomputation, seed: Seed = SPLIT) -> Program:
    program = lower(GRAPH, with_recomputation(GRAPH, seed_strategy(GRAPH, seed), name))
    check(program)
    return program


def gathers(program: Program) -> int:
    """Count the gathers of activations that one step issues."""
    return sum(
        program.messages[int(item)].primitive == "all_gather"
        and program.messages[int(item)].purpose == "activation"
        for kind, item in zip(program.kind, program.item, strict=True)
        if kind == Kind.MESSAGE
    )


def peak(program: Program) -> float:
    return simulate(program, np.ones(program.num_instructions)).peak_bytes[0]


def test_only_the_chosen_operators_run_again() -> None:
    program = recomputing("selective", Seed())
    counts = Counter(
        (GRAPH.operators[call.operator].kind, Kind(int(kind)))
        for kind, item in zip(program.kind, program.item, strict=True)
        if kind in (Kind.FORWARD, Kind.RECOMPUTE)
        for call in program.segments[int(item)].calls
    )
    assert counts["aten.gelu.default", Kind.RECOMPUTE] == LAYERS
    assert {kind for kind, when in counts if when == Kind.RECOMPUTE} == {"aten.gelu.default"}


@pytest.mark.parametrize("seed", [Seed(), SPLIT, Seed(data=2, zero=3)])
def test_a_block_runs_again_until_its_backward_has_what_it_reads(seed: Seed) -> None:
    plain, program = recomputing("none", seed), recomputing("blocks", seed)
    again = Counter(
        GRAPH.operators[call.operator].kind
        for kind, item in zip(program.kind, program.item, strict=True)
        if kind == Kind.RECOMPUTE
        for call in program.segments[int(item)].calls
    )
    # Neither the second product, which reads what it needs, nor the sum behind it, nor its messages.
    assert again == {"aten.linear.default": LAYERS, "aten.gelu.default": LAYERS}
    scatters = [
        sum(
            program.messages[int(item)].primitive == "reduce_scatter"
            for kind, item in zip(program.kind, program.item, strict=True)
            if kind == Kind.MESSAGE
        )
        for program in (plain, program)
    ]
    assert scatters[0] == scatters[1]


def test_a_split_linear_gathers_its_input_again() -> None:
    plain, again = recomputing("none"), recomputing("selective")
    inside = {i for b in GRAPH.blocks[1:-1] for i in range(b.start, b.stop)}
    strategy = replace(seed_strategy(GRAPH, SPLIT), reshard_again=copies_kept(GRAPH, inside))
    copies = lower(GRAPH, strategy)
    assert gathers(again) == gathers(plain) + LAYERS
    assert gathers(copies) == gathers(plain) + LAYERS
    assert peak(again) < peak(copies) < peak(plain)


def test_what_runs_again_runs_just_before_the_backward_that_needs_it() -> None:
    program = recomputing("selective")
    computing = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
    order = [int(i) for i in np.flatnonzero(np.isin(program.kind, computing))]
    for here, following in itertools.pairwise(order):
        if program.kind[here] == Kind.RECOMPUTE:
            made = set(program.segments[int(program.item[here])].outputs)
            assert program.kind[following] == Kind.BACKWARD
            assert made & set(program.segments[int(program.item[following])].rematerialised)


@pytest.mark.parametrize("name", ["none", "selective", "blocks"])
def test_memory_returns_to_its_base(name: Recomputation) -> None:
    for seed in (SPLIT, Seed(data=2, zero=3, num_microbatches=2), Seed(stages=2)):
        program = recomputing(name, seed)
        timeline = simulate(program, np.ones(program.num_instructions))
        assert [rows[-1, 1] for rows in timeline.memory] == [rows[0, 1] for rows in timeline.memory]


def test_naming_all_operators_is_recomputing_all_blocks() -> None:
    strategy = seed_strategy(GRAPH, Seed(data=2))
    blocks = replace(strategy, recompute=tuple(range(len(GRAPH.blocks))))
    operators = replace(strategy, recompute_operators=tuple(range(len(GRAPH.operators))))
    one, other = lower(GRAPH, blocks), lower(GRAPH, operators)
    assert one.segments == other.segments
    assert np.array_equal(one.kind, other.kind)


def parameter_gathers(program: Program) -> list[tuple[int, int, int]]:
    """Return (place, block of the first segment that reads it, place of that) of every gather."""
    found: list[tuple[int, int, int]] = []
    for place in range(program.num_instructions):
        message = int(program.item[place])
        if program.kind[place] != Kind.MESSAGE:
            continue
        if program.messages[message].purpose != "parameter" or place > last_backward(program):
            continue
        gathered = set(program.messages[message].results)
        for later in range(place, program.num_instructions):
            if Kind(program.kind[later]) in (Kind.FORWARD, *AGAIN):
                segment = program.segments[int(program.item[later])]
                if gathered & set(segment.inputs):
                    found.append((place, segment.block, later))
                    break
    return found


def last_backward(program: Program) -> int:
    return int(np.flatnonzero(program.kind == Kind.BACKWARD)[-1])


@pytest.mark.parametrize("name", ["none", "selective", "blocks"])
def test_parameters_are_gathered_while_the_block_before_runs(name: Recomputation) -> None:
    program = recomputing(name, Seed(data=2, zero=3))
    blocks = [
        program.segments[int(item)].block if kind in (Kind.FORWARD, *AGAIN) else -1
        for kind, item in zip(program.kind, program.item, strict=True)
    ]
    every = parameter_gathers(program)
    assert every
    for place, block, use in every:
        between = {b for b in blocks[place:use] if b >= 0}
        phase = (Kind.FORWARD,) if program.kind[use] == Kind.FORWARD else AGAIN
        ran = np.isin(program.kind[:place], phase) & (program.microbatch[:place] >= 0)
        assert between or not ran.any(), "nothing runs while it is under way"
        assert len(between | {block}) <= 2, "no more than a block ahead"


@pytest.mark.parametrize("name", ["none", "selective", "blocks"])
def test_what_is_kept_for_backward_is_gathered_once(name: Recomputation) -> None:
    strategy = with_recomputation(GRAPH, seed_strategy(GRAPH, Seed(data=2, zero=3)), name)
    kept = replace(
        strategy, parameters=tuple(replace(one, keeps=True) for one in strategy.parameters)
    )
    twice, once = lower(GRAPH, strategy), lower(GRAPH, kept)
    check(once)
    assert len(parameter_gathers(twice)) > len(parameter_gathers(once))
    results = [
        value
        for place, _, _ in parameter_gathers(once)
        for value in once.messages[int(once.item[place])].results
    ]
    assert len(results) == len(set(results))
