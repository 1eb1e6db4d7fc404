"""What is told of plans: simulated again, side by side, on a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.core.cluster import Cluster
from shardwright.core.plan import Frontier, Plan
from shardwright.files.planfile import write_atomically
from shardwright.planner.search import room
from shardwright.reasons import Wish
from shardwright.reasons import why_not as find
from shardwright.report.contrast import Contrast, contrast
from shardwright.report.html import page_text
from shardwright.report.perfetto import trace_bytes
from shardwright.report.story import PlanStory, Story
from shardwright.verbs.evidence import document_of, evidence, picked, provenance
from shardwright.verbs.narrate import tell
from shardwright.verbs.reasons import with_reasons
from shardwright.verbs.request import Watch
from shardwright.verbs.results import Report
from shardwright.verbs.subject import Batch, training_of

if TYPE_CHECKING:
    from torch import nn


def simulate(
    plan: Plan | Frontier | str | Path,
    model: str | nn.Module = "",
    cluster: Cluster | str = "",
    *,
    batch: Batch | None = None,
    pick: int | None = None,
) -> PlanStory:
    """Lower, price and simulate a plan: its Program, Timeline, half-width and operators."""
    document = document_of(plan)
    chosen = picked(document.frontier, pick)
    graph, machine, costs = evidence(document, chosen, model, cluster, batch)
    return tell(chosen, graph, machine, costs)


def diff(
    one: Plan | Frontier | str | Path,
    other: Plan | Frontier | str | Path,
    model: str | nn.Module = "",
    cluster: Cluster | str = "",
    *,
    batch: Batch | None = None,
) -> Contrast:
    """Lay two plans of one model and cluster side by side: times, memory, choices, and why."""
    stories = [simulate(plan, model, cluster, batch=batch) for plan in (one, other)]
    return contrast(stories[0], stories[1])


def why_not(
    plan: Plan | Frontier | str | Path,
    wish: Wish,
    model: str | nn.Module = "",
    cluster: Cluster | str = "",
    *,
    batch: Batch | None = None,
    pick: int | None = None,
) -> Contrast:
    """Lay the best plan that does what you have in mind beside a plan, with what decides.

    Raises InputError where there is no such plan.
    """
    document = document_of(plan)
    chosen = picked(document.frontier, pick)
    graph, machine, costs = evidence(document, chosen, model, cluster, batch)
    other = find(graph, machine, costs, wish, training=training_of(chosen.strategy))
    stories = [tell(one, graph, machine, costs) for one in (chosen, other)]
    return contrast(stories[0], stories[1], room(machine))


def report(
    plan: Plan | Frontier | str | Path,
    model: str | nn.Module = "",
    cluster: Cluster | str = "",
    *,
    batch: Batch | None = None,
    out: str | Path = "report.html",
    trace: str | Path = "",
    watch: Watch | None = None,
) -> Report:
    """Write one self-contained page about all plans of a frontier, and a trace of the chosen one.

    It says why the chosen plan, as ``explain`` does."""
    document, watch = document_of(plan), watch or Watch()
    frontier = document.frontier
    facts = evidence(document, frontier.best, model, cluster, batch)
    graph, machine, costs = facts
    stories = with_reasons(
        [tell(one, graph, machine, costs) for one in frontier.plans],
        frontier.chosen, facts, document.origin.memory_limit, watch,
    )  # fmt: skip
    story = Story(
        graph=graph,
        cluster=machine,
        plans=stories,
        chosen=frontier.chosen,
        provenance=provenance(frontier.best, machine, costs),
    )
    page = write_atomically(out, page_text(story).encode())
    return Report(page=page, trace=save_trace(stories[frontier.chosen], trace))


def save_trace(story: PlanStory, path: str | Path) -> Path | None:
    """Write a Perfetto trace (gzip where the name ends so); an empty path writes nothing."""
    data = trace_bytes(story, compressed=str(path).endswith(".gz")) if path else b""
    return write_atomically(path, data) if path else None
