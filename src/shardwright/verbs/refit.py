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
from shardwright.core.program import LOCAL, Kind, Program
from shardwright.core.strategy import Strategy
from shardwright.planner.cost import price
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.simulate import simulate_on

Floats = NDArray[np.float64]
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
    fit = _Fit(context, programs, np.log(np.array(list(measured.values()))))
    # A message that is hidden has no slope: the second start is where messages take thrice as long.
    slow = np.where([name in EXPECTED for name in fit.names], 0.0, math.log(3.0))
    return fit.table(min(map(fit.descend, (0 * slow, slow)), key=lambda one: one[0])[1])


class _Fit:
    """Logarithms of factors, and what the simulator makes of them."""

    def __init__(self, context: Context, programs: list[Program], target: Floats) -> None:
        self._context, self._programs, self._target = context, programs, target
        self.names = _names(programs)
        width = [EXPECTED.get(name, EXPECTED_OF_MESSAGES) for name in self.names]
        self._weights = np.array(width) ** -2

    def table(self, at: Floats) -> CostTable:
        """Return the costs with these factors."""
        factors = zip(self.names, np.exp(at).tolist(), strict=True)
        return replace(self._context.table, factors=tuple(factors))

    def _logs(self, at: Floats) -> Floats:
        known = self.table(at)
        return np.log([_seconds(self._context, program, known) for program in self._programs])

    def _loss(self, at: Floats, here: Floats) -> float:
        misses = ((self._target - here) / NOISE) ** 2
        return float(misses.sum() + (at**2 * self._weights).sum())

    def descend(self, at: Floats) -> tuple[float, Floats]:
        """Return the least loss that is reached from there, and where."""
        here = self._logs(at)
        for _ in range(ROUNDS):
            there = self._step(at, here)
            then = self._logs(there)
            while self._loss(there, then) > self._loss(at, here):
                if np.abs(there - at).max() <= STILL:
                    break
                there = at + (there - at) / 2
                then = self._logs(there)
            if self._loss(there, then) >= self._loss(at, here):
                break
            at, here = there, then
        return self._loss(at, here), at

    def _step(self, at: Floats, here: Floats) -> Floats:
        """Return where the loss is least if seconds grow as they do here."""
        units = np.eye(len(self.names))
        slopes = np.stack([(self._logs(at + STEP * unit) - here) / STEP for unit in units])
        left = slopes @ slopes.T / NOISE**2 + np.diag(self._weights)
        right = slopes @ (self._target - here) / NOISE**2 - at * self._weights
        return np.clip(at + np.linalg.solve(left, right), -FARTHEST, FARTHEST)


def _names(programs: list[Program]) -> tuple[str, ...]:
    """Return what the factors multiply: computation, and every primitive that is sent."""
    sent: set[str] = set()
    for program in programs:
        moved = np.isin(program.kind, (Kind.MESSAGE, Kind.SEND))
        items: list[int] = np.unique(program.item[moved]).tolist()
        sent.update(program.messages[item].primitive for item in items)
    return ("compute", *sorted(sent - LOCAL - {"halo", "halo_sum", "send_receive"}))


def _seconds(context: Context, program: Program, table: CostTable) -> float:
    prices = price(program, context.graph, context.cluster, table)
    return simulate_on(context.cluster, table, program, prices.seconds).step_seconds
