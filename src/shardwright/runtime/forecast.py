"""How far predicted weights are off: kept for a batch now and then, and looked at again when they were predicted for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.core.staleness import PREDICTS
from shardwright.errors import InputError
from shardwright.runtime.interpreter import Machine

# What a stage tells of its weights: how many there are, how many updates ahead they were predicted, and
# the sums of squares that the predicted and the stale ones were off by.
FACTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The weights that batch ``number`` (from 1) ran forward on, as they turned out; equal on all ranks.

    By stage: how many updates ahead they were ``predicted`` and the root of the mean square by which they
    were off; and by which those would have been that the stage had then, the ``stale`` ones. A stage that predicts
    nothing has 0 steps and NaN.
    """

    number: int
    steps: tuple[int, ...]
    predicted: tuple[float, ...]
    stale: tuple[float, ...]
    weights: tuple[int, ...]

    @property
    def predicted_rmse(self) -> float:
        """Of all weights together that were predicted; NaN where none were."""
        return self._over_all(self.predicted)

    @property
    def stale_rmse(self) -> float:
        """Likewise, had they been used as they were."""
        return self._over_all(self.stale)

    def _over_all(self, errors: Sequence[float]) -> float:
        count = sum(self.weights)
        squares = sum(w * e**2 for w, e in zip(self.weights, errors, strict=True) if w)
        return math.sqrt(squares / count) if count else math.nan


class Forecasts:
    """What a rank keeps of its predictions, and what it heard of all ranks'. ``every``: so many batches."""

    def __init__(self, machine: Machine, every: int) -> None:
        staleness, stages = machine.program.strategy.pipeline.staleness, len(machine.program.meshes)
        if every < 0 or (every and (staleness not in PREDICTS or stages == 1)):
            raise InputError(
                f"predicted weights are looked at every so many batches, in an asynchronous pipeline that predicts, but "
                f"forecast_every is {every} and the plan has staleness {staleness} and {stages} stages; "
                f"give 0, or a plan of {', '.join(sorted(PREDICTS))}"
            )
        self._machine, self._stages = machine, stages
        # Of one batch at a time all stages tell before the next one's forward.
        self.every = max(every, stages + 1) if every else 0
        self.last: Forecast | None = None
        self._kept: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self._left = 0  # updates until what is kept is looked at
        self._sums = self._zeros()
        self._heard = [0.0] * (FACTS * stages)

    def see(
        self, minibatch: int, pairs: Sequence[tuple[nn.Parameter, Tensor | None]], steps: int
    ) -> None:
        """Keep what was predicted for a minibatch, if it is one of those, and a copy of what it was predicted from."""
        if not self._looks_at(minibatch):
            return
        self._kept = [
            (one, ahead, one.detach().clone()) for one, ahead in pairs if ahead is not None
        ]
        self._left = steps
        stage, site = min(self._machine.sites.items())
        self._sums[stage, 1] = steps * (
            not any(site.coordinate)
        )  # of one device, for all of its stage
        if steps == 0:
            self._look()

    def _looks_at(self, minibatch: int) -> bool:
        return bool(self.every) and minibatch >= 0 and (minibatch + 1) % self.every == 0

    def updated(self) -> None:
        """Count an update of the stage."""
        if self._kept:
            self._left -= 1
            if self._left == 0:
                self._look()

    def _look(self) -> None:
        row = self._sums[min(self._machine.sites)]
        for parameter, ahead, before in self._kept:
            now = parameter.detach().double()
            row[0] += now.numel()
            row[2] += (ahead.double() - now).square().sum()
            row[3] += (before.double() - now).square().sum()
        self._kept = []

    def tell(self) -> Tensor:
        """Return what all ranks are told in a period (flat, float64)."""
        told, self._sums = self._sums, self._zeros()
        return told.flatten()

    def hear(self, period: int, sums: Sequence[float]) -> None:
        """Take what all ranks told in a period, and know the forecast once all stages must have."""
        entered = period - self._machine.program.under_way + 1  # the minibatch that leaves
        self._heard = [a + b for a, b in zip(self._heard, sums, strict=True)]
        if self._looks_at(entered):
            rows = [self._heard[at : at + FACTS] for at in range(0, len(self._heard), FACTS)]
            self._heard = [0.0] * len(self._heard)
            if any(count for count, *_ in rows):  # else it left in a flush
                self.last = _forecast(entered + 1, rows)

    def clear(self) -> None:
        """Forget what is under way."""
        self._kept, self._sums, self._heard = [], self._zeros(), [0.0] * len(self._heard)

    def _zeros(self) -> Tensor:
        device = self._machine.store.device
        return torch.zeros(self._stages, FACTS, dtype=torch.float64, device=device)


def _forecast(number: int, rows: list[list[float]]) -> Forecast:
    def root(count: float, squares: float) -> float:
        return math.sqrt(squares / count) if count else math.nan

    return Forecast(
        number=number,
        steps=tuple(int(steps) for _, steps, _, _ in rows),
        predicted=tuple(root(count, squares) for count, _, squares, _ in rows),
        stale=tuple(root(count, squares) for count, _, _, squares in rows),
        weights=tuple(int(count) for count, _, _, _ in rows),
    )
