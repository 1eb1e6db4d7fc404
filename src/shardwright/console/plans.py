"""How graphs, profiles and plans sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.text import Text

from shardwright.console.terminal import WIDE, Terminal
from shardwright.core.cluster import Cluster
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import STALE, Plan
from shardwright.report.contrast import Contrast
from shardwright.report.reasons import why_parts
from shardwright.report.story import PlanStory, group_rows, memory_by_part, seconds_by_work
from shardwright.report.tables import filled_table
from shardwright.report.text import (
    chosen_lines,
    contrast_parts,
    curve_table,
    frontier_table,
    operator_table,
    plan_tables,
)
from shardwright.report.units import bytes_text, count_text, overhead_text, seconds_text

if TYPE_CHECKING:
    from shardwright.verbs.reasons import Explanation
    from shardwright.verbs.results import (
        Check,
        Coverage,
        Profile,
        Study,
    )


def show_checks(terminal: Terminal, checks: Sequence[Check]) -> None:
    """Print what the doctor found."""
    columns = ("", "what", "found", "remedy")
    table = filled_table("This machine", columns, map(_check_row, checks), left=columns)
    terminal.say(table)
    terminal.emit(ok=all(check.is_ok for check in checks), checks=list(checks))
    terminal.next("`shardwright demo` shows everything on a small model, in a few minutes")


def _check_row(check: Check) -> tuple[str | Text, ...]:
    mark = Text("ok", style="green") if check.is_ok else Text("no", style="bold red")
    return mark, check.name, check.detail, "" if check.is_ok else check.remedy


def show_cluster_file(terminal: Terminal, path: Path) -> None:
    """Say where the cluster file is."""
    terminal.say(Text(f"Wrote {path}."))
    terminal.emit(file=str(path))
    terminal.next(f"edit it, then `shardwright plan MODEL --cluster {path}`")


def show_graph(
    terminal: Terminal, graph: OperatorGraph, coverage: Coverage, path: Path | None
) -> None:
    """Print what was captured and what can be split."""
    rows = (
        ("parameters", f"{count_text(graph.num_parameters)} in {len(graph.parameters)} tensors"),
        ("operators", f"{len(graph.operators)} in {len(graph.blocks)} blocks"),
        ("distinct blocks", str(len({block.signature for block in graph.blocks}))),
        ("flops, forward", count_text(sum(op.flops for op in graph.operators))),
        (
            "batch",
            ", ".join(
                f"{t.name} {list(t.shape)}" for t in map(graph.tensors.__getitem__, graph.inputs)
            ),
        ),
        ("can be split", f"{coverage.num_with_rule} of {coverage.num_operators} operators"),
        ("cannot, share of time", f"{coverage.replicated_share:.1%} (modelled)"),
    )
    columns = ("what", "value")
    terminal.say(
        filled_table(f"Captured {graph.name}", columns, rows, left=columns),
        *(Text(f"Note: {note}", style="dim") for note in graph.notes),
    )
    terminal.emit(
        model=graph.name,
        fingerprint=graph.fingerprint,
        num_parameters=graph.num_parameters,
        num_operators=coverage.num_operators,
        num_with_rule=coverage.num_with_rule,
        replicated={one.kind: one.count for one in coverage.replicated},
        replicated_shares={one.kind: one.share for one in coverage.replicated},
        replicated_share=coverage.replicated_share,
        notes=graph.notes,
        file=str(path) if path else None,
    )
    terminal.next("`shardwright plan MODEL` finds how to train it")


def show_profile(terminal: Terminal, found: Profile) -> None:
    """Print what was measured."""
    text = f"{found.num_measured} new measurements, {found.num_known} known in this environment."
    terminal.say(Text(text))
    for name, value in found.costs.overheads:
        text = overhead_text(name, value)
        terminal.say(Text(f"{name.replace('_', ' ')}: {text}", style="dim"))
    terminal.say(*(Text(f"Note: {note}", style="yellow") for note in found.notes))
    terminal.emit(
        measured=found.num_measured,
        known=found.num_known,
        cluster=found.cluster.name,
        notes=found.notes,
    )
    where = "" if found.cluster.name == "local" else " --cluster FILE"
    terminal.next(f"`shardwright plan MODEL{where}` plans with these numbers")


def show_study(terminal: Terminal, study: Study, path: Path) -> None:
    """Print the frontier and the chosen plan."""
    cluster = study.cluster
    if study.curve:
        terminal.say(curve_table(study.curve))
    terminal.say(
        frontier_table(study.frontier, study.spreads, cluster.least_memory),
        chosen_lines(study.frontier),
    )
    if not study.is_complete:
        terminal.say(Text("Stopped early: this is the best found so far.", style="yellow"))
    terminal.say(*(Text(f"Note: {note}", style="yellow") for note in study.notes))
    if not cluster.has_cpus:
        terminal.say(Text(_software_text(cluster), style="dim"))
    terminal.emit(
        file=str(path),
        complete=study.is_complete,
        measured=study.num_measured,
        notes=study.notes,
        software=None if cluster.has_cpus else cluster.software,
        chosen=study.frontier.chosen,
        plans=[
            plan_summary(plan) | {"spread_seconds": spread}
            for plan, spread in zip(study.frontier.plans, study.spreads, strict=True)
        ],
        curve=[plan_summary(plan) for plan in study.curve],
    )
    model = study.origin.model or "MODEL"
    terminal.say(Text(f"Wrote {path}."))
    if cluster.name == "local":
        terminal.next(f"`shardwright run {path} {model}` trains with it")
    else:
        terminal.next(
            f"`shardwright report {path} {model}` shows more; on the cluster, "
            f"`torchrun ... -m shardwright run {path} {model}` trains"
        )


def _software_text(cluster: Cluster) -> str:
    names = ", ".join(dict.fromkeys(kind.name for kind in cluster.kinds))
    return f"Costs are those of {cluster.software!r} software on {names} (`software` in a cluster file)."


def plan_summary(plan: Plan) -> dict[str, Any]:
    """Return a plan's numbers for machines."""
    return {
        "label": plan.strategy.label,
        "step_seconds": plan.predicted.step_seconds,
        "peak_bytes": plan.predicted.peak_bytes,
        "dollars": plan.predicted.dollars,
        "staleness": plan.predicted.staleness,
        "gradients_lost": plan.predicted.lost,
        "measured": None if plan.measured is None else asdict(plan.measured),
        "devices": len(plan.strategy.devices),
        "reason": plan.reason,
        "bound_seconds": None if plan.bound is None else plan.bound.step_seconds,
        "gap": None if plan.bound is None else plan.bound.gap,
        "sources": dict(plan.sources),
        "stale": plan.is_stale,
    }


def story_summary(story: PlanStory) -> dict[str, Any]:
    """Return a simulated plan's numbers for machines."""
    timeline = story.predicted
    return plan_summary(story.plan) | {
        "step_seconds": timeline.step_seconds,
        "spread_seconds": story.spread_seconds,
        "peak_bytes": list(timeline.peak_bytes),
        "num_instructions": story.program.num_instructions,
        "work_seconds": dict(seconds_by_work(story.program, timeline)),
        "memory_bytes": [
            dict(memory_by_part(story, mesh)) for mesh in range(len(story.program.meshes))
        ],
        "beside_bytes": dict(story.beside),
    }


def show_simulation(terminal: Terminal, story: PlanStory, trace: Path | None) -> None:
    """Print where a step's time and memory go."""
    spread = f" ± {seconds_text(story.spread_seconds)}" if story.spread_seconds else ""
    title = Text.assemble(
        (story.plan.strategy.label or "unnamed", "bold cyan"),
        f": {seconds_text(story.predicted.step_seconds)}{spread} per step, "
        f"{bytes_text(story.predicted.worst_peak_bytes)} at the peak",
    )
    terminal.say(title, plan_tables(story))
    if story.input_seconds:
        waits = story.input_seconds >= story.predicted.step_seconds
        parts = ", ".join(
            f"{what} {seconds_text(seconds)}" for _, what, seconds in story.feeding if seconds
        )
        terminal.say(
            f"Input: {seconds_text(story.input_seconds)} a step, beneath the steps before"
            f"{': steps wait for it' if waits else ''} ({parts})."
        )
    if story.plan.is_stale:
        terminal.say(Text(f"Note: {STALE}; what is shown here was predicted anew.", style="yellow"))
    terminal.emit(**story_summary(story), trace=str(trace) if trace else None)
    if trace:
        terminal.say(Text(f"Wrote {trace}; open it at ui.perfetto.dev (it stays on your machine)."))
    terminal.next("`shardwright explain` says what each operator costs and how it is split")


def show_contrast(terminal: Terminal, found: Contrast) -> None:
    """Print two plans side by side."""
    terminal.say(contrast_parts(found))
    terminal.emit(
        one=found.one,
        other=found.other,
        sentence=found.sentence,
        rows=[asdict(row) for row in found.rows],
        facts=[dict(zip(("what", "one", "other"), fact, strict=True)) for fact in found.facts],
    )


def show_explanation(terminal: Terminal, found: Explanation, limit: int) -> None:
    """Print why this plan, what else could have been decided, and what more would buy."""
    terminal.say(*_explanation(found, limit))
    terminal.emit(
        **story_summary(found.story),
        memory_limit=found.limit,
        seconds_per_byte=found.reasons.byte_seconds,
        decisions=[asdict(one) for one in found.reasons.decisions],
        prices=[asdict(one) for one in found.reasons.prices],
        critical=[asdict(row) for row in found.critical],
        notes=list(found.reasons.notes),
        operators=list(group_rows(found.story.operators)[:limit]),
        others=[plan_summary(plan) for plan in found.frontier.plans],
    )
    terminal.next("`shardwright report` shows all plans and their timelines on one page")


def explanation_text(found: Explanation, limit: int = 15) -> str:
    """Return the explanation as plain text."""
    console = Console(width=WIDE, no_color=True, file=None, record=True, quiet=False, stderr=True)
    with console.capture() as captured:
        for part in _explanation(found, limit):
            console.print(part)
    return captured.get()


def _explanation(found: Explanation, limit: int) -> list[RenderableType]:
    return [
        chosen_lines(found.frontier),
        why_parts(found.why, limit),
        plan_tables(found.story),
        operator_table(group_rows(found.story.operators), limit),
        frontier_table(found.frontier),
    ]
