"""Tables and sentences for a terminal. Every name is shown as text, never read as markup."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.core.plan import STALE, Frontier, Plan
from shardwright.report.comparison import Difference, comparison_notes, differences
from shardwright.report.contrast import Contrast
from shardwright.report.story import (
    OperatorRow,
    PlanStory,
    kind_text,
    memory_by_part,
    parameter_lines,
    seconds_by_work,
    wire_text,
)
from shardwright.report.tables import plain_table
from shardwright.report.units import (
    bytes_text,
    dollars_text,
    percent_text,
    seconds_text,
)
from shardwright.report.why import bound_text

BAR = 24  # letters of the longest bar


def unruled_lines(rows: Sequence[tuple[str, int, float]], model: str) -> list[Text]:
    """Say what runs whole for want of a rule, (kind, count, share of modelled time) each, and what
    to do about it."""
    if not rows:
        return []
    lines = [f"{kind} ({count}), {share:.1%} of the modelled time" for kind, count, share in rows]
    listed = "\n".join(f"  {line}" for line in lines)
    return [
        Text(f"No rule splits these; every device runs them whole:\n{listed}", style="yellow"),
        Text(f"`shardwright verify-rules --find --model {model or 'MODEL'}` looks for rules."),
    ]


def frontier_table(
    frontier: Frontier, spreads: Sequence[float] = (), capacity: float = 0.0
) -> Table:
    """Show all plans, fastest first, the chosen one marked.

    ``spreads`` are half-widths of the step times, ``capacity`` the bytes of the smallest device.
    """
    table = plain_table("Frontier: no plan here is better in everything than another")
    table.add_column("")
    table.add_column("plan", overflow="fold", ratio=1)
    late, sent = _late(frontier), _sent(frontier)
    for name in ("step time", "peak memory", "$/step", *late[:1], *sent[:1], "known from"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, plan in enumerate(frontier.plans):
        spread = spreads[index] if index < len(spreads) else 0.0
        chosen = index == frontier.chosen
        table.add_row(
            Text("▸" if chosen else str(index)),
            Text(plan.strategy.label or "unnamed"),
            *_plan_cells(plan, spread, capacity),
            *late[1:][index : index + 1],
            *sent[1:][index : index + 1],
            sources_text(plan),
            style="bold" if chosen else "",
        )
    return table


def _late(frontier: Frontier) -> list[str]:
    """Return a column's name and, by plan, how many updates late its gradients are; nothing where none are."""
    late = [plan.predicted.staleness for plan in frontier.plans]
    return ["updates late", *map(str, late)] if any(late) else []


def _sent(frontier: Frontier) -> list[str]:
    """Return a column's name and, by plan, how much of its gradients' bits it sends; nothing where all is sent."""
    loses = any(plan.objective.lost for plan in frontier.plans)
    return ["gradients sent", *map(sent_text, frontier.plans)] if loses else []


def _plan_cells(plan: Plan, spread: float, capacity: float) -> list[str]:
    seconds, peak = plan.objective.step_seconds, bytes_text(plan.predicted.peak_bytes)
    step = seconds_text(seconds)
    if spread > 0:
        step += f" ±{percent_text(spread / seconds)[1:]}"
    if capacity:
        peak += f" ({plan.predicted.peak_bytes / capacity:.0%})"
    return [step, peak, dollars_text(plan.objective.dollars)]


def sent_text(plan: Plan) -> str:
    """Say how much of the bits of its gradients a plan sends in a step."""
    return "all" if not plan.objective.lost else f"{1 - plan.objective.lost:.2%}"


def curve_table(plans: Sequence[Plan]) -> Table:
    """Show the fastest plan for each number of devices, with bars of their step times."""
    table = plain_table("Curve: the fastest plan for each number of devices")
    table.add_column("devices", justify="right")
    table.add_column("step time", justify="right", no_wrap=True)
    table.add_column("")
    for name in ("speed-up", "efficiency", "$/step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold", ratio=1)
    slowest = max(plan.predicted.step_seconds for plan in plans)
    first = plans[0]
    for plan in plans:
        seconds, count = plan.predicted.step_seconds, len(plan.strategy.devices)
        faster = first.predicted.step_seconds / seconds
        table.add_row(
            str(count),
            seconds_text(seconds),
            Text("█" * max(1, round(BAR * seconds / slowest)), style="cyan"),
            f"{faster:.2f} x",
            f"{faster * len(first.strategy.devices) / count:.0%}",
            dollars_text(plan.predicted.dollars),
            Text(plan.strategy.label or "unnamed"),
        )
    return table


def chosen_lines(frontier: Frontier) -> Group:
    """Name the chosen plan, why it was chosen, and how far it may be from the best possible."""
    plan = frontier.best
    lines: list[RenderableType] = [
        Text.assemble(("Chosen: ", "bold"), (plan.strategy.label or "unnamed", "bold cyan"))
    ]
    if plan.reason:
        lines.append(Text(plan.reason))
    if plan.bound is not None:
        lines.append(Text(bound_text(plan), style="dim"))
    if plan.is_stale:
        lines.append(Text(f"Note: {STALE}.", style="yellow"))
    lines += [Text(f"Note: {note}", style="dim") for note in plan.notes]
    return Group(*lines)


def _axis_uses(story: PlanStory, index: int) -> list[str]:
    """Return what the axes of a mesh split, in brackets: of a server, that is parameters."""
    strategy = story.plan.strategy
    count = len(strategy.meshes[index].axes)
    if all(config.mesh != index for config in strategy.configs):
        return [" (parameters at rest)"] * count
    return [f" ({use})" for use in story.axes[index]] if story.axes else [""] * count


def plan_tables(story: PlanStory) -> Group:
    """Explain one plan: devices, parameters, where the step's time and the memory go."""
    strategy = story.plan.strategy
    devices = plain_table("Devices")
    for name in ("stage", "mesh", "devices"):
        devices.add_column(name)
    for index, mesh in enumerate(strategy.meshes):
        uses = _axis_uses(story, index)
        axes = " x ".join(
            f"{a} {n}{use}" for a, n, use in zip(mesh.axes, mesh.sizes, uses, strict=True)
        )
        devices.add_row(str(index), Text(axes or "single"), span_text(mesh.devices))
    kept = plain_table(
        "Parameters (S0 = split along dim 0, R = full copy; one letter per mesh axis)"
    )
    for name in ("at rest", "optimizer state", "gradient reduced", "how many"):
        kept.add_column(name)
    for rest, state, sync, count in parameter_lines(story.plan):
        kept.add_row(rest, state, f"every {sync}", str(count))
    wire = wire_text(story.program)
    said = [Text(wire.capitalize() + ".")] if wire else []
    return Group(devices, kept, *said, time_table(story), memory_table(story))


def time_table(story: PlanStory) -> Table:
    """Show seconds per kind of work on the busiest stage's devices."""
    table = plain_table("Time of one step, busiest device (kinds may overlap)")
    table.add_column("work")
    table.add_column("seconds", justify="right")
    table.add_column("share of step", justify="right")
    for name, seconds in seconds_by_work(story.program, story.predicted):
        share = seconds / story.predicted.step_seconds if story.predicted.step_seconds else 0.0
        table.add_row(name, seconds_text(seconds), f"{share:.0%}")
    table.add_row("step", seconds_text(story.predicted.step_seconds), "", style="bold")
    return table


def memory_table(story: PlanStory) -> Table:
    """Show the peak of the fullest stage by part."""
    peaks = story.predicted.peak_bytes
    mesh = max(range(len(peaks)), key=lambda index: peaks[index])
    table = plain_table(f"Peak memory of one device (stage {mesh}, the fullest)")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for name, size in memory_by_part(story, mesh):
        table.add_row(name, bytes_text(size), f"{size / peaks[mesh]:.0%}" if peaks[mesh] else "")
    table.add_row("peak", bytes_text(peaks[mesh]), "", style="bold")
    for name, size in story.beside:
        table.add_row(f"+ {name}", bytes_text(size), "")
    if story.beside:
        seen = peaks[mesh] + sum(size for _, size in story.beside)
        table.add_row("seen by the driver", bytes_text(seen), "", style="bold")
    return table


def operator_table(rows: Sequence[OperatorRow], limit: int = 20) -> Table:
    """Show the costliest operators: how each is split and what it takes."""
    table = plain_table(
        f"Operators by cost (per microbatch and device; first {min(limit, len(rows))})"
    )
    table.add_column("operator", overflow="fold", ratio=1)
    table.add_column("split", overflow="fold", ratio=1)
    for name in ("stage", "count", "forward", "backward", "known from"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows[:limit]:
        table.add_row(
            Text(f"{row.name} ({kind_text(row.kind)})"),
            Text(row.split),
            str(row.stage),
            str(row.count),
            seconds_text(row.forward_seconds),
            seconds_text(row.backward_seconds),
            row.source,
        )
    return table


def comparison_parts(story: PlanStory) -> Group:
    """Lay predicted beside measured, with what has to be said about it."""
    notes = [Text(f"Note: {note}", style="dim") for note in comparison_notes(story)]
    return Group(difference_table(differences(story)), *notes)


def difference_table(rows: Sequence[Difference]) -> Table:
    """Lay predicted beside measured."""
    table = plain_table("Predicted beside measured")
    table.add_column("what")
    for name in ("predicted", "measured", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        write = bytes_text if row.unit == "bytes" else seconds_text
        table.add_row(
            row.name,
            write(row.predicted),
            write(row.measured) if row.measured else "-",
            percent_text(row.ratio),
            style="bold" if row.name in ("step time", "peak memory") else "",
        )
    return table


def contrast_parts(found: Contrast) -> Group:
    """Lay two plans side by side, the deciding sentence first."""
    numbers = plain_table("Predicted")
    numbers.add_column("what")
    for name in (found.one, found.other, "difference"):
        numbers.add_column(Text(name), justify="right", overflow="fold")
    writers = {"seconds": seconds_text, "bytes": bytes_text, "dollars": dollars_text}
    for row in found.rows:
        write = writers[row.unit]
        gap = 0.0 if math.isclose(row.one, row.other) else row.other - row.one
        sign = "+" if gap > 0 else "-"
        numbers.add_row(
            row.name,
            write(row.one) if row.one else "-",
            write(row.other) if row.other else "-",
            f"{sign}{write(abs(gap))}" if gap else "",
            style="bold" if row.name in ("step time", "peak memory") else "",
        )
    return Group(Text(found.sentence), numbers, *_choices(found))


def _choices(found: Contrast) -> Iterator[Table]:
    """Yield a table of what two plans choose otherwise, if anything."""
    if found.facts:
        table = plain_table("Choices that differ")
        for name in ("what", found.one, found.other):
            table.add_column(Text(name), overflow="fold")
        for fact in found.facts:
            table.add_row(*map(Text, fact))
        yield table


def sources_text(plan: Plan) -> str:
    """Say over how many steps a plan's time was measured, or else what part of the step's seconds is
    measured, published or modelled; or that it is another strategy's."""
    if plan.is_stale:
        return "stale: another strategy"
    if plan.measured is not None:
        return f"measured {plan.measured.num_steps} steps"
    total = sum(seconds for _, seconds in plan.sources)
    if total <= 0:
        return "-"
    shares = sorted(plan.sources, key=lambda pair: -pair[1])
    return ", ".join(f"{name} {s / total:.0%}" for name, s in shares if s / total >= 0.005)


def span_text(devices: Sequence[int]) -> str:
    """Write device numbers shortly: ``0-7``, ``0, 2, 4``."""
    first, last = min(devices), max(devices)
    if len(devices) > 2 and sorted(devices) == list(range(first, last + 1)):
        return f"{first}-{last}"
    shown = ", ".join(map(str, devices[:16]))
    return shown + (f", ... ({len(devices)})" if len(devices) > 16 else "")
