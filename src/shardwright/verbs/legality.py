"""Between a plan, wherever it comes from, and everything that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.core.cluster import Cluster
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Plan
from shardwright.core.program import Program
from shardwright.errors import InputError, PlanMismatch
from shardwright.files.planfile import AGAIN, check_fits
from shardwright.operators.splitting import find_samples
from shardwright.planner.lower import lower
from shardwright.planner.space import check_strategy
from shardwright.proofs import check_complete


def check_plan(plan: Plan, graph: OperatorGraph, cluster: Cluster | None = None) -> None:
    """Raise PlanMismatch unless a plan was made for this graph and cluster, and its strategy is
    legal."""
    check_fits(plan, graph, cluster)
    with _as_mismatch():
        check_strategy(graph, plan.strategy, find_samples(graph))


def lowered(plan: Plan, graph: OperatorGraph) -> Program:
    """Lower a plan, which checks it too, and prove that nothing is lost in what comes of it. Raises as
    ``check_plan`` does."""
    check_fits(plan, graph)
    with _as_mismatch():
        program = lower(graph, plan.strategy)
    try:
        check_complete(program, graph)
    except ValueError as error:
        raise PlanMismatch(
            f"what is computed reaches every update, but by this plan {error}; this is a defect of "
            f"Shardwright: please report it with the plan, and {AGAIN}"
        ) from error
    return program


@contextmanager
def _as_mismatch() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise PlanMismatch(f"the plan does not fit its model: {error}; or {AGAIN}") from error
