"""What a plan rests on: the file it came in, the model's graph, the cluster and its costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Frontier, Plan
from shardwright.errors import InputError
from shardwright.files.planfile import Origin, PlanFile, read_plan_file
from shardwright.verbs.legality import check_plan
from shardwright.verbs.subject import Batch, capture, find_cluster

if TYPE_CHECKING:
    from torch import nn


def document_of(plan: Plan | Frontier | str | Path) -> PlanFile:
    """Return a plan as the file it came in, or as one of its own."""
    if isinstance(plan, Plan | Frontier):
        return PlanFile(plans=plan, origin=Origin(), cluster=None)
    return read_plan_file(plan)


def picked(frontier: Frontier, pick: int | None) -> Plan:
    """Return the chosen plan, or number ``pick``. Raises InputError where there is none."""
    if pick is None:
        return frontier.best
    if not 0 <= pick < len(frontier.plans):
        raise InputError(
            f"the frontier has plans 0 to {len(frontier.plans) - 1}, not {pick}; pick one of these"
        )
    return frontier.plans[pick]


def evidence(
    document: PlanFile,
    plan: Plan,
    model: str | nn.Module,
    cluster: Cluster | str,
    batch: Batch | None,
) -> tuple[OperatorGraph, Cluster, CostTable]:
    """Return the graph, cluster and costs behind a plan, refusing what it was not made for.

    A file's own cluster is the one its plans were made for, whatever digest they carry: those of
    older files covered measured rates as well.
    """
    origin = document.origin
    if model is None or model == "":
        model = model_of(document)
    captured = capture(
        model,
        batch,
        global_batch=plan.global_batch,
        seq=origin.seq,
        precision=plan.strategy.precision,
        batch_norm=plan.strategy.batch_norm,
        outputs=plan.outputs,
    )
    own = None if cluster else document.cluster
    machine = own or find_cluster(cluster)[0]
    with document.named():
        check_plan(plan, captured.graph, None if own else machine)
    return captured.graph, machine, costs_behind(document, plan)


def costs_behind(document: PlanFile, plan: Plan) -> CostTable:
    """Return the costs that a file's plan was predicted with, as far as they are still known."""
    from shardwright.verbs.measure import costs_of

    factors = tuple(document.origin.factors.items())
    fitted = CostTable(factors=factors)
    if plan.costs_fingerprint == fitted.fingerprint:
        return fitted
    known = costs_of(plan, document.cluster)
    return replace(known, factors=factors) if factors else known


def fitted_costs(path: str) -> CostTable:
    """Return the factors that ``tune`` left in a plan file. Raises InputError where there are none."""
    factors = read_plan_file(path).origin.factors
    if not factors:
        raise InputError(
            f"{path} holds no costs fitted to measured steps; `shardwright tune` writes them"
        )
    return CostTable(factors=tuple(factors.items()))


def model_of(document: PlanFile) -> str:
    """Return the model a plan file names.

    A name of Python code in a file is not an order to run it; a config name is harmless.
    """
    model = document.origin.model
    if not model.startswith("hf:"):
        made_for = f" (it was made for {model!r})" if model else ""
        raise InputError(f"the plan needs its model{made_for}; name it after the plan")
    return model


def provenance(plan: Plan, cluster: Cluster, costs: CostTable) -> tuple[tuple[str, str], ...]:
    """Say where a report's numbers come from."""
    kinds = ", ".join(dict.fromkeys(f"{kind.name} ({kind.source})" for kind in cluster.kinds))
    points = sum(len(found) for _, found in costs.collectives)
    measured = f"{len(costs.operators)} operator shards, {points} collective points"
    return (
        ("Cluster", f"{cluster.name}, {cluster.num_devices} x {kinds}"),
        (
            "Measured here",
            measured if costs.operators or points else "nothing: all costs are modelled",
        ),
        ("Graph", plan.graph_fingerprint),
        ("Cluster fingerprint", plan.cluster_fingerprint),
        ("Costs fingerprint", plan.costs_fingerprint),
        *(("Assumed", note) for note in cluster.notes),
    )
