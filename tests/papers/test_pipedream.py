"""PipeDream (Narayanan et al., 2019): its planner computes what its published optimizer prints."""

import math

import pytest

from shardwright.core.profile import Layer, LayerGraph, WorkerKind
from shardwright.files.layergraph import parse_layer_graph
from shardwright.layerwise import (
    Level,
    PipelineProblem,
    find_cuts,
    in_flight,
    plan_exact,
    plan_pipedream,
    study_pipelines,
)
from shardwright.layerwise.pipedream import OURS, Habits, nest

G, FLAT4, FLAT8, SLOW5 = 1e9, ((4, 1e9),), ((8, 1e9),), ((5, 3e8),)
HOSTS = ((4, 1e10), (2, 1e9))  # innermost first

# Seconds that the optimizer published by the authors (branch pipedream, commit 7db6a1c3) returns
# for the profiles of ``profile_text``: kind, layers, levels, transfers counted, memory, seconds.
PUBLISHED = [
    ("chain", 9, FLAT4, False, None, 0.023), ("chain", 9, FLAT8, False, None, 0.013),
    ("chain", 9, FLAT8, False, 6e7, 0.014), ("chain", 9, FLAT8, True, None, 0.016),
    ("chain", 9, SLOW5, False, None, 0.017), ("chain", 9, SLOW5, True, None, 1 / 30),
    ("chain", 9, SLOW5, True, 6e7, 0.038), ("chain", 9, HOSTS, False, None, 0.011),
    ("chain", 9, HOSTS, True, None, 0.0129), ("chain", 9, HOSTS, True, 6e7, 0.012911111111111108),
    ("chain", 14, FLAT4, True, None, 0.031), ("chain", 14, FLAT4, True, 6e7, 0.05),
    ("chain", 14, FLAT8, True, None, 0.019), ("chain", 14, FLAT8, False, 6e7, 0.031),
    ("chain", 14, SLOW5, True, 6e7, 0.06), ("chain", 14, HOSTS, False, None, 0.015844444444444442),
    ("chain", 14, HOSTS, False, 6e7, 0.022075), ("chain", 14, HOSTS, True, None, 0.0164),
    ("residual", 13, FLAT4, True, None, 0.03), ("residual", 13, FLAT4, False, 6e7, 0.042),
    ("residual", 13, FLAT8, False, None, 0.017), ("residual", 13, FLAT8, True, None, 0.019),
    ("residual", 13, SLOW5, True, None, 1 / 30), ("residual", 13, SLOW5, True, 6e7, 0.058),
    ("residual", 13, HOSTS, False, None, 0.015177777777777776),
    ("residual", 13, HOSTS, True, 6e7, 0.020075),
]  # fmt: skip


def profile_text(kind, count):
    """A profile as PipeDream's profiler writes; ``residual`` skips a layer here and there."""
    lines, edges = [], []
    for i in range(count):
        lines.append(
            f"node{i + 1} -- Layer{i + 1:02d}({i}) -- forward_compute_time={1 + 7 * i % 5:.3f}, "
            f"backward_compute_time={2 + 3 * i % 7:.3f}, "
            f"activation_size={(1 + 5 * i % 11) * 1e6}, parameter_size={(i * i % 13) * 1e6:.3f}"
        )
        if i:
            edges.append(f"\tnode{i} -- node{i + 1}")
        if kind == "residual" and i % 4 == 3:
            edges.append(f"\tnode{i - 1} -- node{i + 1}")
    return "\n".join([*lines, *edges])


@pytest.mark.parametrize(("kind", "count", "levels", "transfers", "memory", "seconds"), PUBLISHED)
def test_the_recursion_gives_what_the_published_optimizer_prints(
    kind, count, levels, transfers, memory, seconds
):
    cuts = find_cuts(parse_layer_graph(profile_text(kind, count)))
    habits = Habits(counts_transfers=transfers, memory_bytes=memory or math.inf)
    levels = [Level(count=n, bandwidth=b) for n, b in levels]
    assert nest(cuts, levels, habits).seconds == pytest.approx(seconds, rel=1e-12)


FLAT = [row for row in PUBLISHED if len(row[2]) == 1 and row[3] and row[4] is None]


@pytest.mark.parametrize(("kind", "count", "levels", "transfers", "memory", "seconds"), FLAT)
def test_by_its_own_count_ours_is_never_larger_than_what_it_prints(
    kind, count, levels, transfers, memory, seconds
):
    """It leaves out what its first stage sends, so what it prints may be less than any pipeline
    takes: the best by that count stands beside it."""
    ((workers, bandwidth),) = levels
    cuts = find_cuts(parse_layer_graph(profile_text(kind, count)))
    problem = PipelineProblem(cuts=cuts, workers=(WorkerKind(count=workers),), bandwidth=bandwidth)
    study = study_pipelines(problem)
    printed = {rival.planner: rival.published_seconds for rival in study.rivals}
    assert printed["pipedream"] == pytest.approx(seconds, rel=1e-12)
    printed["exact"] = study.best.published_seconds
    assert min(printed.values()) <= seconds * (1 + 1e-9)
    ours = [seconds for planner, seconds in printed.items() if planner.startswith("exact")]
    assert min(ours) == pytest.approx(min(printed.values()), rel=1e-9)
    assert study.best.seconds <= min(rival.seconds for rival in study.rivals) * (1 + 1e-12)


@pytest.mark.parametrize("kind", ["chain", "residual"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("formula", ["code", "paper"])
def test_ours_is_never_worse_and_ignoring_transfers_is(kind, workers, formula):
    cuts = find_cuts(parse_layer_graph(profile_text(kind, 14)))
    problem = PipelineProblem(
        cuts=cuts, workers=(WorkerKind(count=workers),), bandwidth=G, formula=formula
    )
    best = plan_exact(problem)
    counted = plan_pipedream(problem, counts_transfers=True)
    ignored = plan_pipedream(problem)
    assert best.seconds <= counted.seconds * (1 + 1e-12)
    assert counted.seconds <= ignored.seconds * (1 + 1e-12)


def one_layer(seconds, weights):
    layers = (Layer(name="a", forward_seconds=seconds, parameter_bytes=weights),)
    return find_cuts(LayerGraph(name="one", layers=layers, edges=()))


@pytest.mark.parametrize(("formula", "expected"), [("code", (6 + 4 * 2 * 9 / 3) / 3),
                                                   ("paper", max(6, 2 * 2 * 9) / 3)])  # fmt: skip
def test_a_replicated_stage_costs_what_the_formulas_say(formula, expected):
    levels = [Level(count=3, bandwidth=1.0)]
    assert nest(one_layer(6.0, 9.0), levels, Habits(formula=formula)).seconds == expected


def test_the_sum_of_the_code_exceeds_the_maximum_of_the_paper_only_while_messages_are_short():
    levels = [Level(count=4, bandwidth=1.0)]
    for weights, is_more in ((0.1, True), (10.0, False)):
        code, paper = (
            nest(one_layer(1.0, weights), levels, Habits(formula=formula)).seconds
            for formula in ("code", "paper")
        )
        assert (code > paper) == is_more


def test_idle_workers_are_its_one_loss_on_equal_workers():
    """It must use every worker; with ours for the recursion it may leave some idle."""
    levels = [Level(count=4, bandwidth=1.0)]
    cuts = one_layer(1.0, 100.0)
    assert nest(cuts, levels, Habits(counts_transfers=True)).seconds == (1 + 4 * 3 * 100 / 4) / 4
    assert nest(cuts, levels, OURS).seconds == 1.0


def test_it_forgets_what_its_first_stage_sends():
    """It plans 8/3 s for one worker and three; the one sends 4 bytes there and back, so 8 s."""
    layers = tuple(
        Layer(name=str(i), forward_seconds=seconds, activation_bytes=sent, parameter_bytes=1.0)
        for i, (seconds, sent) in enumerate(((1.0, 4.0), (4.0, 0.0)))
    )
    cuts = find_cuts(LayerGraph(name="two", layers=layers, edges=((0, 1),)))
    planned = nest(cuts, [Level(count=4, bandwidth=1.0)], Habits(counts_transfers=True))
    problem = PipelineProblem(cuts=cuts, workers=(WorkerKind(count=4),), bandwidth=1.0)
    assert planned.seconds == 8 / 3
    assert plan_pipedream(problem, counts_transfers=True).seconds == 8.0
    assert plan_exact(problem).seconds == 2.75


def test_the_input_stage_keeps_noam_minibatches_in_flight():
    for workers in range(1, 20):
        for replicas in range(1, workers + 1):
            noam = math.ceil(workers / replicas)
            assert in_flight("pipedream", replicas, workers) == noam


def test_an_output_that_only_layers_inside_read_does_not_cross():
    """The published optimizer counts it: a diamond's top, once both branches are done."""
    layers = tuple(Layer(name=str(i), activation_bytes=10.0**i) for i in range(4))
    graph = LayerGraph(name="diamond", layers=layers, edges=((0, 1), (0, 2), (1, 3), (2, 3)))
    cuts = find_cuts(graph)
    assert cuts.crossing[cuts.masks.index(0b0111)] == 110.0
    assert cuts.crossing[cuts.masks.index(0b0011)] == 11.0
