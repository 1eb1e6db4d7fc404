"""Layers that may be computed by several algorithms: faster ones take more memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Workspace = Literal["sum", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to compute a layer: seconds, and bytes of workspace."""

    name: str
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAlgorithms:
    """A layer and what it may be computed by."""

    name: str
    algorithms: tuple[Algorithm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmTable:
    """The layers of a step with this batch (0 where nobody said), in the order of the table."""

    batch: int
    layers: tuple[LayerAlgorithms, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmChoice:
    """An algorithm by its place for every layer, with the seconds of all and the bytes of workspace."""

    seconds: float
    bytes: int
    algorithms: tuple[int, ...]
