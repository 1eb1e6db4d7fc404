"""Advice on how to configure a run: one form for every answer, so that none comes without what it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One chart: lines of points (x, y) by name, and points that are worth a mark."""

    title: str
    across: str
    up: str
    lines: tuple[tuple[str, Points], ...]
    marked: Points = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """An answer with what it rests on.

    ``answers`` are sentences, the first of them the advice itself; ``inputs`` what was given or measured, by name,
    with units; ``sources`` where formulas and numbers come from. ``rows`` belong to ``columns``. ``values`` are the
    same numbers in SI units, by names that stay.
    """

    title: str
    answers: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]
    assumptions: tuple[str, ...]
    sources: tuple[str, ...]
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    curves: tuple[Curve, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
