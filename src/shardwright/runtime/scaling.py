"""Loss scaling, so that small gradients do not vanish in float16.

The loss's gradient begins at the scale instead of 1. Before gradients are clipped or used they are
divided by it; where any rank finds one that is not finite, nobody updates. Rules, defaults and
rounding are those of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.core.program import Program
from shardwright.errors import InputError
from shardwright.runtime.tables import ScaleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """``scale`` to begin with; after a step that was skipped it is multiplied by ``backoff``, after
    ``interval`` others in a row by ``growth``. A growth of 1 and a backoff of 1 keep it as it is."""

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        is_sound = self.scale > 0 and self.growth >= 1 and 0 < self.backoff <= 1
        if not is_sound or not math.isfinite(self.scale * self.growth) or self.interval < 1:
            raise InputError(
                "loss scaling needs a positive scale, a growth of at least 1, a backoff above 0 and "
                f"at most 1, and an interval of at least 1, not {self}"
            )


class LossScaler:
    """The scale as it changes from step to step; equal on all ranks."""

    def __init__(self, rules: Scaling) -> None:
        self.rules = rules
        self.scale = rules.scale
        self.good_steps = 0
        self.skipped = 0

    def unscale(
        self,
        data: list[Tensor | None],
        owned: list[bool],
        slots: Iterable[int],
        device: torch.device,
    ) -> Tensor:
        """Divide gradients by the scale; return how many of them are not finite (0-d, on ``device``)."""
        inverse = _as_float32(1.0 / self.scale)
        found = torch.zeros((), device=device)
        for slot in slots:
            gradient = data[slot]
            if gradient is not None:
                data[slot] = gradient.mul_(inverse) if owned[slot] else gradient * inverse
                owned[slot] = True
                found += ~gradient.isfinite().all()
        return found

    def advance(self, skipped: bool) -> None:
        """Set the next step's scale."""
        rules = self.rules
        if skipped:
            self.scale = _as_float32(self.scale * rules.backoff)
            self.good_steps = 0
            self.skipped += 1
            return
        self.good_steps += 1
        if self.good_steps == rules.interval:
            grown = _as_float32(self.scale * rules.growth)
            self.scale = grown if math.isfinite(grown) else self.scale
            self.good_steps = 0

    def table(self) -> ScaleTable:
        """Return the state as a checkpoint holds it."""
        return ScaleTable(scale=self.scale, good_steps=self.good_steps, skipped=self.skipped)

    def restore(self, table: ScaleTable) -> None:
        """Go on from a checkpoint."""
        self.scale, self.good_steps, self.skipped = table.scale, table.good_steps, table.skipped


def scaler_of(program: Program, rules: Scaling | None, num_meshes: int) -> LossScaler | None:
    """Return what scales the loss on a rank that is on so many meshes: something for float16, and
    where rules are given.

    Raises InputError where a rank's meshes are updated one by one: overflow in any of them must be
    known before the first.
    """
    scales = program.strategy.precision == "float16" or rules is not None
    if scales and program.strategy.gradient_sync.feeds_back:
        raise InputError(
            "residuals of error feedback are in the units of the loss, whose scale would change; leave "
            "out scaling, or plan without error feedback"
        )
    if program.strategy.precision == "float16":
        return LossScaler(rules or Scaling())
    if rules is not None and num_meshes > 1 and not program.strategy.clips:
        raise InputError(
            "a loss can be scaled where all gradients of a rank are looked at together, but this "
            f"rank is on {num_meshes} meshes and the plan, in {program.strategy.precision}, neither "
            "clips nor is for float16; plan with clipping or --precision float16, or leave out scaling"
        )
    return None if rules is None else LossScaler(rules)


def _as_float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))
