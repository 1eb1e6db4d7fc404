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
    from shardwright import api, voice

    speaker = _voice(json)
    with speaker.waiting("capturing the model"):
        graph = api.capture(model, global_batch=global_batch, seq=seq, precision=precision).graph
    voice.show_graph(speaker, graph, api.coverage(graph), api.save_graph(graph, out))


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
    model: Model,
    cluster: Cluster = "local",
    global_batch: Batch = None,
    seq: Seq = None,
    memory_limit: Annotated[
        str, typer.Option("--memory-limit", help="Per device, such as '12 GiB'.")
    ] = "",
    optimizer: Optimizer = "adamw",
    precision: Precision = "auto",
    batch_norm: Annotated[
        str, typer.Option("--batch-norm", help="Statistics: local (per device) or synchronised.")
    ] = "local",
    seed: Annotated[int, typer.Option("--seed", help="Recorded in the plan.")] = 0,
    seed_plan: Annotated[
        str,
        typer.Option(
            "--seed-plan",
            help="Do not search: megatron, megatron-sequence, summa, tesseract or cube[:2x2x2].",
        ),
    ] = "",
    measure: Annotated[
        str, typer.Option("--measure", help="auto, never, or always (again).")
    ] = "auto",
    out: Annotated[str, typer.Option("--out", "-o", help="Where to write the plan.")] = "plan.json",
    json: Json = False,
) -> None:
    """Find the best plans in step time, memory and money."""
    from shardwright import api, voice

    speaker = _voice(json)
    request = api.Request(
        global_batch=global_batch,
        seq=seq,
        memory_limit=memory_limit,
        optimizer=optimizer,
        precision=precision,
        seed=seed,
        measure=measure,
        batch_norm=batch_norm,
        seed_plan=seed_plan,
    )
    with speaker.progress(stoppable=True) as watch:
        study = api.study(model, cluster, request, watch)
    voice.show_study(speaker, study, api.save_plan(study, out))


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
    from shardwright import api, voice

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
