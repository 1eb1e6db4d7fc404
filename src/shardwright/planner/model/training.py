"""How a model is trained, as far as plans depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.core.strategy import Accumulation, Precision, Recomputation, WireDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How the model is trained, as far as plans depend on it (see ``Strategy``).

    ``recompute``: what every repeated block makes again, or ``auto``: as memory requires.
    """

    precision: Precision = "float32"
    optimizer_states: int = 2
    clips: bool = False
    max_norm: float = 0.0
    accumulation: Accumulation = "float32"
    gradient_dtype: WireDtype = "parameter"
    error_feedback: bool = False
    batch_norm: Literal["local", "synchronised"] = "local"
    recompute: Recomputation | Literal["auto"] = "auto"
