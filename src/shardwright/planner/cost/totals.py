"""Costs of several operators in one: added up, started by a host, or shared between I and W."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.core.cluster import Source
from shardwright.core.costs import BACKWARD_STARTS, Cost
from shardwright.core.deferral import weight_shares
from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Program, Segment
from shardwright.planner.cost.roofline import Rates

SOURCES: tuple[Source, ...] = ("measured", "published", "modelled")
# What is measured below this starts no kernel on a GPU: views take some 20 ns there.
SHORTEST_KERNEL = 5e-7
# So many times as long as hosts of published runs may another take to start an operator: those of three rented H200
# took 6 to 10 times (benchmarks/reports/gpu_h200_202611.md).
SLOW_HOST = 8.0


def total(costs: Sequence[Cost]) -> Cost:
    """Add costs; half-widths add too, since one machine's errors are not independent."""
    seconds = dict.fromkeys(SOURCES, 0.0)
    for cost in costs:
        seconds[cost.source] += cost.seconds
    source = max(SOURCES, key=lambda name: seconds[name])
    return Cost(
        seconds=sum(seconds.values()), spread=sum(cost.spread for cost in costs), source=source
    )


def started(busy: Cost, costs: Sequence[Cost], phase: str, rates: Rates) -> Cost:
    """Return a segment's time where the host may not start its operators, of these ``costs``, as fast as they end."""
    num_operators = sum(cost.seconds > SHORTEST_KERNEL for cost in costs)
    kernels = num_operators * (BACKWARD_STARTS if phase == "backward" else 1.0)
    measured = rates.table.overhead_map.get("start_seconds")
    usual = rates.software.host * rates.kind.launch_seconds
    host = kernels * (usual if measured is None else measured)
    slowest = host if measured is not None else SLOW_HOST * host
    seconds = max(busy.seconds, host)
    return replace(busy, seconds=seconds, spread=max(busy.spread, slowest - seconds))


def halves(
    graph: OperatorGraph, program: Program, segment: Segment, whole: Sequence[Cost], phase: str
) -> list[Cost]:
    """Return what of the backward of each call, of which the ``whole`` is known, is I's (``input``) or W's
    (``weight``)."""
    found: list[Cost] = []
    for cost, later in zip(whole, weight_shares(graph, program, segment), strict=True):
        share = later if phase == "weight" else 1.0 - later
        found.append(replace(cost, seconds=share * cost.seconds, spread=share * cost.spread))
    return found
