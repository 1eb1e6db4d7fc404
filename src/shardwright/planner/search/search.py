"""The search: from graph, cluster and costs to the frontier of plans.

One loop over proposers (``loop``) looks among plans of all devices and fewer; goals other than the fastest
plan take one loop for every number of devices. Frontiers are made of simulated objectives only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict, Unpack

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Frontier, Plan
from shardwright.errors import InputError
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search.answer import Findings, answer, late, named_answer
from shardwright.planner.search.bounds import Bounds
from shardwright.planner.search.goals import FASTEST, Goal, device_numbers
from shardwright.planner.search.limits import NO_LIMITS, Limits, room
from shardwright.planner.search.loop import Proposer, run
from shardwright.planner.search.looped import tighten
from shardwright.planner.search.pool import Pool, Progress
from shardwright.planner.search.proposers.additive import on_all, on_fewer
from shardwright.planner.search.proposers.compression import compressed
from shardwright.planner.search.proposers.gaps import filled
from shardwright.planner.search.proposers.gradients import merged, sent_earlier, summed_sooner
from shardwright.planner.search.proposers.known import asked, grids, known
from shardwright.planner.search.proposers.late import late as proposes_late
from shardwright.planner.search.proposers.refine import refined
from shardwright.planner.search.proposers.schedules import schedules
from shardwright.planner.search.proposers.smallest import smallest
from shardwright.planner.search.proposers.uneven import uneven
from shardwright.planner.search.survey import Survey
from shardwright.planner.space import Placement

AS_USUAL = Training()
# Who proposes, in rounds: plans that differ in where things lie; of the best of them when gradients
# are summed, travel, and which together; then single decisions. A round begins when the one before has nothing
# left that could be faster.
LATER: tuple[tuple[Proposer, ...], ...] = (
    (schedules, uneven),
    (summed_sooner,),
    (merged,),
    (sent_earlier,),
    (refined,),
    (smallest,),
)


class How(TypedDict, total=False):
    """How to search: what is trained how (``AS_USUAL``), within what (``NO_LIMITS``), who hears of the
    progress, and who says ``stop``: asked between steps; once true the best found so far is returned."""

    training: Training
    limits: Limits
    progress: Callable[[Progress], None] | None
    stop: Callable[[], bool] | None


class Asked(How, total=False):
    """What is wanted besides: ``goal`` (``FASTEST``), or ``seed_plan``, the one strategy wanted, by name
    (``cube``, ``summa:2x2``; see ``asked.SEED_PLANS``) or as it is: then nothing is searched. ``seed`` is
    recorded in the plans: this search is deterministic and draws no random numbers.
    """

    goal: Goal
    seed: int
    seed_plan: str | Placement


def search(
    graph: OperatorGraph, cluster: Cluster, table: CostTable, **wanted: Unpack[Asked]
) -> Frontier:
    """Return the non-dominated plans found; the one that serves the goal best is chosen.

    Raises NoPlan when nothing fits, saying how much is missing where.
    """
    return survey(graph, cluster, table, **wanted).frontier


def survey(
    graph: OperatorGraph,
    cluster: Cluster,
    table: CostTable,
    *,
    goal: Goal = FASTEST,
    seed: int = 0,
    seed_plan: str | Placement = "",
    **how: Unpack[How],
) -> Survey:
    """Search, and return besides the frontier all that was looked at; arguments as for ``search``."""
    loose = _Session.of(graph, cluster, table, **how)
    session = loose.sending_all()
    if seed_plan:
        found = _named(session, seed_plan, loose.least_sent)
        name = seed_plan if isinstance(seed_plan, str) else seed_plan.name
        return Survey(named_answer(found, seed, name), found, goal, seed)
    if goal.mode == "min-devices":
        return _fewest(session, goal, seed)
    if goal.mode == "min-time":
        found = _fastest(session, loose)
    else:
        if goal.mode == "min-money":
            _check_prices(cluster)
        found = _merged([findings for _, findings in session.each()])
    return Survey(answer(found, seed, goal), found, goal, seed)


def begun(graph: OperatorGraph, cluster: Cluster, table: CostTable, **how: Unpack[How]) -> Pool:
    """Return a pool for all devices in which nothing was tried yet: whoever searches otherwise fills it. Its gradients
    send all their bits, since nobody compresses them afterwards."""
    return _Session.of(graph, cluster, table, **how).sending_all().pool(cluster.num_devices)


def curve(
    graph: OperatorGraph,
    cluster: Cluster,
    table: CostTable,
    *,
    seed: int = 0,
    **how: Unpack[How],
) -> tuple[Plan, ...]:
    """Return the fastest plan for every number of devices on which one fits, fewest first.

    Raises NoPlan where none does.
    """
    found = [findings for _, findings in _Session.of(graph, cluster, table, **how).each()]
    fitting = [findings for findings in found if findings.fitting]
    # Where nothing fits, the answer on most devices says what is missing.
    return tuple(answer(findings, seed).best for findings in fitting or found[-1:])


def best_of(plans: tuple[Plan, ...], goal: Goal = FASTEST) -> Frontier:
    """Make a frontier of the plans that no other dominates; the fastest is chosen.

    Raises NoPlan where even that one misses the deadline.
    """
    kept = {
        plan.predicted: plan
        for plan in plans
        if not any(other.predicted.dominates(plan.predicted) for other in plans)
    }
    frontier = Frontier(plans=tuple(kept[objective] for objective in sorted(kept)))
    fastest = frontier.best.predicted.step_seconds
    if fastest > goal.deadline:
        raise late(frontier.best.strategy.label, fastest, goal.deadline)
    return frontier


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """Loops over one context, for one number of devices each."""

    context: Context
    limits: Limits
    progress: Callable[[Progress], None] | None
    stop: Callable[[], bool] | None

    @classmethod
    def of(
        cls,
        graph: OperatorGraph,
        cluster: Cluster,
        table: CostTable,
        *,
        training: Training = AS_USUAL,
        limits: Limits = NO_LIMITS,
        progress: Callable[[Progress], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> _Session:
        """Prepare what all loops share."""
        context = Context.of(graph, cluster, table, training)
        return cls(context=context, limits=limits, progress=progress, stop=stop)

    @property
    def least_sent(self) -> float:
        """The share of its bits that a gradient must send at least."""
        return self.context.training.least_sent

    def sending_all(self) -> _Session:
        """Return the session in which gradients send all their bits."""
        if self.least_sent == 1:
            return self
        whole = replace(self.context.training, least_sent=1.0)
        return replace(self, context=self.context.at(training=whole))

    def pool(self, num_devices: int, share: tuple[int, int] = (0, 1)) -> Pool:
        """Return an empty pool for so many devices: number ``share[0]`` of ``share[1]``."""
        number, count = share

        def tell(one: Progress) -> None:
            if self.progress is not None:
                text = one.text if count == 1 else f"on {num_devices}: {one.text}"
                part = (number + one.fraction) / count
                self.progress(replace(one, fraction=part, text=text))

        return Pool(
            self.context.on(num_devices),
            room(self.context.cluster, self.limits),
            self.limits.max_candidates,
            tell,
            self.stop,
            self.limits.staleness,
        )

    def each(self, deadline: float = math.inf) -> Iterator[tuple[int, Findings]]:
        """Search on every number of devices in turn, fewest first, but for those that would miss the
        deadline even if all work divided evenly."""
        cluster, least = self.context.cluster, self.context.prices.least_serial_seconds / deadline
        numbers = [
            number
            for number in device_numbers(cluster)
            if number >= least or number == cluster.num_devices
        ]
        for place, number in enumerate(numbers):
            if place and self.stop is not None and self.stop():
                return
            pool = self.pool(number, (place, len(numbers)))
            explore(pool, on_all)
            run(pool, proposes_late)
            yield number, pool.findings()


def explore(pool: Pool, arrangements: Proposer) -> None:
    """Fill a pool, until nothing is left to try or the caller stops."""
    pool.complete = False  # until the arrangements are through
    for proposers in ((known, arrangements, grids), *LATER):
        run(pool, *proposers)


def _named(session: _Session, wanted: str | Placement, least_sent: float) -> Findings:
    """Look at one strategy only."""
    pool = session.pool(session.context.num_devices)
    run(pool, partial(asked, wanted))
    run(pool, merged)
    if least_sent < 1:
        run(pool, partial(compressed, least_sent))
    return pool.findings()


def _fastest(session: _Session, loose: _Session) -> Findings:
    """Search on all devices and fewer; then again where sums of gradients are as short as compression makes
    them, if it may, and compress them where that pays. What was found before stays, with its bound."""
    pool = session.pool(session.context.num_devices)
    explore(pool, on_fewer)
    run(pool, partial(filled, spacing=session.limits.spacing))
    run(pool, proposes_late)
    tighten(pool)
    known = pool.findings()
    if loose.least_sent == 1:
        return known
    again = loose.pool(session.context.num_devices)
    again.evaluations, again.same = list(known.evaluations), known.same
    run(again, on_fewer)
    run(again, partial(compressed, loose.least_sent))
    return replace(
        known,
        evaluations=tuple(again.evaluations),
        refused=(*known.refused, *again.refused),
        is_complete=known.is_complete and again.complete,
        packed_bound=again.bounds.least(),
    )


def _fewest(session: _Session, goal: Goal, seed: int) -> Survey:
    tried: dict[int, Findings] = {}
    for number, findings in session.each(goal.deadline):
        tried[number] = findings
        if findings.fitting and findings.fitting[0].seconds <= goal.deadline:
            found = _because_fewest(answer(findings, seed, goal), goal, [*tried])
            return Survey(found, findings, goal, seed)
    nearest = min(reversed(tried.values()), key=_nearness)
    if not nearest.fitting:
        return Survey(answer(nearest, seed), nearest)  # raises NoPlan with what is missing
    best = nearest.fitting[0]
    tried_first = f"tried {_listed([*tried])} devices: "
    raise late(best.strategy.label, best.seconds, goal.deadline, tried_first)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _because_fewest(frontier: Frontier, goal: Goal, tried: list[int]) -> Frontier:
    """Return a frontier with what the last number of devices tried is said before why its best plan was chosen."""
    plans, number = list(frontier.plans), tried[-1]
    best = plans[frontier.chosen]
    count = len(best.strategy.devices)
    # Where the fastest devices are not the first, a plan may leave the first idle.
    fewest = f"{number}" if count == number else f"{count} of the first {number}"
    before = f"; {_listed(tried[:-1])} do not" if tried[:-1] else ""
    meets = "fit and meet the deadline" if goal.deadline < math.inf else "fit"
    reason = f"The fewest devices that {meets}: {fewest}{before}. "
    plans[frontier.chosen] = replace(best, reason=reason + best.reason)
    return Frontier(plans=tuple(plans), chosen=frontier.chosen)


def _nearness(findings: Findings) -> tuple[float, float]:
    """Order what does not do: by the seconds of what fits, else by the bytes of what does not."""
    if findings.fitting:
        return findings.fitting[0].seconds, 0.0
    return math.inf, min((one.bytes for one in findings.evaluations), default=math.inf)


def _merged(found: list[Findings]) -> Findings:
    """Take the findings of several numbers of devices together."""
    return replace(
        found[-1],
        evaluations=tuple(evaluation for one in found for evaluation in one.evaluations),
        refused=tuple(text for one in found for text in one.refused),
        bounds=Bounds(least for one in found for least in one.bounds),
        is_complete=all(one.is_complete for one in found),
    )


def _check_prices(cluster: Cluster) -> None:
    if cluster.dollars_per_second(tuple(range(cluster.num_devices))) <= 0:
        raise InputError(
            f"the least money needs prices, but cluster {cluster.name} has none; add "
            'price = "3.2 USD/h" to its hosts, or choose another mode'
        )
