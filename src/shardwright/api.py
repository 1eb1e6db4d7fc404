"""The verbs: everything the command line does, as functions. The one file that knows both wings.

Verbs that need no torch come from ``verbs`` as they are; the others import the runtime, and with it
torch, when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.core.arguments import checked
from shardwright.core.cluster import Cluster
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Frontier, Plan
from shardwright.errors import InputError
from shardwright.files import clusterfile
from shardwright.files.planfile import (
    Origin,
    read_plan,
    read_plan_file,
    write_atomically,
    write_graph,
    write_plan,
)
from shardwright.reasons import Wish
from shardwright.report.comparison import differences
from shardwright.verbs.advice import save_advice
from shardwright.verbs.advice.algorithms import advise_algorithms
from shardwright.verbs.advice.batch import advise_batch
from shardwright.verbs.advice.caches import advise_caches
from shardwright.verbs.advice.devices import advise_devices
from shardwright.verbs.advice.microbatch import advise_microbatch
from shardwright.verbs.advice.requests import (
    AlgorithmRequest,
    BatchRequest,
    CacheRequest,
    DeviceRequest,
    MicrobatchRequest,
    ServerRequest,
    SettingsRequest,
)
from shardwright.verbs.advice.servers import advise_servers
from shardwright.verbs.advice.settings import advise_settings
from shardwright.verbs.checks import doctor
from shardwright.verbs.coverage import coverage
from shardwright.verbs.evidence import document_of, model_of, picked
from shardwright.verbs.layertraces import predict_trace, save_layers
from shardwright.verbs.narrate import with_process
from shardwright.verbs.options import takes
from shardwright.verbs.pipelines import is_of_profile, plan_profile
from shardwright.verbs.reasons import reasons
from shardwright.verbs.request import Job, PipelineRequest, Request, Trial, Watch
from shardwright.verbs.results import (
    Comparison,
    ContestAnswer,
    Profile,
    Proposal,
    RuleChecks,
    Study,
    TrainingRun,
    Verification,
)
from shardwright.verbs.stalls import analyse_script as stalls
from shardwright.verbs.stalls import save_stalls
from shardwright.verbs.study import study
from shardwright.verbs.subject import Batch, capture, find_cluster, is_here
from shardwright.verbs.telling import diff, report, save_trace, simulate, why_not
from shardwright.verbs.tracerequest import TraceRequest
from shardwright.verbs.tuning import tune
from shardwright.verbs.validation import validate

if TYPE_CHECKING:
    from torch import nn

    from shardwright.runtime.executor import Executor, RunOptions

__all__ = [
    "AlgorithmRequest", "BatchRequest", "CacheRequest", "DeviceRequest", "Job", "MicrobatchRequest", "PipelineRequest", "Request", "ServerRequest", "SettingsRequest",
    "TraceRequest", "Trial", "Watch", "Wish", "advise_algorithms", "advise_batch", "advise_caches", "advise_devices", "advise_microbatch",
    "advise_servers", "advise_settings", "build", "capture",
    "compare", "coverage", "diff", "doctor", "explain", "export", "find_cluster", "find_rules",
    "init", "iopddl", "is_of_profile", "plan", "plan_profile", "predict_trace", "profile", "read_frontier",
    "read_origin", "read_plan", "reasons", "report", "run", "save_advice", "save_choice", "save_graph", "save_layers", "save_plan", "save_stalls", "save_trace",
    "simulate", "stalls", "study", "tune", "validate", "verify", "verify_rules", "why_not", "write_plan",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Planned(Request):
    """The arguments of ``plan``: the model, where, and the options of a request."""

    model: str | nn.Module = field(kw_only=False)
    cluster: Cluster | str | None = field(default=None, kw_only=False)
    batch: Batch | None = None


@takes(_Planned)
def plan(asked: _Planned) -> Frontier:
    """Return the frontier of plans for a model on a cluster (None: this machine).

    ``seed_plan`` names one strategy (``megatron``, ``summa``, ``tesseract``, ``cube``, ``spatial``, with a grid after
    a colon if wanted) or a parts file: then it is planned and nothing is searched. ``clip`` is the largest global
    norm of the gradients, held in the plan (0: not clipped). ``accumulation="own"`` adds gradients up in the
    parameters' dtype; they travel in ``gradient_dtype`` (``error_feedback``: what that loses is added to the next),
    or as a ``compressor`` leaves them (``top-k`` a ``density`` of their elements).
    ``mode`` is what to look for: ``min-time``, ``min-devices``, ``min-money``, or ``curve`` (the fastest plan for
    each number of devices, as far as no other beats it), ``deadline`` the most that a step may take. ``seconds`` end
    the search with the best so far; ``method="mcmc"`` draws ``proposals`` at random instead of searching exactly, or
    as many as it can in ``seconds``. ``spacing=0.02`` looks for plans between neighbours on the frontier that are
    more than 2 % apart in both time and memory. On this machine the ``trials`` best plans of a model given by name
    are run for some steps beside plain data parallelism (None: 4). ``costs`` is a plan file that ``tune`` has
    written, for what it fitted to measured steps. Deterministic, unless given ``seconds``: equal inputs, measurements
    and seed give equal plans. Raises NoPlan when nothing fits.
    """
    return study(asked.model, asked.cluster, asked, batch=asked.batch).frontier


def profile(
    model: str = "",
    request: Request | None = None,
    watch: Watch | None = None,
    *,
    cluster: Cluster | str = "",
) -> Profile:
    """Measure this machine's links and, given a model, the operators its best plans would run; or, called
    by every rank of a ``cluster`` under torchrun, those of that cluster."""
    from shardwright.verbs.measure import known_costs, measure_links

    request, watch = request or Request(), watch or Watch()
    if not is_here(cluster):
        from shardwright.verbs.hosts import profile_hosts

        return profile_hosts(model, cluster, request, watch)
    machine, _ = find_cluster(None, watch)
    count, notes = measure_links(machine, watch, again=request.measure == "always"), ()
    if model:
        found = study(model, None, request, watch)
        count, notes = count + found.num_measured, found.notes
    costs = known_costs()
    known = len(costs.operators) + sum(len(points) for _, points in costs.collectives)
    return Profile(cluster=machine, costs=costs, num_measured=count, num_known=known, notes=notes)


def explain(
    plan: Plan | Frontier | str | Path,
    model: str | nn.Module = "",
    cluster: Cluster | str = "",
    *,
    batch: Batch | None = None,
    pick: int | None = None,
) -> str:
    """Return, as text, why this plan: what else could be decided, what more of everything would buy,
    where time and memory go."""
    from shardwright.console import explanation_text

    return explanation_text(reasons(plan, model, cluster, batch=batch, pick=pick))


def build(
    plan: Plan | Frontier | str | Path,
    model: nn.Module | Callable[[], Any],
    *,
    optimizer: Callable[..., Any],
    batch: Batch,
    options: RunOptions | None = None,
    pick: int | None = None,
) -> Executor:
    """Make this rank's executor of a plan, under torchrun, the built-in launcher, or alone.

    ``optimizer`` makes a ``torch.optim`` optimizer of named parameters (``functools.partial(AdamW,
    lr=1e-3)``). ``batch`` is an example of any size. Without a device in ``options``: this rank's own of
    the plan's type. A factory is built one parameter at a time. Raises PlanMismatch for another model.
    """
    from shardwright.verbs.execution import build_executor

    document = document_of(plan)
    chosen, where = picked(document.frontier, pick), document.cluster
    with document.named():
        return build_executor(
            chosen, model, where, optimizer=optimizer, batch=batch, options=options
        )


def run(
    plan: Plan | Frontier | str | Path,
    job: Job,
    watch: Watch | None = None,
    *,
    pick: int | None = None,
) -> TrainingRun:
    """Train on this machine: one process per device of the plan, started and watched from here; or, called by
    every rank under torchrun, on those. Ctrl-C, and a scheduler's SIGTERM with a checkpoint folder, ask for the end."""
    from shardwright.verbs.training import start

    document = document_of(plan)
    chosen = picked(document.frontier, pick)
    with document.named():
        return start(chosen, document.origin, job, watch or Watch()).run


def compare(
    plan: Plan | Frontier | str | Path,
    job: Job,
    watch: Watch | None = None,
    *,
    pick: int | None = None,
) -> Comparison:
    """Train a few steps as ``run`` does, and lay the measured timeline beside the predicted one."""
    from dataclasses import replace

    from shardwright.verbs.training import start

    document = document_of(plan)
    chosen = picked(document.frontier, pick)
    if not chosen.strategy.pipeline.is_flushed:
        raise InputError(
            "predicted and measured steps are compared from flush to flush, but "
            f"{chosen.strategy.label} is never flushed; `shardwright run` says what a step takes"
        )
    story = simulate(plan, job.model, pick=pick)
    with document.named():
        outcome = start(chosen, document.origin, replace(job, profiles=True), watch or Watch())
    if outcome.timeline is None:
        raise InputError("the ranks measured no step; train more steps (--steps)")
    measured = with_process(outcome.timeline, story.process_bytes)
    story = replace(story, measured=measured, usual_seconds=outcome.run.step_seconds)
    rows = differences(story)
    return Comparison(story=story, rows=rows, training=outcome.run)


def verify(
    plan: Plan | Frontier | str | Path,
    trial: Trial,
    watch: Watch | None = None,
    *,
    pick: int | None = None,
) -> Verification:
    """Train a plan in float64 beside plain PyTorch, all its ranks on this machine at a small batch,
    and return how far every tensor is apart."""
    from dataclasses import replace

    from shardwright.verbs import verification

    document = document_of(plan)
    chosen = picked(document.frontier, pick)
    if not trial.model:
        trial = replace(trial, model=model_of(document))
    with document.named():
        return verification.verify(chosen, document.origin, trial, watch or Watch())


def verify_rules(
    kinds: Sequence[str] = (),
    *,
    cases: int | None = None,
    seed: int = 0,
    watch: Watch | None = None,
) -> RuleChecks:
    """Run operators in pieces against whole, at ``cases`` random shapes per rule (None: 8)."""
    from shardwright.verbs import rules

    return rules.verify_rules(kinds, cases=cases or rules.CASES, seed=seed, watch=watch)


def find_rules(
    kinds: Sequence[str] = (),
    model: str = "",
    *,
    cases: int | None = None,
    seed: int = 0,
    watch: Watch | None = None,
) -> tuple[Proposal, ...]:
    """Propose rules for kinds, or for all operators of a model that have none. Uses none of
    them."""
    from shardwright.verbs import finder, rules

    return finder.find_rules(kinds, model, cases=cases or rules.CASES, seed=seed, watch=watch)


def read_frontier(plan: Plan | Frontier | str | Path, pick: int | None = None) -> Frontier:
    """Return a plan or plan file as a frontier, with ``pick`` chosen instead where it is given."""
    frontier = document_of(plan).frontier
    picked(frontier, pick)
    return frontier if pick is None else frontier.choosing(pick)


def read_origin(plan: str | Path) -> Origin:
    """Return what a plan file was made for, and what of its model no rule splits."""
    return read_plan_file(plan).origin


def export(checkpoint: str | Path, out: str | Path) -> Path:
    """Write a checkpoint's weights as one safetensors file, without the model and without ranks."""
    from shardwright.runtime.weights import export_checkpoint

    return export_checkpoint(checkpoint, out)


def iopddl(
    path: str | Path, *, seconds: float = 60.0, seed: int = 0, watch: Watch | None = None
) -> ContestAnswer:
    """Solve a problem of the IOPDDL contest: cheapest strategies within the memory limit."""
    from shardwright.verbs.iopddl import answer

    return answer(path, seconds, seed, watch or Watch())


def save_choice(found: ContestAnswer, path: str | Path) -> Path | None:
    """Write a solution in the contest's format; an empty path writes nothing."""
    from shardwright.files.iopddl import write_choice

    return write_choice(path, found.choice) if path else None


def init(path: str | Path, *, detect: bool = False, force: bool = False) -> Path:
    """Write a cluster file to edit: a commented one, or the description of this machine."""
    if Path(path).exists() and not force:
        raise InputError(f"{path} exists and is kept; choose another name, or pass --force")
    text = clusterfile.commented_template()
    if detect:
        text = clusterfile.write_cluster(find_cluster(None)[0])
    return write_atomically(path, text.encode())


def save_plan(study: Study, path: str | Path) -> Path:
    """Write a study's frontier with its origin and cluster."""
    return write_plan(path, study.frontier, origin=study.origin, cluster=study.cluster)


def save_graph(graph: OperatorGraph, path: str | Path) -> Path | None:
    """Write a graph; an empty path writes nothing."""
    return write_graph(path, graph) if path else None


# Whoever calls a verb, from wherever it is imported here, hears of a wrong argument by its name.
globals().update(
    {name: checked(globals()[name]) for name in __all__ if isfunction(globals()[name])}
)
