"""The answer: plans of the evaluations that fit, the certificate, and the reasons in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import filterfalse

from shardwright.core.counts import GIB
from shardwright.core.plan import Bound, Frontier, Objective, Plan, digest_of
from shardwright.core.staleness import MEANS
from shardwright.core.strategy import MIXED
from shardwright.core.version import VERSION
from shardwright.errors import NoPlan
from shardwright.planner.cost.feed import input_seconds, input_words, least_input_seconds
from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.model.arrangements import global_batch
from shardwright.planner.model.context import Context
from shardwright.planner.search.bounds import Bounds
from shardwright.planner.search.goals import FASTEST, Goal
from shardwright.planner.search.labels import told_apart

MODEL = (
    "no plan of the searched arrangements is faster when costs add up, equal blocks are treated "
    "alike, and gradient synchronisation and parameter gathers overlap computation as well as the "
    "cluster lets them"
)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Findings:
    """What a search found: evaluations in the order they were reached, sentences about strategies that
    turned out illegal, the least additive seconds proved for the space, and whether the search ran to its end.
    ``packed_bound`` is the least for plans that compress gradients and have two chunks a device at most. ``limit``
    is the memory limit in bytes per device, ``same`` the share below which the search takes two step times for
    the same.
    """

    context: Context
    limit: float
    evaluations: tuple[Evaluation, ...]
    refused: tuple[str, ...]
    is_complete: bool
    bounds: Bounds = field(default_factory=Bounds)
    same: float = 0.0
    packed_bound: float = math.inf

    @property
    def fitting(self) -> list[Evaluation]:
        """Verdicts within the memory limit, fastest first."""
        return fitting(self.evaluations, self.limit)


def fitting(judged: tuple[Evaluation, ...] | list[Evaluation], limit: float) -> list[Evaluation]:
    """Return the evaluations within a memory limit, fastest first, of equals the fewest devices."""
    return sorted(
        (one for one in judged if one.bytes <= limit),
        key=lambda one: (one.seconds, one.bytes, len(one.strategy.devices), one.strategy.label),
    )


def answer(found: Findings, seed: int, goal: Goal = FASTEST) -> Frontier:
    """Make plans of the non-dominated evaluations that fit, and choose the fastest or cheapest.

    Of plans with equal objectives the one on the fewest devices stays; of plans that nobody could
    tell apart the fastest. Raises NoPlan where nothing fits or meets the deadline.
    """
    evaluations = found.fitting
    if not evaluations:
        raise _no_plan(found)
    if evaluations[0].seconds > goal.deadline:
        raise late(evaluations[0].strategy.label, evaluations[0].seconds, goal.deadline)
    kept = _edge(evaluations, found.same)
    chosen = 0
    if goal.mode == "min-money":
        in_time = [place for place, one in enumerate(kept) if one.seconds <= goal.deadline]
        chosen = min(in_time, key=lambda place: (kept[place].objective.dollars, place))
    plans = told_apart([make_plan(found, evaluation, seed) for evaluation in kept])
    reason = _reason(found, kept[chosen], goal)
    plans[chosen] = replace(plans[chosen], reason=reason)
    return Frontier(plans=tuple(plans), chosen=chosen)


def late(label: str, seconds: float, deadline: float, tried: str = "") -> NoPlan:
    """Complain that the fastest plan that fits is too slow, and by how much."""
    return NoPlan(
        f"{tried}every step must end within {deadline:.4g} s, but the fastest plan that fits "
        f"({label}) takes {seconds:.4g} s",
        remedy=f"allow {seconds:.4g} s, or use more or faster devices, or a smaller global batch",
    )


def named_answer(found: Findings, seed: int, name: str) -> Frontier:
    """Make a plan of the one strategy that was asked for by name. Raises NoPlan if it is too big."""
    frontier = answer(found, seed)
    plan = replace(
        frontier.best,
        method="named strategy, simulation",
        reason=f"{frontier.best.strategy.label} was asked for by name ({name}); nothing was searched.",
    )
    return Frontier(plans=(plan,), chosen=0)


def are_same(one: float, other: float, share: float) -> bool:
    """Whether two numbers differ by no more than a share of the larger."""
    return abs(one - other) <= share * max(one, other)


def _is_alike(one: Evaluation, other: Evaluation, same: float) -> bool:
    """Whether two plans are the same in time, memory and money."""
    is_near = are_same(one.seconds, other.seconds, same) and are_same(one.bytes, other.bytes, same)
    return is_near and is_no_less(one, other, same)


def is_no_less(one: Evaluation, other: Evaluation, share: float) -> bool:
    """Whether a plan needs as much memory and money as another, but for a share, or more, is no less late
    and loses as much."""
    here, there = one.objective, other.objective
    return (
        here.peak_bytes >= there.peak_bytes * (1 - share)
        and here.dollars >= there.dollars * (1 - share)
        and here.staleness >= there.staleness
        and here.lost >= there.lost
    )


def make_plan(found: Findings, evaluation: Evaluation, seed: int) -> Plan:
    """Write an evaluation as a plan, with what it was found for."""
    context = found.context
    notes = [*context.graph.notes, *_of_input(found, evaluation)]
    if not found.is_complete:
        notes.append("the search did not end: this is the best found so far, without a bound")
    if context.facts.samples.blocker:
        notes.append(f"one microbatch only: {context.facts.samples.blocker}")
    if note := MEANS[evaluation.strategy.pipeline.staleness]:
        notes.append(f"no flush: {note}")
        if evaluation.strategy.clips:
            notes.append(
                "each stage clips its own gradients, by their norm: none waits for the others'"
            )
    return Plan(
        strategy=evaluation.strategy,
        predicted=evaluation.objective,
        model=context.graph.name,
        graph_fingerprint=context.graph.fingerprint,
        cluster_name=context.cluster.name,
        cluster_fingerprint=context.cluster.fingerprint,
        costs_fingerprint=context.table.fingerprint,
        global_batch=context.graph.batch_rows,
        method="exact elimination, partition program, simulation",
        seed=seed,
        version=VERSION,
        bound=_bound(found, evaluation),
        sources=evaluation.sources,
        notes=tuple(notes),
        outputs=tuple(name for name, _ in context.graph.outputs),
        predicted_for=digest_of(evaluation.strategy),
    )


def _bound(found: Findings, evaluation: Evaluation) -> Bound | None:
    """Return the certificate: the least additive cost of any arrangement searched, for as many chunks a device
    as the plan has, and of plans with a split backward for any order.

    A plan outside those arrangements (a grid) may be faster; then it says nothing. Nor does it of asynchronous
    pipelines, and of compressed gradients in orders that wait less.
    """
    is_known = found.is_complete and math.isfinite(found.bounds.least())
    if not is_known or evaluation.bytes > found.limit or evaluation.objective.staleness:
        return None
    flushed = [one for one in found.fitting if not one.objective.staleness]
    certificate = _of_its_kind(found, evaluation, flushed)
    if certificate is None:
        return None
    bound, alike, model = certificate
    least = max(bound, least_input_seconds(global_batch(found.context), found.context.cluster))
    if min(one.seconds for one in alike) < least * (1 - 1e-9):
        return None
    return Bound(step_seconds=least, gap=max(0.0, 1 - least / evaluation.seconds), model=model)


def _of_its_kind(
    found: Findings, evaluation: Evaluation, flushed: list[Evaluation]
) -> tuple[float, list[Evaluation], str] | None:
    """Return the bound of plans like one, those of them that were found, and what it assumes."""
    chunks, splits = max(evaluation.strategy.chunks, 2), _splits(evaluation)
    if evaluation.objective.lost > 0:
        bound = min(found.bounds.least(), found.packed_bound)
        model = f"{MODEL}, if compressing took nothing"
        return None if splits or chunks > 2 else (bound, [*filterfalse(_splits, flushed)], model)
    if splits:
        return found.bounds.busy(), flushed, f"{MODEL}, whatever devices wait for"
    return _of_whole(found, flushed, chunks)


def _of_whole(
    found: Findings, flushed: list[Evaluation], chunks: int
) -> tuple[float, list[Evaluation], str]:
    """Return the same of plans whose backwards are whole and lose nothing, with so many chunks a device."""
    few = [one for one in flushed if one.strategy.chunks <= chunks]
    dense = [one for one in few if one.objective.lost <= 0]
    whole = [*filterfalse(_splits, dense)]
    limits = (
        (flushed, few, f", with {chunks} chunks a device at most"),
        (few, dense, ", without compressing gradients"),
        (dense, whole, ", and no backward is split"),
    )
    said = [words for before, after, words in limits if len(after) < len(before)]
    return found.bounds.least(chunks), whole, "".join([MODEL, *said])


def _splits(evaluation: Evaluation) -> bool:
    return evaluation.strategy.pipeline.splits_backward


def _edge(evaluations: Sequence[Evaluation], same: float) -> list[Evaluation]:
    """Return the evaluations that no other dominates, the first of those that nobody could tell apart."""
    best: dict[Objective, Evaluation] = {}
    for evaluation in evaluations:
        best.setdefault(evaluation.objective, evaluation)
    kept: list[Evaluation] = []
    for objective in sorted(best):
        is_dominated = any(other.dominates(objective) for other in best)
        if not is_dominated and not any(_is_alike(best[objective], one, same) for one in kept):
            kept.append(best[objective])
    return kept


def _unlike(found: Findings, best: Evaluation) -> list[Evaluation]:
    """Return what fits and has another name and another objective."""
    label, objective = best.strategy.label, best.objective
    return [j for j in found.fitting if j.strategy.label != label and j.objective != objective]


def _reason(found: Findings, best: Evaluation, goal: Goal) -> str:
    is_cheapest = goal.mode == "min-money"
    others = _unlike(found, best)
    dollars = f", {best.objective.dollars:.3g} USD per step" if is_cheapest else ""
    in_time = f" and {goal.deadline:.4g} s" if goal.deadline < math.inf else ""
    text = (
        f"{best.strategy.label} is the {'cheapest' if is_cheapest else 'fastest'} of "
        f"{len(found.evaluations)} simulated plans within {found.limit / GIB:.1f} GiB per device{in_time} "
        f"({best.seconds:.4g} s, {best.bytes / GIB:.2f} GiB{dollars})"
    )
    if others and not is_cheapest:
        behind = others[0].seconds / best.seconds - 1
        text += f", {behind:.1%} ahead of {others[0].strategy.label}"
    elif found.fitting[0].seconds < best.seconds:
        fastest = found.fitting[0]
        text += (
            f"; the fastest, {fastest.strategy.label}, takes {fastest.seconds:.4g} s and "
            f"{fastest.objective.dollars:.3g} USD"
        )
    bound = None if is_cheapest else _bound(found, best)
    if bound is not None:
        text += f"; the lower bound is {bound.step_seconds:.4g} s, a gap of {bound.gap:.1%}"
    return text + "."


def _of_input(found: Findings, evaluation: Evaluation) -> tuple[str, ...]:
    """Say where a plan waits for its input, and which one of fewer devices waits no longer."""
    if not 0 < evaluation.seconds * (1 - 1e-9) <= input_seconds(evaluation.feeding):
        return ()
    devices = evaluation.strategy.devices
    text = input_words(found.context.cluster, evaluation.feeding, evaluation.seconds, devices)
    alike = [
        one
        for one in found.fitting
        if one.seconds <= evaluation.seconds * 1.01 and len(one.strategy.devices) < len(devices)
    ]
    if not alike:
        return (text,)
    least = min(alike, key=lambda one: (len(one.strategy.devices), one.seconds))
    count = len(least.strategy.devices)
    return (f"{text}; {least.strategy.label} is as fast on {count} of the {len(devices)} devices",)


def _size(count: float) -> str:
    """Write bytes in the unit that leaves digits before the point."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.2f} {unit}"
    return f"{count:.0f} bytes"


def _no_plan(found: Findings) -> NoPlan:
    if not found.evaluations:
        why = "; ".join(found.refused[:3]) or "no arrangement of the devices divides the batch"
        return NoPlan(
            f"no plan could be made: {why}",
            remedy="choose a global batch that more devices divide",
        )
    nearest = min(found.evaluations, key=lambda j: j.bytes)
    stage = max(range(len(nearest.stage_bytes)), key=lambda s: nearest.stage_bytes[s])
    missing = nearest.bytes - found.limit
    return NoPlan(
        f"every plan must fit {_size(found.limit)} per device, but the smallest found "
        f"({nearest.strategy.label}) needs {_size(nearest.bytes)} on stage {stage}, "
        f"{_size(missing)} too much",
        remedy=_remedy(found, nearest),
        nearest=make_plan(found, nearest, 0),
    )


def _remedy(found: Findings, nearest: Evaluation) -> str:
    more = math.ceil(found.context.cluster.num_devices * nearest.bytes / found.limit)
    ways = [f"use about {more} such devices", "a smaller global batch", "shorter sequences"]
    if found.context.training.precision not in MIXED:
        ways.append("bfloat16 precision")
    if found.context.facts.samples.blocker:
        ways.append(f"a model that allows microbatches ({found.context.facts.samples.blocker})")
    return ", ".join(ways[:-1]) + " or " + ways[-1]
