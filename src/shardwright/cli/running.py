"""Commands that run plans, and what comes of it."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from shardwright.cli.app import app
from shardwright.cli.options import Json, MaybeModel, Model, Pick, PlanPath, Steps, terminal_for


@app.command()
def run(
    plan: PlanPath,
    model: Model,
    steps: Steps = 100,
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr", min=0.0)] = 1e-3,
    clip: Annotated[
        float | None,
        typer.Option("--clip", min=0.0, help="Largest gradient norm; the plan's by default."),
    ] = None,
    checkpoint_dir: Annotated[
        str, typer.Option("--checkpoint-dir", help="Where checkpoints go.")
    ] = "",
    checkpoint_every: Annotated[int, typer.Option("--checkpoint-every", min=1)] = 100,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint.")
    ] = False,
    pick: Pick = None,
    json: Json = False,
) -> None:
    """Train on this machine, one process per device."""
    from shardwright import api, console

    terminal = terminal_for(json)
    job = api.Job(
        model=model,
        steps=steps,
        learning_rate=learning_rate,
        clip=clip,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        resume=resume,
    )
    notes = [
        note
        for note in api.read_frontier(plan, pick).best.notes
        if "one opaque operator" in note or note.startswith("forward changes")
    ]
    console.show_unruled(terminal, api.read_origin(plan).unruled, model, notes)
    with terminal.training(steps) as watch:
        done = api.run(plan, job, watch, pick=pick)
    console.show_training(terminal, done, job)
    if not done.is_complete:
        raise typer.Exit(128 + signal.SIGTERM if done.is_terminated else 1)


@app.command()
def compare(
    plan: PlanPath,
    model: Model,
    steps: Steps = 8,
    pick: Pick = None,
    trace: Annotated[str, typer.Option("--trace", help="Write a Perfetto trace of both.")] = "",
    json: Json = False,
) -> None:
    """Train a few steps; lay predicted beside measured."""
    from shardwright import api, console

    terminal = terminal_for(json)
    with terminal.training(steps) as watch:
        comparison = api.compare(plan, api.Job(model=model, steps=steps), watch, pick=pick)
    console.show_comparison(terminal, comparison, api.save_trace(comparison.story, trace))


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

    console.show_tuning(terminal_for(json), api.tune(plan, model, out=out, tries=tries))


@app.command()
def verify(
    plan: PlanPath,
    model: MaybeModel = "",
    steps: Steps = 3,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", min=0.0, help="Largest relative difference; 1e-9 by default."),
    ] = None,
    ranks: Annotated[
        str, typer.Option("--ranks", help="threads (of this process), or processes.")
    ] = "threads",
    pick: Pick = None,
    json: Json = False,
) -> None:
    """Prove that a plan trains like plain PyTorch, small and exact."""
    from shardwright import api, console

    terminal = terminal_for(json)
    trial = api.Trial(model=model, steps=steps, tolerance=tolerance, ranks=ranks)
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
