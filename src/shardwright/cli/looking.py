"""Commands that look: at this machine, a model, the rules."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shardwright.cli.app import app
from shardwright.cli.options import (
    MODEL_HELP,
    Cluster,
    Json,
    MaybeModel,
    Model,
    asking,
    terminal_for,
)
from shardwright.verbs.request import Request


@app.command()
def doctor(json: Json = False) -> None:
    """Look at this machine: what can be planned and run here."""
    from shardwright import api, console

    console.show_checks(terminal_for(json), api.doctor())


@app.command()
def init(
    path: Annotated[str, typer.Argument(help="Where to write.")] = "cluster.toml",
    detect: Annotated[bool, typer.Option("--detect", help="Describe this machine.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite.")] = False,
    json: Json = False,
) -> None:
    """Write a commented cluster file to edit."""
    from shardwright import api, console

    console.show_cluster_file(terminal_for(json), api.init(path, detect=detect, force=force))


@app.command()
@asking(Request, "global_batch", "seq", "precision")
def capture(
    model: Model,
    *,
    asked: dict[str, Any],
    out: Annotated[str, typer.Option("--out", "-o", help="Write the graph as JSON.")] = "",
    json: Json = False,
) -> None:
    """Capture a model and say which operators can be split."""
    from shardwright import api, console

    terminal = terminal_for(json)
    with terminal.waiting("capturing the model"):
        graph = api.capture(model, **asked).graph
    coverage = api.coverage(graph)
    console.show_unruled(terminal, coverage.replicated, model)
    console.show_graph(terminal, graph, coverage, api.save_graph(graph, out))


@app.command()
@asking(Request, "global_batch", "seq", "precision")
def profile(
    model: MaybeModel = "",
    cluster: Cluster = "local",
    *,
    asked: dict[str, Any],
    again: Annotated[bool, typer.Option("--again", help="Measure also what is known.")] = False,
    json: Json = False,
) -> None:
    """Measure links and a model's operators, here or under torchrun."""
    from shardwright import api, console

    terminal = terminal_for(json, ranks=True)
    request = Request(**asked, measure="always" if again else "auto")
    with terminal.progress() as watch:
        found = api.profile(model, request, watch, cluster=cluster)
    console.show_profile(terminal, found)


@app.command("verify-rules")
def verify_rules(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KIND]...", help="Such as aten.softmax.int; all, if none."),
    ] = None,
    find: Annotated[
        bool, typer.Option("--find", help="Propose rules for operators that have none.")
    ] = False,
    model: Annotated[str, typer.Option("--model", help="Whose operators; " + MODEL_HELP)] = "",
    cases: Annotated[int, typer.Option("--cases", min=1, help="Random shapes per rule.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Of everything drawn at random.")] = 0,
    json: Json = False,
) -> None:
    """Run operators in pieces against whole: are the rules right?"""
    from shardwright import api, console
    from shardwright.errors import InputError

    terminal = terminal_for(json)
    if model and not find:
        raise InputError("--model says where --find looks; add --find, or leave it out")
    with terminal.progress(stoppable=True) as watch:
        if find:
            proposals = api.find_rules(kinds or (), model, cases=cases, seed=seed, watch=watch)
        else:
            checks = api.verify_rules(kinds or (), cases=cases, seed=seed, watch=watch)
    if find:
        return console.show_proposals(terminal, proposals)
    console.show_rules(terminal, checks)
    if checks.wrong or not checks.is_complete:
        raise typer.Exit(1)
    return None


@app.command()
def validate(
    file: Annotated[str, typer.Argument(metavar="RUNS", help="Published runs, a CSV file.")],
    cases: Annotated[bool, typer.Option("--cases", help="Also print every run.")] = False,
    json: Json = False,
) -> None:
    """Plan published runs as printed: predicted beside published."""
    from shardwright import api, console

    terminal = terminal_for(json)
    with terminal.progress(stoppable=True) as watch:
        found = api.validate(file, watch)
    console.show_validation(terminal, found, cases)


@app.command()
def stalls(
    loader: Annotated[
        str,
        typer.Argument(
            metavar="LOADER",
            help="file.py:loader, batches to iterate or a function that makes them.",
        ),
    ],
    step: Annotated[str, typer.Option("--step", help="file.py:train_step, called with a batch.")],
    data: Annotated[
        list[str] | None, typer.Option("--data", help="A file or folder that the loader reads.")
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option("--batches", min=1, help="Of each phase; as time allows, if not given."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option("--seconds", help="About how long all takes; 8 batches of a phase at least."),
    ] = 60.0,
    html: Annotated[str, typer.Option("--html", help="Write a page with what-if curves.")] = "",
    json: Json = False,
) -> None:
    """Measure where a training step waits for its input, and what would help."""
    from shardwright import api, console

    terminal = terminal_for(json)
    with terminal.progress() as watch:
        found, speaks = api.stalls(
            loader, step, page=html, data=data or (), batches=batches, seconds=seconds, watch=watch
        )
    if speaks:
        console.show_stalls(terminal, found, api.save_stalls(found, html))
