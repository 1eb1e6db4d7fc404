"""What the verbs of ``api`` return besides the core nouns: small frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Frontier, Plan
from shardwright.files.planfile import Origin, Unruled
from shardwright.report.comparison import Difference
from shardwright.report.story import PlanStory


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of ``doctor``: what was looked at, whether it is as needed, and what to do if
    not."""

    name: str
    is_ok: bool
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Which operators of a graph can be split: those with a rule; others run replicated.

    ``replicated`` counts operators without a rule by kind. ``replicated_share`` is the share of one
    step's modelled seconds on one device in all operators that cannot be split along any dim, for
    want of a rule or because their rule says so (see ``verbs.coverage``).
    """

    num_operators: int
    num_with_rule: int
    replicated: tuple[Unruled, ...]
    replicated_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What profiling did: how many measurements were made and how many are known. ``notes``: what of
    those no longer holds."""

    cluster: Cluster
    costs: CostTable
    num_measured: int
    num_known: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Study:
    """A finished planning session: the frontier with everything it rests on.

    ``spreads`` are the half-widths of the plans' step times. ``curve`` holds the fastest plan for each
    number of devices, where that was asked for. ``plain`` is plain data parallelism with 1, 2 and 4
    microbatches, as far as it fits. ``is_complete`` is false when the search was stopped and this is
    the best it had found. ``notes`` say what to know of the measurements.
    """

    graph: OperatorGraph
    cluster: Cluster
    costs: CostTable
    frontier: Frontier
    origin: Origin = field(default_factory=Origin)
    spreads: tuple[float, ...] = ()
    curve: tuple[Plan, ...] = ()
    plain: tuple[Plan, ...] = ()
    num_measured: int = 0
    is_complete: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastError:
    """By how much (root of the mean square) the weights that were predicted for a step were off, and by how much
    those would have been from which they were predicted."""

    step: int
    predicted: float
    stale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """What training did, as the ranks reported it.

    ``first_step`` counts steps done before (after a resume). ``step_seconds`` is the median of all
    steps but the first two. ``peak_bytes`` is what tensors took per stage, where it was measured;
    ``held_out`` are losses on batches not trained on, ``gradient_norms`` those before clipping, per
    step (none where the plan does not clip). ``signal``: which ended it early, 0 for none.
    ``input_seconds``: how long steps waited for their batches besides, the mean of the same steps on the rank
    that waited longest, which makes the others wait within the step.
    ``notes``: what the ranks could not do as they should. ``noise_scale``: of the gradients at the end, in samples;
    None where it was not measured, or no gradient stood out of the noise. ``forecasts``: where an asynchronous pipeline looked at its predictions.
    """

    losses: tuple[float, ...]
    first_step: int
    step_seconds: float
    tokens_per_second: float
    peak_bytes: tuple[float, ...] = ()
    held_out: tuple[float, ...] = ()
    checkpoint: str = ""
    is_complete: bool = True
    gradient_norms: tuple[float, ...] = ()
    signal: int = 0
    input_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    noise_scale: float | None = None
    forecasts: tuple[ForecastError, ...] = ()

    @property
    def input_share(self) -> float:
        """Which share of their time steps waited for their batches."""
        whole = self.step_seconds + self.input_seconds
        return self.input_seconds / whole if whole else 0.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Prediction beside measurement of one plan."""

    story: PlanStory
    rows: tuple[Difference, ...]
    training: TrainingRun


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGap:
    """How far a tensor of a verified plan is from plain PyTorch's, relative to its largest
    element."""

    name: str
    role: str
    shape: tuple[int, ...]
    difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A plan trained beside plain PyTorch: the loss and every tensor, the largest gap first.

    ``losses`` are plain PyTorch's. ``ranks`` says what the ranks were: threads or processes.
    ``notes`` say what was changed to make the comparison possible.
    """

    label: str
    rows: tuple[TensorGap, ...]
    tolerance: float
    losses: tuple[float, ...]
    num_ranks: int
    ranks: str
    global_batch: int
    notes: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether nothing is further apart than the tolerance."""
        return all(row.difference <= self.tolerance for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCheck:
    """One kind of operator, run in pieces against whole.

    ``num_cases`` counts calls, ``num_splits`` all splits of all calls; ``difference`` is the largest,
    in units of the tolerance (1e-10 of a tensor's largest element in float64). ``problem`` says, with
    shapes and split, why the rule is wrong, and is empty where it is not.
    """

    kind: str
    rule: str
    num_cases: int
    num_splits: int
    difference: float
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleChecks:
    """All rules that were checked; ``is_complete`` is false when it was stopped before the last."""

    rows: tuple[RuleCheck, ...]
    seed: int
    is_complete: bool = True

    @property
    def wrong(self) -> tuple[RuleCheck, ...]:
        """The rules that do not hold."""
        return tuple(row for row in self.rows if row.problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Lines for the rules' table that held in all tests: evidence, not proof.

    ``num_unexplained`` of the ``num_examples`` calls are covered by none of the lines.
    ``num_crashes`` wrong cuts ended the process in which they were tried; ``problem`` says why
    nothing could be tried at all.
    """

    kind: str
    lines: tuple[str, ...]
    num_cases: int
    num_splits: int
    num_examples: int
    num_unexplained: int
    num_crashes: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The files a report consists of."""

    page: Path
    trace: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestAnswer:
    """A solution of a contest problem: a strategy per node, and what can be said about it.

    ``limit`` None: memory is not limited. ``is_complete`` is false when the search was interrupted.
    ``is_allowed``: no forbidden strategy or pair is chosen. ``is_impossible``: no choice is allowed and
    keeps the limit, proved.
    """

    name: str
    num_nodes: int
    num_edges: int
    choice: tuple[int, ...]
    cost: int
    bound: float
    peak: int
    limit: int | None
    seconds: float
    is_complete: bool
    is_allowed: bool
    is_impossible: bool

    @property
    def gap(self) -> float:
        """(cost - bound) / cost, 0 where the solution is proved optimal."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether no solution can be cheaper."""
        return self.fits and self.is_allowed and self.cost <= self.bound

    @property
    def fits(self) -> bool:
        """Whether memory stays within the limit."""
        return self.limit is None or self.peak <= self.limit
