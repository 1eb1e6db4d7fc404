"""Commands that run plans, and what comes of it."""

from __future__ import annotations

import signal
from typing import Annotated, Any

import typer

from shardwright.cli.app import app
from shardwright.cli.options import (
    Json,
    MaybeModel,
    Model,
    Pick,
    PlanPath,
    Steps,
    asking,
    terminal_for,
)
from shardwright.verbs.request import Job, Trial


@app.command()
@asking(Job)
def run(
    plan: PlanPath,
    model: Model,
    *,
    asked: dict[str, Any],
    pick: Pick = None,
    json: Json = False,
) -> None:
    """Train, one process per device: here, or under torchrun on its ranks."""
    from shardwright import api, console

    terminal = terminal_for(json, ranks=True)
    job = Job(model=model, **asked)
    notes = [
        note
        for note in api.read_frontier(plan, pick).best.notes
        if "one opaque operator" in note or note.startswith("forward changes")
    ]
    console.show_unruled(terminal, api.read_origin(plan).unruled, model, notes)
    with terminal.training(job.steps) as watch:
        done = api.run(plan, job, watch, pick=pick)
    console.show_training(terminal, done, job)
    if not done.is_complete:
        raise typer.Exit(128 + (done.signal or signal.SIGINT))


@app.command()
def compare(
    plan: PlanPath,
    model: Model,
    steps: Steps = 8,
    pick: Pick = None,
    trace: Annotated[str, typer.Option("--trace", help="Write a Perfetto trace of both.")] = "",
    json: Json = False,
) -> None:
    """Train a few steps, here or under torchrun; lay predicted beside measured."""
    from shardwright import api, console

    terminal = terminal_for(json, ranks=True)
    with terminal.training(steps) as watch:
        comparison = api.compare(plan, Job(model=model, steps=steps), watch, pick=pick)
    file = None if terminal.is_mute else api.save_trace(comparison.story, trace)
    console.show_comparison(terminal, comparison, file)


@app.command()
def tune(
    plan: PlanPath,
    model: Model,
    tries: Annotated[
        int | None, typer.Option("--try", min=0, help="Plans to run besides data parallelism (4).")
    ] = None,
    out: Annotated[
        str, typer.Option("--out", "-o", help="Where to write the tuned plan; its own by default.")
    ] = "",
    json: Json = False,
) -> None:
    """Under torchrun: run the plans, choose the fastest measured, fit costs."""
    from shardwright import api, console

    terminal = terminal_for(json, ranks=True)
    with terminal.waiting("running the plans"):
        found = api.tune(plan, model, out=out, tries=tries)
    console.show_tuning(terminal, found)


@app.command()
@asking(Trial)
def verify(
    plan: PlanPath,
    model: MaybeModel = "",
    *,
    asked: dict[str, Any],
    pick: Pick = None,
    json: Json = False,
) -> None:
    """Prove that a plan trains like plain PyTorch, small and exact."""
    from shardwright import api, console

    terminal = terminal_for(json)
    trial = Trial(model=model, **asked)
    with terminal.progress() as watch:
        found = api.verify(plan, trial, watch, pick=pick)
    console.show_verification(terminal, found)
    if not found.is_equal:
        raise typer.Exit(1)


@app.command()
def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A folder of checkpoints, or one of them.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT.safetensors", help="Where to write.")],
    json: Json = False,
) -> None:
    """Write a checkpoint's weights as safetensors, for plain PyTorch."""
    from shardwright import api, console

    terminal = terminal_for(json)
    with terminal.waiting("reading the checkpoint"):
        path = api.export(checkpoint, out)
    console.show_export(terminal, path)


@app.command()
def demo(
    out: Annotated[str, typer.Option("--out", "-o", help="Where results go.")] = "out",
    steps: Steps = 200,
    json: Json = False,
) -> None:
    """Plan and train a small language model, start to end."""
    from shardwright import demo

    demo.play(terminal_for(json), out, steps)
