"""How results sound: tables and a next step for people, one object with stable keys for machines.

Results go to standard output; progress and warnings to standard error, so that output can be piped.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from shardwright.core.codec import dumps, encode
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Frontier, Plan
from shardwright.report.contrast import Contrast
from shardwright.report.story import PlanStory, group_rows, memory_by_part, seconds_by_work
from shardwright.report.text import (
    chosen_lines,
    contrast_parts,
    curve_table,
    difference_table,
    frontier_table,
    operator_table,
    plain_table,
    plan_tables,
)
from shardwright.report.units import bytes_text, count_text, seconds_text
from shardwright.verbs.request import Job, Watch
from shardwright.verbs.results import (
    Check,
    Comparison,
    Coverage,
    Profile,
    Report,
    Study,
    TrainingRun,
    Verification,
)

WIDE = 110
MOST_ROWS = 20  # of a table of tensors; --json has all


class Voice:
    """Where a command speaks: tables or JSON on standard output, progress on standard error."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.out = _console(stderr=False)
        self.err = _console(stderr=True)

    def say(self, *parts: RenderableType) -> None:
        """Print for people, a blank line after each part."""
        if not self.as_json:
            for part in parts:
                self.out.print(part)
                self.out.print()

    def emit(self, **values: object) -> None:
        """Print for machines."""
        if self.as_json:
            self.out.file.write(dumps(encode_loosely(values)))

    def next(self, text: str) -> None:
        """Say what to do next."""
        if not self.as_json:
            self.out.print(Text.assemble(("Next: ", "dim"), text), soft_wrap=True)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show that something without known length is going on."""
        with self.err.status(what) if self.err.is_terminal else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def progress(self, stoppable: bool = False) -> Iterator[Watch]:
        """Show a bar. Where ``stoppable``, the first Ctrl-C asks for the best so far."""
        stopped = threading.Event()
        with self._bar() as bar, _interrupt(stopped if stoppable else None, self.err):
            task = bar.add_task("starting", total=1.0)

            def tell(what: str, fraction: float) -> None:
                bar.update(task, description=what[:70], completed=min(max(fraction, 0.0), 1.0))

            yield Watch(tell=tell, stop=stopped.is_set)

    @contextlib.contextmanager
    def training(self, steps: int) -> Iterator[Watch]:
        """Show training live: loss, step time, tokens per second. Ctrl-C asks for a checkpoint."""
        stopped = threading.Event()
        with self._bar() as bar, _interrupt(stopped, self.err):
            task = bar.add_task("starting ranks", total=float(steps))

            def step(event: dict[str, float]) -> None:
                text = f"loss {event['loss']:.4f}  {seconds_text(event['seconds'])}/step"
                if event.get("tokens"):
                    text += f"  {count_text(event['tokens'] / event['seconds'])} tokens/s"
                bar.update(task, description=text, completed=event["step"])

            def tell(what: str, fraction: float) -> None:
                bar.update(task, description=what[:70], completed=fraction * steps)

            yield Watch(tell=tell, stop=stopped.is_set, step=step)

    def _bar(self) -> Progress:
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=self.err,
            transient=True,
            disable=not self.err.is_terminal,
        )


def show_checks(voice: Voice, checks: Sequence[Check]) -> None:
    """Print what the doctor found."""
    table = plain_table("This machine")
    for name in ("", "what", "found", "remedy"):
        table.add_column(name, overflow="fold")
    for check in checks:
        mark = Text("ok", style="green") if check.is_ok else Text("no", style="bold red")
        table.add_row(
            mark, check.name, Text(check.detail), Text("" if check.is_ok else check.remedy)
        )
    voice.say(table)
    voice.emit(ok=all(check.is_ok for check in checks), checks=list(checks))
    voice.next("`shardwright demo` shows everything on a small model, in a few minutes")


def show_cluster_file(voice: Voice, path: Path) -> None:
    """Say where the cluster file is."""
    voice.say(Text(f"Wrote {path}."))
    voice.emit(file=str(path))
    voice.next(f"edit it, then `shardwright plan MODEL --cluster {path}`")


def show_graph(voice: Voice, graph: OperatorGraph, coverage: Coverage, path: Path | None) -> None:
    """Print what was captured and what can be split."""
    table = plain_table(f"Captured {graph.name}")
    table.add_column("what")
    table.add_column("value")
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
        ("runs whole", f"{coverage.replicated_share:.1%} of the modelled time"),
    )
    for name, value in rows:
        table.add_row(name, Text(value))
    for kind, count in coverage.replicated:
        table.add_row("runs replicated", Text(f"{kind} ({count})"))
    voice.say(table, *(Text(f"Note: {note}", style="dim") for note in graph.notes))
    voice.emit(
        model=graph.name,
        fingerprint=graph.fingerprint,
        num_parameters=graph.num_parameters,
        num_operators=coverage.num_operators,
        num_with_rule=coverage.num_with_rule,
        replicated=dict(coverage.replicated),
        replicated_share=coverage.replicated_share,
        notes=graph.notes,
        file=str(path) if path else None,
    )
    voice.next("`shardwright plan MODEL` finds how to train it")


def show_profile(voice: Voice, found: Profile) -> None:
    """Print what was measured."""
    text = f"{found.num_measured} new measurements, {found.num_known} known in this environment."
    voice.say(Text(text))
    for name, value in found.costs.overheads:
        text = bytes_text(value) if name.endswith("bytes") else f"{value:.3g} s"
        voice.say(Text(f"{name.replace('_', ' ')}: {text}", style="dim"))
    voice.emit(measured=found.num_measured, known=found.num_known, cluster=found.cluster.name)
    voice.next("`shardwright plan MODEL` plans with these numbers")


def show_study(voice: Voice, study: Study, path: Path) -> None:
    """Print the frontier and the chosen plan."""
    cluster = study.cluster
    room = min(cluster.kind_of(d).memory_bytes for d in range(cluster.num_devices))
    if study.curve:
        voice.say(curve_table(study.curve))
    voice.say(frontier_table(study.frontier, study.spreads, room), chosen_lines(study.frontier))
    if not study.is_complete:
        voice.say(Text("Stopped early: this is the best found so far.", style="yellow"))
    voice.emit(
        file=str(path),
        complete=study.is_complete,
        measured=study.num_measured,
        chosen=study.frontier.chosen,
        plans=[
            plan_summary(plan) | {"spread_seconds": spread}
            for plan, spread in zip(study.frontier.plans, study.spreads, strict=True)
        ],
        curve=[plan_summary(plan) for plan in study.curve],
    )
    model = study.origin.model or "MODEL"
    voice.say(Text(f"Wrote {path}."))
    if cluster.name == "local":
        voice.next(f"`shardwright run {path} {model}` trains with it")
    else:
        voice.next(
            f"`shardwright report {path} {model}` shows more; on the cluster, torchrun trains"
        )


def plan_summary(plan: Plan) -> dict[str, Any]:
    """Return a plan's numbers for machines."""
    return {
        "label": plan.strategy.label,
        "step_seconds": plan.predicted.step_seconds,
        "peak_bytes": plan.predicted.peak_bytes,
        "dollars": plan.predicted.dollars,
        "devices": len(plan.strategy.devices),
        "reason": plan.reason,
        "bound_seconds": None if plan.bound is None else plan.bound.step_seconds,
        "gap": None if plan.bound is None else plan.bound.gap,
        "sources": dict(plan.sources),
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
    }


def show_simulation(voice: Voice, story: PlanStory, trace: Path | None) -> None:
    """Print where a step's time and memory go."""
    spread = f" ± {seconds_text(story.spread_seconds)}" if story.spread_seconds else ""
    title = Text.assemble(
        (story.plan.strategy.label or "unnamed", "bold cyan"),
        f": {seconds_text(story.predicted.step_seconds)}{spread} per step, "
        f"{bytes_text(story.predicted.worst_peak_bytes)} at the peak",
    )
    voice.say(title, plan_tables(story))
    voice.emit(**story_summary(story), trace=str(trace) if trace else None)
    if trace:
        voice.say(Text(f"Wrote {trace}; open it at ui.perfetto.dev (it stays on your machine)."))
    voice.next("`shardwright explain` says what each operator costs and how it is split")


def show_contrast(voice: Voice, found: Contrast) -> None:
    """Print two plans side by side."""
    voice.say(contrast_parts(found))
    voice.emit(
        one=found.one,
        other=found.other,
        sentence=found.sentence,
        rows=[asdict(row) for row in found.rows],
        facts=[dict(zip(("what", "one", "other"), fact, strict=True)) for fact in found.facts],
    )


def show_explanation(voice: Voice, frontier: Frontier, story: PlanStory, limit: int) -> None:
    """Print why this plan, and everything it does."""
    voice.say(*_explanation(frontier, story, limit))
    operators = group_rows(story.operators)
    voice.emit(
        **story_summary(story),
        operators=list(operators[:limit]),
        others=[plan_summary(plan) for plan in frontier.plans],
    )
    voice.next("`shardwright report` shows the same and the timeline on one page")


def explanation_text(frontier: Frontier, story: PlanStory, limit: int = 20) -> str:
    """Return the explanation as plain text."""
    console = Console(width=WIDE, no_color=True, file=None, record=True, quiet=False, stderr=True)
    with console.capture() as captured:
        for part in _explanation(frontier, story, limit):
            console.print(part)
    return captured.get()


def _explanation(frontier: Frontier, story: PlanStory, limit: int) -> list[RenderableType]:
    return [
        chosen_lines(frontier),
        plan_tables(story),
        operator_table(group_rows(story.operators), limit),
        frontier_table(frontier),
    ]


def show_training(voice: Voice, run: TrainingRun, job: Job) -> None:
    """Print how training went."""
    done = run.first_step + len(run.losses)
    if run.losses:
        facts = [
            f"{len(run.losses)} steps (to step {done})",
            f"loss {run.losses[0]:.4f} to {run.losses[-1]:.4f}",
            f"{seconds_text(run.step_seconds)} per step",
        ]
        if run.tokens_per_second:
            facts.append(f"{count_text(run.tokens_per_second)} tokens/s")
        voice.say(Text(", ".join(facts) + "."))
    if not run.is_complete:
        voice.say(Text("Stopped before the last step.", style="yellow"))
    voice.emit(
        complete=run.is_complete,
        first_step=run.first_step,
        losses=run.losses,
        step_seconds=run.step_seconds,
        tokens_per_second=run.tokens_per_second,
        peak_bytes=run.peak_bytes,
        checkpoint=run.checkpoint or None,
    )
    if run.checkpoint:
        voice.next(f"the last checkpoint is {run.checkpoint}; `--resume` goes on from it")
    elif job.checkpoint_dir == "":
        voice.next(
            "`--checkpoint-dir DIR` keeps checkpoints; `shardwright compare` checks predictions"
        )


def show_comparison(voice: Voice, comparison: Comparison, trace: Path | None) -> None:
    """Print predicted beside measured."""
    voice.say(difference_table(comparison.rows))
    voice.emit(
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
        step_seconds=comparison.training.step_seconds,
        trace=str(trace) if trace else None,
    )
    voice.next("`shardwright profile MODEL` measures again if predictions have drifted")


def show_verification(voice: Voice, found: Verification) -> None:
    """Print how far a plan is from plain PyTorch, the worst tensors first, and the verdict."""
    title = f"{found.label or 'unnamed'}: largest differences from plain PyTorch"
    table = plain_table(title)
    for name in ("tensor", "what", "shape", "relative difference"):
        table.add_column(name, overflow="fold")
    for row in found.rows[:MOST_ROWS]:
        style = "" if row.difference <= found.tolerance else "bold red"
        gap = Text(f"{row.difference:.1e}" if row.difference else "0", style=style)
        table.add_row(row.name, row.role, Text(str(list(row.shape)) if row.shape else ""), gap)
    beyond = sum(row.difference > found.tolerance for row in found.rows)
    verdict = (
        f"Equal: all {len(found.rows)} tensors are within {found.tolerance:g}."
        if found.is_equal
        else f"Different: {beyond} of {len(found.rows)} tensors are beyond {found.tolerance:g}."
    )
    style = "green" if found.is_equal else "bold red"
    what = f"ranks: {found.num_ranks}, as {found.ranks}"
    notes = [Text(f"Note: {note}", style="dim") for note in (what, *found.notes)]
    voice.say(table, *notes, Text(verdict, style=style))
    voice.emit(
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
        voice.next("this is a defect: please report it with the plan file and the model")


def show_report(voice: Voice, files: Report) -> None:
    """Say where the report is."""
    voice.say(Text(f"Wrote {files.page}" + (f" and {files.trace}." if files.trace else ".")))
    voice.emit(page=str(files.page), trace=str(files.trace) if files.trace else None)
    voice.next(f"open {files.page} in a browser; it needs no network")


def show_export(voice: Voice, path: Path) -> None:
    """Say where the weights are."""
    voice.say(Text(f"Wrote {path} ({bytes_text(path.stat().st_size)})."))
    voice.emit(weights=str(path), bytes=path.stat().st_size)
    voice.next("module.load_state_dict(safetensors.torch.load_file(path)) takes it")


def encode_loosely(value: Any) -> Any:
    """Encode for ``--json``: like the codec, with dicts, and null for numbers JSON does not
    have."""
    if isinstance(value, dict):
        return {str(key): encode_loosely(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_loosely(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return encode(value)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    return console


@contextlib.contextmanager
def _interrupt(stopped: threading.Event | None, console: Console) -> Iterator[None]:
    """Let the first Ctrl-C set an event; the second one interrupts as usual."""
    if stopped is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()
        console.print("stopping at the next safe point; Ctrl-C again stops at once", style="yellow")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
