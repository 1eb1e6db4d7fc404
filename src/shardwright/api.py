"""The verbs: everything the command line does, as functions. The one file that knows both wings.

Planner and reports are imported where they are needed, the runtime (and with it torch) inside the
few functions that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.core.cluster import Cluster
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Frontier, Plan
from shardwright.errors import InputError
from shardwright.files import clusterfile
from shardwright.files.planfile import (
    Origin,
    read_plan_file,
    write_atomically,
    write_graph,
    write_plan,
)
from shardwright.planner.search import Wish
from shardwright.report.comparison import differences
from shardwright.report.contrast import Contrast, contrast
from shardwright.report.html import page_text
from shardwright.report.perfetto import trace_bytes
from shardwright.report.story import PlanStory, Story
from shardwright.verbs.coverage import coverage
from shardwright.verbs.evidence import document_of, evidence, model_of, picked, provenance
from shardwright.verbs.narrate import tell, with_process
from shardwright.verbs.pipelines import PipelineRequest, is_of_profile, plan_profile
from shardwright.verbs.request import Job, Request, Trial, Watch
from shardwright.verbs.results import (
    Check,
    Comparison,
    ContestAnswer,
    Profile,
    Proposal,
    Report,
    RuleChecks,
    Study,
    TrainingRun,
    Verification,
)
from shardwright.verbs.study import study
from shardwright.verbs.subject import Batch, capture, find_cluster

if TYPE_CHECKING:
    from torch import nn

    from shardwright.core.accuracy import Validation
    from shardwright.runtime.executor import Executor, RunOptions
    from shardwright.verbs.reasons import Explanation
    from shardwright.verbs.tuning import Tuning

__all__ = [
    "Job", "PipelineRequest", "Request", "Trial", "Watch", "Wish", "build", "capture",
    "compare", "coverage", "diff", "doctor", "explain", "export", "find_cluster", "find_rules",
    "init", "iopddl", "is_of_profile", "plan", "plan_profile", "profile", "read_frontier",
    "read_origin", "reasons", "report", "run", "save_choice", "save_graph", "save_plan", "save_trace",
    "simulate", "study", "tune", "validate", "verify", "verify_rules", "why_not",
]  # fmt: skip


def plan(
    model: str | nn.Module,
    cluster: Cluster | str | None = None,
    *,
    batch: Batch | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    memory_limit: str | float | None = None,
    optimizer: str = "adamw",
    precision: str = "auto",
    seed: int = 0,
    measure: str = "auto",
    batch_norm: str = "local",
    clip: float = 0.0,
    accumulation: str = "float32",
    gradient_dtype: str = "parameter",
    error_feedback: bool = False,
    recompute: str = "auto",
    seed_plan: str = "",
    mode: str = "min-time",
    deadline: str | float | None = None,
    method: str = "exact",
    seconds: float | None = None,
    proposals: int | None = None,
    outputs: tuple[str, ...] = (),
    spacing: float | None = None,
    trials: int | None = None,
    costs: str = "",
) -> Frontier:
    """Return the frontier of plans for a model on a cluster (None: this machine).

    ``seed_plan`` names one strategy (``megatron``, ``summa``, ``tesseract``, ``cube``, ``spatial``, with a grid after
    a colon if wanted) or a parts file: then it is planned and nothing is searched. ``clip`` is the largest global
    norm of the gradients, held in the plan (0: not clipped). ``accumulation="own"`` adds gradients up in the
    parameters' dtype; they travel in ``gradient_dtype`` (``error_feedback``: what that loses is added to the next).
    ``mode`` is what to look for: ``min-time``, ``min-devices``, ``min-money``, or ``curve`` (the fastest plan for
    each number of devices, as far as no other beats it), ``deadline`` the most that a step may take. ``seconds`` end
    the search with the best so far; ``method="mcmc"`` draws ``proposals`` at random instead of searching exactly, or
    as many as it can in ``seconds``. ``spacing=0.02`` looks for plans between neighbours on the frontier that are
    more than 2 % apart in both time and memory. On this machine the ``trials`` best plans of a model given by name
    are run for some steps beside plain data parallelism (None: 4). ``costs`` is a plan file that ``tune`` has
    written, for what it fitted to measured steps. Deterministic, unless given ``seconds``: equal inputs, measurements
    and seed give equal plans. Raises NoPlan when nothing fits.
    """
    request = Request(
        global_batch=global_batch,
        seq=seq,
        memory_limit=memory_limit,
        optimizer=optimizer,
        precision=precision,
        seed=seed,
        measure=measure,
        batch_norm=batch_norm,
        clip=clip,
        accumulation=accumulation,
        gradient_dtype=gradient_dtype,
        error_feedback=error_feedback,
        recompute=recompute,
        seed_plan=seed_plan,
        mode=mode,
        deadline=deadline,
        method=method,
        seconds=seconds,
        proposals=proposals,
        outputs=outputs,
        spacing=spacing,
        trials=trials,
        costs=costs,
    )
    return study(model, cluster, request, batch=batch).frontier


def profile(model: str = "", request: Request | None = None, watch: Watch | None = None) -> Profile:
    """Measure this machine's links and, given a model, the operators its best plans would run."""
    from shardwright.verbs.measure import known_costs, measure_links

    request, watch = request or Request(), watch or Watch()
    machine, _ = find_cluster(None, watch)
    count = measure_links(machine, watch, again=request.measure == "always")
    if model:
        count += study(model, None, request, watch).num_measured
    costs = known_costs()
    known = len(costs.operators) + sum(len(points) for _, points in costs.collectives)
    return Profile(cluster=machine, costs=costs, num_measured=count, num_known=known)


def simulate(
    plan: Plan | Frontier | str | Path,
    model: str | nn.Module = "",
    cluster: Cluster | str = "",
    *,
    batch: Batch | None = None,
    pick: int | None = None,
) -> PlanStory:
    """Lower, price and simulate a plan: its Program, Timeline, half-width and operators."""
    document = document_of(plan)
    chosen = picked(document.frontier, pick)
    graph, machine, costs = evidence(document, chosen, model, cluster, batch)
    return tell(chosen, graph, machine, costs)


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


def reasons(
    plan: Plan | Frontier | str | Path,
    model: str | nn.Module = "",
    cluster: Cluster | str = "",
    *,
    batch: Batch | None = None,
    pick: int | None = None,
    watch: Watch | None = None,
) -> Explanation:
    """Return why this plan: its decisions with their runners-up, shadow prices, critical path."""
    from shardwright.verbs.reasons import explanation

    return explanation(plan, model, cluster, batch=batch, pick=pick, watch=watch)


def diff(
    one: Plan | Frontier | str | Path,
    other: Plan | Frontier | str | Path,
    model: str | nn.Module = "",
    cluster: Cluster | str = "",
    *,
    batch: Batch | None = None,
) -> Contrast:
    """Lay two plans of one model and cluster side by side: times, memory, choices, and why."""
    stories = [simulate(plan, model, cluster, batch=batch) for plan in (one, other)]
    return contrast(stories[0], stories[1])


def why_not(
    plan: Plan | Frontier | str | Path,
    wish: Wish,
    model: str | nn.Module = "",
    cluster: Cluster | str = "",
    *,
    batch: Batch | None = None,
    pick: int | None = None,
) -> Contrast:
    """Lay the best plan that does what you have in mind beside a plan, with what decides.

    Raises InputError where there is no such plan.
    """
    from shardwright.planner.search import room
    from shardwright.planner.search import why_not as find
    from shardwright.verbs.reasons import training_of

    document = document_of(plan)
    chosen = picked(document.frontier, pick)
    graph, machine, costs = evidence(document, chosen, model, cluster, batch)
    other = find(graph, machine, costs, wish, training=training_of(chosen.strategy))
    stories = [tell(one, graph, machine, costs) for one in (chosen, other)]
    return contrast(stories[0], stories[1], room(machine))


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
    return build_executor(chosen, model, where, optimizer=optimizer, batch=batch, options=options)


def run(
    plan: str | Path, job: Job, watch: Watch | None = None, *, pick: int | None = None
) -> TrainingRun:
    """Train on this machine: one process per device of the plan, started and watched from here."""
    from shardwright.verbs.training import start

    document = document_of(plan)
    return start(picked(document.frontier, pick), document.origin, job, watch or Watch()).run


def compare(
    plan: str | Path, job: Job, watch: Watch | None = None, *, pick: int | None = None
) -> Comparison:
    """Train a few steps, and lay the measured timeline beside the predicted one."""
    from dataclasses import replace

    from shardwright.verbs.training import start

    document = document_of(plan)
    chosen = picked(document.frontier, pick)
    story = simulate(plan, job.model, pick=pick)
    outcome = start(chosen, document.origin, replace(job, profiles=True), watch or Watch())
    if outcome.timeline is None:
        raise InputError("the ranks measured no step; train more steps (--steps)")
    story = replace(story, measured=with_process(outcome.timeline, story.process_bytes))
    rows = differences(story)
    return Comparison(story=story, rows=rows, training=outcome.run)


def tune(plan: str | Path, model: str, *, out: str | Path = "", tries: int | None = None) -> Tuning:
    """Run a file's plans in turns where they are to run, beside plain data parallelism, and write the
    file again: the fastest measured chosen, costs fitted. Every rank calls it, under torchrun."""
    from shardwright.verbs import tuning

    return tuning.tune(plan, model, out=out, tries=tries)


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


def report(
    plan: Plan | Frontier | str | Path,
    model: str | nn.Module = "",
    cluster: Cluster | str = "",
    *,
    batch: Batch | None = None,
    out: str | Path = "report.html",
    trace: str | Path = "",
    watch: Watch | None = None,
) -> Report:
    """Write one self-contained page about all plans of a frontier, and a trace of the chosen one.

    It says why the chosen plan, as ``explain`` does."""
    from shardwright.verbs.reasons import with_reasons

    document, watch = document_of(plan), watch or Watch()
    frontier = document.frontier
    facts = evidence(document, frontier.best, model, cluster, batch)
    graph, machine, costs = facts
    stories = with_reasons(
        [tell(one, graph, machine, costs) for one in frontier.plans],
        frontier.chosen, facts, document.origin.memory_limit, watch,
    )  # fmt: skip
    story = Story(
        graph=graph,
        cluster=machine,
        plans=stories,
        chosen=frontier.chosen,
        provenance=provenance(frontier.best, machine, costs),
    )
    page = write_atomically(out, page_text(story).encode())
    return Report(page=page, trace=save_trace(stories[frontier.chosen], trace))


def read_frontier(plan: Plan | Frontier | str | Path, pick: int | None = None) -> Frontier:
    """Return a plan or plan file as a frontier, with ``pick`` chosen instead where it is given."""
    frontier = document_of(plan).frontier
    picked(frontier, pick)
    return frontier if pick is None else Frontier(plans=frontier.plans, chosen=pick)


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


def validate(path: str | Path, watch: Watch | None = None) -> Validation:
    """Plan published runs exactly as they are printed, and lay predicted beside published."""
    from shardwright.verbs.validation import validate as lay_beside

    return lay_beside(path, watch)


def doctor() -> tuple[Check, ...]:
    """Look at what is installed and what this machine can do. Imports no torch."""
    from shardwright.verbs.checks import all_checks

    return all_checks()


def save_plan(study: Study, path: str | Path) -> Path:
    """Write a study's frontier with its origin and cluster."""
    return write_plan(path, study.frontier, origin=study.origin, cluster=study.cluster)


def save_graph(graph: OperatorGraph, path: str | Path) -> Path | None:
    """Write a graph; an empty path writes nothing."""
    return write_graph(path, graph) if path else None


def save_trace(story: PlanStory, path: str | Path) -> Path | None:
    """Write a Perfetto trace (gzip where the name ends so); an empty path writes nothing."""
    data = trace_bytes(story, compressed=str(path).endswith(".gz")) if path else b""
    return write_atomically(path, data) if path else None
