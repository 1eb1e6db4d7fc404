"""Waiting for another rank is told from sending, on real ranks of which one comes late."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.program import Kind, Program
from shardwright.core.timeline import Timeline
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.clocks import best_offset, clock_offset
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.interpreter import Compiled
from tests import zoo
from tests.runtime.equivalence import captured_of
from tests.runtime.world import run_ranks

LATE = 0.6  # seconds; far above what small messages take on a busy machine
SGD = partial(torch.optim.SGD, lr=0.1)


def measured(seed: Seed, late: list[int]) -> list[tuple[Program, Timeline]]:
    """Measure a step for each of the ranks that is to come late."""
    module, batch, captured = captured_of(zoo.gpt)
    program = lower(captured.graph, seed_strategy(captured.graph, seed))
    options = RunOptions(check_finite=True)
    executor = Executor(captured, program, module, optimizer=SGD, options=options)
    executor.step(batch)
    usual, found = executor._training, []
    for rank in late:
        executor._training = with_nap(usual, program) if dist.get_rank() == rank else usual
        found.append((program, executor.profile_step(batch)))
    executor.close()
    return found


def with_nap(usual: Compiled, program: Program) -> Compiled:
    """Sleep in the first backward, as if the device were slow there."""
    actions = list(usual.actions)
    place = next(i for i, (index, _) in enumerate(actions) if program.kind[index] == Kind.BACKWARD)
    index, run = actions[place]

    def slow() -> None:
        time.sleep(LATE)
        run()

    actions[place] = (index, slow)
    return Compiled(tuple(actions), usual.exchanges)


def found_on(step: tuple[Program, Timeline], mesh: int) -> dict[str, float]:
    """Seconds on a mesh: waiting in all, and the longest message and backward."""
    program, timeline = step
    assert timeline.waited is not None
    mine = program.group == mesh
    messages = mine & np.isin(program.kind, (Kind.MESSAGE, Kind.SEND, Kind.RECEIVE))
    return {
        "waiting": float(timeline.waited[mine].sum()),
        "sending": float(timeline.worked_seconds[messages].max()),
        "backward": float(timeline.worked_seconds[mine & (program.kind == Kind.BACKWARD)].max()),
    }


@pytest.mark.ranks
@pytest.mark.parametrize("seed", [Seed(data=2), Seed(data=2, zero=3)], ids=lambda seed: seed.label)
def test_a_rank_that_comes_late_is_waited_for_and_makes_no_message_longer(seed: Seed) -> None:
    """Rank 0 speaks for both: it waits for rank 1, and works longer where it is late itself."""
    other, own = run_ranks(2, measured, seed, [1, 0])[0]
    found = found_on(other, 0)
    assert LATE * 0.9 <= found["waiting"] <= other[1].step_seconds
    assert max(found["sending"], found["backward"]) < LATE / 2
    found = found_on(own, 0)
    assert found["backward"] >= LATE
    assert max(found["sending"], found["waiting"]) < LATE / 2


@pytest.mark.ranks
def test_a_stage_waits_for_the_stage_that_sleeps_and_no_transfer_is_longer() -> None:
    (step,) = run_ranks(2, measured, Seed(stages=2, num_microbatches=2), [1])[0]
    first, second = found_on(step, 0), found_on(step, 1)
    assert first["waiting"] >= LATE * 0.9
    assert second["backward"] >= LATE
    assert max(first["sending"], second["sending"]) < LATE / 2


def offsets(ahead: float) -> float:
    """Ask for the clocks' difference, each rank a machine of its own."""
    shift = ahead if dist.get_rank() == 0 else 0.0
    place = f"machine {dist.get_rank()}"
    return clock_offset(torch.device("cpu"), place, lambda: time.perf_counter() + shift)


@pytest.mark.ranks
def test_clocks_of_two_machines_are_laid_on_each_other() -> None:
    first, second = run_ranks(2, offsets, 100.0)
    assert first == 0.0
    assert second == pytest.approx(100.0, abs=0.02)


@given(
    ahead=st.floats(-1e3, 1e3),
    ways=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8),
)
def test_a_clocks_difference_is_wrong_by_at_most_half_the_quickest_answer(
    ahead: float, ways: list[tuple[float, float]]
) -> None:
    answers = [(0.0, there + ahead, there + back) for there, back in ways]
    quickest = min(there + back for there, back in ways)
    assert abs(best_offset(answers) - ahead) <= quickest / 2 + 1e-9
