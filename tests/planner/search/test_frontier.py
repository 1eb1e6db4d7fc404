"""Holes of the simulated frontier are filled with plans that lie in them."""

from __future__ import annotations

import itertools
import math

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.plan import Objective
from shardwright.planner.judge.evaluate import evaluate
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search import Limits, search
from shardwright.planner.search.candidates import to_strategy
from shardwright.planner.search.loop import run
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.proposers.additive import on_all
from shardwright.planner.search.proposers.gaps import filled
from shardwright.planner.search.steering import CANDIDATES
from tests.planner.search.models import cluster, residual

pytestmark = pytest.mark.usefixtures("short_climbs")

GRAPH = residual(batch=64, width=64, depth=1, classes=16)
MACHINE = cluster(1, 4, flops=1e10, near=1e9, far=1e8)


def widest(points: list[Objective]) -> float:
    edge = sorted(one for one in points if not any(other.dominates(one) for other in points))
    return max(
        (
            min(
                math.log(b.step_seconds / a.step_seconds),
                math.log(max(a.peak_bytes / b.peak_bytes, 1.0)),
            )
            for a, b in itertools.pairwise(edge)
        ),
        default=0.0,
    )


def test_a_sparse_frontier_gets_plans_in_its_holes() -> None:
    context = Context.of(GRAPH, MACHINE, CostTable(), Training())
    pool = Pool(context, 1e12, 1)
    run(pool, on_all)
    pool.count = CANDIDATES  # gaps may be filled as usual
    smallest = min(pool.candidates, key=lambda c: c.bytes)
    pool.evaluations.append(evaluate(context, to_strategy(context, smallest)))
    before, count = (
        widest([one.objective for one in pool.fitting]),
        len(pool.evaluations),
    )
    assert before > 0.5  # the fastest and the smallest are far apart
    run(pool, filled)
    # Each may be simulated again, with its gradients merged.
    assert count < len(pool.evaluations) <= count + CANDIDATES
    assert widest([one.objective for one in pool.fitting]) < before


def test_a_narrower_spacing_leaves_narrower_holes() -> None:
    frontiers = [
        search(GRAPH, MACHINE, CostTable(), limits=Limits(spacing=spacing, max_candidates=2))
        for spacing in (None, 0.03)
    ]
    plain, fine = ([plan.predicted for plan in one.plans] for one in frontiers)
    assert len(fine) > len(plain)
    assert widest(fine) < widest(plain)
    assert fine[0] == plain[0]
