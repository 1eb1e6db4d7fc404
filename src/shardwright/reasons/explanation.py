"""Why a plan: its decisions with their runners-up, and the shadow prices of what it is short of."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.explanation import Decision, Reasons, ShadowPrice
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Plan
from shardwright.errors import InputError
from shardwright.planner.cost import price
from shardwright.planner.cost.feed import input_costs, input_words
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.steering import CANDIDATES
from shardwright.planner.simulate import on_shared_cores, simulate_on
from shardwright.reasons.decode import Decoded, decode
from shardwright.reasons.neighbours import Rivalry
from shardwright.reasons.sensitivity import price_choices, sensitivity
from shardwright.reasons.shadow import hardware_prices


def _nothing(text: str, fraction: float) -> None:
    del text, fraction


def explain(
    graph: OperatorGraph,
    cluster: Cluster,
    table: CostTable,
    plan: Plan,
    *,
    training: Training,
    limit: float,
    tell: Callable[[str, float], None] = _nothing,
) -> Reasons:
    """Return the reasons for a plan, which may use ``limit`` bytes per device.

    Deterministic. ``tell`` hears what is being done and how much of it is (0 to 1).
    """
    context = Context.of(graph, cluster, table, training).on(len(plan.strategy.devices))
    graph = context.graph  # as the cluster's kernels run it
    place = decode(context, plan.strategy)
    decisions: tuple[Decision, ...] = ()
    prices: tuple[ShadowPrice, ...] = ()
    byte_seconds, notes = math.nan, list[str]()
    if place is None:
        notes.append(
            f"{plan.strategy.label} is no point of the additive model (its meshes have other axes or "
            "sizes than data x tensor, or chunks, or an order of their own), so its choices have no runners-up here; `why-not` compares"
        )
    else:
        decisions, prices, byte_seconds, more = _inside(context, place, plan, limit, tell)
        notes += more
    tell("shadow prices", 0.95)
    program = lower(graph, plan.strategy, context.facts.samples)
    prices += hardware_prices(program, graph, cluster, table)
    feeding = input_costs(program, graph, context.facts.samples, cluster)
    if feeding:
        timeline = simulate_on(
            cluster, table, program, price(program, graph, cluster, table).seconds
        )
        _, feeding = on_shared_cores(program, timeline, feeding, cluster)
    words = input_words(cluster, feeding, plan.predicted.step_seconds, plan.strategy.devices)
    notes += [words] if words else []
    return Reasons(
        decisions=decisions, prices=prices, byte_seconds=byte_seconds, notes=tuple(notes)
    )


def _inside(
    context: Context,
    place: Decoded,
    plan: Plan,
    limit: float,
    tell: Callable[[str, float], None],
) -> tuple[tuple[Decision, ...], tuple[ShadowPrice, ...], float, list[str]]:
    """Return decisions, prices of memory, the worth of a byte, and what could not be priced."""
    pool = Pool(context, limit)
    pool.weigh(plan.strategy)  # what is the same is known from it
    rivalry = Rivalry(pool, place.arrangement, plan.strategy)
    decisions = rivalry.decisions(lambda text, share: tell(text, 0.6 * share))
    predicted = plan.predicted
    prices = rivalry.more_memory(predicted.step_seconds, predicted.peak_bytes)
    tell("pricing every choice", 0.7)
    try:
        priced = price_choices(place, plan.strategy, predicted.peak_bytes, limit)
    except InputError as error:
        return decisions, prices, math.nan, [str(error)]
    decisions += sensitivity(pool, priced, CANDIDATES // 2)
    return decisions, prices, priced.byte_seconds, []
