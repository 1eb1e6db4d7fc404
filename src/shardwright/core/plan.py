"""What the search returns: a strategy with its evidence, and the set of the best ones."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Objective:
    """Three things to keep small: seconds per step, peak bytes on the fullest device, dollars per step."""

    step_seconds: float
    peak_bytes: float
    dollars: float = 0.0

    def __post_init__(self) -> None:
        if not (self.step_seconds >= 0 and self.peak_bytes >= 0 and self.dollars >= 0):
            raise ValueError(f"an objective cannot be negative or NaN: {self}")

    def dominates(self, other: Objective) -> bool:
        """Whether this is nowhere worse and somewhere better."""
        mine = (self.step_seconds, self.peak_bytes, self.dollars)
        theirs = (other.step_seconds, other.peak_bytes, other.dollars)
        return all(a <= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A certificate: no plan of the searched space is faster than ``step_seconds`` under ``model``.

    ``gap`` is (chosen - bound) / chosen under the same cost model. ``model`` is a sentence which says
    what the bound assumes.
    """

    step_seconds: float
    gap: float
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A strategy complete enough to run, or to refuse.

    The fingerprints name the graph, cluster and costs it was made for. ``sources`` counts how many of
    its step's seconds are measured, published or modelled. ``reason`` is one sentence why. ``outputs``
    are reported besides the loss.
    """

    strategy: Strategy
    predicted: Objective
    model: str
    graph_fingerprint: str
    cluster_name: str
    cluster_fingerprint: str
    costs_fingerprint: str
    global_batch: int
    method: str
    seed: int
    version: str
    reason: str = ""
    bound: Bound | None = None
    sources: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Plans none of which dominates another, fastest first; ``chosen`` indexes the recommended one."""

    plans: tuple[Plan, ...]
    chosen: int = 0

    def __post_init__(self) -> None:
        for plan in self.plans:
            if any(other.predicted.dominates(plan.predicted) for other in self.plans):
                raise ValueError("a frontier holds no dominated plan")
        if [p.predicted for p in self.plans] != sorted(p.predicted for p in self.plans):
            raise ValueError("a frontier is sorted by step time")
        if self.plans and not 0 <= self.chosen < len(self.plans):
            raise ValueError("the chosen plan is not on the frontier")

    @property
    def best(self) -> Plan:
        """The recommended plan."""
        return self.plans[self.chosen]
