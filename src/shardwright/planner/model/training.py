"""How a model is trained, as far as plans depend on it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from shardwright.core.strategy import (
    Accumulation,
    Compressor,
    Feedback,
    GradientSync,
    Precision,
    Recomputation,
    Strategy,
    WireDtype,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How the model is trained, as far as plans depend on it (see ``Strategy``).

    ``recompute``: what every repeated block makes again, or ``auto``: as memory requires. ``least_sent``:
    the share of its bits that a gradient must send at least; below 1 plans may compress.
    """

    precision: Precision = "float32"
    optimizer_states: int = 2
    clips: bool = False
    max_norm: float = 0.0
    accumulation: Accumulation = "float32"
    gradient_dtype: WireDtype = "parameter"
    error_feedback: bool = False
    compressor: Compressor = "none"
    density: float = 1.0
    feedback: Feedback = field(default=Feedback())
    least_sent: float = 1.0
    batch_norm: Literal["local", "synchronised"] = "local"
    recompute: Recomputation | Literal["auto"] = "auto"

    @property
    def sync(self) -> GradientSync:
        """How gradients travel, whichever travel together."""
        return GradientSync(
            dtype=self.gradient_dtype,
            error_feedback=self.error_feedback,
            compressor=self.compressor,
            density=self.density,
            feedback=self.feedback,
        )

    def applied(self, strategy: Strategy) -> Strategy:
        """Return a strategy as it trains here; which gradients travel together stays."""
        return replace(
            strategy,
            precision=self.precision,
            batch_norm=self.batch_norm,
            optimizer_states=self.optimizer_states,
            clips=self.clips,
            max_norm=self.max_norm,
            accumulation=self.accumulation,
            gradient_sync=self.sync.carrying(strategy.gradient_sync),
        )
