"""What a search tells while it goes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is: ``fraction`` of its work, the best step that fits so far (inf before the
    first), and the bound (0 until it is known).
    """

    fraction: float
    best_seconds: float
    bound_seconds: float
    text: str
