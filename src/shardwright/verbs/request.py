"""What a caller asks of a verb, checked once: planning requests, training jobs, and who watches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import get_args

from shardwright.core.staleness import COURSES
from shardwright.core.strategy import (
    Accumulation,
    Compressor,
    Precision,
    Recomputation,
    Residual,
    WireDtype,
)
from shardwright.errors import InputError
from shardwright.files.units import Quantity, read_quantity
from shardwright.files.workers import MOST_WORKERS
from shardwright.verbs.compression import check_compression, check_lateness
from shardwright.verbs.options import FINITE, check_options, check_word, option

# Tensors that the optimizer keeps per parameter.
OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1}
MCMC_SECONDS = 60.0  # what chains may take where nothing was said
LARGEST_BATCH = 2**31
MOST_STEPS = 2**62
MOST_STALENESS = 63  # updates that a gradient is late


def _steps(default: int, what: str) -> int:
    says = what + " takes 1 to {most:,} steps (--steps), not {value}; choose within these"
    return option(default, "Steps to train.", "-n", least=1, most=MOST_STEPS, says=says)


def _modes() -> tuple[str, ...]:
    from shardwright.planner.search import MODES  # all of the search, which profiles do without

    return MODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a plan is wanted for: the options of ``plan``.

    The command line, the keywords of ``api.plan`` and, by their names, the fields of the planner's
    ``Training`` follow from the fields here. None means: the model's or machine's own.
    ``memory_limit`` and ``deadline`` are bytes and seconds, or text with a unit.

    ``measure``: ``auto`` measures on this machine what is not known yet, ``always`` also what is, ``never`` nothing.
    ``precision``: ``auto`` is bfloat16 (mixed, float32 masters) where every device multiplies in it faster than in
    float32, else float32; ``float16`` is mixed too and scales the loss; ``fp8`` is bfloat16 with linear maps
    multiplied in 8-bit floats, scaled by tensor or (``fp8-row``) by row. Gradients are scaled down to a global norm
    of ``clip``. ``accumulation`` ``own`` is the parameters' dtype. Gradients travel and are summed between devices in
    ``gradient_dtype``; with ``error_feedback`` what that loses on a device is added to its next gradient. Or
    gradients are compressed by a ``compressor``, which feeds back what it loses: ``top-k`` sends a ``density`` of
    their elements; ``residual``, ``rank``, ``momentum``, ``unmasked``, ``local_norm`` and ``warm_up`` are those of
    ``core.strategy.Feedback``. Or, with ``allow_compression``, where the planner thinks that it pays; then
    ``density`` is the least share of its bits that a gradient sends. ``batch_norm``: statistics over each device's
    samples, or over all. ``recompute``: what every repeated block makes again in backward. ``seed_plan`` names the
    one strategy to plan instead of searching (``cube``, ``summa:2x2``), or a parts file (``*.toml``) that describes
    it; ``order`` a file with the order of its pipeline. ``method``: the ``exact`` search, which ends by itself; or
    Markov chains that draw ``proposals``, or as many as they can. After ``seconds``, capturing, measuring and trials
    included, the answer is the best so far; only capturing and this machine's rates are not cut short. ``spacing``:
    how far apart, as a share of both time and memory, neighbours on the frontier may be before plans between them are
    looked for (None: 10 %, and in graphs of more than 1,000 operators nothing is filled). ``trials``: how many plans
    are tried for some steps on this machine, besides plain data parallelism (0: none; None: 4 where the model has a
    name). ``costs``: a plan file that was tuned on the cluster, for the factors in it. ``loader``: whose rates are
    measured here and are then those of the cluster's ranks and hosts.
    """

    global_batch: int | None = option(
        None, "Samples per step, all devices.", "-b", least=1, most=LARGEST_BATCH
    )
    seq: int | None = option(
        None, "Tokens per sample, where that applies.", "-s", least=1, most=LARGEST_BATCH
    )
    memory_limit: str | float | None = option(
        None, "Per device, such as '12 GiB'.", "--memory-limit", "--memory"
    )
    optimizer: str = option(
        "adamw", "adamw, adam, sgd, or momentum.", one_of=tuple(OPTIMIZER_STATES)
    )
    precision: str = option(
        "auto",
        "auto, float32, bfloat16 (mixed), float16 (mixed, scaled loss), fp8 or fp8-row (mixed, "
        "linear maps in 8 bits), or float64.",
        one_of=("auto", *get_args(Precision)),
    )
    batch_norm: str = option(
        "local",
        "Statistics: local (per device) or synchronised.",
        one_of=("local", "synchronised"),
    )
    clip: float = option(
        0.0,
        "Largest gradient norm, held in the plan; 0: none.",
        least=0.0,
        says="a gradient norm to clip at must be finite and not negative, not {value}; give 0 to "
        "clip nothing",
    )
    accumulation: str = option(
        "float32",
        "In mixed precision, what gradients of microbatches add up in: float32, or own (half "
        "the memory).",
        one_of=get_args(Accumulation),
    )
    gradient_dtype: str = option(
        "parameter",
        "What gradients travel in between devices: parameter (their own), float32, bfloat16, "
        "float16.",
        one_of=get_args(WireDtype),
    )
    error_feedback: bool = option(
        False,
        "Add what a gradient loses in a narrower dtype to the next one (memory: one gradient).",
        "--gradient-error-feedback",
    )
    compressor: str = option(
        "none",
        "Compress gradients that are summed over devices: top-k, gtop-k, gtop-k-tree, int8, 1-bit or "
        "powersgd; what that loses is added to the next (memory: one gradient).",
        "--gradient-compressor",
        one_of=get_args(Compressor),
    )
    density: float = option(
        1.0,
        "The share of a gradient's elements that top-k or gtop-k sends, such as 0.01; with "
        "--allow-compression the least.",
        "--gradient-density",
    )
    rank: int = option(1, "The rank of powersgd's factors.", "--gradient-rank")
    residual: str = option(
        "conserving",
        "What becomes of what is not sent: conserving (added to the next gradient), paper (gtop-k's "
        "published rule, which loses some), none (forgotten).",
        "--gradient-residual",
        one_of=get_args(Residual),
    )
    momentum: float = option(
        0.0,
        "Momentum before top-k or gtop-k selects, which begins anew where something was sent; the optimizer must "
        "have the same, for what travels whole, or none (memory: one gradient).",
        "--gradient-momentum",
    )
    unmasked: bool = option(
        False, "That momentum runs on where something was sent.", "--gradient-momentum-unmasked"
    )
    local_norm: float = option(
        0.0, "The largest norm devices put in before compression (0: any).", "--gradient-local-norm"
    )
    warm_up: int = option(
        0,
        "So many steps each the first gradients are sent at densities 0.25, 0.0625, 0.015625 and 0.004.",
        "--gradient-warm-up",
    )
    allow_compression: bool = option(
        False,
        "Compress gradients where that is predicted to pay (top-k, int8 or 1-bit, by bucket); at least "
        "--gradient-density of their bits are sent (0.001).",
    )
    recompute: str = option(
        "auto",
        "auto (as memory requires), none, attention, selective, blocks.",
        one_of=("auto", *get_args(Recomputation)),
    )
    outputs: tuple[str, ...] = option(
        (), "Reported besides the loss; may be given several times.", "--output"
    )
    spacing: float | None = option(None, "Fill gaps of the frontier wider than this, such as 0.02.")
    staleness: int = option(
        0,
        "Also look at asynchronous pipelines whose gradients are at most so many updates late: N stages, N - 1.",
        "--allow-staleness",
        least=0,
        most=MOST_STALENESS,
        says="gradients may be 0 to {most} updates late (--allow-staleness), not {value}; choose within these",
    )
    trials: int | None = option(
        None,
        "Plans to run for some steps on this machine (4); 0: none.",
        "--try",
        least=0,
        most=64,
        says="between 0 and {most} plans can be tried (--try), not {value}; choose within these",
    )
    costs: str = option("", "A plan file that `tune` wrote on this cluster.")
    seed: int = option(0, "Recorded in the plan.")
    seed_plan: str = option(
        "",
        "Do not search: megatron, megatron-sequence, summa, tesseract, cube[:2x2x2], expert, "
        "spatial, spatial-2d, parameter-server[:8x2], 1f1b, gpipe, 1f1b-so[:4x8], interleaved[:2x2x8], "
        "stash, spectrain-v2 (asynchronous), or a parts file.",
    )
    order: str = option(
        "",
        "A file with what every worker runs, such as 2F0 1B3: with --profile, or with a parts file.",
    )
    mode: str = option("min-time", "min-time, min-devices, min-money, or curve.", one_of=_modes)
    deadline: str | float | None = option(None, "The most a step may take, such as '200 ms'.")
    method: str = option(
        "exact", "exact, or mcmc (Markov chains, random).", one_of=("exact", "mcmc")
    )
    seconds: float | None = option(
        None, "How long all may take; capture counts, uncut (exact: to the end; mcmc: 60 s)."
    )
    proposals: int | None = option(None, "With mcmc: how many instead, repeatable.")
    loader: str = option(
        "", "script.py:name of a loader: measure how fast it gives samples, and plan for that."
    )
    measure: str = option(
        "auto", "auto, never, or always (again).", one_of=("auto", "never", "always")
    )

    def __post_init__(self) -> None:
        check_options(self)
        check_compression(self)
        check_lateness(self)
        if self.seed_plan and (self.mode != "min-time" or self.deadline_seconds < math.inf):
            raise InputError("a seed plan is planned as it is; leave out the mode and the deadline")
        if self.order and not self.seed_plan.endswith(".toml"):
            raise InputError(
                "an order is one of the parts that a file names; give --seed-plan parts.toml with it, "
                "or plan a profile of layers (--profile)"
            )
        self._check_method()
        if self.spacing is not None and not 0.001 <= self.spacing <= 1:
            raise InputError(
                f"the frontier's spacing must be between 0.001 and 1, not {self.spacing}; choose it within these"
            )

    def _check_method(self) -> None:
        if self.staleness and (self.seed_plan or self.method == "mcmc"):
            raise InputError(
                "asynchronous pipelines are allowed to a search; leave out --allow-staleness with --seed-plan and "
                "with the method mcmc, or name one: --seed-plan spectrain-v2"
            )
        if self.method == "mcmc":
            self._check_chains()
        elif self.proposals is not None:
            raise InputError("the exact search ends by itself; proposals are for the method mcmc")
        elif self.seconds is not None and not 0 < self.seconds < math.inf:
            raise InputError(f"the seconds to plan in must be more than 0, not {self.seconds}")

    def _check_chains(self) -> None:
        budgets = [value for value in (self.seconds, self.proposals) if value is not None]
        if self.seed_plan or self.mode != "min-time" or self.deadline_seconds < math.inf:
            raise InputError(
                "Markov chains look for the fastest plan; leave out seed plan, mode and deadline"
            )
        if len(budgets) > 1 or not all(0 < value < math.inf for value in budgets):
            raise InputError("give the chains either seconds or proposals, more than 0")

    @property
    def deadline_seconds(self) -> float:
        """The most seconds a step may take, infinite where nothing was said."""
        return _positive("deadline", self.deadline, "seconds") or math.inf

    @property
    def memory_bytes(self) -> float | None:
        """The memory limit in bytes, None for the devices' own."""
        return _positive("memory limit", self.memory_limit, "bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """What a pipeline is wanted for, as text with units.

    ``workers``: 16, 2x8 (hosts x workers, with one bandwidth each), or kinds ``8,8@0.5@16GiB``.
    ``microbatches`` 0: no flush, PipeDream's asynchronous pipeline. ``schedule`` auto: that, or with
    microbatches the fastest of those that run on GPUs. ``formula``: what messages cost, by
    PipeDream's published optimizer (``code``; ``published``: without what the first stage sends, as
    it counts itself) or by its paper. ``shards``: over how many workers a
    stage may split its layers or its weights; 1 for replicas only. ``order``: a file with the order of
    the workers, in place of schedule and microbatches.
    """

    workers: str = option("", "With --profile: 16, 2x8, or kinds: 8,8@0.5@16GiB.")
    bandwidth: str = option("", "With --profile, per worker: 1e9 (bytes/s) or '10 GB/s'.")
    schedule: str = option(
        "auto",
        "With --profile: auto, pipedream, gpipe, 1f1b-sno, 1f1b-so, 1f1b-as, fbp-as, or replayed: "
        "interleaved, looped-bfs, zb-h1, zb-h2, zb-interleaved, zb-1p, zb-2p, zb-v, v-half, v-min.",
    )
    microbatches: int = option(
        0,
        "With --profile: per flush, 0 for none.",
        least=0,
        most=2**20,
        says="microbatches must be 0 (no flush) to {most}, not {value}; give --microbatches within "
        "that",
    )
    shards: int = option(
        1,
        "With --profile: a stage may split layers or weights over so many workers.",
        least=1,
        most=MOST_WORKERS,
        says="shards must be 1 to {most}, not {value}; leave --shards out, or give fewer",
    )
    memory_limit: str = ""
    formula: str = "code"
    order: str = ""

    def __post_init__(self) -> None:
        if not self.workers or not self.bandwidth:
            raise InputError(
                "planning from a profile needs --workers and --bandwidth; add for example --workers 16 "
                "--bandwidth '1 GB/s'"
            )
        if self.formula not in ("code", "paper", "published"):
            raise InputError(
                f"the formula is one of three, not {self.formula[:40]!r}; choose 'code', 'paper' or "
                "'published'"
            )
        if self.order and (self.schedule != "auto" or self.microbatches):
            raise InputError(
                "an order says itself which microbatches run when; leave --schedule and --microbatches "
                "out, or --order"
            )
        check_options(self)

    @property
    def memory_bytes(self) -> float:
        """Bytes per worker, infinite where not limited."""
        return _positive("memory limit", self.memory_limit, "bytes") or math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to train. ``clip`` is the largest gradient norm (None: the plan's)."""

    model: str
    steps: int = _steps(100, "training")
    learning_rate: float = option(1e-3, "", "--learning-rate", "--lr", least=0.0, says=FINITE)
    optimizer: str = ""
    clip: float | None = option(
        None, "Largest gradient norm; the plan's by default.", least=0.0, says=FINITE
    )
    checkpoint_dir: str = option("", "Where checkpoints go.")
    checkpoint_every: int = option(
        100, "", least=1, says="checkpoints must be at least one step apart"
    )
    resume: bool = option(False, "Go on from the last checkpoint.")
    loader: str = option(
        "", "script.py:name of a DataLoader, data set or iterable; the model's batches by default."
    )
    noise_scale: bool = option(
        False, "Measure how noisy gradients are, for `advise batch` (data-parallel plans)."
    )
    forecast_every: int = option(
        0,
        "Every so many steps, measure how far predicted weights are off (asynchronous pipelines).",
        least=0,
        says="predictions are looked at every so many steps, 0 for never",
    )
    extrapolation: str = option(
        "last",
        "Along what weights are predicted (asynchronous pipelines): the optimizer's last step, that decaying, or the "
        "last update's difference.",
        one_of=COURSES,
    )
    extrapolation_limit: float = option(
        0.0,
        "Learning rates a step that a prediction may move an element; 0: any.",
        least=0.0,
        says=FINITE,
    )
    rate_annealing: int = option(
        0,
        "Steps in which the learning rates of late stages grow to all of it (pipemare).",
        least=0,
        says="learning rates grow over so many steps, 0 for all of it at once",
    )
    profiles: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.optimizer:
            check_word("optimizer", self.optimizer, tuple(OPTIMIZER_STATES))
        if self.resume and not self.checkpoint_dir:
            raise InputError(
                "--resume needs to know where the checkpoints are; give --checkpoint-dir"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How to verify a plan. ``tolerance`` None: what float64 allows. ``ranks``: all of them as
    threads of this process, or one process each."""

    model: str
    steps: int = _steps(3, "verifying")
    tolerance: float | None = option(
        None, "Largest relative difference; 1e-9 by default.", least=0.0, says=FINITE
    )
    ranks: str = option(
        "threads", "threads (of this process), or processes.", one_of=("threads", "processes")
    )

    def __post_init__(self) -> None:
        check_options(self)


def _nothing(what: str, fraction: float) -> None:
    """Show nothing."""
    del what, fraction


def _never() -> bool:
    return False


def _no_step(event: dict[str, float]) -> None:
    del event


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Who looks on: told how far long work is, asked whether to stop (not ``at_once``, where there is no answer yet),
    shown every training step. ``deadline``: when work should be over, by ``time.monotonic``."""

    tell: Callable[[str, float], None] = _nothing
    stop: Callable[[], bool] = _never
    step: Callable[[dict[str, float]], None] = _no_step
    deadline: float = math.inf
    at_once: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def left(self) -> float:
        """Seconds until work should be over, 0 afterwards."""
        return max(0.0, self.deadline - time.monotonic())


def _positive(name: str, value: str | float | None, quantity: Quantity) -> float | None:
    """Return a positive number, read with its unit where it is text; None where nothing was said."""
    if value is None or value == "":
        return None
    try:
        size = read_quantity(value, quantity) if isinstance(value, str) else float(value)
    except InputError as error:
        raise InputError(f"the {name} {error}") from error
    if not (size > 0 and math.isfinite(size)):
        raise InputError(f"the {name} must be positive, not {value}; give more, or leave it out")
    return size
