"""Why a plan: its story with the runners-up of its decisions and its shadow prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.explanation import Reasons
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Frontier, Plan
from shardwright.planner.search import room
from shardwright.reasons import explain as find
from shardwright.report.critical import CriticalRow, critical_rows
from shardwright.report.reasons import why
from shardwright.report.story import PlanStory
from shardwright.report.why import Why
from shardwright.verbs.evidence import document_of, evidence, picked
from shardwright.verbs.narrate import tell
from shardwright.verbs.request import Watch
from shardwright.verbs.subject import Batch, training_of

if TYPE_CHECKING:
    from torch import nn


Facts = tuple[OperatorGraph, Cluster, CostTable]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A plan of a frontier with all that speaks for it. ``limit`` is the
    bytes per device that it was held against."""

    frontier: Frontier
    story: PlanStory
    reasons: Reasons
    critical: tuple[CriticalRow, ...]
    limit: float

    @property
    def why(self) -> Why:
        """What speaks for it, in words."""
        return why(self.story.plan, self.critical, self.reasons, self.limit)


def reasons(
    plan: Plan | Frontier | str | Path,
    model: str | nn.Module = "",
    cluster: Cluster | str = "",
    *,
    batch: Batch | None = None,
    pick: int | None = None,
    watch: Watch | None = None,
) -> Explanation:
    """Return why this plan: its decisions with their runners-up, shadow prices, critical path.

    The fastest plan is held against the memory that it was planned for, others against their own.
    """
    watch = watch or Watch()
    document = document_of(plan)
    frontier = document.frontier
    chosen = picked(frontier, pick)
    if pick is not None:
        frontier = frontier.choosing(pick)
    watch.tell("capturing the model", 0.0)
    graph, machine, costs = evidence(document, chosen, model, cluster, batch)
    story = tell(chosen, graph, machine, costs)
    return explained(frontier, story, (graph, machine, costs), document.origin.memory_limit, watch)


def explained(
    frontier: Frontier, story: PlanStory, facts: Facts, memory_limit: float | None, watch: Watch
) -> Explanation:
    """Explain the plan of a story, one of a frontier, from graph, cluster and costs."""
    graph, machine, costs = facts
    chosen = story.plan
    fastest = chosen.predicted == frontier.plans[0].predicted
    limit = memory_limit or room(machine)
    limit = limit if fastest else chosen.predicted.peak_bytes
    found = find(
        graph, machine, costs, chosen, training=training_of(chosen.strategy), limit=limit,
        tell=watch.tell,
    )  # fmt: skip
    return Explanation(
        frontier=frontier,
        story=story,
        reasons=found,
        critical=critical_rows(story, graph, machine),
        limit=limit,
    )


def with_reasons(
    stories: Sequence[PlanStory],
    chosen: int,
    facts: Facts,
    memory_limit: float | None,
    watch: Watch,
) -> tuple[PlanStory, ...]:
    """Add to each story what speaks for its plan; runners-up and prices, which take a search, to the
    chosen one only."""
    graph, machine, _ = facts
    frontier = Frontier(plans=tuple(story.plan for story in stories), chosen=chosen)
    told: list[PlanStory] = []
    for index, story in enumerate(stories):
        if index == chosen:
            words = explained(frontier, story, facts, memory_limit, watch).why
        else:
            words = why(story.plan, critical_rows(story, graph, machine), None)
        told.append(replace(story, why=words))
    return tuple(told)
