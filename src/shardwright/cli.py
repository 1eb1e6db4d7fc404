"""The voice: parse, call one verb, print.

Nothing heavy is imported before a command needs it, so that ``--help`` answers at once. Every
command prints tables for people or, with ``--json``, one object with stable keys. Exit codes: 0
good, 1 a negative answer (nothing fits, a rank failed, interrupted), 2 misuse or bad input.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardwright.verbs.pipelines import PipelineRequest
    from shardwright.voice import Voice

app = typer.Typer(
    name="shardwright",
    help="Plan and run distributed PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

MODEL_HELP = "file.py:factory, package.module:factory, or hf:NAME (hf:gpt2, hf:config.json)"
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
MaybeModel = Annotated[
    str, typer.Argument(metavar="[MODEL]", help=MODEL_HELP + "; the plan's, if hf:")
]
PlanPath = Annotated[str, typer.Argument(metavar="PLAN", help="A plan file.")]
Cluster = Annotated[
    str, typer.Option("--cluster", "-c", help="A cluster file, 8x8xH100, or local (this machine).")
]
Batch = Annotated[
    int | None, typer.Option("--global-batch", "-b", min=1, help="Samples per step, all devices.")
]
Seq = Annotated[
    int | None, typer.Option("--seq", "-s", min=1, help="Tokens per sample, where that applies.")
]
Precision = Annotated[
    str, typer.Option("--precision", help="auto, float32, bfloat16 (mixed), or float64.")
]
Optimizer = Annotated[str, typer.Option("--optimizer", help="adamw, adam, sgd, or momentum.")]
Pick = Annotated[
    int | None,
    typer.Option("--pick", min=0, help="Plan of the frontier to use, not the chosen one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
LayerProfile = Annotated[
    str, typer.Option("--profile", help="Plan a pipeline of PipeDream's graph.txt, not a model.")
]
Workers = Annotated[
    str, typer.Option("--workers", help="With --profile: 16, 2x8, or kinds: 8,8@0.5@16GiB.")
]
Bandwidth = Annotated[
    str,
    typer.Option("--bandwidth", help="With --profile, per worker: 1e9 (bytes/s) or '10 GB/s'."),
]
Schedule = Annotated[
    str,
    typer.Option(
        "--schedule",
        help="With --profile: auto, pipedream, gpipe, 1f1b-sno, 1f1b-so, 1f1b-as, fbp-as.",
    ),
]
Microbatches = Annotated[
    int, typer.Option("--microbatches", min=0, help="With --profile: per flush, 0 for none.")
]
Steps = Annotated[int, typer.Option("--steps", "-n", min=1, help="Steps to train.")]


def _voice(as_json: bool) -> Voice:
    from shardwright.voice import Voice

    return Voice(as_json)


@app.command()
def doctor(json: Json = False) -> None:
    """Look at this machine: what can be planned and run here."""
    from shardwright import api, voice

    voice.show_checks(_voice(json), api.doctor())


@app.command()
def init(
    path: Annotated[str, typer.Argument(help="Where to write.")] = "cluster.toml",
    detect: Annotated[bool, typer.Option("--detect", help="Describe this machine.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite.")] = False,
    json: Json = False,
) -> None:
    """Write a commented cluster file to edit."""
    from shardwright import api, voice

    voice.show_cluster_file(_voice(json), api.init(path, detect=detect, force=force))


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
    from shardwright import api, voice, voice_rules

    speaker = _voice(json)
    with speaker.waiting("capturing the model"):
        graph = api.capture(model, global_batch=global_batch, seq=seq, precision=precision).graph
    coverage = api.coverage(graph)
    voice_rules.show_unruled(speaker, coverage.replicated, model)
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

    speaker = _voice(json)
    request = api.Request(
        global_batch=global_batch,
        seq=seq,
        precision=precision,
        measure="always" if again else "auto",
    )
    with speaker.progress() as watch:
        found = api.profile(model, request, watch)
    voice.show_profile(speaker, found)


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help=MODEL_HELP + "; or see --profile")
    ] = "",
    cluster: Cluster = "local",
    global_batch: Batch = None,
    seq: Seq = None,
    memory_limit: Annotated[
        str,
        typer.Option("--memory-limit", "--memory", help="Per device, such as '12 GiB'."),
    ] = "",
    optimizer: Optimizer = "adamw",
    precision: Precision = "auto",
    batch_norm: Annotated[
        str, typer.Option("--batch-norm", help="Statistics: local (per device) or synchronised.")
    ] = "local",
    recompute: Annotated[
        str,
        typer.Option(
            "--recompute", help="auto (as memory requires), none, attention, selective, blocks."
        ),
    ] = "auto",
    output: Annotated[
        list[str] | None,
        typer.Option("--output", help="Reported besides the loss; may be given several times."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Recorded in the plan.")] = 0,
    seed_plan: Annotated[
        str,
        typer.Option(
            "--seed-plan",
            help="Do not search: megatron, megatron-sequence, summa, tesseract, cube[:2x2x2], "
            "expert, spatial, spatial-2d, or a parts file (parts.toml).",
        ),
    ] = "",
    mode: Annotated[
        str, typer.Option("--mode", help="min-time, min-devices, min-money, or curve.")
    ] = "min-time",
    deadline: Annotated[
        str, typer.Option("--deadline", help="The most a step may take, such as '200 ms'.")
    ] = "",
    measure: Annotated[
        str, typer.Option("--measure", help="auto, never, or always (again).")
    ] = "auto",
    profile: LayerProfile = "",
    workers: Workers = "",
    bandwidth: Bandwidth = "",
    schedule: Schedule = "auto",
    microbatches: Microbatches = 0,
    out: Annotated[str, typer.Option("--out", "-o", help="Where to write the plan.")] = "plan.json",
    json: Json = False,
) -> None:
    """Find the best plans in step time, memory and money."""
    from shardwright import api, voice, voice_rules

    speaker = _voice(json)
    if api.is_of_profile(model, profile, workers, bandwidth):
        wanted = api.PipelineRequest(
            workers=workers,
            bandwidth=bandwidth,
            memory_limit=memory_limit,
            schedule=schedule,
            microbatches=microbatches,
        )
        _plan_profile(speaker, profile, wanted)
        return
    request = api.Request(
        global_batch=global_batch,
        seq=seq,
        memory_limit=memory_limit,
        optimizer=optimizer,
        precision=precision,
        seed=seed,
        measure=measure,
        batch_norm=batch_norm,
        recompute=recompute,
        outputs=tuple(output or ()),
        seed_plan=seed_plan,
        mode=mode,
        deadline=deadline,
    )
    with speaker.progress(stoppable=True) as watch:
        study = api.study(model, cluster, request, watch)
    voice_rules.show_unruled(speaker, study.origin.unruled, model)
    voice.show_study(speaker, study, api.save_plan(study, out))


def _plan_profile(speaker: Voice, profile: str, wanted: PipelineRequest) -> None:
    from shardwright import api
    from shardwright.report.pipelines import pipeline_tables, pipeline_values

    with speaker.waiting("planning the pipeline"):
        graph, found = api.plan_profile(profile, wanted)
    speaker.say(pipeline_tables(graph, found))
    speaker.emit(**pipeline_values(graph, found))


@app.command()
def simulate(
    plan: PlanPath,
    model: MaybeModel = "",
    cluster: Cluster = "",
    pick: Pick = None,
    trace: Annotated[str, typer.Option("--trace", help="Write a Perfetto trace.")] = "",
    json: Json = False,
) -> None:
    """Run a plan with a clock: where time and memory go."""
    from shardwright import api, voice

    speaker = _voice(json)
    with speaker.waiting("simulating"):
        story = api.simulate(plan, model, cluster, pick=pick)
    voice.show_simulation(speaker, story, api.save_trace(story, trace))


@app.command()
def explain(
    plan: PlanPath,
    model: MaybeModel = "",
    cluster: Cluster = "",
    pick: Pick = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many operators to show.")] = 20,
    json: Json = False,
) -> None:
    """Say why this plan, what each operator costs, and what else."""
    from shardwright import api, voice

    speaker = _voice(json)
    with speaker.waiting("pricing every operator"):
        story = api.simulate(plan, model, cluster, pick=pick)
    voice.show_explanation(speaker, api.read_frontier(plan, pick), story, limit)


@app.command()
def diff(
    one: PlanPath,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Another plan file.")],
    model: MaybeModel = "",
    cluster: Cluster = "",
    json: Json = False,
) -> None:
    """Lay two plans side by side, and say what decides."""
    from shardwright import api, voice

    speaker = _voice(json)
    with speaker.waiting("simulating both"):
        found = api.diff(one, other, model, cluster)
    voice.show_contrast(speaker, found)


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
    from shardwright import api, voice

    speaker = _voice(json)
    wish = api.Wish(
        data=data,
        tensor=tensor,
        stages=stages,
        zero=zero,
        microbatches=microbatches,
        recompute=recompute,
        seed_plan=seed_plan,
    )
    with speaker.waiting("planning the alternative"):
        found = api.why_not(plan, wish, model, cluster, pick=pick)
    voice.show_contrast(speaker, found)


@app.command()
def run(
    plan: PlanPath,
    model: Model,
    steps: Steps = 100,
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr", min=0.0)] = 1e-3,
    clip: Annotated[
        float, typer.Option("--clip", min=0.0, help="Largest gradient norm, 0 for none.")
    ] = 0.0,
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
    from shardwright import api, voice, voice_rules

    speaker = _voice(json)
    job = api.Job(
        model=model,
        steps=steps,
        learning_rate=learning_rate,
        clip=clip,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        resume=resume,
    )
    voice_rules.show_unruled(speaker, api.read_origin(plan).unruled, model)
    with speaker.training(steps) as watch:
        done = api.run(plan, job, watch, pick=pick)
    voice.show_training(speaker, done, job)
    if not done.is_complete:
        raise typer.Exit(1)


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
    from shardwright import api, voice

    speaker = _voice(json)
    with speaker.training(steps) as watch:
        comparison = api.compare(plan, api.Job(model=model, steps=steps), watch, pick=pick)
    voice.show_comparison(speaker, comparison, api.save_trace(comparison.story, trace))


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
    from shardwright import api, voice

    speaker = _voice(json)
    trial = api.Trial(model=model, steps=steps, tolerance=tolerance, ranks=ranks)
    with speaker.progress() as watch:
        found = api.verify(plan, trial, watch, pick=pick)
    voice.show_verification(speaker, found)
    if not found.is_equal:
        raise typer.Exit(1)


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
    from shardwright import api, voice_rules
    from shardwright.errors import InputError

    speaker = _voice(json)
    if model and not find:
        raise InputError("--model says where --find looks; add --find, or leave it out")
    with speaker.progress(stoppable=True) as watch:
        if find:
            proposals = api.find_rules(kinds or (), model, cases=cases, seed=seed, watch=watch)
        else:
            checks = api.verify_rules(kinds or (), cases=cases, seed=seed, watch=watch)
    if find:
        return voice_rules.show_proposals(speaker, proposals)
    voice_rules.show_rules(speaker, checks)
    if checks.wrong or not checks.is_complete:
        raise typer.Exit(1)
    return None


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
    from shardwright import api, voice

    speaker = _voice(json)
    with speaker.waiting("writing the report"):
        files = api.report(plan, model, cluster, out=out, trace=trace)
    voice.show_report(speaker, files)


@app.command()
def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A folder of checkpoints, or one of them.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT.safetensors", help="Where to write.")],
    json: Json = False,
) -> None:
    """Write a checkpoint's weights as safetensors, for plain PyTorch."""
    from shardwright import api, voice

    speaker = _voice(json)
    with speaker.waiting("reading the checkpoint"):
        path = api.export(checkpoint, out)
    voice.show_export(speaker, path)


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
    from shardwright import api, contest

    speaker = _voice(json)
    with speaker.progress(stoppable=True) as watch:
        found = api.iopddl(file, seconds=seconds, seed=seed, watch=watch)
    contest.show_contest(speaker, found, api.save_choice(found, out))
    if not (found.fits and found.is_allowed):
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[str, typer.Option("--out", "-o", help="Where results go.")] = "out",
    steps: Steps = 200,
    json: Json = False,
) -> None:
    """Plan and train a small language model, start to end."""
    from shardwright import demo

    demo.play(_voice(json), out, steps)


def main() -> None:
    """Run the command line; the one place where errors become a message and an exit code."""
    from shardwright.errors import InputError, ShardwrightError

    code = 0
    try:
        app()  # misuse and interruption end here, with 2 and 1
    except ShardwrightError as error:
        code = _complain(str(error), 2 if isinstance(error, InputError) else 1)
    except MemoryError:
        code = _complain(
            "this machine is out of memory; use a smaller batch or free some memory", 1
        )
    except BrokenPipeError:
        sys.stderr.close()
        code = 1
    except OSError as error:
        code = _complain(f"the system refused: {error}; free space or check the path", 2)
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    return code


if __name__ == "__main__":
    main()
