"""Where nothing fits: the smallest changes of the request under which a plan is really found.

Each sort of change is tried by itself: memory, devices, batch, sequence, precision, recomputation,
batch norm, optimizer, deadline, and searching freely where a strategy was named. What helps is kept with the plan
that shows it; guesses are not made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.counts import GIB
from shardwright.core.explanation import Relaxation
from shardwright.core.graph import OperatorGraph
from shardwright.core.legality import divisors
from shardwright.core.plan import Plan
from shardwright.core.strategy import MIXED
from shardwright.errors import InputError, NoPlan
from shardwright.operators.splitting import find_samples
from shardwright.planner.search import Limits, room
from shardwright.reasons import grown, some_plan
from shardwright.report.reasons import relaxations_text
from shardwright.report.units import bytes_text, seconds_text
from shardwright.verbs.request import OPTIMIZER_STATES, Request, Watch
from shardwright.verbs.subject import Batch, captured_for, own_batch_size, training_for

if TYPE_CHECKING:
    from torch import nn

# Devices are tried so many times as many, sequences down to so few tokens.
TIMES, SHORTEST = (2, 4, 8, 16), 16


@dataclass(frozen=True, eq=False, kw_only=True)
class Question:
    """What could not be answered: the model, its graph, where, and what was asked of the plan.

    ``nearest`` is the smallest plan found, ``is_local``: the cluster is this machine, which cannot be made larger.
    """

    model: str | nn.Module
    batch: Batch | None
    graph: OperatorGraph
    cluster: Cluster
    is_local: bool
    costs: CostTable
    request: Request
    nearest: Plan | None = None


def relaxed(question: Question, refused: NoPlan, watch: Watch) -> NoPlan:
    """Return the refusal with the smallest changes that help in place of its guesses.

    Stopping early keeps those found by then. Where the search itself was stopped nothing is proved.
    """
    if watch.stop():
        problem = f"{refused.problem}, of those looked at before the search was stopped"
        return NoPlan(problem, remedy=f"give it more time, or {refused.remedy}")
    found = tuple(_relaxations(question, watch))
    if not found and watch.stop():
        return NoPlan(refused.problem, remedy=refused.remedy)
    remedy = "no single change of memory, devices, batch or precision that was tried helps"
    remedy = relaxations_text(found) if found else remedy
    if blocker := find_samples(question.graph).blocker:
        remedy += f"; microbatches need less memory, but this model allows only one: {blocker}"
    return NoPlan(refused.problem, remedy=remedy, relaxations=found)


def _relaxations(question: Question, watch: Watch) -> Iterator[Relaxation]:
    sorts: tuple[tuple[str, Callable[[Question, Watch], Relaxation | None]], ...] = (
        ("a free search", _free_search),
        ("memory", _memory),
        ("the deadline", _deadline),
        ("recomputation", _recomputation),
        ("precision", _precision),
        ("batch norm", _batch_norm),
        ("devices", _devices),
        ("batch", _batch),
        ("sequence", _sequence),
        ("optimizer", _optimizer),
    )
    for number, (name, find) in enumerate(sorts):
        if watch.stop():
            return
        watch.tell(f"nothing fits; trying what would help: {name}", number / len(sorts))
        found = find(question, watch)
        if found is not None:
            yield found


def _try(
    question: Question, request: Request, watch: Watch, cluster: Cluster | None = None
) -> Plan | None:
    """Return a plan for a changed request, or a changed cluster, if there is one."""
    captured = ("global_batch", "seq", "precision", "batch_norm")
    graph = question.graph
    if any(getattr(request, name) != getattr(question.request, name) for name in captured):
        try:
            graph = captured_for(question.model, request, question.batch).graph
        except InputError:
            return None
    return some_plan(
        graph,
        cluster or question.cluster,
        question.costs,
        training=training_for(request),
        limits=Limits(memory_bytes=request.memory_bytes),
        deadline=request.deadline_seconds,
        stop=watch.stop,
    )


def _said(what: str, option: str, plan: Plan | None) -> Relaxation | None:
    if plan is None:
        return None
    return Relaxation(
        what=what,
        option=option,
        label=plan.strategy.label,
        step_seconds=plan.predicted.step_seconds,
        peak_bytes=plan.predicted.peak_bytes,
    )


def _free_search(question: Question, watch: Watch) -> Relaxation | None:
    if not question.request.seed_plan:
        return None
    plan = _try(question, question.request, watch)
    return _said("another strategy", "without --seed-plan", plan)


def _memory(question: Question, watch: Watch) -> Relaxation | None:
    """Ask for as much memory as the smallest plan needs; nothing where memory is not the problem."""
    del watch
    plan, request, cluster = question.nearest, question.request, question.cluster
    if plan is None:
        return None
    needed, limit = (
        plan.predicted.peak_bytes,
        room(cluster, Limits(memory_bytes=request.memory_bytes)),
    )
    scale, unit = (GIB, "GiB") if needed >= GIB else (2**10, "KiB")
    option = f'--memory-limit "{math.ceil(needed / scale * 1000) / 1000:.10g} {unit}"'
    what = f"{bytes_text(needed)} per device instead of {bytes_text(limit)}"
    return _said(what, option if needed <= cluster.least_memory else "", plan)


def _deadline(question: Question, watch: Watch) -> Relaxation | None:
    request = question.request
    if request.deadline_seconds == math.inf:
        return None
    from shardwright.planner.search import search

    try:
        plan = search(
            question.graph, question.cluster, question.costs, stop=watch.stop,
            training=training_for(request), limits=Limits(memory_bytes=request.memory_bytes),
        ).best  # fmt: skip
    except NoPlan:
        return None
    seconds = plan.predicted.step_seconds
    if seconds <= request.deadline_seconds:
        return None
    return _said(
        f"{seconds_text(seconds)} per step", f'--deadline "{math.ceil(seconds * 1e6)} us"', plan
    )


def _recomputation(question: Question, watch: Watch) -> Relaxation | None:
    if question.request.recompute == "auto":
        return None
    plan = _try(question, replace(question.request, recompute="auto"), watch)
    return _said("recomputation as memory requires", "--recompute auto", plan)


def _precision(question: Question, watch: Watch) -> Relaxation | None:
    if question.request.precision in MIXED:
        return None
    plan = _try(question, replace(question.request, precision="bfloat16"), watch)
    return _said("mixed precision", "--precision bfloat16", plan)


def _batch_norm(question: Question, watch: Watch) -> Relaxation | None:
    """Take statistics over microbatches: those of the whole batch allow none."""
    if question.request.batch_norm == "local" or not find_samples(question.graph).blocker:
        return None
    plan = _try(question, replace(question.request, batch_norm="local"), watch)
    return _said("statistics of batch norm over each microbatch", "--batch-norm local", plan)


def _optimizer(question: Question, watch: Watch) -> Relaxation | None:
    """Try optimizers with less state, the most state first."""
    states = OPTIMIZER_STATES[question.request.optimizer]
    for name in ("momentum", "sgd"):
        if OPTIMIZER_STATES[name] < states:
            plan = _try(question, replace(question.request, optimizer=name), watch)
            if plan is not None:
                return _said("an optimizer with less state", f"--optimizer {name}", plan)
    return None


def _devices(question: Question, watch: Watch) -> Relaxation | None:
    """Double whole hosts (or the devices of the only host) until a plan fits, then go back.

    The most are tried first: where those do not help, fewer are taken not to."""
    cluster = question.cluster
    if question.is_local:
        return None
    hosts = [device.host for device in cluster.devices]
    lonely = cluster.switches[hosts[-1]].parent < 0
    unit = 1 if lonely else hosts.count(hosts[-1])
    total = cluster.num_devices

    def fits(extra: int) -> Plan | None:
        larger = grown(cluster, total + extra * unit)
        return None if larger is None else _try(question, question.request, watch, larger)

    steps = [max(1, total * (times - 1) // unit) for times in TIMES]
    found = _fewest(steps, fits, watch.stop) if fits(steps[-1]) is not None else None
    if found is None:
        return None
    extra, plan = found
    return _said(f"{total + extra * unit} such devices instead of {total}", "", plan)


def _fewest(
    steps: list[int], fits: Callable[[int], Plan | None], stop: Callable[[], bool]
) -> tuple[int, Plan] | None:
    """Return the fewest that fit, up to the first of ascending steps that does, by bisection."""
    low = 0
    for extra in steps:
        if stop():
            return None
        plan = fits(extra)
        if plan is not None:
            break
        low = extra
    else:
        return None
    while extra - low > 1 and not stop():
        middle = (low + extra) // 2
        fewer = fits(middle)
        if fewer is None:
            low = middle
        else:
            extra, plan = middle, fewer
    return extra, plan


def _batch(question: Question, watch: Watch) -> Relaxation | None:
    """Find the largest divisor of the global batch that fits, if the smallest does."""
    request = question.request
    if request.global_batch is None and not isinstance(question.model, str):
        return None  # an example batch says how large it is
    whole = request.global_batch or own_batch_size(str(question.model))
    sizes = list(divisors(whole, whole - 1))

    def fits(size: int) -> Plan | None:
        return _try(question, replace(request, global_batch=size), watch)

    found = _largest(sizes, fits)
    if found is None:
        return None
    size, plan = found
    return _said(f"a global batch of {size} instead of {whole}", f"--global-batch {size}", plan)


def _largest(sizes: list[int], fits: Callable[[int], Plan | None]) -> tuple[int, Plan] | None:
    """Return the largest of ascending sizes that fits, by bisection; None if the smallest does not.

    The largest is tried second: it often fits, and every size is a capture of its own."""
    plan = fits(sizes[0]) if sizes else None
    if plan is None:
        return None
    low, high, best = 0, len(sizes), (sizes[0], plan)
    if high > 1 and (plan := fits(sizes[-1])) is not None:
        return sizes[-1], plan
    high -= 1
    while high - low > 1:
        middle = (low + high) // 2
        plan = fits(sizes[middle])
        low, high = (middle, high) if plan is not None else (low, middle)
        best = (sizes[middle], plan) if plan is not None else best
    return best


def _sequence(question: Question, watch: Watch) -> Relaxation | None:
    request, seq = question.request, question.request.seq
    if seq is None:
        return None
    sizes = [seq >> power for power in range(seq.bit_length(), 0, -1) if seq >> power >= SHORTEST]
    found = _largest(sizes, lambda size: _try(question, replace(request, seq=size), watch))
    if found is None:
        return None
    return _said(f"{found[0]} tokens per sample instead of {seq}", f"--seq {found[0]}", found[1])
