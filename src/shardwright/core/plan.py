"""What the search returns: a strategy with its evidence, and the set of the best ones."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from shardwright.core.strategy import Feedback, Strategy

# Steps of a plan before those that count: kernels are chosen, memory is found.
WARM_STEPS = 2
# Steps are told apart if they differ by more than this and the mean of their turns' spreads: one plan that runs
# twice in one race differs from itself by so much (decision 0028).
TOLD_APART = 0.02
CHANGED = " (changed since)"
STALE = (
    "step time, memory, price and bound in the plan file are stale: they were found for another "
    "strategy than it now holds; `shardwright simulate` predicts anew, `shardwright plan` plans again"
)


def digest_of(strategy: Strategy) -> str:
    """Return a digest of all that a strategy says, but for what people call it."""
    configs = {one: number for number, one in enumerate(dict.fromkeys(strategy.configs))}
    parameters = {one: number for number, one in enumerate(dict.fromkeys(strategy.parameters))}
    sync = strategy.gradient_sync
    is_own = sync.dtype == "parameter"
    # Files that could not say in what gradients travel said "float32": their digests stay true.
    said = replace(sync, dtype="float32") if is_own else sync
    short = replace(
        strategy, configs=tuple(configs), parameters=tuple(parameters), label="",
        gradient_sync=said,
    )  # fmt: skip
    numbers = (
        [configs[one] for one in strategy.configs],
        [parameters[one] for one in strategy.parameters],
        *([] if is_own else ["on the wire"]),
        *_said_later(strategy),
    )
    return hashlib.sha256(repr((short, numbers)).encode()).hexdigest()[:16]


def _said_later(strategy: Strategy) -> list[object]:
    """Return what older files could not say, only where it says something: their digests stay true."""
    sync, pipeline = strategy.gradient_sync, strategy.pipeline
    return [
        *(["error feedback"] if sync.error_feedback else []),
        *([sync.compressor, sync.density] if sync.compressor != "none" else []),
        *sync.apart,
        *([repr(sync.feedback)] if sync.feedback != Feedback() else []),
        *([f"updates: {strategy.updates}"] if strategy.updates != "step" else []),
        *[f"home: {one.mesh}" for one in dict.fromkeys(strategy.parameters) if one.mesh >= 0],
        *pipeline.order,
        *([] if pipeline.is_flushed else [f"staleness: {pipeline.staleness}"]),
    ]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Objective:
    """What to keep small: seconds per step, peak bytes on the fullest device, dollars per step, ``staleness``, by how
    many updates gradients are late at most (0 where training is synchronous), and the share of the gradients' bits
    that a step ``lost``: those which compression does not send."""

    step_seconds: float
    peak_bytes: float
    dollars: float = 0.0
    staleness: int = 0
    lost: float = 0.0

    def __post_init__(self) -> None:
        if not min(self._values) >= 0:
            raise ValueError(f"an objective cannot be negative or NaN: {self}")

    def dominates(self, other: Objective) -> bool:
        """Whether this is nowhere worse and somewhere better."""
        mine, theirs = self._values, other._values
        return all(a <= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs

    @property
    def _values(self) -> tuple[float, ...]:
        return (self.step_seconds, self.peak_bytes, self.dollars, self.staleness, self.lost)


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
class Measured:
    """A plan as it ran in a trial: the median of its steps, half the distance between the quartiles
    of its turns, and how many steps that is. ``plain_seconds`` is plain data parallelism's step in
    the same trial, 0 where it could not run."""

    step_seconds: float
    spread_seconds: float
    num_steps: int
    plain_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (self.step_seconds > 0 and self.spread_seconds >= 0 and self.plain_seconds >= 0):
            raise ValueError(f"a measured step takes time: {self}")
        if self.num_steps < 1:
            raise ValueError("a measurement needs at least one step")

    def told_apart(self, other: Measured) -> bool:
        """Whether two step times differ by more than the machine moves them."""
        spread = (self.spread_seconds + other.spread_seconds) / 2
        apart = abs(self.step_seconds - other.step_seconds)
        return apart > TOLD_APART * min(self.step_seconds, other.step_seconds) + spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A strategy complete enough to run, or to refuse.

    The fingerprints name the graph, cluster and costs it was made for. ``sources`` counts how many of
    its step's seconds are measured, published or modelled. ``reason`` is one sentence why. ``outputs``
    are reported besides the loss. ``measured`` is how it ran, if it was tried.
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
    measured: Measured | None = None
    predicted_for: str = ""

    @property
    def is_stale(self) -> bool:
        """Whether what is predicted speaks of another strategy than the plan's: somebody changed it."""
        return self.predicted_for not in ("", digest_of(self.strategy))

    def marked(self) -> Plan:
        """Return the plan, its label marked where it was given to another strategy."""
        label = self.strategy.label
        if not self.is_stale or label.endswith(CHANGED):
            return self
        return replace(self, strategy=replace(self.strategy, label=label + CHANGED))

    @property
    def objective(self) -> Objective:
        """What is predicted, with the measured step time where there is one."""
        if self.measured is None:
            return self.predicted
        share = self.measured.step_seconds / self.predicted.step_seconds
        return replace(
            self.predicted,
            step_seconds=self.measured.step_seconds,
            dollars=self.predicted.dollars * share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Plans, fastest first, none of which dominates another; ``chosen`` indexes the recommended one.

    The recommended one may be dominated: of plans that a prediction cannot tell apart it is the
    simplest.
    """

    plans: tuple[Plan, ...]
    chosen: int = 0

    def __post_init__(self) -> None:
        if self.plans and not 0 <= self.chosen < len(self.plans):
            raise ValueError("the chosen plan is not on the frontier")
        objectives = [plan.objective for plan in self.plans]
        others = [one for place, one in enumerate(objectives) if place != self.chosen]
        if any(one.dominates(other) for one in objectives for other in others):
            raise ValueError("a frontier holds no dominated plan besides the chosen one")
        if objectives != sorted(objectives):
            raise ValueError("a frontier is sorted by step time")

    @property
    def best(self) -> Plan:
        """The recommended plan."""
        return self.plans[self.chosen]

    def choosing(self, place: int) -> Frontier:
        """Return the frontier with another plan chosen; the recommended one leaves where it is dominated."""
        chosen, others = self.plans[place], [plan.objective for plan in self.plans]
        kept = tuple(
            plan
            for plan in self.plans
            if plan is chosen or not any(one.dominates(plan.objective) for one in others)
        )
        return Frontier(plans=kept, chosen=kept.index(chosen))
