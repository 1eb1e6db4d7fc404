"""Costs that agree with plans that ran.

What is known of operators and messages was measured of them alone. Whole steps that ran say how far
that is off: one factor for computation and one for each primitive of messages, found by simulating
the same plans again until predicted and measured agree as well as factors near 1 let them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.costs import CostTable
from shardwright.core.program import Kind, Program
from shardwright.core.strategy import Strategy
from shardwright.planner.cost import price
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.simulate import simulate_on

# A factor is expected within this of 1, as a logarithm: a message beneath computation may take
# several times as long as alone, an operator some tens of percent.
EXPECTED = {"compute": 0.2}
EXPECTED_OF_MESSAGES = 0.8
# Steps on a quiet machine agree to about so much from one minute to the next.
NOISE = 0.02
ROUNDS = 4
# The farthest that one factor may go, and the step of its finite difference, as logarithms.
FARTHEST, STEP = math.log(8.0), 0.05
# Nearer than this no better factors are looked for.
STILL = 1e-3


def refit(context: Context, measured: Mapping[Strategy, float]) -> CostTable:
    """Return the context's costs with factors fitted to measured step times (seconds).

    Least squares on the logarithms of step times, by Gauss and Newton on the simulator itself, each
    factor held to 1 by what is expected of it. Costs O(rounds x factors x plans) simulations.
    """
    programs = [lower(context.graph, one, context.facts.samples) for one in measured]
    if not programs:
        return context.table
    names = _names(programs)
    target = np.log(np.array(list(measured.values())))
    table = replace(context.table, factors=())
    width = np.array([EXPECTED.get(name, EXPECTED_OF_MESSAGES) for name in names])

    def logs(at: NDArray[np.float64]) -> NDArray[np.float64]:
        factors = tuple(zip(names, np.exp(at).tolist(), strict=True))
        known = replace(table, factors=factors)
        return np.log([_seconds(context, program, known) for program in programs])

    def loss(at: NDArray[np.float64], here: NDArray[np.float64]) -> float:
        return float((((target - here) / NOISE) ** 2).sum() + ((at / width) ** 2).sum())

    def descend(at: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        here = logs(at)
        for _ in range(ROUNDS):
            units = np.eye(len(names))
            slopes = np.stack([(logs(at + STEP * unit) - here) / STEP for unit in units])
            left = slopes @ slopes.T / NOISE**2 + np.diag(width**-2)
            right = slopes @ (target - here) / NOISE**2 - at / width**2
            there = np.clip(at + np.linalg.solve(left, right), -FARTHEST, FARTHEST)
            then = logs(there)
            while loss(there, then) > loss(at, here) and np.abs(there - at).max() > STILL:
                there = at + (there - at) / 2
                then = logs(there)
            if loss(there, then) >= loss(at, here):
                break
            at, here = there, then
        return loss(at, here), at

    # A message that is hidden has no slope: the second start is where messages take thrice as long.
    slow = np.array([0.0 if name in EXPECTED else math.log(3.0) for name in names])
    found = min((descend(np.zeros(len(names))), descend(slow)), key=lambda one: one[0])[1]
    return replace(table, factors=tuple(zip(names, np.exp(found).tolist(), strict=True)))


def _names(programs: list[Program]) -> tuple[str, ...]:
    """Return what the factors multiply: computation, and every primitive that is sent."""
    sent: set[str] = set()
    for program in programs:
        moved = np.isin(program.kind, (Kind.MESSAGE, Kind.SEND))
        items: list[int] = np.unique(program.item[moved]).tolist()
        sent.update(program.messages[item].primitive for item in items)
    return ("compute", *sorted(sent - {"slice", "copy", "halo", "halo_sum", "send_receive"}))


def _seconds(context: Context, program: Program, table: CostTable) -> float:
    prices = price(program, context.graph, context.cluster, table)
    return simulate_on(context.cluster, program, prices.seconds).step_seconds
