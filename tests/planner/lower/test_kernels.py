"""Waits and lifetimes of compiled loops against a second way, by NumPy."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.operators.splitting import find_samples, iterate
from shardwright.planner.lower.builder import ProgramBuilder
from shardwright.planner.lower.compile import Compiler, Needed, Phases
from shardwright.planner.lower.gradients import place
from shardwright.planner.lower.ground import Ground
from shardwright.planner.lower.lower import Lowering
from shardwright.planner.lower.phases import PREVIOUS, Phase
from shardwright.planner.lower.template import READ, Facts, Rows
from shardwright.planner.space import seed_strategy
from tests.laws.moves import redrawn
from tests.planner.lower.numpy_lifetimes import (
    Lifetimes,
    backward_lifetimes,
    forward_lifetimes,
    free_at_update,
    input_lifetimes,
    once_lifetimes,
)
from tests.planner.lower.numpy_waits import Template, Waits
from tests.planner.lower.test_incremental import SEEDS, built, tied
from tests.planner.search.models import images, residual

NOTHING = np.zeros(0, dtype=np.int64)


def by_numpy(facts: Facts, stage: int, phases: Phases, many: int) -> list[tuple[object, ...]]:
    """Return of every phase its sizes, what it frees and what it waits for."""
    none = Rows(np.zeros((0, READ + 1), dtype=np.int64), NOTHING, NOTHING)
    own = [Template([*parts] or [none]) for parts in phases]
    prologue, forward, inputs, middle, last, sends, receives, epilogue = own
    behind = Template([*phases[Phase.INPUT], *phases[Phase.LAST]] or [none])
    waits, reported = Waits(facts), facts.reported
    found = dict[Phase, Lifetimes]()
    found[Phase.PROLOGUE] = once_lifetimes(facts, prologue, NOTHING, ends_step=False)
    found[Phase.FORWARD], alive = forward_lifetimes(facts, forward, behind, reported)
    if len(inputs):
        found[Phase.INPUT], alive = input_lifetimes(facts, inputs, last, alive, reported)
    else:
        found[Phase.INPUT] = once_lifetimes(facts, inputs, NOTHING, ends_step=False)
    found[Phase.BACKWARD] = backward_lifetimes(facts, middle, alive, reported)
    found[Phase.LAST] = backward_lifetimes(facts, last, alive, reported)
    for phase, one in ((Phase.SEND, sends), (Phase.RECEIVE, receives)):
        found[phase] = once_lifetimes(facts, one, last.written, ends_step=True)
    before = np.concatenate([last.written, receives.written])
    found[Phase.EPILOGUE] = end = once_lifetimes(facts, epilogue, before, ends_step=True)
    behind = prologue, last, (sends, receives, epilogue)
    free_at_update(facts, (stage, many), end, behind, reported)
    result: list[tuple[object, ...]] = []
    for phase, template in zip(Phase, own, strict=True):
        one = found[phase]
        nothing = np.zeros(len(template), dtype=np.int64)
        sizes = [one.allocated, one.freed, one.temporary]
        sizes += [part if len(part) else nothing for part in (one.first, one.second, one.onward)]
        needed = Needed(NOTHING, NOTHING, NOTHING, -1)
        if len(template):
            needed = (waits.copy() if phase is Phase.BACKWARD else waits).of(phase, template)
        result.append(
            (
                [part.tolist() for part in sizes],
                [one.free_place.tolist(), one.free_value.tolist()],
                sorted(np.array(needed[:3]).T.tolist()),
                needed.last_compute,
            )
        )
    return result


def by_kernels(builder: ProgramBuilder, stages: list[Phases]) -> list[list[tuple[object, ...]]]:
    """Return the same, as it goes into the Program; waits for other stages are left out."""
    found: list[list[tuple[object, ...]]] = []
    for own in Compiler(builder, {}).stages(stages):
        found.append([])
        for one in own:
            waits = np.array(one.needed[:3])
            waits = waits[:, waits[1] <= PREVIOUS]
            sizes, frees = one.sizes.tolist(), one.frees.tolist()
            found[-1].append((sizes, frees, sorted(waits.T.tolist()), one.needed.last_compute))
    return found


def both(graph: OperatorGraph, strategy: Strategy) -> tuple[object, object]:
    ground = Ground(graph, find_samples(graph))
    placed = place(graph, strategy, ground.samples, ground.iterations)
    lowering = Lowering(ProgramBuilder(ground, strategy), placed)
    lowering.lower_blocks()
    stages, many = lowering.phases(), strategy.pipeline.num_microbatches
    facts = Facts.of(lowering.builder)
    known = [by_numpy(facts, stage, phases, many) for stage, phases in enumerate(stages)]
    return known, by_kernels(lowering.builder, stages)


@pytest.mark.parametrize("build", [tied, residual, images])
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
def test_compiled_loops_find_the_waits_and_lifetimes_that_numpy_finds(build, seed) -> None:
    graph = built(build, seed)
    samples, random = find_samples(graph), Random(5)
    iterations = [iterate(graph, index) for index in range(len(graph.operators))]
    strategy, lowered = seed_strategy(graph, seed, samples), 0
    for _ in range(6):
        try:
            known, found = both(graph, strategy)
        except ValueError:
            continue
        assert found == known
        lowered += 1
        strategy = redrawn(graph, samples, iterations, strategy, random)
    assert lowered >= 1
