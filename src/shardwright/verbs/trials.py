"""Trials: the plans predicted fastest are run for some steps beside plain data parallelism, costs are
fitted to what was seen, and planned again, until no untried plan promises more than the prediction
can tell.

The plan chosen is the fastest measured; of those that the measurement cannot tell apart, the
simplest. What was measured is kept in the store, so that planning again tries nothing twice; but what
ran some time ago runs again, the best of it: machines become slower and faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.core.costs import CostTable
from shardwright.core.plan import WARM_STEPS, Frontier, Measured, Plan
from shardwright.core.strategy import Strategy
from shardwright.planner.search import Survey, complexity
from shardwright.report.units import seconds_text
from shardwright.verbs.racing import ROUND_SECONDS, TRIED, Entry, run_trial
from shardwright.verbs.refit import refit
from shardwright.verbs.request import Watch
from shardwright.verbs.shelf import Shelf

if TYPE_CHECKING:
    from shardwright.runtime.race import Laps

# Rounds of trying and planning again.
ROUNDS = 3
# What ran some time ago runs again if it took so much longer than the fastest: more than that is between
# two plans no hour's doing.
NEAR = 0.1
# Of the plans that need less memory than the chosen one, those are shown that need so much less.
LESS = 0.95


def tried(
    survey: Survey, entry: Entry, again: Callable[[], Survey], watch: Watch
) -> tuple[Survey, Frontier]:
    """Return the last survey, with costs fitted to what ran, and its frontier with measured times.

    ``again`` plans with what the store knows by then.

    Tries at most ``entry.count`` plans that have not run and plain data parallelism, for some
    ``ROUND_SECONDS`` in each of ``ROUNDS`` rounds.
    """
    from shardwright.runtime.stopped import Stopped

    shelf = Shelf.of(survey, entry.optimizer, entry.environment)
    known, is_old = ({}, False) if entry.is_afresh else shelf.read(survey)
    if known and not survey.context.table.factors:
        shelf.write({}, fitted(survey, known))
        survey = again()
    left = entry.count - _num_tried(survey, known)
    for number in range(ROUNDS):
        wanted = _fast(survey, known) if is_old else _wanted(survey, known, left)
        if not wanted or watch.stop():
            break
        left -= _num_tried(survey, {plan.strategy for plan in wanted} - known.keys())
        plans = runnable(survey, [*survey.plain[:1], *_fast(survey, known)[:1], *wanted])
        text = f"round {number + 1}, {len(plans)} plans"
        try:
            laps = run_trial(plans, entry, _following(watch, text))
        except Stopped:
            break
        ran = measured_of(plans, laps)
        known, is_old = {**_at_pace(known, ran, survey.plain[:1]), **ran}, False
        shelf.write(known, fitted(survey, known))
        watch.tell("planning with what was measured", 1.0)
        survey = again()
    return survey, with_measured(survey, known)


def _at_pace(
    known: Mapping[Strategy, Measured], ran: Mapping[Strategy, Measured], plain: Sequence[Plan]
) -> dict[Strategy, Measured]:
    """Return what is known of plans as it would be now: plain data parallelism has run again, and
    what has made it slower, or faster, is the machine."""
    pace = 1.0
    for one in plain:
        if one.strategy in known and one.strategy in ran:
            pace = ran[one.strategy].step_seconds / known[one.strategy].step_seconds
    return {
        strategy: replace(
            one,
            step_seconds=pace * one.step_seconds,
            spread_seconds=pace * one.spread_seconds,
        )
        for strategy, one in known.items()
    }


def with_measured(survey: Survey, known: Mapping[Strategy, Measured]) -> Frontier:
    """Return the survey's frontier with what was measured: the fastest measured plan chosen, every
    measured plan that could be, and those predicted to need less memory or money."""
    if not known:
        return survey.frontier
    plain = next((known[one.strategy] for one in survey.plain if one.strategy in known), None)
    ran = [
        replace(
            survey.plan(strategy),
            measured=replace(one, plain_seconds=plain.step_seconds if plain else 0.0),
        )
        for strategy, one in known.items()
    ]
    ran.sort(key=lambda plan: plan.objective)
    best = _simplest(ran)
    best = replace(best, reason=_reason(best, ran, plain))
    others = [plan for plan in ran if plan.strategy != best.strategy]
    others += [plan for plan in survey.frontier.plans if plan.strategy not in known]
    kept = sorted(_beside(best, others), key=lambda plan: plan.objective)
    return Frontier(plans=tuple(kept), chosen=kept.index(best))


def _beside(best: Plan, others: Sequence[Plan]) -> list[Plan]:
    """Return the best with those that need less than all that are faster, and than it."""
    kept = [best]
    for plan in sorted(others, key=lambda one: one.objective):
        if all(_is_less(plan, one) for one in kept):
            kept.append(plan)
    return kept


def _simplest(ran: Sequence[Plan]) -> Plan:
    """Return, of the plans as fast as the fastest, the simplest."""
    best = ran[0]
    for plan in ran[1:]:
        are_same = not _ran(plan).told_apart(_ran(ran[0]))
        no_later = plan.objective.staleness <= best.objective.staleness
        if are_same and no_later and complexity(plan.strategy) < complexity(best.strategy):
            best = plan
    return best


def _ran(plan: Plan) -> Measured:
    assert plan.measured is not None  # asked of plans that ran only
    return plan.measured


def _is_less(plan: Plan, than: Plan) -> bool:
    """Whether a plan offers something beside another: less memory, less money, or gradients that are less
    late or lose less."""
    here, there = plan.objective, than.objective
    return (
        here.peak_bytes < LESS * there.peak_bytes
        or here.dollars < LESS * there.dollars
        or here.staleness < there.staleness
        or here.lost < there.lost
    )


def _reason(best: Plan, ran: Sequence[Plan], plain: Measured | None) -> str:
    own, fastest = _ran(best), ran[0]
    text = f"{best.strategy.label} is the fastest of {len(ran)} plans tried"
    if fastest.strategy != best.strategy:
        text = (
            f"{best.strategy.label} is the simplest of those that nobody could tell from the fastest "
            f"of {len(ran)} plans tried ({fastest.strategy.label}, "
            f"{seconds_text(_ran(fastest).step_seconds)})"
        )
    text += f": {seconds_text(own.step_seconds)} per step, measured over {own.num_steps} steps"
    if plain is not None and plain.step_seconds != own.step_seconds:
        gain = plain.step_seconds / own.step_seconds
        text += f"; plain data parallelism took {seconds_text(plain.step_seconds)} ({gain:.2f}x)"
    return text + "."


# -- what to try -----------------------------------------------------------------------------------


def _wanted(survey: Survey, known: Mapping[Strategy, Measured], left: int) -> list[Plan]:
    """Return untried plans: at first the best few and plain data parallelism; then those predicted
    faster than the fastest that ran, by more than the half-width of the difference."""
    plain = [plan for plan in survey.plain[:1] if plan.strategy not in known]
    if not known:
        return [*plain, *first_tried(survey, left)]
    fastest = min(known, key=lambda one: known[one].step_seconds)
    seconds = known[fastest].step_seconds
    promising = [
        plan
        for plan in survey.fastest(TRIED)
        if plan.strategy not in known
        and plan.predicted.step_seconds + survey.half_width(plan.strategy, fastest) < seconds
    ]
    return [*plain, *promising[: max(left, 0)]]


def first_tried(survey: Survey, count: int) -> list[Plan]:
    """Return the plans to try first, so many, besides plain data parallelism: the best, that with microbatches
    where nobody can tell it from the best, and those predicted fastest."""
    best = survey.frontier.best
    alike = [
        plan
        for plan in survey.plain[1:]
        if plan.predicted.step_seconds - survey.half_width(plan.strategy, best.strategy)
        < best.predicted.step_seconds
    ]
    found = [best, *alike, *survey.fastest(count + len(survey.plain))]
    chosen = {one.strategy: one for one in found if not _is_plain(survey, one.strategy)}
    return list(chosen.values())[: max(count, 0)]


def _fast(survey: Survey, known: Mapping[Strategy, Measured]) -> list[Plan]:
    """Return what ran nearly as fast as the fastest, which comes first: as many as are tried at once."""
    ordered = sorted(known, key=lambda one: known[one].step_seconds)
    most = (1 + NEAR) * known[ordered[0]].step_seconds if ordered else 0.0
    near = [one for one in ordered if known[one].step_seconds <= most]
    return [survey.plan(one) for one in near[:TRIED]]


def _is_plain(survey: Survey, strategy: Strategy) -> bool:
    return any(plan.strategy == strategy for plan in survey.plain[:1])


def _num_tried(survey: Survey, strategies: Iterable[Strategy]) -> int:
    return sum(not _is_plain(survey, one) for one in strategies)


def runnable(survey: Survey, plans: Iterable[Plan]) -> list[Plan]:
    """Return different plans that may be in memory together, and whose steps are soon over; two of
    them whatever these take."""
    room, seconds = survey.room, ROUND_SECONDS
    kept: list[Plan] = []
    for plan in {plan.strategy: plan for plan in plans}.values():
        room -= plan.predicted.peak_bytes
        seconds -= (WARM_STEPS + 2) * plan.objective.step_seconds
        if len(kept) < 2 or room > 0 < seconds:
            kept.append(plan)
    return kept


def _following(watch: Watch, text: str) -> Watch:
    """Show the turns of a trial as they end."""

    def step(event: dict[str, float]) -> None:
        share = event["step"] / event["of"]
        watch.tell(f"trying plans, {text}: turn {event['step']:.0f} of {event['of']:.0f}", share)

    watch.tell(f"trying plans, {text}", 0.0)
    return replace(watch, step=step)


def measured_of(plans: Sequence[Plan], laps: Sequence[Laps]) -> dict[Strategy, Measured]:
    """Return what a race measured of each plan."""
    return {plan.strategy: lap.measured for plan, lap in zip(plans, laps, strict=True)}


def fitted(survey: Survey, known: Mapping[Strategy, Measured]) -> CostTable:
    """Return the costs of a survey with factors fitted to what was measured."""
    return refit(survey.context, {one: found.step_seconds for one, found in known.items()})
