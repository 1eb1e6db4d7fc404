"""Trials where the plan is to run: every rank of a cluster calls ``tune`` under torchrun.

The frontier was planned elsewhere, from models of this cluster. Here its plans are run in turns beside
plain data parallelism; the file then holds what was measured, the fastest measured plan chosen, and
the factors fitted to it, with which ``shardwright plan --costs`` plans again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.core.plan import Frontier
from shardwright.core.strategy import Strategy
from shardwright.errors import InputError, PlanMismatch
from shardwright.files.planfile import read_plan_file, write_plan
from shardwright.planner.search import Survey, best_of, surveyed
from shardwright.verbs.evidence import costs_behind
from shardwright.verbs.legality import check_plan
from shardwright.verbs.racing import (
    MOST_STEPS,
    ROUND_SECONDS,
    TRIED,
    TURN_SECONDS,
    TURNS,
    Task,
    prepare,
    race_plans,
)
from shardwright.verbs.subject import training_of
from shardwright.verbs.trials import fitted, measured_of, runnable, with_measured

if TYPE_CHECKING:
    from shardwright.core.plan import Measured

PLAIN_PLANS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A tuned frontier, where it was written, and the factors fitted."""

    frontier: Frontier
    path: Path
    factors: tuple[tuple[str, float], ...]


def tune(plan: str | Path, model: str, *, out: str | Path = "", tries: int | None = None) -> Tuning:
    """Run a file's plans and plain data parallelism in turns on the ranks that are here.

    ``tries`` is how many plans besides plain data parallelism (None: 4), ``out`` the file to write
    (the plan's own where it is empty). A collective call: every rank returns what its own clock
    saw, and rank 0's is written. Raises PlanMismatch where the ranks are not the plan's.
    """
    from shardwright.runtime.launch import join_world, meet
    from shardwright.runtime.race import Rules

    document = read_plan_file(plan)
    best, cluster = document.frontier.best, document.cluster
    if cluster is None:
        raise InputError(f"{plan} keeps no cluster; plan again with `shardwright plan`, then tune")
    rank, size = join_world()
    if size != cluster.num_devices:
        raise PlanMismatch(
            f"the plan is for a cluster of {cluster.num_devices} devices, but {size} ranks were "
            "started; start one for each device: torchrun --nproc-per-node ... -m shardwright tune "
            "PLAN MODEL"
        )
    task = Task(
        model=model,
        seq=document.origin.seq,
        optimizer=document.origin.optimizer,
        folder="",
        plans=(),
        turns=TURNS,
        steps=max(1, min(MOST_STEPS, round(TURN_SECONDS / best.objective.step_seconds))),
        budget_seconds=ROUND_SECONDS,
    )
    ground = prepare(task, best)
    with document.named():
        check_plan(best, ground.captured.graph)
    facts = ground.captured.graph, cluster, costs_behind(document, best)
    survey = surveyed(*facts, document.frontier, training_of(best.strategy))
    count = TRIED if tries is None else tries
    counts = (size, 1)
    told = [one for one in (best, *document.frontier.plans) if len(one.strategy.devices) in counts]
    plans = runnable(survey, [*survey.plain[:PLAIN_PLANS], *told[: count + 1]])
    if not plans:
        raise InputError(
            f"no plan of {plan} runs on all {size} devices, and plain data parallelism does not "
            "divide the batch: there is nothing to tune"
        )
    rules = Rules(turns=task.turns, steps=task.steps, budget_seconds=task.budget_seconds)
    laps = race_plans(ground, plans, task, rules)
    known = measured_of(plans, laps)
    table = fitted(survey, known)
    again = surveyed(facts[0], cluster, table, document.frontier, training_of(best.strategy))
    frontier = _tuned(again, document.frontier, known)
    path = Path(out or plan)
    if rank == 0:
        origin = document.origin.model_copy(update={"factors": dict(table.factors)})
        write_plan(path, frontier, origin=origin, cluster=cluster)
    meet("at the end of tuning")
    return Tuning(frontier=frontier, path=path, factors=table.factors)


def _tuned(survey: Survey, before: Frontier, known: dict[Strategy, Measured]) -> Frontier:
    """Return the frontier with what was measured, and what else was on it predicted anew."""
    rest = tuple(survey.plan(one.strategy) for one in before.plans if one.strategy not in known)
    others = best_of(rest) if rest else Frontier(plans=())
    return with_measured(replace(survey, frontier=others), known)
