"""What a pipeline of profiled layers costs: one model, under which every planner is judged.

A stage of r replicas takes every r-th (micro)batch on each (PipeDream's 1F1B-RR), so it is busy

    asynchronous, code:   max((C + 4 (r-1) w / (r B)) / r, 2 max(a_in, a_out) / (r B))
    asynchronous, paper:  max(C / r, 2 (r-1) w / (r B), 2 max(a_in, a_out) / B)

seconds per minibatch: C is its compute time on its slowest worker, w its weights, a the bytes that
cross its cuts, B the bandwidth of a worker. "code" is the formula of PipeDream's published
optimizer with transfers counted, "paper" that of its paper. With a flush every M microbatches the
weights' message S is paid once, and with n = ceil(M / r) microbatches of a replica a stage is busy

    1f1b-so, gpipe, fbp-as:  max(n C + S, n 2x)    transfers of x = max(a_in, a_out) / B hidden
    1f1b-sno:                n (C + 2x) + S        transfers exposed (in full; the closed form of
                                                   equal stages has the share 1 - 1/N of it)
    1f1b-as:                 n (max(F, x) + max(B, x)) + S   hidden inside forward and backward

A step is not over before any stage has waited for its first microbatch, done its own share, and the
last one has gone back: step(s) = max(that, C + 2 a_out / B + step(s + 1)). That is the closed form of
equal stages, and 1f1b-so and gpipe never take less. See
docs/guides/pipelines.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.profile import (
    CostFormula,
    PipelinePlan,
    PipelineStage,
    ScheduleKind,
    WorkerKind,
)
from shardwright.errors import InputError
from shardwright.planner.search.pipelines.cuts import Cuts

SCHEDULES: tuple[ScheduleKind, ...] = (
    "pipedream", "1f1b-so", "1f1b-sno", "gpipe", "1f1b-as", "fbp-as",
)  # fmt: skip
MOST_STATES = 1200

Replicas = tuple[int, ...]
Placed = tuple[int, Replicas]  # the cut a stage ends at, its workers of each kind


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineProblem:
    """Layers to cut, workers to give, how they talk and in which order they work.

    ``bandwidth`` in bytes per second of a worker. ``microbatches`` 0 means no flush, which is the
    schedule ``pipedream`` and only that. Raises InputError for a schedule without its microbatches.
    """

    cuts: Cuts
    workers: tuple[WorkerKind, ...]
    bandwidth: float
    schedule: ScheduleKind = "pipedream"
    microbatches: int = 0
    formula: CostFormula = "code"

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise InputError(
                f"schedule {self.schedule!r} is unknown; choose {', '.join(SCHEDULES)}"
            )
        if (self.schedule == "pipedream") != (self.microbatches == 0):
            raise InputError(
                f"schedule {self.schedule!r} with {self.microbatches} microbatches: only "
                "'pipedream' runs without a flush; give --microbatches with the others, and only "
                "with them"
            )
        if not (self.bandwidth > 0 and math.isfinite(self.bandwidth)):
            raise InputError(f"the bandwidth must be positive and finite, not {self.bandwidth}")
        if not self.workers:
            raise InputError("a pipeline needs at least one worker")
        states = math.prod(kind.count + 1 for kind in self.workers)
        if states > MOST_STATES:
            raise InputError(
                f"{states} mixtures of workers are more than {MOST_STATES}; join similar kinds"
            )

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return sum(kind.count for kind in self.workers)


def in_flight(
    schedule: ScheduleKind, replicas: int, from_here: int, num_microbatches: int = 0
) -> int:
    """Return how many (micro)batches a replica holds at most.

    ``from_here`` counts the workers of this stage and all after it. Unreplicated this is N - i for
    1F1B at stage i of N, and 2 (N - i - 1) + 1 with a doubled warm-up (BaPipe's 1F1B-SO); PipeDream
    keeps as many versions of the weights (warm-up (from_here - 1) // replicas, plus one).
    """
    most = -(-num_microbatches // replicas)
    warm_up = (from_here - 1) // replicas
    if schedule == "pipedream":
        return warm_up + 1
    if schedule == "gpipe":
        return most
    if schedule == "fbp-as":
        return min(most, 2 * (warm_up + 1))
    return min(most, (2 * warm_up if schedule == "1f1b-so" else warm_up) + 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Mixtures:
    """All mixtures of workers, by mixed-radix index: (0, ..., 0) is 0 and all workers the last.

    Index of a difference is the difference of indices. ``unit`` is the compute seconds (of the
    profiled device) that a stage of the mixture takes on while it is busy for one second, and
    ``capacity`` the most that any stages of the mixture can: the bound that prunes.
    """

    vectors: NDArray[np.int64]
    replicas: NDArray[np.int64]
    speed: NDArray[np.float64]
    memory: NDArray[np.float64]
    unit: NDArray[np.float64]
    capacity: NDArray[np.float64]
    part_offset: NDArray[np.int64]
    part: NDArray[np.int64]


def tabulate_mixtures(problem: PipelineProblem) -> Mixtures:
    """Build the table of mixtures, and of each mixture's parts."""
    kinds = problem.workers
    shape = [kind.count + 1 for kind in kinds]
    vectors = np.array(list(np.ndindex(*shape)), dtype=np.int64)
    count = len(vectors)
    uses = vectors > 0
    speeds = np.array([kind.speed for kind in kinds])
    sizes = np.array([kind.memory_bytes for kind in kinds])
    speed = np.where(uses, speeds, np.inf).min(axis=1)
    memory = np.where(uses, sizes, np.inf).min(axis=1)
    replicas = vectors.sum(axis=1)
    unit = np.zeros(count)
    for t in range(1, count):
        if problem.microbatches:
            unit[t] = speed[t] / -(-problem.microbatches // int(replicas[t]))
        else:
            unit[t] = speed[t] * replicas[t]
    parts: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
    capacity = np.zeros(count)
    for s in range(1, count):
        part = np.nonzero((vectors[1 : s + 1] <= vectors[s]).all(axis=1))[0] + 1
        parts.append(part)
        capacity[s] = (unit[part] + capacity[s - part]).max()
    offset = np.zeros(count + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=offset[1:])
    return Mixtures(
        vectors=vectors,
        replicas=replicas,
        speed=speed,
        memory=memory,
        unit=unit,
        capacity=capacity,
        part_offset=offset,
        part=np.concatenate(parts),
    )


def weights_message(problem: PipelineProblem, replicas: int, parameter_bytes: float) -> float:
    """Seconds of making the replicas' gradients equal."""
    if problem.formula == "code":
        return 4 * (replicas - 1) * parameter_bytes / (replicas * problem.bandwidth)
    return 2 * (replicas - 1) * parameter_bytes / problem.bandwidth


def busy_seconds(problem: PipelineProblem, start: int, stop: int, workers: Replicas) -> float:
    """Return how long a stage is busy: per minibatch, or, with a flush, per step. The formulas are
    in the module's text."""
    cuts, replicas = problem.cuts, sum(workers)
    speed = min(kind.speed for kind, n in zip(problem.workers, workers, strict=True) if n)
    forward = float(cuts.forward[stop] - cuts.forward[start]) / speed
    backward = float(cuts.backward[stop] - cuts.backward[start]) / speed
    message = weights_message(
        problem, replicas, float(cuts.parameter[stop] - cuts.parameter[start])
    )
    send = max(float(cuts.crossing[start]), float(cuts.crossing[stop])) / problem.bandwidth
    if not problem.microbatches:
        if problem.formula == "code":
            return max((forward + backward + message) / replicas, 2 * send / replicas)
        return max((forward + backward) / replicas, message / replicas, 2 * send)
    rounds = -(-problem.microbatches // replicas)
    if problem.schedule == "1f1b-sno":
        return rounds * (forward + backward + 2 * send) + message
    if problem.schedule == "1f1b-as":
        return rounds * (max(forward, send) + max(backward, send)) + message
    return max(rounds * (forward + backward) + message, rounds * 2 * send)


def memory_bytes(
    problem: PipelineProblem, start: int, stop: int, replicas: int, from_here: int
) -> float:
    """Return the bytes of one of the stage's workers.

    Weights and gradients (2 w), and per (micro)batch in flight the outputs of the stage's layers
    and its input; PipeDream keeps one version of the weights per minibatch in flight instead of
    one.
    """
    cuts = problem.cuts
    weights = float(cuts.parameter[stop] - cuts.parameter[start])
    kept = float(cuts.activation[stop] - cuts.activation[start]) + float(cuts.crossing[start])
    held = in_flight(problem.schedule, replicas, from_here, problem.microbatches)
    copies = held + 1 if problem.schedule == "pipedream" else 2
    return copies * weights + held * kept


def measure(
    problem: PipelineProblem, stages: Sequence[Placed], planner: str, *, bound: float = 0.0
) -> PipelinePlan:
    """Work out what given stages cost under the problem's model."""
    cuts = problem.cuts
    from_here = sum(sum(workers) for _, workers in stages)
    found: list[PipelineStage] = []
    start, fits = 0, True
    for stop, workers in stages:
        replicas = sum(workers)
        used = [kind for kind, n in zip(problem.workers, workers, strict=True) if n]
        speed = min(kind.speed for kind in used)
        forward = float(cuts.forward[stop] - cuts.forward[start]) / speed
        compute = forward + float(cuts.backward[stop] - cuts.backward[start]) / speed
        memory = memory_bytes(problem, start, stop, replicas, from_here)
        fits = fits and memory <= min(kind.memory_bytes for kind in used)
        mask = cuts.masks[stop] & ~cuts.masks[start]
        found.append(
            PipelineStage(
                layers=tuple(i for i in range(mask.bit_length()) if mask >> i & 1),
                replicas=workers,
                seconds=busy_seconds(problem, start, stop, workers),
                compute_seconds=compute,
                forward_seconds=forward,
                receive_bytes=float(cuts.crossing[start]),
                parameter_bytes=float(cuts.parameter[stop] - cuts.parameter[start]),
                memory_bytes=memory,
                in_flight=in_flight(problem.schedule, replicas, from_here, problem.microbatches),
            )
        )
        start, from_here = stop, from_here - replicas
    bottleneck = max(stage.seconds for stage in found)
    seconds = bottleneck
    if problem.microbatches:
        seconds, sent = 0.0, 0.0
        for stage in reversed(found):
            seconds = max(stage.seconds, stage.compute_seconds + sent + seconds)
            sent = 2 * stage.receive_bytes / problem.bandwidth
    return PipelinePlan(
        planner=planner,
        schedule=problem.schedule,
        stages=tuple(found),
        seconds=seconds,
        bottleneck=bottleneck,
        inputs_per_second=(problem.microbatches or 1) / seconds if seconds > 0 else math.inf,
        bound=bound,
        fits=fits,
    )
