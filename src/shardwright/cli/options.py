"""Arguments and options that several commands take, and the terminal that answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardwright.console import Terminal

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
    str,
    typer.Option(
        "--precision",
        help="auto, float32, bfloat16 (mixed), float16 (mixed, scaled loss), fp8 or fp8-row (mixed, "
        "linear maps in 8 bits), or float64.",
    ),
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
Shards = Annotated[
    int,
    typer.Option(
        "--shards",
        min=1,
        help="With --profile: a stage may split layers or weights over so many workers.",
    ),
]
Microbatches = Annotated[
    int, typer.Option("--microbatches", min=0, help="With --profile: per flush, 0 for none.")
]
MemoryLimit = Annotated[
    str, typer.Option("--memory-limit", "--memory", help="Per device, such as '12 GiB'.")
]
Outputs = Annotated[
    list[str] | None,
    typer.Option("--output", help="Reported besides the loss; may be given several times."),
]
Spacing = Annotated[
    float | None,
    typer.Option("--spacing", help="Fill gaps of the frontier wider than this, such as 0.02."),
]
Tries = Annotated[
    int | None,
    typer.Option("--try", min=0, help="Plans to run for some steps on this machine (4); 0: none."),
]
Deadline = Annotated[
    str, typer.Option("--deadline", help="The most a step may take, such as '200 ms'.")
]
Method = Annotated[str, typer.Option("--method", help="exact, or mcmc (Markov chains, random).")]
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", help="How long to look at most (exact: to the end; mcmc: 60)."),
]
NumProposals = Annotated[
    int | None, typer.Option("--proposals", help="With mcmc: how many instead, repeatable.")
]
BatchNorm = Annotated[
    str, typer.Option("--batch-norm", help="Statistics: local (per device) or synchronised.")
]
Clip = Annotated[
    float, typer.Option("--clip", min=0.0, help="Largest gradient norm, held in the plan; 0: none.")
]
Accumulation = Annotated[
    str,
    typer.Option(
        "--accumulation",
        help="In mixed precision, what gradients of microbatches add up in: float32, or own (half "
        "the memory).",
    ),
]
GradientDtype = Annotated[
    str,
    typer.Option(
        "--gradient-dtype",
        help="What gradients travel in between devices: parameter (their own), float32, bfloat16, "
        "float16.",
    ),
]
ErrorFeedback = Annotated[
    bool,
    typer.Option(
        "--gradient-error-feedback",
        help="Add what a gradient loses in a narrower dtype to the next one (memory: one gradient).",
    ),
]
Recompute = Annotated[
    str,
    typer.Option(
        "--recompute", help="auto (as memory requires), none, attention, selective, blocks."
    ),
]
SeedPlan = Annotated[
    str,
    typer.Option(
        "--seed-plan",
        help="Do not search: megatron, megatron-sequence, summa, tesseract, cube[:2x2x2], "
        "expert, spatial, spatial-2d, 1f1b, gpipe, 1f1b-so[:4x8], interleaved[:2x2x8], or a parts file.",
    ),
]
Steps = Annotated[int, typer.Option("--steps", "-n", min=1, help="Steps to train.")]


def given(context: typer.Context) -> set[str]:
    """Return the names of the arguments and options that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def terminal_for(as_json: bool) -> Terminal:
    """Return where a command speaks."""
    from shardwright.console import Terminal

    return Terminal(as_json)
