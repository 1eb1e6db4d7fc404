"""Pipelines that are replayed: cuts against brute force, times and memory against closed forms."""

from __future__ import annotations

import itertools
import random

import pytest

from shardwright.core.profile import Layer, LayerGraph, WorkerKind
from shardwright.core.schedules import REPLAYED, SCHEDULES
from shardwright.errors import InputError, NoPlan
from shardwright.layerwise import PipelineProblem, find_cuts, plan_order, study_orders
from shardwright.layerwise.ordered import balanced
from shardwright.planner.schedule import pipeline_order, written

KEPT, WEIGHTS = 4.0, 3.0


def chain(times, *, weights=WEIGHTS):
    """Layers of F = t and B = 2 t, so that I and W take t each."""
    layers = tuple(
        Layer(
            name=f"l{i}",
            forward_seconds=t,
            backward_seconds=2 * t,
            activation_bytes=KEPT,
            parameter_bytes=weights,
        )
        for i, t in enumerate(times)
    )
    edges = tuple((i, i + 1) for i in range(len(layers) - 1))
    return LayerGraph(name="chain", layers=layers, edges=edges)


def problem(graph, workers, microbatches, bandwidth=1e15, memory=float("inf")):
    return PipelineProblem(
        cuts=find_cuts(graph), workers=(WorkerKind(count=workers, memory_bytes=memory),),
        bandwidth=bandwidth, schedule="1f1b-sno", microbatches=microbatches,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("counts_transfers", [False, True])
def test_cuts_are_the_best_of_all(seed, counts_transfers):
    rng = random.Random(seed)
    times = [rng.random() + 0.1 for _ in range(rng.randint(2, 8))]
    parts = rng.randint(1, len(times))
    each = problem(chain(times), 2, 4, bandwidth=rng.choice([4.0, 50.0]))
    ends = balanced(each, parts, counts_transfers)

    def longest(stops):
        starts = (0, *stops[:-1])
        return max(
            3 * sum(times[a:b])
            + (2 * KEPT / each.bandwidth if counts_transfers and b < len(times) else 0.0)
            for a, b in zip(starts, stops, strict=True)
        )

    wanted = min(
        longest((*some, len(times)))
        for some in itertools.combinations(range(1, len(times)), parts - 1)
    )
    assert longest([each.cuts.masks[end].bit_count() for end in ends]) == pytest.approx(wanted)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (4, 8), (4, 13)])
def test_steps_and_memory_of_equal_stages_are_the_closed_forms(p, m):
    """Two layers a stage, F = I = W = 2 s: Qi et al., table 2."""
    each = problem(chain([1.0] * 2 * p), p, m)
    total = 6.0
    plans = {name: plan_order(each, name) for name in ("1f1b-sno", "zb-h1", "zb-h2", "zb-1p")}
    assert plans["1f1b-sno"].seconds == pytest.approx((m + p - 1) * total)
    assert plans["zb-h1"].seconds == pytest.approx(m * total + (p - 1) * 2.0)
    assert plans["zb-h2"].seconds == pytest.approx(m * total) or m < 2 * p
    assert plans["zb-1p"].seconds <= plans["zb-h1"].seconds * (1 + 1e-12)
    for k, stage in enumerate(plans["1f1b-sno"].stages):
        kept = (2 if k == 0 else 3) * KEPT
        assert stage.memory_bytes == pytest.approx(2 * 2 * WEIGHTS + min(m, p - k) * kept)
        assert stage.in_flight == min(m, p - k)
    most = max(stage.memory_bytes for stage in plans["zb-h1"].stages)
    assert most <= 2 * 2 * WEIGHTS + p * 3 * KEPT  # the memory of 1F1B


def test_a_v_of_equal_layers_has_no_bubble():
    p, m = 3, 7
    plan = plan_order(problem(chain([1.0] * 12), p, m), "zb-v")
    assert plan.seconds == pytest.approx(m * 12.0)
    assert plan.bottleneck == pytest.approx(m * 12.0)
    assert [stage.worker for stage in plan.stages] == [0, 1, 2, 2, 1, 0]
    assert plan.num_workers == p


def test_a_stage_without_weights_has_nothing_to_put_off():
    """Its backward is I alone, so that ZB-H1 is 1F1B."""
    each = problem(chain([1.0] * 4, weights=0.0), 4, 6)
    found = plan_order(each, "zb-h1")
    assert {bar.end - bar.start for lane in found.timeline for bar in lane if bar.phase == "W"} == {
        0.0
    }
    assert found.seconds == pytest.approx(plan_order(each, "1f1b-sno").seconds)


def test_an_order_of_ones_own_is_what_its_name_makes():
    each = problem(chain([1.0, 2.0, 1.5, 1.0]), 4, 5, bandwidth=8.0)
    named = plan_order(each, "zb-h1")
    lines = pipeline_order("zb-h1", 4, 5)
    rows = [" ".join(map(str, line)) for line in lines]
    own = plan_order(each, "custom", written(rows))
    assert own.timeline == named.timeline
    assert own.seconds == named.seconds
    with pytest.raises(ValueError, match=r"lacks actions: 3W4 \(row 3\)"):
        plan_order(each, "custom", written([*rows[:3], rows[3].replace(" 3W4", "")]))


def test_too_little_memory_names_the_worker_and_a_remedy():
    each = problem(chain([1.0] * 4), 4, 6, memory=2 * WEIGHTS + 3.5 * 2 * KEPT)
    with pytest.raises(NoPlan, match=r"on worker 1 .*row of the order") as refused:
        plan_order(each, "zb-h2")
    assert "give more memory" in refused.value.remedy
    # The searched order keeps within whatever there is.
    found = plan_order(each, "zb-2p")
    assert max(stage.memory_bytes for stage in found.stages) <= each.workers[0].memory_bytes
    with pytest.raises(NoPlan, match="zb-2p takes"):
        plan_order(problem(chain([1.0] * 4), 4, 6, memory=2 * WEIGHTS + 1), "zb-2p")


def test_a_cut_without_room_leaves_the_others():
    """Cut by compute, one worker holds all weights and what is sent most; by transfers too, it fits."""
    made = ((2.0, 100.0, 0.0), (1.0, 1.0, 0.0), (1.0, 1.0, 80.0))
    layers = tuple(
        Layer(name=f"l{i}", forward_seconds=t, backward_seconds=2 * t, activation_bytes=a, parameter_bytes=w)
        for i, (t, a, w) in enumerate(made)
    )  # fmt: skip
    graph = LayerGraph(name="chain", layers=layers, edges=((0, 1), (1, 2)))
    found = plan_order(problem(graph, 2, 4, bandwidth=10.0, memory=250.0), "1f1b-sno")
    assert [stage.memory_bytes for stage in found.stages] == [2 * 101.0, 2 * 80.0 + 2.0]


def test_a_study_shows_every_schedule_or_why_not():
    study = study_orders(problem(chain([1.0] * 5), 4, 6), "zb-h1")
    told = {plan.schedule for plan in study.rivals} | {name for name, _ in study.refusals}
    assert told == {*REPLAYED, "1f1b-sno", "1f1b-so", "gpipe"} - {"zb-h1"}
    assert {name for name, _ in study.refusals} == {n for n in REPLAYED if SCHEDULES[n].chunks}


def test_unequal_workers_are_refused():
    kinds = (WorkerKind(count=1), WorkerKind(count=1, speed=2.0))
    each = PipelineProblem(
        cuts=find_cuts(chain([1.0, 1.0])), workers=kinds, bandwidth=1.0, schedule="1f1b-sno",
        microbatches=2,
    )  # fmt: skip
    with pytest.raises(InputError, match="planned for equal workers"):
        plan_order(each, "zb-h1")
