"""What a pipeline of profiled layers costs: one model, under which every planner is judged.

A stage's workers make r replicas of g shards each. Replicas take every r-th (micro)batch
(PipeDream's 1F1B-RR), so the stage is busy

    asynchronous, code:   max((C + 4 (r-1) w / (r B)) / r, 2 max(a_in, a_out) / (r g B))
    asynchronous, paper:  max(C / r, 2 (r-1) w / (r B), 2 max(a_in, a_out) / (g B))

seconds per minibatch: C is its compute time on its slowest worker, w its weights on a shard, a the
bytes that cross its cuts, B the bandwidth of a worker. "code" is the formula of PipeDream's
published optimizer with transfers counted, "paper" that of its paper, and "published" is "code" as
that optimizer counts it, without what the first stage sends. With a flush every M
microbatches the weights' message S is paid once, and with n = ceil(M / r) microbatches of a replica
a stage is busy

    1f1b-so, gpipe, fbp-as:  max(n C + S, n 2x)    transfers of x = max(a_in, a_out) / (g B) hidden
    1f1b-sno:                n (C + 2x) + S        transfers exposed (in full; the closed form of
                                                   equal stages has the share 1 - 1/N of it)
    1f1b-as:                 n (max(F, x) + max(B, x)) + S   hidden inside forward and backward

The g shards of a replica split every layer: each computes C / g and holds w / g and its part of the
activations. What a layer with weights reads (z bytes in the stage) is gathered in the forward and
again in the backward, and its gradient reduced and scattered: 3/2 of an all-reduce of z, exposed in
C (sequence parallelism of Korthikanti et al., 2022, or a split by channels). Replicas may split the
weights instead of S: gathered twice and reduced once for every microbatch, 3/2 S in C (ZeRO stage 3,
Rajbhandari et al., 2020).

A step is not over before any stage has waited for its first microbatch, done its own share, and the
last one has gone back: step(s) = max(that, C + 2 a_out / (g B) + step(s + 1)). That is the closed
form of equal stages, and 1f1b-so and gpipe never take less, but for a stage's message while those
before it still work. See docs/guides/pipelines.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core import schedules
from shardwright.core.profile import (
    CostFormula,
    PipelinePlan,
    PipelineStage,
    WorkerKind,
    per_second,
)
from shardwright.core.schedules import PLANNED, SCHEDULES, ScheduleKind
from shardwright.errors import InputError
from shardwright.layerwise.cuts import Cuts

MOST_STATES = 1200

# Of the seconds that 3/2 all-reduces take, the part in the forward: the first of three halves.
THREE_HALVES, IN_FORWARD = 1.5, 1 / 3

Workers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Crew:
    """Workers of each kind, how many of them share a replica, and whether replicas split weights."""

    workers: Workers
    shards: int = 1
    splits_weights: bool = False

    @property
    def replicas(self) -> int:
        """How many (micro)batches they work on at a time."""
        return sum(self.workers) // self.shards


Placed = tuple[int, Crew]  # the cut a stage ends at, and who does it


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineProblem:
    """Layers to cut, workers to give, how they talk and in which order they work.

    ``bandwidth`` in bytes per second of a worker. ``microbatches`` 0 means no flush, which is the
    schedule ``pipedream`` and only that. Layers and weights may be split over at most ``shards``
    workers. Raises InputError for a schedule without its microbatches.
    """

    cuts: Cuts
    workers: tuple[WorkerKind, ...]
    bandwidth: float
    schedule: ScheduleKind = "pipedream"
    microbatches: int = 0
    formula: CostFormula = "code"
    shards: int = 1

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise InputError(
                f"at least 1 worker does a layer, not {self.shards} shards; give 1 or more"
            )
        if self.schedule not in PLANNED:
            raise InputError(f"schedule {self.schedule!r} is unknown; choose {', '.join(PLANNED)}")
        if SCHEDULES[self.schedule].flushes != (self.microbatches > 0):
            raise InputError(
                f"schedule {self.schedule!r} with {self.microbatches} microbatches: only "
                "'pipedream' runs without a flush; give --microbatches with the others, and only "
                "with them"
            )
        if self.formula == "published" and self.microbatches:
            raise InputError(
                "PipeDream's published optimizer counts no flush; leave the microbatches out, or "
                "take the formula 'code'"
            )
        if not (self.bandwidth > 0 and math.isfinite(self.bandwidth)):
            raise InputError(
                f"the bandwidth must be positive and finite, not {self.bandwidth}; give bytes per "
                "second such as 1e9"
            )
        if not self.workers:
            raise InputError(
                "a pipeline needs at least one worker, and there is none; give --workers 1 or more"
            )
        if self.num_mixtures > MOST_STATES:
            raise InputError(
                f"{self.num_mixtures} mixtures of workers are more than {MOST_STATES}; join similar kinds"
            )

    @property
    def num_mixtures(self) -> int:
        """How many mixtures of workers there are."""
        return math.prod(kind.count + 1 for kind in self.workers)

    def kinds_of(self, crew: Crew) -> list[WorkerKind]:
        """Return what a crew's workers are."""
        return [kind for kind, n in zip(self.workers, crew.workers, strict=True) if n]

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return sum(kind.count for kind in self.workers)


def in_flight(
    schedule: ScheduleKind, replicas: int, from_here: int, num_microbatches: int = 0
) -> int:
    """Return how many (micro)batches a replica holds at most.

    ``from_here`` counts the replicas of this stage and all after it. Unreplicated this is N - i for
    1F1B at stage i of N, and 2 (N - i - 1) + 1 with a doubled warm-up (BaPipe's 1F1B-SO); PipeDream
    keeps as many versions of the weights (warm-up (from_here - 1) // replicas, plus one).
    """
    behind, most = (from_here - 1) // replicas, -(-num_microbatches // replicas)
    return schedules.in_flight(schedule, behind, most)


def all_reduce(problem: PipelineProblem, workers: int, size: float) -> float:
    """Seconds of making ``size`` bytes equal among workers, as the formula counts them."""
    if problem.formula == "paper":
        return 2 * (workers - 1) * size / problem.bandwidth
    return 4 * (workers - 1) * size / (workers * problem.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Seconds of one (micro)batch on one replica: compute, the collectives between its shards and
    for split weights, the larger transfer one way; and the gradients' ``message``."""

    forward: float
    backward: float
    collective: float
    send: float
    message: float

    @property
    def compute(self) -> float:
        """Seconds in which the replica does nothing else."""
        return self.forward + self.backward + self.collective


def load(problem: PipelineProblem, start: int, stop: int, crew: Crew) -> Load:
    """Work out what the layers between two cuts cost a crew. The formulas are in the module's text."""
    cuts, shards, replicas = problem.cuts, crew.shards, crew.replicas
    speed = shards * min(kind.speed for kind in problem.kinds_of(crew))
    weights = float(cuts.parameter[stop] - cuts.parameter[start]) / shards
    gathered = float(cuts.gathered[stop] - cuts.gathered[start])
    message = all_reduce(problem, replicas, weights)
    collective = THREE_HALVES * all_reduce(problem, shards, gathered)
    if crew.splits_weights:
        collective, message = collective + THREE_HALVES * message, 0.0
    crossing = max(float(cuts.crossing[start]), float(cuts.crossing[stop]))
    if problem.formula == "published" and start == 0:
        crossing = 0.0
    return Load(
        forward=float(cuts.forward[stop] - cuts.forward[start]) / speed,
        backward=float(cuts.backward[stop] - cuts.backward[start]) / speed,
        collective=collective,
        send=crossing / (shards * problem.bandwidth),
        message=message,
    )


def busy_seconds(problem: PipelineProblem, start: int, stop: int, crew: Crew) -> float:
    """Return how long a stage is busy: per minibatch, or, with a flush, per step."""
    it, replicas = load(problem, start, stop, crew), crew.replicas
    if not problem.microbatches:
        if problem.formula == "paper":
            return max(it.compute / replicas, it.message / replicas, 2 * it.send)
        return max((it.compute + it.message) / replicas, 2 * it.send / replicas)
    rounds = -(-problem.microbatches // replicas)
    executes = SCHEDULES[problem.schedule].executes
    if executes == "exposed":
        return rounds * (it.compute + 2 * it.send) + it.message
    if executes == "streaming":
        forward = it.forward + IN_FORWARD * it.collective
        backward = it.compute - forward
        return rounds * (max(forward, it.send) + max(backward, it.send)) + it.message
    return max(rounds * it.compute + it.message, rounds * 2 * it.send)


def memory_bytes(
    problem: PipelineProblem, start: int, stop: int, crew: Crew, from_here: int
) -> float:
    """Return the bytes of one of the stage's workers; ``from_here`` as for ``in_flight``.

    Weights and gradients (2 w), and per (micro)batch in flight the outputs of the stage's layers
    and its input; PipeDream keeps one version of the weights per minibatch in flight instead of
    one. Where layers are split, what the largest gathers; where weights are, the largest layer's.
    """
    cuts, shards = problem.cuts, crew.shards
    weights = float(cuts.parameter[stop] - cuts.parameter[start])
    kept = float(cuts.activation[stop] - cuts.activation[start]) + float(cuts.crossing[start])
    held = in_flight(problem.schedule, crew.replicas, from_here, problem.microbatches)
    copies = 2 if SCHEDULES[problem.schedule].flushes else held + 1
    whole = 0.0
    if shards > 1:
        whole += min(float(cuts.gathered[stop] - cuts.gathered[start]), cuts.most_gathered)
    if crew.splits_weights:
        whole += min(weights, cuts.most_parameter) / shards
        copies /= crew.replicas
    return (copies * weights + held * kept) / shards + whole


def measure(problem: PipelineProblem, stages: Sequence[Placed], planner: str) -> PipelinePlan:
    """Work out what given stages cost under the problem's model."""
    cuts = problem.cuts
    from_here = sum(crew.replicas for _, crew in stages)
    found: list[PipelineStage] = []
    start, fits, passing = 0, True, list[tuple[float, float]]()
    for stop, crew in stages:
        it = load(problem, start, stop, crew)
        memory = memory_bytes(problem, start, stop, crew, from_here)
        fits = fits and memory <= min(kind.memory_bytes for kind in problem.kinds_of(crew))
        found.append(
            PipelineStage(
                layers=cuts.layers(start, stop),
                workers=crew.workers,
                seconds=busy_seconds(problem, start, stop, crew),
                compute_seconds=it.forward + it.backward,
                forward_seconds=it.forward,
                collective_seconds=it.collective,
                receive_bytes=float(cuts.crossing[start]),
                parameter_bytes=float(cuts.parameter[stop] - cuts.parameter[start]),
                memory_bytes=memory,
                in_flight=in_flight(
                    problem.schedule, crew.replicas, from_here, problem.microbatches
                ),
                shards=crew.shards,
                splits_weights=crew.splits_weights,
            )
        )
        sent = 2 * float(cuts.crossing[stop]) / (crew.shards * problem.bandwidth)
        passing.append((it.compute + sent, found[-1].seconds))
        start, from_here = stop, from_here - crew.replicas
    bottleneck = max(stage.seconds for stage in found)
    seconds = _until_last_ends(passing) if problem.microbatches else bottleneck
    return PipelinePlan(
        planner=planner,
        schedule=problem.schedule,
        stages=tuple(found),
        seconds=seconds,
        bottleneck=bottleneck,
        inputs_per_second=per_second(problem.microbatches or 1, seconds),
        fits=fits,
    )


def _until_last_ends(passing: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of a step with a flush; per stage what the first microbatch takes to pass it
    and how long it is busy."""
    seconds = 0.0
    for passes, busy in reversed(passing):
        seconds = max(busy, passes + seconds)
    return seconds
