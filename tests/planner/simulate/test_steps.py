"""Steps in a row of pipelines whose stages begin the next when they are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.completion import meets_at_end
from shardwright.core.costs import CostTable
from shardwright.core.program import Kind, Program
from shardwright.core.schedules import SCHEDULES, NamedSchedule
from shardwright.planner.lower import lower
from shardwright.planner.schedule import StageTimes, order_of, replay
from shardwright.planner.schedule.generators import GENERATED
from shardwright.planner.schedule.pipeline import Action, Line
from shardwright.planner.simulate import simulate, simulate_on
from shardwright.planner.space import Seed, seed_strategy
from tests.planner.schedule.drawn import SECONDS, draw_pipeline
from tests.planner.search.models import cluster, mlp

PHASES = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.INPUT_GRADIENT: "I",
    Kind.WEIGHT_GRADIENT: "W",
}
STEPS, FROM = 30, 18


def rhythm(
    lines: Sequence[Line], stages: Sequence[StageTimes], once: Sequence[float] | None = None
) -> float:
    """Return the seconds from one step to the next of workers that run their lines again and again, and for ``once``
    seconds more behind each: an oracle of its own.

    A worker begins a step when what it sent in the one before has arrived. Nothing travels to it for a step that it has not
    begun. Each way between two workers carries one transfer at a time, in the order in which they are sent.
    """
    home = {action.mesh: number for number, line in enumerate(lines) for action in line}
    at = {action: place for line in lines for place, action in enumerate(line)}
    ahead = {"F": 1, "B": -1, "I": -1, "W": 0}

    def goes_to(action: Action) -> int:
        """The worker that is sent what an action makes; -1 if none is."""
        mesh = action.mesh + ahead[action.phase]
        return home[mesh] if home.get(mesh, home[action.mesh]) != home[action.mesh] else -1

    @cache
    def begins(step: int, worker: int) -> float:
        if not step:
            return 0.0
        own = ended(step - 1, lines[worker][-1]) + (once[worker] if once else 0.0)
        return max([own, *(arrives(step - 1, a) for a in lines[worker] if goes_to(a) >= 0)])

    @cache
    def ended(step: int, action: Action) -> float:
        worker, place = home[action.mesh], at[action]
        ready = ended(step, lines[worker][place - 1]) if place else begins(step, worker)
        before = action.mesh - ahead[action.phase]
        sources = [Action(before, phase, action.microbatch) for phase in ("F", "B", "I")
                   if before != action.mesh and (phase == "F") == (action.phase == "F")]  # fmt: skip
        for source in sources:
            if source in at:
                is_sent = goes_to(source) >= 0
                ready = max(ready, arrives(step, source) if is_sent else ended(step, source))
        return ready + stages[action.mesh].seconds(action.phase)

    @cache
    def arrives(step: int, action: Action) -> float:
        there = goes_to(action)
        same = [one for one in lines[home[action.mesh]] if goes_to(one) == there]
        place = same.index(action)
        start = max(ended(step, action), begins(step, there))
        if place or step:
            start = max(start, arrives(step - (not place), same[place - 1]))
        return start + stages[max(action.mesh, action.mesh + ahead[action.phase])].receive

    ends = [max(begins(step, worker) for worker in range(len(lines))) for step in range(STEPS + 1)]
    return (ends[STEPS] - ends[FROM]) / (STEPS - FROM)


def program_of(name: NamedSchedule, stages: int, pieces: int) -> Program:
    chunks = 2 if SCHEDULES[name].chunks else 1
    graph = mlp(batch=24, depth=stages * chunks - 1)
    seed = Seed(stages=stages, chunks=chunks, num_microbatches=pieces, schedule=name)
    return lower(graph, seed_strategy(graph, seed))


def durations(program: Program, stages: Sequence[StageTimes], once: Sequence[float]) -> np.ndarray:
    """Give the first instruction of every action what the action takes, transfers theirs, and one update of every
    worker what it does once."""
    found, met = np.zeros(program.num_instructions), set[object]()
    workers = list(dict.fromkeys(mesh.devices for mesh in program.meshes))
    for index in range(program.num_instructions):
        kind, mesh = Kind(int(program.kind[index])), int(program.group[index])
        devices = program.meshes[mesh].devices
        key: object = kind, mesh, int(program.microbatch[index])
        if kind in PHASES and key not in met and program.microbatch[index] >= 0:
            found[index] = stages[mesh].seconds(PHASES[kind])
        elif kind == Kind.UPDATE and (key := devices) not in met:
            found[index] = once[workers.index(devices)]
        elif kind == Kind.SEND:
            there = program.messages[int(program.item[index])].destination
            if program.meshes[there].devices != devices:
                found[index] = stages[max(mesh, there)].receive
        met.add(key)
    return found


@pytest.mark.parametrize(
    "name", ["1f1b", "gpipe", "1f1b-so", "interleaved", "zb-h1", "zb-h2", "zb-v"]
)
@pytest.mark.parametrize(("stages", "pieces"), [(2, 2), (2, 6), (4, 8)])
def test_the_rhythm_is_that_of_workers_who_run_their_lists_again_and_again(name, stages, pieces):
    program = program_of(name, stages, pieces)
    lines, count = order_of(program.strategy), len(program.meshes)
    drawn = np.random.default_rng(7)
    shorter = 0
    for _ in range(4):
        times = [
            StageTimes(forward=f, backward=b, weight=w, receive=r)
            for f, b, w, r in (drawn.uniform(0.5, 1.5, (count, 4)) * (1, 1, 1, 0.1)).tolist()
        ]
        once = drawn.uniform(0.0, 1.0, stages).tolist()
        seconds = durations(program, times, once)
        found, alone = simulate(program, seconds, meets=False), simulate(program, seconds)
        assert found.step_seconds == pytest.approx(rhythm(lines, times, once), rel=1e-3)
        assert found.step_seconds <= alone.step_seconds
        assert (found.start == alone.start).all()
        assert (found.end == alone.end).all()
        chain = np.array(found.critical)
        assert seconds[chain].sum() / found.laps == pytest.approx(found.step_seconds, rel=1e-3)
        shorter += found.step_seconds < 0.999 * alone.step_seconds
    assert shorter or pieces == 2 or not SCHEDULES[name].splits


@pytest.mark.parametrize(("stages", "pieces"), [(2, 8), (4, 8), (4, 12)])
def test_orders_without_a_bubble_have_none_in_a_row(stages, pieces):
    """F, I and W equally long and transfers free: workers of ZB-H2 and ZB-V compute all the time (Qi et al., 2024), and
    1F1B waits for the first microbatch and the last in every step."""
    wanted: dict[NamedSchedule, int] = {
        "zb-h2": 3 * pieces, "zb-v": 3 * pieces, "1f1b": 3 * (pieces + stages - 1),
    }  # fmt: skip
    for name, step in wanted.items():
        program = program_of(name, stages, pieces)
        share = stages / len(program.meshes)
        times = [StageTimes(forward=share, backward=share, weight=share)] * len(program.meshes)
        seconds = durations(program, times, [0.0] * stages)
        assert simulate(program, seconds, meets=False).step_seconds == pytest.approx(step)


def test_a_prediction_is_of_steps_in_a_row_where_ranks_do_not_meet():
    """As the runtime has it: on hosts' own cores, and where neither a norm of all gradients is asked for nor a
    mesh has all devices."""
    program = program_of("zb-h2", 2, 8)
    stages = [StageTimes(forward=1.0, backward=1.0, weight=1.0)] * 2
    for backend, clips, wanted in (
        ("cpu", False, 24.0),
        ("cuda", False, 25.0),
        ("cpu", True, 25.0),
    ):
        one = (
            lower(mlp(batch=24, depth=1), replace(program.strategy, clips=clips))
            if clips
            else program
        )
        machine = cluster()
        where = replace(machine, kinds=(replace(machine.kinds[0], backend=backend),))
        assert meets_at_end(one, on_host=where.has_cpus) == (wanted == 25.0)
        seconds = durations(one, stages, [0.0, 0.0])
        found = simulate_on(where, CostTable(), one, seconds)
        assert found.step_seconds == pytest.approx(wanted)


@given(st.data(), st.sampled_from(GENERATED), st.integers(2, 3), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_bounds_hold_for_steps_in_a_row(data, name, devices, pieces):
    """Whatever is cut how, also where updates of a stage run beneath the next step of another. What the paper calls the
    cost of a step, the longest span of a worker, is reached at least."""
    lines, stages, least, share = draw_pipeline(data, name, devices, pieces, most_chunks=2)
    once = [data.draw(SECONDS) for _ in range(devices)]
    assert rhythm(lines, stages, once) >= (least + share * sum(once)) * (1 - 1e-9)
    assert rhythm(lines, stages) <= replay(lines, stages).span * (1 + 1e-9)
