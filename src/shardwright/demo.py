"""The main job on an embedded default, start to end, on the machine at hand.

A byte-level GPT learns Python's own standard library: detect, measure, search, choose, train on
local ranks, compare with the prediction and with a single process, and write plan, page and trace.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from shardwright import api
from shardwright.console import Terminal
from shardwright.errors import ShardwrightError
from shardwright.files.planfile import write_atomically
from shardwright.report.html import page_text
from shardwright.report.story import PlanStory, Story
from shardwright.report.tables import plain_table
from shardwright.report.text import chosen_lines, comparison_parts, frontier_table
from shardwright.report.units import bytes_text, count_text, seconds_text
from shardwright.verbs.evidence import provenance
from shardwright.verbs.narrate import tell, with_process
from shardwright.verbs.racing import Entry, run_trial
from shardwright.verbs.reasons import with_reasons
from shardwright.verbs.request import Job, Request, Watch
from shardwright.verbs.results import Study
from shardwright.verbs.training import Outcome, start

MODEL = "shardwright.demo_model:build"
BATCH = 16
SEQ = 128
LEARNING_RATE = 1e-3
# Sums in another order differ by rounding, and training amplifies it from step to step.
EXACT_STEPS = 20
TOLERANCE = 1e-4


def play(terminal: Terminal, out: str, steps: int) -> None:
    """Run the demo, writing into ``out``. Raises ShardwrightError when losses do not agree."""
    began = time.monotonic()
    folder = Path(out)
    study = _study(terminal)
    api.save_plan(study, folder / "plan.json")
    terminal.say(
        frontier_table(study.frontier, study.spreads, study.cluster.least_memory),
        chosen_lines(study.frontier),
    )

    job = Job(model=MODEL, steps=steps, learning_rate=LEARNING_RATE, profiles=True)
    with terminal.training(steps) as watch:
        outcome = start(study.frontier.best, study.origin, job, watch)
    if not outcome.run.is_complete:
        raise KeyboardInterrupt
    alone = _alone(terminal, len(outcome.run.losses))
    story = _story(study, outcome, alone)
    chosen = story.plans[story.chosen]
    terminal.say(comparison_parts(chosen))
    rows = _race(terminal, study)
    worst = _show_losses(terminal, outcome, alone)

    page = write_atomically(folder / "report.html", page_text(story).encode())
    trace = api.save_trace(chosen, folder / "trace.json")
    terminal.emit(
        plan=str(folder / "plan.json"),
        page=str(page),
        trace=str(trace),
        label=study.frontier.best.strategy.label,
        losses=outcome.run.losses,
        held_out=outcome.run.held_out,
        worst_difference=worst,
        step_seconds=outcome.run.step_seconds,
        race=[
            dict(zip(("what", "predicted", "measured", "spread"), row, strict=True)) for row in rows
        ],
        seconds=time.monotonic() - began,
    )
    terminal.say(
        Text(f"Wrote {folder}/plan.json, report.html and trace.json "
             f"in {seconds_text(time.monotonic() - began)}.")
    )  # fmt: skip
    terminal.next(f"open {page} in a browser, and trace.json at ui.perfetto.dev")
    if worst > TOLERANCE:
        raise ShardwrightError(
            f"the plan's losses must equal a single process's to {TOLERANCE:g} in the first "
            f"{EXACT_STEPS} steps, but they differ by {worst:.1e}; please report this"
        )


def _study(terminal: Terminal) -> Study:
    request = Request(global_batch=BATCH, seq=SEQ)
    with terminal.progress() as watch:
        study = api.study(MODEL, None, request, watch)
    cluster, graph = study.cluster, study.graph
    kind = cluster.kind_of(0)
    table = plain_table("This machine and this model")
    table.add_column("what")
    table.add_column("value")
    rate = (
        f"{count_text(kind.flops_for('float32'))}flop/s, {bytes_text(kind.memory_bandwidth)}/s each"
    )
    table.add_row("devices", Text(f"{cluster.num_devices} x {kind.name}"))
    table.add_row("measured rates", rate)
    table.add_row("model", f"{graph.name}, {count_text(graph.num_parameters)} parameters")
    table.add_row("batch", f"{BATCH} x {SEQ} bytes of Python's standard library")
    new = f"{study.num_measured} new, {len(study.costs.operators)} operator shards known"
    table.add_row("measurements", new)
    terminal.say(table)
    return study


def _race(terminal: Terminal, study: Study) -> list[tuple[str, float | None, float, float]]:
    """Run the chosen plan beside plain data parallelism, ours and torch's, in turns; return and print
    (what, predicted, measured, spread) in seconds."""
    plain = study.plain
    entry = Entry(model=MODEL, seq=SEQ, optimizer="adamw", environment="")
    plans = [study.frontier.best, *(p for p in plain if p.strategy != study.frontier.best.strategy)]
    with terminal.progress() as watch:
        watch.tell("the chosen plan beside plain data parallelism", 0.0)
        laps = run_trial(plans, entry, watch, with_torch=True)
    names = [plan.strategy.label for plan in plans] + ["torch's DistributedDataParallel"]
    predicted: list[float | None] = [plan.predicted.step_seconds for plan in plans]
    rows = [
        (name, guess, lap.seconds, lap.spread)
        for name, guess, lap in zip(names, [*predicted, None], laps, strict=True)
    ]
    turns = len(laps[0].turns)
    table = plain_table(f"Step time, in turns: {turns} turns, {laps[0].num_steps} steps each")
    table.add_column("")
    for name in ("predicted", "measured", "chosen plan is faster by"):
        table.add_column(name, justify="right")
    for name, guess, seconds, spread in rows:
        table.add_row(
            Text(name),
            seconds_text(guess) if guess else "-",
            f"{seconds_text(seconds)} ±{spread / seconds:.1%}",
            "" if seconds is rows[0][2] else f"{seconds / rows[0][2]:.2f}x",
        )
    terminal.say(table)
    return rows


def _alone(terminal: Terminal, steps: int) -> tuple[float, ...]:
    """Train the same model on the same batches in this process, with plain PyTorch."""
    from shardwright.runtime.capture import load_model
    from shardwright.runtime.train import Step, named_optimizer, train_alone

    source = load_model(MODEL)
    losses: list[float] = []
    with terminal.training(steps) as watch:

        def tell_step(step: Step) -> None:
            losses.append(step.loss)
            if watch.stop():
                raise KeyboardInterrupt
            watch.step({"step": step.number, "loss": step.loss, "seconds": step.seconds})

        watch.tell("one process, for comparison", 0.0)
        optimizer = named_optimizer("adamw", LEARNING_RATE)
        train_alone(source, source.batches(BATCH, SEQ), optimizer, steps, tell_step)
    return tuple(losses)


def _story(study: Study, outcome: Outcome, alone: tuple[float, ...]) -> Story:
    plans: list[PlanStory] = []
    for index, plan in enumerate(study.frontier.plans):
        told = tell(plan, study.graph, study.cluster, study.costs)
        if index == study.frontier.chosen and outcome.timeline is not None:
            measured = with_process(outcome.timeline, told.process_bytes)
            told = replace(told, measured=measured, usual_seconds=outcome.run.step_seconds)
        plans.append(told)
    chosen, facts = study.frontier.chosen, (study.graph, study.cluster, study.costs)
    return Story(
        graph=study.graph,
        cluster=study.cluster,
        plans=with_reasons(plans, chosen, facts, None, Watch()),
        chosen=study.frontier.chosen,
        losses=(("this plan", outcome.run.losses), ("one process", alone)),
        provenance=provenance(study.frontier.best, study.cluster, study.costs),
    )


def _show_losses(terminal: Terminal, outcome: Outcome, alone: tuple[float, ...]) -> float:
    """Print the loss curves beside each other; return the largest relative difference at first."""
    ours = outcome.run.losses
    pairs = list(zip(ours, alone, strict=False))
    apart = [abs(a - b) / abs(b) for a, b in pairs]
    table = plain_table("Loss: this plan and a single process, same seed and batches")
    for name in ("step", "this plan", "one process", "relative difference"):
        table.add_column(name, justify="right")
    last = len(pairs) - 1
    for index in dict.fromkeys(round(last * share) for share in (0, 0.05, 0.25, 0.5, 0.75, 1)):
        table.add_row(
            str(index + 1), f"{ours[index]:.6f}", f"{alone[index]:.6f}", f"{apart[index]:.1e}"
        )
    worst = max(apart[:EXACT_STEPS], default=0.0)
    first = min(EXACT_STEPS, len(apart))
    verdict = (
        f"Equal to {worst:.1e} over the first {first} steps (at most {TOLERANCE:g} is rounding)."
    )
    held_out = outcome.run.held_out
    parts: list[Text] = [Text(verdict, style="green" if worst <= TOLERANCE else "bold red")]
    if held_out:
        mean = sum(held_out) / len(held_out)
        parts.append(Text(f"Held-out loss: {mean:.4f} nats per byte, on files never trained on."))
    terminal.say(table, *parts)
    return worst
