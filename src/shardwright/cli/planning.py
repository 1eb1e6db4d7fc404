"""Commands that plan, and tell of plans."""

from __future__ import annotations

import atexit
import gc
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.app import app
from shardwright.cli.options import (
    MODEL_HELP,
    Cluster,
    Draw,
    Json,
    LayerProfile,
    MaybeModel,
    MaybePlan,
    Pick,
    PlanPath,
    asking,
    given,
    terminal_for,
)
from shardwright.errors import InputError
from shardwright.verbs.request import PipelineRequest, Request
from shardwright.verbs.tracerequest import TraceRequest

if TYPE_CHECKING:
    from shardwright.console import Terminal


# So many new objects before Python looks for cycles among them: half as many take 5 % longer and .03 GiB less (405B
# parameters on 16,384 devices).
COLLECTED = 1_000_000


@app.command()
@asking(Request)
@asking(PipelineRequest, into="pipeline")
def plan(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help=MODEL_HELP + "; or see --profile")
    ] = "",
    cluster: Cluster = "local",
    *,
    asked: dict[str, Any],
    profile: LayerProfile = "",
    pipeline: dict[str, Any],
    draw: Draw = "",
    out: Annotated[str, typer.Option("--out", "-o", help="Where to write the plan.")] = "plan.json",
    json: Json = False,
) -> None:
    """Find the best plans in step time, memory and money."""
    from shardwright.verbs.pipelines import is_of_profile

    terminal = _speaker(json)
    if is_of_profile(given(context)):
        limit, order = asked["memory_limit"] or "", asked["order"]
        wanted = PipelineRequest(memory_limit=limit, order=order, **pipeline)
        _plan_profile(terminal, profile, wanted, draw)
        return
    from shardwright import api, console

    request = Request(**asked)
    with terminal.progress(stoppable=True) as watch:
        study = api.study(model, cluster, request, watch)
    console.show_unruled(terminal, study.origin.unruled, model)
    console.show_study(terminal, study, api.save_plan(study, out))


def _speaker(as_json: bool) -> Terminal:
    """Begin a search: looking for cycles as often as usual takes a quarter of it, and it makes few; the look
    at Python's end, a second for thousands of operators, frees what ends anyhow."""
    gc.set_threshold(COLLECTED, 10, 10)
    atexit.register(gc.freeze)
    return terminal_for(as_json)


def _plan_profile(terminal: Terminal, profile: str, wanted: PipelineRequest, draw: str) -> None:
    from rich.text import Text

    from shardwright.report.pipelines import pipeline_tables, pipeline_values
    from shardwright.verbs.pipelines import draw_plan, plan_profile

    with terminal.waiting("planning the pipeline"):
        graph, found = plan_profile(profile, wanted)
    drawn = draw_plan(found.best, draw) if draw else ""
    terminal.say(pipeline_tables(graph, found))
    if drawn:
        terminal.say(Text(drawn, no_wrap=True))
    terminal.emit(**pipeline_values(graph, found))


@app.command()
@asking(TraceRequest)
def simulate(
    plan: MaybePlan = "",
    model: MaybeModel = "",
    cluster: Cluster = "",
    pick: Pick = None,
    trace: Annotated[
        str,
        typer.Option(
            "--trace", help="Write a Perfetto trace; without PLAN: a trace of layers to play."
        ),
    ] = "",
    layers: Annotated[
        str, typer.Option("--layers", help="Write the plan's layers as a trace of layers.")
    ] = "",
    *,
    asked: dict[str, Any],
    json: Json = False,
) -> None:
    """Run a plan with a clock: where time and memory go. Or a trace of layers on any workers."""
    from shardwright import api, console

    terminal = terminal_for(json)
    if not plan:
        if not trace:
            raise InputError("simulate needs a PLAN, or --trace layers.csv; give one of them")
        if layers or cluster or pick is not None:
            raise InputError(
                "--layers, --cluster and --pick are for a PLAN, and a trace of layers has none; leave them out"
            )
        return console.show_trace(terminal, api.predict_trace(trace, TraceRequest(**asked)))
    if asked["workers"] or asked["link"]:
        raise InputError(
            "--workers and --link are for a trace of layers, without PLAN; leave one out"
        )
    with terminal.waiting("simulating"):
        story = api.simulate(plan, model, cluster, pick=pick)
    console.show_simulation(terminal, story, api.save_trace(story, trace))
    if layers:
        api.save_layers(layers, plan, model, cluster, pick=pick)
    return None


@app.command()
def explain(
    plan: PlanPath,
    model: MaybeModel = "",
    cluster: Cluster = "",
    pick: Pick = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows per table.")] = 15,
    json: Json = False,
) -> None:
    """Say why this plan, what else was possible, what more would buy."""
    from shardwright import api, console

    terminal = terminal_for(json)
    with terminal.progress() as watch:
        found = api.reasons(plan, model, cluster, pick=pick, watch=watch)
    console.show_explanation(terminal, found, limit)


@app.command()
def diff(
    one: PlanPath,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Another plan file.")],
    model: MaybeModel = "",
    cluster: Cluster = "",
    json: Json = False,
) -> None:
    """Lay two plans side by side, and say what decides."""
    from shardwright import api, console

    terminal = terminal_for(json)
    with terminal.waiting("simulating both"):
        found = api.diff(one, other, model, cluster)
    console.show_contrast(terminal, found)


@app.command("why-not")
def why_not(
    plan: PlanPath,
    model: MaybeModel = "",
    data: Annotated[int | None, typer.Option("--dp", min=1, help="Data parallel degree.")] = None,
    tensor: Annotated[
        int | None, typer.Option("--tp", min=1, help="Tensor parallel degree.")
    ] = None,
    stages: Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline stages.")] = None,
    zero: Annotated[int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage.")] = None,
    microbatches: Annotated[int | None, typer.Option("--microbatches", min=1)] = None,
    recompute: Annotated[
        bool | None, typer.Option("--recompute/--no-recompute", help="Recompute every block.")
    ] = None,
    seed_plan: Annotated[str, typer.Option("--seed-plan", help="A strategy by name.")] = "",
    cluster: Cluster = "",
    pick: Pick = None,
    json: Json = False,
) -> None:
    """Say what decides against an alternative that you name."""
    from shardwright import api, console

    terminal = terminal_for(json)
    wish = api.Wish(
        data=data,
        tensor=tensor,
        stages=stages,
        zero=zero,
        microbatches=microbatches,
        recompute=recompute,
        seed_plan=seed_plan,
    )
    with terminal.waiting("planning the alternative"):
        found = api.why_not(plan, wish, model, cluster, pick=pick)
    console.show_contrast(terminal, found)


@app.command()
def report(
    plan: PlanPath,
    model: MaybeModel = "",
    cluster: Cluster = "",
    out: Annotated[
        str, typer.Option("--out", "-o", help="Where to write the page.")
    ] = "report.html",
    trace: Annotated[str, typer.Option("--trace", help="Also write a Perfetto trace.")] = "",
    json: Json = False,
) -> None:
    """Write one self-contained HTML page about all plans of a file."""
    from shardwright import api, console

    terminal = terminal_for(json)
    with terminal.progress() as watch:
        files = api.report(plan, model, cluster, out=out, trace=trace, watch=watch)
    console.show_report(terminal, files)


@app.command()
def iopddl(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A problem, .json or .json.gz.")],
    seconds: Annotated[float, typer.Option("--seconds", help="Time for all of it.")] = 60.0,
    out: Annotated[
        str, typer.Option("--out", "-o", help="Write the solution, a list of strategies.")
    ] = "",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the search.")] = 0,
    json: Json = False,
) -> None:
    """Solve a problem of the IOPDDL contest, with a bound."""
    from shardwright import api, console

    terminal = terminal_for(json)
    with terminal.progress(stoppable=True) as watch:
        found = api.iopddl(file, seconds=seconds, seed=seed, watch=watch)
    console.show_contest(terminal, found, api.save_choice(found, out))
    if not (found.fits and found.is_allowed):
        raise typer.Exit(1)
