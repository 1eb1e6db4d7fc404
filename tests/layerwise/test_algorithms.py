"""Algorithms under a bound of memory: the knapsack against trying everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.algorithms import Algorithm, AlgorithmTable, LayerAlgorithms
from shardwright.errors import InputError
from shardwright.layerwise import algorithms
from shardwright.layerwise.algorithms import best_batch, frontier

COSTS = st.tuples(st.integers(0, 9), st.integers(0, 9))
LAYERS = st.lists(st.lists(COSTS, min_size=1, max_size=4), min_size=1, max_size=6)


def made(costs):
    """Layers of (seconds, bytes)."""
    return [
        LayerAlgorithms(
            name=str(number),
            algorithms=tuple(
                Algorithm(name=str(k), seconds=float(s), bytes=b) for k, (s, b) in enumerate(row)
            ),
        )
        for number, row in enumerate(costs)
    ]


def every_choice(costs, workspace):
    """(bytes, seconds) of all choices."""
    joined = sum if workspace == "sum" else max
    for picks in itertools.product(*costs):
        yield joined(b for _, b in picks), float(sum(s for s, _ in picks))


@pytest.mark.parametrize("workspace", ["sum", "max"])
@given(costs=LAYERS)
def test_the_frontier_is_that_of_all_choices(workspace, costs):
    found = frontier(made(costs), workspace)
    every = sorted(set(every_choice(costs, workspace)))
    best = [
        (size, seconds)
        for size, seconds in every
        if not any(s <= size and t <= seconds and (s, t) != (size, seconds) for s, t in every)
    ]
    assert list(zip(found.memory, found.seconds, strict=True)) == best


@pytest.mark.parametrize("workspace", ["sum", "max"])
@given(costs=LAYERS, bound=st.integers(0, 60))
def test_the_choice_within_a_bound_is_the_fastest_of_all_and_what_it_says(workspace, costs, bound):
    fitting = [t for size, t in every_choice(costs, workspace) if size <= bound]
    found = frontier(made(costs), workspace).best(bound)
    if not fitting:
        assert found is None
        return
    assert found is not None
    picks = [row[place] for row, place in zip(costs, found.algorithms, strict=True)]
    joined = sum if workspace == "sum" else max
    assert found.seconds == min(fitting) == sum(s for s, _ in picks)
    assert found.bytes == joined(b for _, b in picks) <= bound


def test_a_frontier_descends_in_seconds_as_it_ascends_in_bytes():
    costs = [[(k * 7 % 11 + 1, (k * 13 + layer) % 17) for k in range(4)] for layer in range(12)]
    found = frontier(made(costs))
    assert len(found) > 5
    assert all(a < b for a, b in itertools.pairwise(found.memory))
    assert all(a > b for a, b in itertools.pairwise(found.seconds))


def test_a_frontier_that_would_not_fit_is_refused_with_a_remedy(monkeypatch):
    monkeypatch.setattr(algorithms, "MOST_POINTS", 100)
    costs = [[(2.0**k, 2**k), (0.0, 2 ** (k + 1) + 2**k)] for k in range(12)]
    with pytest.raises(InputError, match="round the bytes"):
        frontier(made(costs))


def test_the_smallest_batch_within_the_tolerance_of_the_best_is_taken():
    speeds = {32: 90.0, 64: 97.0, 128: 100.0, 256: 99.0}
    found = [
        (
            AlgorithmTable(batch=batch, layers=()),
            algorithms.AlgorithmChoice(seconds=batch / speed, bytes=0, algorithms=()),
        )
        for batch, speed in speeds.items()
    ]
    for tolerance, batch in ((0.0, 128), (0.02, 128), (0.05, 64), (0.2, 32)):
        best = best_batch(found, tolerance)
        assert best is not None
        assert best.batch == batch
    assert best_batch([(found[0][0], None)], 0.05) is None
