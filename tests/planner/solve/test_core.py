"""The core's choices and bounds against brute force."""

from __future__ import annotations

import contextlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import InputError
from shardwright.planner.solve import core
from shardwright.planner.solve.core import Core
from shardwright.planner.solve.exchange import Exchange


def random_network(
    seed: int, hub: bool
) -> tuple[list[int], list[tuple[int, ...]], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(1, 5, size=7)]
    scopes = {(v,) for v in range(7) if rng.random() < 0.5}
    scopes |= {pair for pair in itertools.combinations(range(7), 2) if rng.random() < 0.7}
    scopes |= {three for three in itertools.combinations(range(7), 3) if rng.random() < 0.1}
    if hub:
        scopes |= {(0, v) for v in range(1, 7)}
    listed = sorted(scopes)
    tables = []
    for scope in listed:
        table = rng.random([sizes[v] for v in scope]) * 10.0 ** rng.integers(-3, 3)
        table[rng.random(table.shape) < 0.15] = np.inf
        tables.append(table)
    return sizes, listed, tables


def least(sizes: list[int], scopes: list[tuple[int, ...]], tables: list[np.ndarray]) -> float:
    """The least of all choices: every table spread over all variables, and added."""
    total = np.zeros(sizes)
    for scope, table in zip(scopes, tables, strict=True):
        total += table.reshape([size if v in scope else 1 for v, size in enumerate(sizes)])
    return float(total.min())


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0, 2]))
def test_the_bound_holds_and_the_choice_is_near_it(seed: int, hub: bool, others: int) -> None:
    """``others`` = 0: nothing is eliminated beforehand, so the dual decomposition sees all of it."""
    sizes, scopes, tables = random_network(seed, hub)
    best = least(sizes, scopes, tables)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "MAX_OTHERS", others)
        patch.setattr(core, "MOST_AROUND", 4 if hub else 64)
        network = Core(sizes, scopes)
    if math.isinf(best):
        with contextlib.suppress(InputError):  # it may not know
            assert math.isinf(network.minimise(tables).bound)
        return
    found = network.minimise(tables)
    cost = sum(
        float(table[tuple(found.picks[v] for v in scope)])
        for scope, table in zip(scopes, tables, strict=True)
    )
    assert found.bound <= best * (1 + 1e-9)
    assert best == pytest.approx(cost, rel=1e-4)
    assert found.bound == pytest.approx(best, rel=1e-4)


@given(st.integers(0, 10**6), st.booleans(), st.integers(0, 12))
def test_what_is_stopped_has_a_choice_that_is_allowed_and_a_bound_that_holds(
    seed: int, hub: bool, patience: int
) -> None:
    """It is stopped when it has asked so often."""
    sizes, scopes, tables = random_network(seed, hub)
    best, asked = least(sizes, scopes, tables), itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "MAX_OTHERS", 0)
        patch.setattr(core, "MOST_AROUND", 4 if hub else 64)
        network = Core(sizes, scopes)
    with contextlib.suppress(InputError) if math.isinf(best) else contextlib.nullcontext():
        found = network.minimise(tables, lambda: next(asked) >= patience)
        cost = sum(
            float(table[tuple(found.picks[v] for v in scope)])
            for scope, table in zip(scopes, tables, strict=True)
        )
        assert found.bound <= best * (1 + 1e-9)
        assert math.isinf(best) or best * (1 - 1e-9) <= cost < math.inf


def test_what_is_stopped_tries_no_more_values_of_what_touches_everything() -> None:
    sizes, scopes = [8, *[3] * 64], [(0, v) for v in range(1, 65)]
    random = np.random.default_rng(0)
    tables = [random.random([8, 3]) for _ in scopes]
    assert Core(sizes, scopes).minimise(tables).bound > 0
    asked = itertools.count()
    Core(sizes, scopes).minimise(tables, lambda: next(asked) >= 0)
    assert next(asked) <= 4


@given(st.integers(0, 10**6), st.floats(0.3, 0.9))
def test_exchanges_end_within_the_limit_where_no_single_change_helps(
    seed: int, share: float
) -> None:
    sizes, scopes, seconds = random_network(seed, False)
    rng = np.random.default_rng(seed + 1)
    seconds = [np.where(np.isinf(table), 50.0, table) for table in seconds]
    memory = [rng.random(table.shape) for table in seconds]
    tables = Exchange(sizes, scopes, seconds, memory)
    begin = np.array([int(rng.integers(size)) for size in sizes], np.int64)
    limit = share * float(tables.costs(begin)[1]) + 0.2
    found = tables.within(begin, limit)
    if found is None:
        return
    time, size = tables.costs(found)
    assert size <= limit
    for variable, count in enumerate(sizes):
        for other in range(count):
            changed = found.copy()
            changed[variable] = other
            slower, larger = tables.costs(changed)
            assert larger > limit or slower >= time * (1 - 1e-8)
