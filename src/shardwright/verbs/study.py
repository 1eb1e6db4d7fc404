"""A planning session: capture, search, and on this machine measure in between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.chains import Chain, sample
from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Frontier, Plan
from shardwright.core.schedules import refusal
from shardwright.core.strategy import Strategy
from shardwright.errors import InputError, NoPlan
from shardwright.files.partsfile import read_parts
from shardwright.files.planfile import Origin
from shardwright.operators.splitting.samples import batch_size, find_samples
from shardwright.planner.schedule import crews_of
from shardwright.planner.search import (
    Context,
    Goal,
    Limits,
    Progress,
    Survey,
    best_of,
    curve,
    survey,
)
from shardwright.planner.space import ModulePart, Placement, Seed
from shardwright.report.units import seconds_text
from shardwright.verbs.compression import notes_of
from shardwright.verbs.coverage import coverage
from shardwright.verbs.evidence import fitted_costs
from shardwright.verbs.narrate import spread_of
from shardwright.verbs.neighbours import Neighbours
from shardwright.verbs.orders import read_lines
from shardwright.verbs.precision import captured_on
from shardwright.verbs.relaxation import Question, relaxed
from shardwright.verbs.request import MCMC_SECONDS, Request, Watch
from shardwright.verbs.results import Study
from shardwright.verbs.stalls import with_loader
from shardwright.verbs.subject import Batch, find_cluster, is_here, training_for

if TYPE_CHECKING:
    from torch import nn

    from shardwright.runtime.capture import Captured
    from shardwright.verbs.measure import Bench
    from shardwright.verbs.pace import Pace
    from shardwright.verbs.racing import Entry


def study(
    model: str | nn.Module,
    cluster: Cluster | str | None = None,
    request: Request | None = None,
    watch: Watch | None = None,
    *,
    batch: Batch | None = None,
    bench: Bench | None = None,
) -> Study:
    """Plan, and return the frontier with the graph, cluster and costs it rests on.

    On this machine, or a ``bench``: plan, measure what the best plans would run, plan again, until those were measured.
    """
    request, asked = request or Request(), watch or Watch()
    watch = _bounded(asked, request)
    limits = Limits(
        memory_bytes=request.memory_bytes, spacing=request.spacing, staleness=request.staleness
    )
    wanted = _wanted(request.seed_plan, request.order)  # both refused before anything is measured
    given = _fitted(request, is_local=is_here(cluster))
    machine, is_local = find_cluster(cluster, watch)
    captured, request, told = _captured(machine, model, request, batch, watch)
    graph = captured.graph
    measures, neighbours = is_local and request.measure != "never", Neighbours()
    num_links, share = 0, 1.0
    if measures:
        (machine, num_links), share = _with_links(machine, watch), 0.5
    else:
        given = _with_known(given, machine, request)
    machine = _with_loader(machine, graph, request, watch)
    solver = _Solver(graph, machine, request, limits, watch, wanted)
    solver.share = share
    question = Question(
        model=model,
        batch=batch,
        graph=graph,
        cluster=machine,
        is_local=is_local,
        costs=given,
        request=request,
    )
    costs, frontier, num_shards = _answered(question, captured, watch, solver, bench)
    seen = neighbours if num_links + num_shards else None
    answer = costs, frontier
    costs, frontier, notes = _paced(question, captured, answer, solver, bench, seen)
    entry = _entry(question, solver)
    if entry is not None and solver.last is not None:
        frontier, more = _after_trials(entry, question, captured, watch, solver)
        costs, num_shards = solver.last.context.table, num_shards + more
    watch.tell("estimating uncertainty", 1.0)
    context = solver.context(costs)
    return Study(
        graph=graph,
        cluster=machine,
        costs=costs,
        frontier=frontier,
        origin=_origin(question, costs),
        spreads=tuple(spread_of(one, context, solver.last) for one in frontier.plans),
        curve=solver.points,
        plain=solver.plain,
        num_measured=num_links + num_shards,
        is_complete=not (watch if request.method == "exact" else asked).stop(),
        notes=(*told, *notes, *notes_of(frontier.best.strategy.gradient_sync, request.optimizer)),
    )


def _with_loader(machine: Cluster, graph: OperatorGraph, request: Request, watch: Watch) -> Cluster:
    """Measure the loader that is asked for, at the graph's batch."""
    if not request.loader:
        return machine
    return with_loader(machine, request.loader, batch_size(graph, find_samples(graph)), watch)


def _captured(
    machine: Cluster, model: str | nn.Module, request: Request, batch: Batch | None, watch: Watch
) -> tuple[Captured, Request, tuple[str, ...]]:
    """Capture a model and tell how far that is; say so where it left no time to search."""
    watch.tell("capturing the model", 0.0)
    from shardwright.runtime.capture.progress import followed

    begin = time.monotonic()
    with watch.at_once(), followed(partial(watch.tell, "capturing the model")):
        captured, request, told = captured_on(machine, model, request, batch)
    if watch.left:
        return captured, request, told
    took = seconds_text(time.monotonic() - begin)
    late = f"capturing the model took {took}, and no time was left to search: give --seconds more than that"
    return captured, request, (*told, late)


def _origin(question: Question, costs: CostTable) -> Origin:
    model, request = question.model, question.request
    return Origin(
        model=model if isinstance(model, str) else "",
        seq=request.seq,
        optimizer=request.optimizer,
        memory_limit=request.memory_bytes,
        unruled=list(coverage(question.graph).replicated),
        factors=dict(costs.factors),
    )


def _paced(
    question: Question,
    captured: Captured,
    answer: tuple[CostTable, Frontier],
    solver: _Solver,
    bench: Bench | None,
    neighbours: Neighbours | None,
) -> tuple[CostTable, Frontier, tuple[str, ...]]:
    """Say what disturbed measuring or, where nothing was measured, see whether the machine is slower or faster than
    its records, and plan again with operators as they are now; on a ``bench``, whose ranks must all plan alike, and where costs
    are fitted to trials of another hour, say it only. To trials costs are fitted, and these are of now."""
    costs, frontier = answer
    if neighbours:
        return costs, frontier, (() if bench else neighbours.notes)
    found = _pace(question, captured, frontier, solver, bench)
    if found is None or found.holds:
        return costs, frontier, ()
    if bench or found.is_fitted or solver.watch.stop():
        return costs, frontier, (found.note,)
    request = replace(question.request, measure="never")
    now = replace(question, costs=found.heeded(costs), request=request)
    costs, frontier, _ = _answered(now, captured, solver.watch, solver, None)
    return costs, frontier, (found.heeds,)


def _pace(
    question: Question,
    captured: Captured,
    frontier: Frontier,
    solver: _Solver,
    bench: Bench | None,
) -> Pace | None:
    """Measure some of the best plan again; None where that is settled otherwise, or not asked for."""
    is_settled = question.request.measure == "never" or _entry(question, solver)
    if is_settled or not (bench or question.is_local) or solver.watch.stop():
        return None
    from shardwright.verbs.pace import pace_of

    facts = captured, (frontier.best.strategy,), question.cluster, question.request
    return pace_of(*facts, solver.watch, bench, solver.last)


def _after_trials(
    entry: Entry, question: Question, captured: Captured, watch: Watch, solver: _Solver
) -> tuple[Frontier, int]:
    """Run the best plans and plan again; return the frontier and how much was measured besides. The
    solver's last survey has the costs fitted to what ran."""
    from shardwright.verbs.measure import refine
    from shardwright.verbs.trials import tried

    missing = replace(question.request, measure="auto")  # each round measures what is new
    count = 0

    def again() -> Survey:
        nonlocal count
        count += refine(captured, question.cluster, missing, watch, solver)[2]
        assert solver.last is not None  # solving made it
        return solver.last

    assert solver.last is not None  # asked of what was searched
    last, frontier = tried(solver.last, entry, again, watch)
    solver.last = last
    return frontier, count


class _Solver:
    """Plans for one request with the costs it is given; ``last`` is what the last search looked at,
    ``points`` the curve where one was asked for."""

    def __init__(
        self,
        graph: OperatorGraph,
        machine: Cluster,
        request: Request,
        limits: Limits,
        watch: Watch,
        wanted: str | Placement,
    ) -> None:
        self.wanted = wanted
        self.graph, self.machine, self.request = graph, machine, request
        self.goal = Goal(mode=request.mode, deadline=request.deadline_seconds)  # type: ignore[arg-type]
        self.how: dict[str, Any] = {
            "training": training_for(request),
            "limits": limits,
            "progress": _search_progress(watch),
            "stop": watch.stop,
        }
        self.watch, self.share = watch, 1.0  # of the seconds left that chains walk in
        self.last: Survey | None = None
        self.points: tuple[Plan, ...] = ()

    @property
    def plain(self) -> tuple[Plan, ...]:
        """Plain data parallelism, where a search looked at it."""
        return self.last.plain if self.last else ()

    @property
    def rivals(self) -> tuple[Strategy, ...]:
        """A device alone, where a search found that it might be as fast as what it chose."""
        return self.last.alone if self.last else ()

    def context(self, costs: CostTable) -> Context:
        """Return what was planned at these costs, with what the last search knows of it."""
        if self.last:
            return self.last.context.at(table=costs)
        return Context.of(self.graph, self.machine, costs, self.how["training"])

    def __call__(self, costs: CostTable) -> Frontier:
        request, facts = self.request, (self.graph, self.machine, costs)
        if request.method == "mcmc":
            return sample(
                *facts,
                Chain(seed=request.seed),
                _spent(request, self.share * self.watch.left),
                **self.how,
            )
        how = {**self.how, "seed": request.seed}
        if self.goal.mode == "curve":
            self.points = curve(*facts, **how)
            return best_of(self.points, self.goal)
        found = survey(*facts, goal=self.goal, seed_plan=self.wanted, **how)
        self.last = found if self.wanted else found.settled()
        return self.last.frontier


def _bounded(watch: Watch, request: Request) -> Watch:
    """Let all that can be stopped end once the seconds are over, as a user would stop it."""
    if request.seconds is None:
        return watch
    end = time.monotonic() + request.seconds
    return replace(watch, stop=lambda: watch.stop() or time.monotonic() > end, deadline=end)


def _with_links(machine: Cluster, watch: Watch) -> tuple[Cluster, int]:
    """Measure this machine's links; return it with the measured overlap, and how much was new.

    Before anything is planned: all that is told of a plan rests on one description.
    """
    from shardwright.verbs.measure import local_cluster, measure_links

    count = measure_links(machine, watch)
    return local_cluster(watch), count


def _answered(
    question: Question,
    captured: Captured,
    watch: Watch,
    solve: _Solver,
    bench: Bench | None,
) -> tuple[CostTable, Frontier, int]:
    """Plan, where it is asked for measuring operators in between; return the costs planned with,
    the frontier, and how much was measured. A refusal says what would help."""
    request, machine = question.request, question.cluster
    try:
        if not (bench or question.is_local) or request.measure == "never":
            return question.costs, solve(question.costs), 0
        from shardwright.verbs.measure import known_costs, refine

        if not bench:
            question = replace(question, costs=known_costs(captured.graph.fingerprint))
        return refine(captured, machine, request, watch, solve, bench)
    except NoPlan as refused:
        raise relaxed(replace(question, nearest=refused.nearest), refused, watch) from refused


def _fitted(request: Request, *, is_local: bool) -> CostTable:
    """Return the factors of a tuned plan file, where one was given."""
    if not request.costs:
        return CostTable()
    if is_local:
        raise InputError(
            "this machine is measured, and what was fitted to trials is in its store; leave out the "
            "costs, or name the cluster that they were fitted on"
        )
    return fitted_costs(request.costs)


def _with_known(given: CostTable, machine: Cluster, request: Request) -> CostTable:
    """Return what was measured where a cluster's ranks are, with the factors that were given."""
    if request.measure == "never":
        return given
    from shardwright.verbs.measure import environment_of, known_costs

    return replace(known_costs(where=environment_of(machine)), factors=given.factors)


def _entry(question: Question, solver: _Solver) -> Entry | None:
    """Return what is to be tried on this machine; None where nothing is, as with a loader, which trials leave out."""
    request, model = question.request, question.model
    wanted = request.loader, request.method, request.mode
    searches = wanted == ("", "exact", "min-time") and not solver.wanted
    if not question.is_local or not searches or request.measure == "never":
        return None
    if question.cluster.num_devices < 2 or not isinstance(model, str):
        return None
    from shardwright.verbs.measure import environment
    from shardwright.verbs.racing import TRIED, Entry

    count = TRIED if request.trials is None else request.trials
    if not count:
        return None
    return Entry(
        model=model,
        seq=request.seq,
        optimizer=request.optimizer,
        environment=environment(),
        count=count,
        is_afresh=request.measure == "always",
    )


def _wanted(text: str, order_file: str) -> str | Placement:
    """Return what a parts file (``*.toml``) asks for, or a strategy's name as it is.

    Raises InputError for a schedule that is known but does not train.
    """
    if not text.endswith(".toml"):
        if reason := refusal(text.partition(":")[0]):
            raise InputError(reason)
        return text
    file = read_parts(text)
    order, count = tuple(file.order or ()), file.num_microbatches
    if order_file:
        try:
            crews = crews_of(part.devices for part in file.part)
        except ValueError as error:
            raise InputError(f"{text}: {error}") from None
        remedy = f"give {text} as many sets of devices as there are rows, or the reverse"
        read, _ = read_lines(order_file, len(crews), remedy, crews)
        order, count = read.rows, read.microbatches
    whole = Seed(num_microbatches=count, schedule=file.schedule, recompute=file.recompute)
    parts = tuple(
        ModulePart(
            devices=tuple(part.devices),
            modules=tuple(part.modules),
            seed=Seed(
                data=part.data_degree,
                tensor=part.tensor,
                context=part.context,
                zero=part.zero,
                sequence=part.sequence,
            ),
        )
        for part in file.part
    )
    name = " with ".join(Path(one).name for one in (text, order_file) if one)
    return Placement(name=name, parts=parts, whole=whole, order=order)


def _spent(request: Request, left: float) -> Callable[[int], float]:
    """Return the share of the budget that so many proposals have used, by number or by clock:
    in the seconds ``left``."""
    if request.proposals is not None:
        whole = request.proposals
        return lambda proposals: proposals / whole
    begin = time.monotonic()
    seconds = max(left, 1e-9) if math.isfinite(left) else MCMC_SECONDS
    return lambda proposals: (time.monotonic() - begin) / seconds


def _search_progress(watch: Watch) -> Callable[[Progress], None]:
    def show(progress: Progress) -> None:
        best = seconds_text(progress.best_seconds)
        bound = gap = "-"
        if progress.bound_seconds:
            bound = seconds_text(progress.bound_seconds)
        if progress.bound_seconds and math.isfinite(progress.best_seconds):
            gap = f"{max(0.0, 1 - progress.bound_seconds / progress.best_seconds):.1%}"
        watch.tell(f"searching: best {best}, bound {bound}, gap {gap}", progress.fraction)

    return show
