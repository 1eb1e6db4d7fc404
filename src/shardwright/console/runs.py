"""How training, comparisons, proofs and files sound."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from shardwright.console.plans import plan_summary
from shardwright.console.terminal import LEAST_WAIT, Terminal
from shardwright.report.comparison import comparison_notes
from shardwright.report.tables import filled_table
from shardwright.report.text import (
    chosen_lines,
    comparison_parts,
    frontier_table,
)
from shardwright.report.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from shardwright.verbs.request import Job
    from shardwright.verbs.results import (
        Comparison,
        Report,
        TensorGap,
        TrainingRun,
        Verification,
    )
    from shardwright.verbs.tuning import Tuning

MOST_ROWS = 20  # of a table of tensors; --json has all


def show_training(terminal: Terminal, run: TrainingRun, job: Job) -> None:
    """Print how training went."""
    done = run.first_step + len(run.losses)
    for note in run.notes:
        terminal.say(Text(f"Note: {note}.", style="yellow"))
    if run.losses:
        facts = [
            f"{len(run.losses)} steps (to step {done})",
            f"loss {run.losses[0]:.4f} to {run.losses[-1]:.4f}",
            f"{seconds_text(run.step_seconds)} per step",
        ]
        if run.tokens_per_second:
            facts.append(f"{count_text(run.tokens_per_second)} tokens/s")
        if run.input_share > LEAST_WAIT:
            waits = seconds_text(run.input_seconds)
            facts.append(f"{waits} more waiting for input ({run.input_share:.0%} of the time)")
        terminal.say(Text(", ".join(facts) + "."))
    elif run.is_complete:
        terminal.say(
            Text(
                f"No step was left: training is at step {done} of {job.steps}; --steps asks for more."
            )
        )
    terminal.say(*map(Text, (*_noise_lines(run, job), *_forecast_lines(run))))
    if not run.is_complete:
        terminal.say(Text("Stopped before the last step.", style="yellow"))
    terminal.emit(
        complete=run.is_complete,
        first_step=run.first_step,
        losses=run.losses,
        gradient_norms=run.gradient_norms,
        step_seconds=run.step_seconds,
        input_seconds=run.input_seconds,
        input_share=run.input_share,
        tokens_per_second=run.tokens_per_second,
        peak_bytes=run.peak_bytes,
        checkpoint=run.checkpoint or None,
        noise_scale=run.noise_scale,
        forecasts=list(run.forecasts),
    )
    if run.checkpoint:
        terminal.next(f"the last checkpoint is {run.checkpoint}; `--resume` goes on from it")
    elif job.checkpoint_dir == "":
        terminal.next(
            "`--checkpoint-dir DIR` keeps checkpoints; `shardwright compare` checks predictions"
        )


def _noise_lines(run: TrainingRun, job: Job) -> tuple[str, ...]:
    if not job.noise_scale:
        return ()
    if run.noise_scale is None:
        return ("No gradient stood out of the noise: train longer for a noise scale.",)
    scale = run.noise_scale
    return (
        f"Noise scale of the gradients: {count_text(scale)} samples; `shardwright advise batch --noise-scale "
        f"{scale:.4g}` weighs batch sizes by it.",
    )


def _forecast_lines(run: TrainingRun) -> tuple[str, ...]:
    if not run.forecasts:
        return ()
    predicted, stale = (
        math.sqrt(statistics.fmean(getattr(one, name) ** 2 for one in run.forecasts))
        for name in ("predicted", "stale")
    )
    return (
        f"Predicted weights were off by {predicted:.2g} (RMSE over {len(run.forecasts)} steps), stale ones would "
        f"have been by {stale:.2g}.",
    )


def show_comparison(terminal: Terminal, comparison: Comparison, trace: Path | None) -> None:
    """Print predicted beside measured."""
    terminal.say(comparison_parts(comparison.story))
    terminal.emit(
        label=comparison.story.plan.strategy.label,
        rows=[
            {
                "name": row.name,
                "predicted": row.predicted,
                "measured": row.measured,
                "unit": row.unit,
            }
            for row in comparison.rows
        ],
        notes=comparison_notes(comparison.story),
        step_seconds=comparison.training.step_seconds,
        trace=str(trace) if trace else None,
    )
    terminal.next("`shardwright profile MODEL` measures again if predictions have drifted")


def show_tuning(terminal: Terminal, found: Tuning) -> None:
    """Print what ran and what was chosen."""
    frontier = found.frontier
    spreads = [one.measured.spread_seconds if one.measured else 0.0 for one in frontier.plans]
    terminal.say(frontier_table(frontier, spreads), chosen_lines(frontier))
    terminal.emit(
        file=str(found.path),
        chosen=frontier.chosen,
        plans=[plan_summary(plan) for plan in frontier.plans],
        factors=dict(found.factors),
    )
    terminal.say(Text(f"Wrote {found.path}."))
    terminal.next(f"`shardwright plan ... --costs {found.path}` plans with what was fitted")


def show_verification(terminal: Terminal, found: Verification) -> None:
    """Print how far a plan is from plain PyTorch, the worst tensors first, and the verdict."""
    title = f"{found.label or 'unnamed'}: largest differences from plain PyTorch"
    columns = ("tensor", "what", "shape", "relative difference")
    rows = (_gap_row(row, found.tolerance) for row in found.rows[:MOST_ROWS])
    table = filled_table(title, columns, rows, left=columns)
    beyond = sum(row.difference > found.tolerance for row in found.rows)
    verdict = (
        f"Equal: all {len(found.rows)} tensors are within {found.tolerance:g}."
        if found.is_equal
        else f"Different: {beyond} of {len(found.rows)} tensors are beyond {found.tolerance:g}."
    )
    style = "green" if found.is_equal else "bold red"
    what = f"ranks: {found.num_ranks}, as {found.ranks}"
    notes = [Text(f"Note: {note}", style="dim") for note in (what, *found.notes)]
    terminal.say(table, *notes, Text(verdict, style=style))
    terminal.emit(
        equal=found.is_equal,
        label=found.label,
        tolerance=found.tolerance,
        losses=found.losses,
        num_ranks=found.num_ranks,
        ranks=found.ranks,
        global_batch=found.global_batch,
        notes=found.notes,
        rows=list(found.rows),
    )
    if not found.is_equal:
        terminal.next("this is a defect: please report it with the plan file and the model")


def _gap_row(row: TensorGap, tolerance: float) -> tuple[str | Text, ...]:
    style = "" if row.difference <= tolerance else "bold red"
    gap = Text(f"{row.difference:.1e}" if row.difference else "0", style=style)
    return row.name, row.role, str(list(row.shape)) if row.shape else "", gap


def show_report(terminal: Terminal, files: Report) -> None:
    """Say where the report is."""
    terminal.say(Text(f"Wrote {files.page}" + (f" and {files.trace}." if files.trace else ".")))
    terminal.emit(page=str(files.page), trace=str(files.trace) if files.trace else None)
    terminal.next(f"open {files.page} in a browser; it needs no network")


def show_export(terminal: Terminal, path: Path) -> None:
    """Say where the weights are."""
    terminal.say(Text(f"Wrote {path} ({bytes_text(path.stat().st_size)})."))
    terminal.emit(weights=str(path), bytes=path.stat().st_size)
    terminal.next("module.load_state_dict(safetensors.torch.load_file(path)) takes it")
