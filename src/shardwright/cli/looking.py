"""Commands that look: at this machine, a model, the rules."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwright.cli.app import app
from shardwright.cli.options import (
    MODEL_HELP,
    Batch,
    Json,
    MaybeModel,
    Model,
    Precision,
    Seq,
    voice_for,
)


@app.command()
def doctor(json: Json = False) -> None:
    """Look at this machine: what can be planned and run here."""
    from shardwright import api, voice

    voice.show_checks(voice_for(json), api.doctor())


@app.command()
def init(
    path: Annotated[str, typer.Argument(help="Where to write.")] = "cluster.toml",
    detect: Annotated[bool, typer.Option("--detect", help="Describe this machine.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite.")] = False,
    json: Json = False,
) -> None:
    """Write a commented cluster file to edit."""
    from shardwright import api, voice

    voice.show_cluster_file(voice_for(json), api.init(path, detect=detect, force=force))


@app.command()
def capture(
    model: Model,
    global_batch: Batch = None,
    seq: Seq = None,
    precision: Precision = "auto",
    out: Annotated[str, typer.Option("--out", "-o", help="Write the graph as JSON.")] = "",
    json: Json = False,
) -> None:
    """Capture a model and say which operators can be split."""
    from shardwright import api, voice

    speaker = voice_for(json)
    with speaker.waiting("capturing the model"):
        graph = api.capture(model, global_batch=global_batch, seq=seq, precision=precision).graph
    coverage = api.coverage(graph)
    voice.show_unruled(speaker, coverage.replicated, model)
    voice.show_graph(speaker, graph, coverage, api.save_graph(graph, out))


@app.command()
def profile(
    model: MaybeModel = "",
    global_batch: Batch = None,
    seq: Seq = None,
    precision: Precision = "auto",
    again: Annotated[bool, typer.Option("--again", help="Measure also what is known.")] = False,
    json: Json = False,
) -> None:
    """Measure this machine's links and a model's operators."""
    from shardwright import api, voice

    speaker = voice_for(json)
    request = api.Request(
        global_batch=global_batch,
        seq=seq,
        precision=precision,
        measure="always" if again else "auto",
    )
    with speaker.progress() as watch:
        found = api.profile(model, request, watch)
    voice.show_profile(speaker, found)


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
    from shardwright import api, voice
    from shardwright.errors import InputError

    speaker = voice_for(json)
    if model and not find:
        raise InputError("--model says where --find looks; add --find, or leave it out")
    with speaker.progress(stoppable=True) as watch:
        if find:
            proposals = api.find_rules(kinds or (), model, cases=cases, seed=seed, watch=watch)
        else:
            checks = api.verify_rules(kinds or (), cases=cases, seed=seed, watch=watch)
    if find:
        return voice.show_proposals(speaker, proposals)
    voice.show_rules(speaker, checks)
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
    from shardwright import api, voice

    speaker = voice_for(json)
    with speaker.progress(stoppable=True) as watch:
        found = api.validate(file, watch)
    voice.show_validation(speaker, found, cases)
