"""``advise``: how to configure a run, a command for each question."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shardwright.cli.app import app
from shardwright.cli.options import MODEL_HELP, Cluster, Json, Model, asking, terminal_for
from shardwright.verbs.advice.requests import (
    AlgorithmRequest,
    BatchRequest,
    CacheRequest,
    DeviceRequest,
    MicrobatchRequest,
    ServerRequest,
    SettingsRequest,
)

advise = typer.Typer(
    help="How to configure a run: devices, servers, batch, caches, algorithms, settings.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(advise, name="advise")
Html = Annotated[str, typer.Option("--html", help="Write a page with charts.")]


@advise.command()
@asking(AlgorithmRequest)
def algorithms(
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE", help="A CSV: layer,algorithm,seconds,bytes and maybe batch."
        ),
    ],
    *,
    asked: dict[str, Any],
    html: Html = "",
    json: Json = False,
) -> None:
    """Choose an algorithm for every layer within memory, and the batch."""
    from shardwright import api, console

    found = api.advise_algorithms(table, AlgorithmRequest(**asked))
    console.show_advice(terminal_for(json), found, api.save_advice(found, html))


@advise.command()
@asking(DeviceRequest)
def devices(
    *,
    asked: dict[str, Any],
    model: Annotated[
        str, typer.Option("--model", help="Also simulate it on --cluster; " + MODEL_HELP)
    ] = "",
    cluster: Cluster = "",
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", "-b", min=1, help="Of --model, all devices.")
    ] = None,
    html: Html = "",
    json: Json = False,
) -> None:
    """Say how many devices are worth it, from a few measured steps."""
    from shardwright import api, console

    terminal = terminal_for(json)
    with terminal.progress(stoppable=True) as watch:
        found = api.advise_devices(DeviceRequest(**asked), model, cluster, global_batch, watch)
    console.show_advice(terminal, found, api.save_advice(found, html))


@advise.command()
@asking(MicrobatchRequest)
def microbatch(
    model: Model,
    *,
    asked: dict[str, Any],
    cluster: Cluster = "",
    html: Html = "",
    json: Json = False,
) -> None:
    """Say how many samples a device takes at once, by predicted memory."""
    from shardwright import api, console

    terminal = terminal_for(json)
    with terminal.progress() as watch:
        found = api.advise_microbatch(model, cluster, MicrobatchRequest(**asked), watch)
    console.show_advice(terminal, found, api.save_advice(found, html))


@advise.command()
@asking(ServerRequest)
def servers(*, asked: dict[str, Any], html: Html = "", json: Json = False) -> None:
    """Say how many parameter servers are enough, and whether an all-reduce is."""
    from shardwright import api, console

    found = api.advise_servers(ServerRequest(**asked))
    console.show_advice(terminal_for(json), found, api.save_advice(found, html))


@advise.command()
@asking(BatchRequest)
def batch(*, asked: dict[str, Any], html: Html = "", json: Json = False) -> None:
    """Say which batch size is worth its samples, by the noise of gradients."""
    from shardwright import api, console

    found = api.advise_batch(BatchRequest(**asked))
    console.show_advice(terminal_for(json), found, api.save_advice(found, html))


@advise.command()
@asking(CacheRequest)
def caches(*, asked: dict[str, Any], html: Html = "", json: Json = False) -> None:
    """Say what keeping data in memory gains, on one host or several."""
    from shardwright import api, console

    found = api.advise_caches(CacheRequest(**asked))
    console.show_advice(terminal_for(json), found, api.save_advice(found, html))


@advise.command()
@asking(SettingsRequest)
def settings(model: Model, *, asked: dict[str, Any], html: Html = "", json: Json = False) -> None:
    """Measure attention back-ends, channels-last, recomputation here."""
    from shardwright import api, console

    terminal = terminal_for(json)
    with terminal.progress() as watch:
        found = api.advise_settings(model, SettingsRequest(**asked), watch)
    console.show_advice(terminal, found, api.save_advice(found, html))
