"""What a caller asks of a verb, checked once: planning requests, training jobs, and who watches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.errors import InputError
from shardwright.files.units import Quantity, read_quantity

# Tensors that the optimizer keeps per parameter.
OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1}
PRECISIONS = ("float32", "bfloat16", "float16", "fp8", "fp8-row", "float64")
BATCH_NORMS = ("local", "synchronised")
ACCUMULATIONS = ("float32", "own")
GRADIENT_DTYPES = ("parameter", "float32", "bfloat16", "float16")
RECOMPUTATIONS = ("auto", "none", "attention", "selective", "blocks")
MEASURES = ("auto", "never", "always")
METHODS = ("exact", "mcmc")
# What chains may take where nothing was said.
MCMC_SECONDS = 60.0
LARGEST_BATCH = 2**31
MOST_TRIALS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a plan is wanted for.

    None means: the model's or machine's own. ``memory_limit`` is bytes per device, or text with a
    unit. ``measure``: ``auto`` measures on this machine what is not known yet, ``always`` also what
    is, ``never`` nothing. ``precision``: ``auto`` is bfloat16 (mixed, float32 masters) where every
    device multiplies in it faster than in float32, else float32; ``float16`` is mixed too and scales
    the loss; ``fp8`` is bfloat16 with linear maps multiplied in 8-bit floats, scaled by tensor or
    (``fp8-row``) by row. ``clip``: the largest
    global norm of the gradients, which are scaled down to it (0: not clipped). ``accumulation``: in
    mixed precision, what gradients of several microbatches add up in: ``float32``, or ``own``, the
    parameters' dtype, for half the memory. ``gradient_dtype``: what gradients travel and are summed
    in between devices, ``parameter`` for each parameter's own dtype; with ``error_feedback`` what that
    loses on a device is added to its next gradient. ``batch_norm``: statistics over each device's samples (``local``)
    or over all (``synchronised``). ``recompute``: what every repeated block makes again in backward
    (``auto``: as memory requires). ``seed_plan`` names the one strategy to plan instead of
    searching (``cube``, ``summa:2x2``), or a parts file (``*.toml``) that describes it. ``mode`` is
    what to look for (``min-time``, ``min-devices``, ``min-money``, ``curve``), ``deadline`` the most
    seconds a step may take, or text with a unit. ``method``: the ``exact`` search, which ends by
    itself, or after ``seconds`` with the best so far; or ``mcmc``, Markov chains that draw
    ``proposals``, or as many as they can in ``seconds`` (per round of measuring). ``outputs`` are what forward returns besides the
    loss and a step may report. ``spacing``: how far apart, as a share of both time and memory,
    neighbours on the frontier may be before plans between them are looked for (None: 15 %, and in
    graphs of more than 1,000 operators nothing is filled). ``trials``: how many plans are tried for
    some steps on this machine, besides plain data parallelism (0: none; None: 4 where the model
    has a name). ``costs``: a plan file that was tuned on the cluster, for the factors in it.
    """

    global_batch: int | None = None
    seq: int | None = None
    memory_limit: str | float | None = None
    optimizer: str = "adamw"
    precision: str = "auto"
    seed: int = 0
    measure: str = "auto"
    clip: float = 0.0
    accumulation: str = "float32"
    gradient_dtype: str = "parameter"
    error_feedback: bool = False
    batch_norm: str = "local"
    recompute: str = "auto"
    seed_plan: str = ""
    mode: str = "min-time"
    deadline: str | float | None = None
    method: str = "exact"
    seconds: float | None = None
    proposals: int | None = None
    outputs: tuple[str, ...] = ()
    spacing: float | None = None
    trials: int | None = None
    costs: str = ""

    def __post_init__(self) -> None:
        _one_of("optimizer", self.optimizer, tuple(OPTIMIZER_STATES))
        _one_of("precision", self.precision, ("auto", *PRECISIONS))
        _one_of("measure", self.measure, MEASURES)
        _one_of("batch norm", self.batch_norm, BATCH_NORMS)
        _one_of("accumulation", self.accumulation, ACCUMULATIONS)
        _one_of("gradient dtype", self.gradient_dtype, GRADIENT_DTYPES)
        if self.error_feedback and self.gradient_dtype == "parameter":
            raise InputError(
                "error feedback keeps what gradients lose on the wire, but they travel in their "
                "parameters' dtype; name a narrower one, such as --gradient-dtype bfloat16"
            )
        if not 0 <= self.clip < math.inf:
            raise InputError(
                f"a gradient norm to clip at must be finite and not negative, not {self.clip}; give "
                "0 to clip nothing"
            )
        from shardwright.planner.search import MODES  # all of the search, which profiles do without

        _one_of("mode", self.mode, MODES)
        if self.seed_plan and (self.mode != "min-time" or self.deadline_seconds < math.inf):
            raise InputError("a seed plan is planned as it is; leave out the mode and the deadline")
        _one_of("recompute", self.recompute, RECOMPUTATIONS)
        self._check_method()
        for name, value in (("global batch", self.global_batch), ("seq", self.seq)):
            if value is not None and not 1 <= value <= LARGEST_BATCH:
                raise InputError(f"the {name} must be between 1 and {LARGEST_BATCH}, not {value}")

        if self.spacing is not None and not 0.001 <= self.spacing <= 1:
            raise InputError(
                f"the frontier's spacing must be between 0.001 and 1, not {self.spacing}"
            )

        if self.trials is not None and not 0 <= self.trials <= MOST_TRIALS:
            raise InputError(
                f"between 0 and {MOST_TRIALS} plans can be tried (--try), not {self.trials}"
            )

    def _check_method(self) -> None:
        _one_of("method", self.method, METHODS)
        budgets = [value for value in (self.seconds, self.proposals) if value is not None]
        if self.method == "mcmc":
            if self.seed_plan or self.mode != "min-time" or self.deadline_seconds < math.inf:
                raise InputError(
                    "Markov chains look for the fastest plan; leave out seed plan, mode and deadline"
                )
            if len(budgets) > 1 or not all(0 < value < math.inf for value in budgets):
                raise InputError("give the chains either seconds or proposals, more than 0")
        elif self.proposals is not None:
            raise InputError("the exact search ends by itself; proposals are for the method mcmc")
        elif self.seconds is not None and not 0 < self.seconds < math.inf:
            raise InputError(f"the seconds to plan in must be more than 0, not {self.seconds}")

    @property
    def deadline_seconds(self) -> float:
        """The most seconds a step may take, infinite where nothing was said."""
        return _positive("deadline", self.deadline, "seconds") or math.inf

    @property
    def memory_bytes(self) -> float | None:
        """The memory limit in bytes, None for the devices' own."""
        return _positive("memory limit", self.memory_limit, "bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to train. ``clip`` is the largest gradient norm (None: the plan's)."""

    model: str
    steps: int = 100
    learning_rate: float = 1e-3
    optimizer: str = ""
    clip: float | None = None
    checkpoint_dir: str = ""
    checkpoint_every: int = 100
    resume: bool = False
    profiles: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or self.checkpoint_every < 1:
            raise InputError("training needs at least one step, and checkpoints at least one apart")
        if not (0 <= self.learning_rate < math.inf and 0 <= (self.clip or 0.0) < math.inf):
            raise InputError("learning rate and clip must be finite and not negative")
        if self.optimizer:
            _one_of("optimizer", self.optimizer, tuple(OPTIMIZER_STATES))
        if self.resume and not self.checkpoint_dir:
            raise InputError(
                "--resume needs to know where the checkpoints are; give --checkpoint-dir"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How to verify a plan. ``tolerance`` None: what float64 allows. ``ranks``: all of them as
    threads of this process, or one process each."""

    model: str
    steps: int = 3
    tolerance: float | None = None
    ranks: str = "threads"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError("verifying needs at least one step")
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise InputError("the tolerance must be finite and not negative")
        _one_of("ranks", self.ranks, ("threads", "processes"))


def _nothing(what: str, fraction: float) -> None:
    """Show nothing."""
    del what, fraction


def _never() -> bool:
    return False


def _no_step(event: dict[str, float]) -> None:
    del event


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Who looks on: told how far long work is, asked whether to stop, shown every training step."""

    tell: Callable[[str, float], None] = _nothing
    stop: Callable[[], bool] = _never
    step: Callable[[dict[str, float]], None] = _no_step


def _positive(name: str, value: str | float | None, quantity: Quantity) -> float | None:
    """Return a positive number, read with its unit where it is text; None where nothing was said."""
    if value is None or value == "":
        return None
    try:
        size = read_quantity(value, quantity) if isinstance(value, str) else float(value)
    except InputError as error:
        raise InputError(f"the {name} {error}") from error
    if not (size > 0 and math.isfinite(size)):
        raise InputError(f"the {name} must be positive, not {value}")
    return size


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"{name} must be one of {', '.join(known)}, not {value[:40]!r}")
