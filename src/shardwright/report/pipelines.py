"""Pipelines of profiled layers as tables, and as plain values for ``--json``."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.core.profile import LayerGraph, PipelinePlan, PipelineStage, PipelineStudy
from shardwright.core.schedules import SCHEDULES
from shardwright.report.tables import plain_table
from shardwright.report.units import bytes_text, percent_text, seconds_text


def pipeline_tables(graph: LayerGraph, study: PipelineStudy) -> Group:
    """Show the best pipeline stage by stage, the bound, and the other planners' pipelines."""
    best = study.best
    parts: list[RenderableType] = [_stage_table(graph, best), Text()]
    per = "step" if _has_flush(best) else "minibatch"
    parts.append(
        Text(
            f"{seconds_text(best.seconds)} per {per}, {best.inputs_per_second:.4g} "
            f"{'microbatches' if _has_flush(best) else 'minibatches'}/s on {best.num_workers} "
            f"workers, schedule {best.schedule}{', ' + best.note if best.note else ''}."
        )
    )
    if best.simulated_seconds is not None:
        parts.append(
            Text(f"Replayed operation by operation: {seconds_text(best.simulated_seconds)}.")
        )
    parts.append(Text(bound_sentence(best), style="dim"))
    if best.published_seconds is not None:
        parts.append(
            Text(
                f"PipeDream's published optimizer would count {seconds_text(best.published_seconds)}"
                ": it leaves out what the first stage sends.",
                style="dim",
            )
        )
    if study.rivals:
        parts += [Text(), _rival_table(study)]
    parts += [Text(f"{name}: {why}", style="dim") for name, why in study.refusals]
    return Group(*parts)


def bound_sentence(plan: PipelinePlan) -> str:
    """Say what is proved about a plan."""
    if plan.seconds > 0 and not plan.bound:
        return "No bound is known."
    if plan.seconds <= plan.bound * (1 + 1e-6):
        return (
            "Optimal under these costs: every cut of the graph and every use of the workers was "
            "tried or excluded."
        )
    return (
        f"No pipeline is faster than {seconds_text(plan.bound)} (gap {plan.gap:.1%}); the graph has "
        "too many cuts to try them all."
    )


def pipeline_values(graph: LayerGraph, study: PipelineStudy) -> dict[str, Any]:
    """Return stable keys: the plan, the rivals' plans and why others found none."""
    return {
        "profile": graph.name,
        "num_layers": len(graph.layers),
        "plan": _values(graph, study.best),
        "rivals": [_values(graph, rival) for rival in study.rivals],
        "refusals": dict(study.refusals),
    }


def _values(graph: LayerGraph, plan: PipelinePlan) -> dict[str, Any]:
    return {
        "planner": plan.planner,
        "schedule": plan.schedule,
        "seconds": plan.seconds,
        "bottleneck_seconds": plan.bottleneck,
        "inputs_per_second": plan.inputs_per_second,
        "bound_seconds": plan.bound or None,
        "replayed_seconds": plan.simulated_seconds,
        "published_count_seconds": plan.published_seconds,
        "fits": plan.fits,
        "num_workers": plan.num_workers,
        "note": plan.note,
        "stages": [
            {
                "layers": [graph.layers[i].name for i in stage.layers],
                "workers": list(stage.workers),
                "worker": stage.worker if stage.worker >= 0 else None,
                "num_replicas": stage.num_replicas,
                "shards": stage.shards,
                "splits_weights": stage.splits_weights,
                "seconds": stage.seconds,
                "compute_seconds": stage.compute_seconds,
                "collective_seconds": stage.collective_seconds,
                "receive_bytes": stage.receive_bytes,
                "parameter_bytes": stage.parameter_bytes,
                "memory_bytes": stage.memory_bytes,
                "in_flight": stage.in_flight,
            }
            for stage in plan.stages
        ],
    }


def _has_flush(plan: PipelinePlan) -> bool:
    return SCHEDULES[plan.schedule].flushes


def _stage_table(graph: LayerGraph, plan: PipelinePlan) -> Table:
    title = "Best pipeline"
    table = plain_table(title)
    table.add_column("stage", justify="right")
    table.add_column("layers", overflow="fold", ratio=1)
    for name in ("workers", "busy", "compute", "receives", "weights", "memory", "in flight"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, stage in enumerate(plan.stages):
        table.add_row(
            str(number),
            Text(_layers_text(graph, stage)),
            _workers_text(stage),
            Text(seconds_text(stage.seconds), style="bold" if _is_busiest(plan, stage) else ""),
            seconds_text(stage.compute_seconds + stage.collective_seconds),
            bytes_text(stage.receive_bytes),
            bytes_text(stage.parameter_bytes),
            bytes_text(stage.memory_bytes),
            str(stage.in_flight),
        )
    return table


def _workers_text(stage: PipelineStage) -> str:
    """Write how many workers of each kind, and what they split where they are no mere replicas."""
    if stage.worker >= 0:
        return f"worker {stage.worker}"
    text = "+".join(str(n) for n in stage.workers)
    if stage.shards > 1:
        text += f" ({stage.num_replicas} x {stage.shards} shards)"
    return text + (", weights split" if stage.splits_weights else "")


def _is_busiest(plan: PipelinePlan, stage: PipelineStage) -> bool:
    return stage.seconds >= max(each.seconds for each in plan.stages)


def _layers_text(graph: LayerGraph, stage: PipelineStage) -> str:
    order = [i for i in graph.order() if i in set(stage.layers)]
    first, last = (graph.layers[i].name for i in (order[0], order[-1]))
    return first if first == last else f"{first} to {last} ({len(order)})"


def _rival_table(study: PipelineStudy) -> Table:
    table = plain_table("Other planners, under the same costs")
    table.add_column("planner")
    table.add_column("schedule")
    names = ["stages", "workers", "seconds", "against ours", "replayed", "memory"]
    has_count = study.best.published_seconds is not None
    for name in (*names, *(["by PipeDream's count"] if has_count else [])):
        table.add_column(name, justify="right")
    for rival in study.rivals:
        ratio = rival.seconds / study.best.seconds - 1 if study.best.seconds else 0.0
        table.add_row(
            rival.planner,
            rival.schedule,
            str(len(rival.stages)),
            str(rival.num_workers),
            seconds_text(rival.seconds),
            percent_text(ratio),
            "-" if rival.simulated_seconds is None else seconds_text(rival.simulated_seconds),
            "fits" if rival.fits else Text("does not fit", style="red"),
            *([seconds_text(rival.published_seconds or 0.0)] if has_count else []),
        )
    return table
