"""One self-contained page: the frontier one can click, timelines, memory, operators, provenance.

The page carries plotly's own script inline and asks nothing of the network. Names from the model
reach it only as JSON whose ``<``, ``>`` and ``&`` are escaped, or through ``html.escape``; its
script writes text nodes, never markup.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.core.plan import STALE
from shardwright.core.program import Program
from shardwright.core.strategy import Strategy
from shardwright.core.timeline import Timeline
from shardwright.report.comparison import comparison_notes, differences
from shardwright.report.lanes import lanes_of, lanes_svg
from shardwright.report.story import (
    WORK,
    PlanStory,
    Story,
    group_rows,
    kind_text,
    lane_text,
    memory_by_part,
    parameter_lines,
    wire_text,
    work_of,
)
from shardwright.report.text import sources_text, span_text
from shardwright.report.units import bytes_text, count_text, dollars_text, seconds_text
from shardwright.report.why import Rows, Why

MAX_BARS = 6000  # on the whole page
MAX_POINTS = 1000
MAX_OPERATORS = 250
MAX_REASONS = 25  # rows of a table of reasons


def page_text(story: Story) -> str:
    """Return the whole page. Its size stays below 6 MB: long timelines are merged and thinned."""
    from plotly.offline import get_plotlyjs  # 0.5 s and 5 MB that only this function needs

    template = files("shardwright.report").joinpath("templates/page.html").read_text("utf-8")
    data = json.dumps(page_data(story), separators=(",", ":"), sort_keys=True)
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    parts = {
        "title": html.escape(story.graph.name or "model"),
        "plotly": get_plotlyjs(),
        "data": data,
        "frontier": _frontier_rows(story),
        "lanes": _lanes(story),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], template)


def page_data(story: Story) -> dict[str, Any]:
    """Return everything the page's script shows, as JSON-able values."""
    stale = [f"{STALE}." for item in story.plans if item.plan.is_stale][:1]
    return {
        "model": story.graph.name,
        "cluster": story.cluster.name,
        "parameters": count_text(story.graph.num_parameters),
        "devices": story.cluster.num_devices,
        "capacity": story.cluster.least_memory,
        "chosen": story.chosen,
        "work": WORK,
        "plans": [_plan_data(plan, MAX_BARS // max(len(story.plans), 2)) for plan in story.plans],
        "losses": [[name, list(curve)] for name, curve in story.losses],
        "provenance": [list(pair) for pair in story.provenance],
        "notes": [*story.graph.notes, *stale],
    }


def _frontier_rows(story: Story) -> str:
    """Return the frontier as table rows that can be read (and chosen) without the chart."""
    rows: list[str] = []
    for index, item in enumerate(story.plans):
        plan = item.plan
        half = _half_width(item)
        cells = (
            seconds_text(plan.objective.step_seconds)
            + (f" ± {seconds_text(half)}" if half else ""),
            bytes_text(plan.predicted.peak_bytes),
            dollars_text(plan.objective.dollars),
            sources_text(plan),
        )
        name = plan.strategy.label or f"plan {index}"
        name += f" ({plan.objective.lost:.2%} of gradients not sent)" if plan.objective.lost else ""
        name = html.escape(name)
        star = ' <span class="tag">chosen</span>' if index == story.chosen else ""
        if late := plan.predicted.staleness:
            star += f' <span class="tag">gradients {late} updates late</span>'
        rows.append(
            f'<tr data-plan="{index}"><th scope="row"><button type="button" class="pick" '
            f'data-plan="{index}">{name}</button>{star}</th>'
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    return "\n".join(rows)


def _lanes(story: Story) -> str:
    """Return the picture of the chosen plan's order, nothing where it has no pipeline."""
    item = story.plans[story.chosen]
    lanes = lanes_of(item.program, item.predicted)
    if len(item.program.meshes) < 2 or sum(map(len, lanes)) > MAX_BARS:
        return ""
    return (
        '<section aria-labelledby="h-lanes"><h3 id="h-lanes">The order of the chosen pipeline</h3>'
        '<p class="hint">A lane for the devices of each stage, as predicted: every microbatch from its '
        "first operator to its last, and its number.</p>"
        f"<figure>{lanes_svg(lanes)}</figure></section>"
    )


def _half_width(item: PlanStory) -> float:
    """Return the half-width of a plan's step time: of the measurement where it was tried."""
    measured = item.plan.measured
    return item.spread_seconds if measured is None else measured.spread_seconds


def _plan_data(item: PlanStory, max_bars: int) -> dict[str, Any]:
    plan, program = item.plan, item.program
    rows = group_rows(item.operators)
    return {
        "label": plan.strategy.label or "unnamed",
        "reason": plan.reason,
        "step": plan.objective.step_seconds,
        "spread": _half_width(item),
        "peak": plan.predicted.peak_bytes,
        "dollars": plan.objective.dollars,
        "bound": None
        if plan.bound is None
        else [plan.bound.step_seconds, plan.bound.gap, plan.bound.model],
        "facts": _facts(item),
        "kept": [*map(list, parameter_lines(plan))],
        "notes": list(plan.notes),
        "why": None if item.why is None else _why_data(item.why),
        "timelines": [
            [line.source, _bars(program, line, max_bars), line.step_seconds]
            for line in (item.predicted, item.measured)
            if line is not None
        ],
        "memory": _memory_data(item),
        "parts": [
            [f"stage {mesh}", [list(part) for part in memory_by_part(item, mesh)]]
            for mesh in range(len(program.meshes))
        ],
        "operators": [
            [
                *(r.name, kind_text(r.kind), r.stage, r.split, r.shape, r.count),
                *(r.forward_seconds, r.backward_seconds, r.source),
            ]
            for r in rows[:MAX_OPERATORS]
        ],
        "hidden": max(0, len(rows) - MAX_OPERATORS),
        "differences": [[d.name, d.predicted, d.measured, d.unit] for d in differences(item)],
        "differenceNotes": list(comparison_notes(item)),
    }


def _facts(item: PlanStory) -> list[list[str]]:
    plan, program, strategy = item.plan, item.program, item.plan.strategy
    pipeline, sync = strategy.pipeline, strategy.gradient_sync
    wire = wire_text(program)
    return [
        ["Stages", " | ".join(_mesh_text(program, i) for i in range(len(strategy.meshes)))],
        ["Schedule", f"{pipeline.title}, {pipeline.num_microbatches} microbatch(es)"],
        ["Global batch", str(plan.global_batch)],
        ["Precision", strategy.precision],
        ["Recomputed", _recomputed_text(strategy)],
        [
            "Gradients",
            f"{sync.method}, {len(sync.buckets)} bucket(s){f', {wire}' if wire else ''}",
        ],
        ["Batch norm", strategy.batch_norm],
        ["Found by", f"{plan.method}, seed {plan.seed}, shardwright {plan.version}"],
        ["Known from", sources_text(plan)],
    ]


def _why_data(why: Why) -> dict[str, Any]:
    def rows(table: Rows) -> dict[str, Any]:
        return {
            "title": table.title,
            "heads": [[h, "n" if i in table.numbers else ""] for i, h in enumerate(table.heads)],
            "rows": [list(row) for row in table.rows[:MAX_REASONS]],
            "hidden": max(0, len(table.rows) - MAX_REASONS),
            "caption": table.caption,
        }

    return {
        "bound": why.bound,
        "decisions": None if why.decisions is None else rows(why.decisions),
        "prices": list(why.prices),
        "critical": rows(why.critical),
        "notes": list(why.notes),
    }


def _recomputed_text(strategy: Strategy) -> str:
    counts = {
        "blocks": len(strategy.recompute),
        "operators": len(strategy.recompute_operators),
        "re-laid-out copies": len(strategy.reshard_again),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "nothing"


def _mesh_text(program: Program, index: int) -> str:
    mesh = program.meshes[index]
    axes = " x ".join(f"{a} {n}" for a, n in zip(mesh.axes, mesh.sizes, strict=True) if n > 1)
    return f"{axes or 'one device'} on {span_text(mesh.devices)}"


def _memory_data(item: PlanStory) -> list[list[Any]]:
    lines: list[list[Any]] = []
    for timeline in (item.predicted, item.measured):
        for mesh, steps in enumerate(() if timeline is None else timeline.memory):
            assert timeline is not None
            last = np.array([[timeline.together_seconds, steps[-1, 1]]]) if len(steps) else steps
            thin = _thin(np.concatenate([steps, last]))
            times = [float(f"{v:.6g}") for v in thin[:, 0]]
            sizes = [int(v) for v in thin[:, 1]]
            lines.append([f"stage {mesh}", timeline.source, times, sizes])
    return lines


def _thin(steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keep the largest size of each of ``MAX_POINTS`` spans, so that no peak is lost."""
    if len(steps) <= MAX_POINTS:
        return steps
    spans = np.array_split(np.arange(len(steps)), MAX_POINTS)
    return steps[[int(span[np.argmax(steps[span, 1])]) for span in spans]]


@dataclass
class _Bar:
    """Equal work of one row, as long as the gaps within are too short to be seen."""

    row: str
    work: int
    start: float
    end: float
    first: int  # its first instruction
    count: int = 1

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def title(self, program: Program) -> str:
        name = program.describe(self.first)
        return name if self.count == 1 else f"{name} and {self.count - 1} more"

    def takes(self, other: _Bar, slack: float) -> bool:
        """Take another in, if it can be."""
        is_same = (self.row, self.work) == (other.row, other.work)
        if not is_same or other.end - self.start >= slack * 4 or other.start - self.end >= slack:
            return False
        self.end = other.end
        self.count += 1
        return True


def _bars(program: Program, timeline: Timeline, limit: int) -> dict[str, list[Any]]:
    """Return bars per row (stage and resource); touching short bars of equal work become one."""
    work = work_of(program)
    begun = timeline.working_from  # waiting for another rank is a gap, not a bar
    seen = np.flatnonzero(~np.isnan(begun) & (timeline.end > begun))
    order = seen[np.lexsort((begun[seen], program.resource[seen], program.group[seen]))]
    slack = timeline.step_seconds / 2000
    bars: list[_Bar] = []
    for index in map(int, order):
        lane = lane_text(program.resource_names[program.resource[index]])
        bar = _Bar(
            row=f"stage {program.group[index]} {lane}",
            work=int(work[index]),
            start=float(begun[index]),
            end=float(timeline.end[index]),
            first=index,
        )
        if not bars or not bars[-1].takes(bar, slack):
            bars.append(bar)
    if len(bars) > limit:
        longest = sorted(bars, key=lambda bar: -bar.seconds)[:limit]
        bars = sorted(longest, key=lambda bar: bar.start)
    return {
        "row": [bar.row for bar in bars],
        "work": [bar.work for bar in bars],
        "start": [float(f"{bar.start:.6g}") for bar in bars],
        "seconds": [float(f"{bar.seconds:.4g}") for bar in bars],
        "name": [bar.title(program) for bar in bars],
    }
