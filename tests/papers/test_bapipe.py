"""BaPipe (Zhao et al., 2020): its times and memory, its balance, and where that is not optimal.

Closed forms are for N equal stages and M microbatches: F and B seconds of one, SR of a transfer.
"""

import itertools
import math
import random

import pytest

from shardwright.core.profile import Layer, LayerGraph, WorkerKind
from shardwright.core.schedules import SCHEDULES
from shardwright.errors import NoPlan
from shardwright.layerwise import (
    PipelineProblem,
    find_cuts,
    in_flight,
    plan_bapipe,
    plan_exact,
)
from shardwright.layerwise.bapipe import balance
from shardwright.layerwise.compare import replayed, step_of
from shardwright.layerwise.problem import all_reduce
from shardwright.planner.schedule import StageTimes
from tests.layerwise.oracle import price, random_problem

SHAPES = [(n, m) for n in (1, 2, 3, 4, 5, 8) for m in (n, n + 1, 2 * n + 1, 17, 64) if m >= n]
TIMES = [(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)]


def step(schedule, n, m, forward, backward, transfer):
    first = StageTimes(forward=forward, backward=backward)
    other = StageTimes(forward=forward, backward=backward, receive=transfer)
    return step_of(schedule, [first, *[other] * (n - 1)], [1] * n, m, has_own_links=True)


def sno_seconds(n, m, total, sr):
    return (m + n - 1) * total + (m + n - 2 - math.ceil((m - 1) / n)) * 2 * sr


def so_seconds(n, m, total, sr):
    return (m + n - 1) * total + (n - 1) * 2 * sr


def as_seconds(n, m, total, sr):
    del sr
    return (m + n - 1) * total


CLOSED_FORMS = {
    "1f1b-sno": sno_seconds, "1f1b-so": so_seconds, "gpipe": so_seconds, "1f1b-as": as_seconds,
    "fbp-as": as_seconds,
}  # fmt: skip


@pytest.mark.parametrize("schedule", CLOSED_FORMS)
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_a_replayed_step_equals_the_closed_form(schedule, share):
    for (n, m), (forward, backward) in itertools.product(SHAPES, TIMES):
        sr = 0.0 if SCHEDULES[schedule].streams else share * forward
        seconds = step(schedule, n, m, forward, backward, sr).seconds
        expected = CLOSED_FORMS[schedule](n, m, forward + backward, sr)
        assert seconds == pytest.approx(expected), (n, m, forward, backward)


@pytest.mark.parametrize("sr", [1.5, 3.0])
def test_without_overlap_the_closed_form_holds_for_long_transfers_too(sr):
    for n, m in SHAPES:
        seconds = step("1f1b-sno", n, m, 1.0, 3.0, sr).seconds
        assert seconds == pytest.approx(sno_seconds(n, m, 4.0, sr)), (n, m)


def test_the_closed_form_of_overlap_ends_where_transfers_are_longer_than_compute():
    assert step("1f1b-so", 4, 16, 1.0, 2.0, 1.5).seconds == so_seconds(4, 16, 3.0, 1.5)
    assert step("1f1b-so", 4, 16, 1.0, 2.0, 2.0).seconds > so_seconds(4, 16, 3.0, 2.0)


@pytest.mark.parametrize("sr", [0.0, 0.4, 0.5, 1.4])
def test_overlap_is_never_slower_and_all_are_equal_without_transfers(sr):
    for n, m in SHAPES:
        overlapped = step("1f1b-so", n, m, 1.0, 2.0, sr).seconds
        exposed = step("1f1b-sno", n, m, 1.0, 2.0, sr).seconds
        assert overlapped <= exposed + 1e-9, (n, m)
        if not sr:
            streamed = step("1f1b-as", n, m, 1.0, 2.0, 0.0).seconds
            assert overlapped == exposed == streamed, (n, m)


@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_microbatches_held_equal_the_table(n, m):
    for i in range(1, n + 1):
        assert in_flight("1f1b-sno", 1, n - i + 1, m) == min(m, n - i + 1)
        assert in_flight("1f1b-as", 1, n - i + 1, m) == min(m, n - i + 1)
        assert in_flight("fbp-as", 1, n - i + 1, m) == min(m, 2 * (n - i + 1))
        assert in_flight("gpipe", 1, n - i + 1, m) == m
        # Counted in the replay: one less than the doubled figure.
        assert in_flight("1f1b-so", 1, n - i + 1, m) == min(m, 2 * (n - i) + 1)
    for schedule in ("gpipe", "1f1b-sno", "1f1b-so", "1f1b-as", "fbp-as"):
        most = held_over_time(step(schedule, n, m, 1.0, 2.0, 0.25), n)
        table = [in_flight(schedule, 1, n - k, m) for k in range(n)]
        assert most <= table if schedule == "fbp-as" else most == table


def held_over_time(found, n):
    """Microbatches between the start of F and the end of B, by the clock."""
    most = []
    for k in range(n):
        begins = [time for action, time in found.start.items() if action[:2] == (k, "F")]
        ends = [time for action, time in found.end.items() if action[:2] == (k, "B")]
        most.append(max(sum(b <= t for b in begins) - sum(e <= t for e in ends) for t in begins))
    return most


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-so"])
def test_no_step_beats_the_model(seed, schedule):
    rng = random.Random(seed)
    _, problem = random_problem(rng, most_layers=7, most_workers=6)
    each = PipelineProblem(
        cuts=problem.cuts, workers=(WorkerKind(count=rng.randint(1, 6)),),
        bandwidth=rng.choice([1.0, 5.0, 1e6]), schedule=schedule, microbatches=rng.randint(1, 12),
    )  # fmt: skip
    for plan in (plan_exact(each), plan_bapipe(each)):
        # A stage may make its weights equal while those before it still work, which is not counted.
        message = max(all_reduce(each, s.num_replicas, s.parameter_bytes) for s in plan.stages)
        assert replayed(each, plan).simulated_seconds >= plan.seconds * (1 - 1e-9) - message


@pytest.mark.parametrize("seed", range(30))
def test_without_transfers_neither_does_the_schedule_that_exposes_them(seed):
    rng = random.Random(seed)
    _, problem = random_problem(rng, most_layers=7, most_workers=6)
    each = PipelineProblem(
        cuts=problem.cuts, workers=(WorkerKind(count=rng.randint(1, 6)),), bandwidth=1e15,
        schedule="1f1b-sno", microbatches=rng.randint(1, 12),
    )  # fmt: skip
    plan = plan_exact(each)
    assert replayed(each, plan).simulated_seconds >= plan.seconds * (1 - 1e-9)


def test_a_link_carries_one_transfer_at_a_time():
    """Forward 1 s, transfers 2 s: outputs leave at 1, 3 and 5, gradients follow at 8.5 at best."""
    first = StageTimes(forward=1.0, backward=0.0)
    second = StageTimes(forward=0.5, backward=0.5, receive=2.0)
    shared = step_of("gpipe", [first, second], [1, 1], 3).seconds
    own = step_of("gpipe", [first, second], [1, 1], 3, has_own_links=True).seconds
    # Shared: arrivals at 3, 5 and 7, forwards until 7.5, backwards until 9, gradients 8-10-12-14.
    assert (shared, own) == (14.0, 9.0)


def test_sum_of_stages_plus_the_rounds_of_the_slowest_is_no_lower_bound():
    """A slow first stage works on while the first microbatch is on its way: 20 s, not 11 + 10."""
    slow, fast = StageTimes(forward=5.0, backward=5.0), StageTimes(forward=0.5, backward=0.5)
    assert step_of("1f1b-as", [slow, fast], [1, 1], 2).seconds == 20.0


def chain_of(*seconds):
    layers = tuple(Layer(name=f"l{i}", forward_seconds=v) for i, v in enumerate(seconds))
    edges = tuple((i, i + 1) for i in range(len(seconds) - 1))
    return LayerGraph(name="chain", layers=layers, edges=edges)


def test_speeds_of_one_to_two_split_equal_layers_one_to_two():
    cuts = find_cuts(chain_of(*[1.0] * 12))
    workers = (WorkerKind(count=1, speed=1.0), WorkerKind(count=1, speed=2.0))
    problem = PipelineProblem(
        cuts=cuts, workers=workers, bandwidth=1e9, schedule="1f1b-so", microbatches=8
    )
    plan = plan_bapipe(problem)
    assert [len(stage.layers) for stage in plan.stages] == [4, 8]
    asynchronous = PipelineProblem(cuts=cuts, workers=workers, bandwidth=1e9)
    assert sorted(len(stage.layers) for stage in plan_exact(asynchronous).stages) == [4, 8]


def test_balancing_by_moving_boundaries_is_not_optimal():
    seconds = (1.0, 5.0, 1.0, 4.0)
    cuts = find_cuts(chain_of(*seconds))
    problem = PipelineProblem(cuts=cuts, workers=(WorkerKind(count=3),), bandwidth=1e9)
    assert balance(problem, range(5), 3) == [2, 3, 4]  # 6 | 1 | 4; 1 | 5 | 5 is better
    assert plan_exact(problem).seconds <= 5.0


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("is_limited", [False, True])
def test_the_best_partition_of_a_chain_equals_brute_force(is_mixed, is_limited):
    infeasible = 0
    for seed in range(12):
        rng = random.Random(f"{seed} {is_mixed} {is_limited}")
        graph, problem = random_problem(rng, most_layers=12, chain=True)
        room = rng.uniform(5, 60) if is_limited else math.inf
        kinds = [WorkerKind(count=2, memory_bytes=room)]
        if is_mixed:
            kinds = [
                WorkerKind(count=1, memory_bytes=room),
                WorkerKind(count=1, speed=2.0, memory_bytes=room / 2),
            ]
        problem = PipelineProblem(
            cuts=problem.cuts, workers=tuple(kinds), bandwidth=rng.choice([0.5, 4.0]),
            schedule="1f1b-sno", microbatches=6,
        )  # fmt: skip
        best = min(price(graph, problem, each) for each in pipelines_of_a_chain(graph, kinds))
        infeasible += best == math.inf
        try:
            assert plan_exact(problem).seconds == pytest.approx(best)
        except NoPlan:
            assert best == math.inf
    assert (infeasible > 0) == is_limited


def pipelines_of_a_chain(graph, kinds):
    """All cuts of a chain into at most as many stages as there are workers."""
    order = graph.order()
    total = sum(kind.count for kind in kinds)
    mixtures = [
        used for used in itertools.product(*(range(kind.count + 1) for kind in kinds)) if any(used)
    ]
    for count in range(1, min(total, len(order)) + 1):
        for ends in itertools.combinations(range(1, len(order)), count - 1):
            for uses in itertools.product(mixtures, repeat=count):
                if all(
                    sum(column) <= kind.count
                    for column, kind in zip(zip(*uses, strict=True), kinds, strict=True)
                ):
                    stops = (*ends, len(order))
                    yield [
                        (frozenset(order[:e]), used, 1, False)
                        for e, used in zip(stops, uses, strict=True)
                    ]


def test_it_picks_among_its_schedules_by_time_and_memory():
    layers = tuple(
        Layer(
            name=f"l{i}",
            forward_seconds=1.0,
            backward_seconds=2.0,
            activation_bytes=1.0,
            parameter_bytes=10.0,
        )
        for i in range(4)
    )
    graph = LayerGraph(name="chain", layers=layers, edges=((0, 1), (1, 2), (2, 3)))
    found = {}
    for room in (1000.0, 27.0):
        problem = PipelineProblem(
            cuts=find_cuts(graph), workers=(WorkerKind(count=4, memory_bytes=room),),
            bandwidth=4.0, schedule="1f1b-so", microbatches=32,
        )  # fmt: skip
        found[room] = plan_bapipe(problem, ("1f1b-so", "1f1b-sno")).schedule
    assert found == {1000.0: "1f1b-so", 27.0: "1f1b-sno"}
