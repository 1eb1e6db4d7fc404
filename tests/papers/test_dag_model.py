"""Iteration time of synchronous SGD (Shi, Wang, Chu, Li, ICPADS 2018, equations 1-7)."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.program import Kind
from shardwright.planner.simulate import simulate
from tests.planner.programs import Row, build_program
from tests.planner.simulate.statistics import program_statistics

seconds_of_node = st.integers(0, 16).map(lambda eighths: eighths / 8)
NUM_ITERATIONS = 12


@st.composite
def models(draw):
    num_layers = draw(st.integers(1, 5))
    layers = st.lists(seconds_of_node, min_size=num_layers, max_size=num_layers)
    return {
        "io": draw(seconds_of_node), "h2d": draw(seconds_of_node), "update": draw(seconds_of_node),
        "forward": draw(layers), "backward": draw(layers), "communicate": draw(layers),
    }  # fmt: skip


def iteration_rows(model, num_iterations=1, *, prefetch=False, wait_free=False):
    """Nodes and edges of the DAG on one worker: io, h2d, f(1..L), b(L..1), c(L..1), u."""
    rows, layers = [], range(len(model["forward"]))
    updated = ()

    def add(resource, seconds, after=(), kind=Kind.FORWARD):
        rows.append(Row(resource=resource, seconds=seconds, after=tuple(after), kind=kind))
        return len(rows) - 1

    for _ in range(num_iterations):
        read = add("host:0", model["io"], () if prefetch else updated)
        last = add("host:0", model["h2d"], (read,))
        for layer in layers:
            last = add("compute:0", model["forward"][layer], (last, *updated))
        backward = {}
        for layer in reversed(layers):
            last = backward[layer] = add(
                "compute:0", model["backward"][layer], (last,), Kind.BACKWARD
            )
        sent = [
            add("link:0", model["communicate"][layer],
                (backward[layer] if wait_free else last,), Kind.MESSAGE)
            for layer in reversed(layers)
        ]  # fmt: skip
        updated = (add("compute:0", model["update"], (last, *sent), Kind.UPDATE),)
    return rows


def steady_seconds(model, **options):
    """Time between two updates once the pipeline of iterations has filled."""
    program, seconds = build_program(iteration_rows(model, NUM_ITERATIONS, **options))
    timeline = simulate(program, seconds)
    updates = [end for end, kind in zip(timeline.end, program.kind, strict=True)
               if kind == Kind.UPDATE]  # fmt: skip
    return updates[-1] - updates[-2]


def compute_seconds(model):
    return sum(model["forward"]) + sum(model["backward"])


def exposed_by_equation_5(model):
    ready = sum(model["forward"]) + 0.0
    free = 0.0
    for backward, message in zip(
        reversed(model["backward"]), reversed(model["communicate"]), strict=True
    ):
        ready += backward
        free = max(free, ready) + message
    return free - compute_seconds(model)


@given(models())
def test_equation_2_nothing_overlaps(model):
    program, seconds = build_program(iteration_rows(model))
    expected = model["io"] + model["h2d"] + compute_seconds(model)
    expected += sum(model["communicate"]) + model["update"]
    assert simulate(program, seconds).step_seconds == expected


@given(models())
def test_equation_1_is_equation_2_without_communication(model):
    alone = {**model, "communicate": [0.0] * len(model["communicate"])}
    program, seconds = build_program(iteration_rows(alone))
    expected = model["io"] + model["h2d"] + compute_seconds(model) + model["update"]
    assert simulate(program, seconds).step_seconds == expected


@given(models())
def test_equation_3_input_is_prefetched(model):
    work = compute_seconds(model) + sum(model["communicate"]) + model["update"]
    assert steady_seconds(model, prefetch=True) == max(model["io"] + model["h2d"], work)


@given(models())
def test_equations_4_and_5_backward_hides_communication(model):
    work = compute_seconds(model) + exposed_by_equation_5(model) + model["update"]
    expected = max(model["io"] + model["h2d"], work)
    assert steady_seconds(model, prefetch=True, wait_free=True) == expected


@given(models())
def test_statistics_find_the_exposed_communication_of_equation_5(model):
    rows = [row for row in iteration_rows(model, wait_free=True) if row.resource != "host:0"]
    first = len(iteration_rows(model)) - len(rows)
    rows = [
        Row(resource=row.resource, seconds=row.seconds, kind=row.kind,
            after=tuple(other - first for other in row.after if other >= first))
        for row in rows
    ]  # fmt: skip
    program, seconds = build_program(rows)
    statistics = program_statistics(simulate(program, seconds), program)
    assert statistics.exposed_seconds[0] == exposed_by_equation_5(model)


@given(models())
def test_wait_free_is_never_slower_and_hides_all_but_the_last_message_if_all_are_short(model):
    assert steady_seconds(model, prefetch=True, wait_free=True) <= steady_seconds(model)
    pairs = itertools.pairwise(range(len(model["forward"])))
    if all(model["communicate"][later] <= model["backward"][earlier] for earlier, later in pairs):
        assert exposed_by_equation_5(model) == model["communicate"][0]


@given(models())
def test_equation_7_bounds_the_gain_of_any_overlap(model):
    bare = {**model, "io": 0.0, "h2d": 0.0, "update": 0.0}
    forward, backward = sum(model["forward"]), sum(model["backward"])
    communicate = sum(model["communicate"])
    if min(backward, communicate) == 0:
        return
    ratio = communicate / backward
    bound = 1 + 1 / (forward / min(communicate, backward) + max(ratio, 1 / ratio))
    gain = steady_seconds(bare) / steady_seconds(bare, wait_free=True)
    assert gain <= bound * (1 + 1e-12)


def test_equation_7_is_1_67_for_equal_backward_and_communication_and_half_the_forward():
    many = 64
    model = {"io": 0.0, "h2d": 0.0, "update": 0.0, "forward": [0.5] * many,
             "backward": [1.0] * many, "communicate": [1.0] * many}  # fmt: skip
    gain = steady_seconds(model) / steady_seconds(model, wait_free=True)
    assert gain == pytest.approx(1.67, rel=0.02)
