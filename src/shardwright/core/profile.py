"""A profiled model as a graph of layers, and a pipeline cut out of it.

PipeDream's profiler writes such graphs. They know times and sizes but no shapes, so a pipeline of
them can be compared and studied; it cannot be run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwright.core.schedules import ScheduleKind
from shardwright.errors import InputError

CostFormula = Literal["code", "paper", "published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One profiled layer, for one (micro)batch on one device.

    Times in seconds. ``activation_bytes`` is its output, kept until its backward.
    """

    name: str
    description: str = ""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    activation_bytes: float = 0.0
    parameter_bytes: float = 0.0

    def __post_init__(self) -> None:
        for field in (
            "forward_seconds",
            "backward_seconds",
            "activation_bytes",
            "parameter_bytes",
        ):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(
                    f"layer {self.name!r}: {field.replace('_', ' ')} must be a finite number, "
                    f"0 or more, not {value}; measure it again"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """Layers and which output feeds which: a directed graph without cycles.

    ``edges`` are (producer, consumer) positions in ``layers``. Raises InputError for a cycle, a
    layer that feeds itself, or no layer at all.
    """

    name: str
    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        count = len(self.layers)
        if not count:
            raise InputError(f"profile {self.name!r} has no layers; profile a model first")
        if any(not (0 <= a < count and 0 <= b < count) for a, b in self.edges):
            raise InputError(
                f"profile {self.name!r} has an edge to a layer that it does not have; add the layer, "
                "or remove the edge"
            )
        if len(self.order()) != count:
            stuck = sorted(set(range(count)).difference(self.order()))
            names = ", ".join(self.layers[i].name for i in stuck[:4])
            raise InputError(
                f"profile {self.name!r} has a cycle through {names}; a layer cannot wait for itself: remove an edge of it"
            )

    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Per layer, the layers that read its output, each once, ascending."""
        found: list[set[int]] = [set() for _ in self.layers]
        for producer, consumer in self.edges:
            found[producer].add(consumer)
        return tuple(tuple(sorted(each)) for each in found)

    def order(self) -> tuple[int, ...]:
        """One topological order, depth first, so that a branch stays together. Shorter than the
        graph where there is a cycle."""
        consumers = self.consumers()
        waiting = [0] * len(self.layers)
        for targets in consumers:
            for target in targets:
                waiting[target] += 1
        ready = [i for i in reversed(range(len(self.layers))) if not waiting[i]]
        order: list[int] = []
        while ready:
            layer = ready.pop()
            order.append(layer)
            for target in reversed(consumers[layer]):
                waiting[target] -= 1
                if not waiting[target]:
                    ready.append(target)
        return tuple(order)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """``count`` equal workers. ``speed`` is relative to the profiled device."""

    count: int
    speed: float = 1.0
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(
                f"workers: a kind needs at least 1 worker, not {self.count}; leave it out"
            )
        if not (self.speed > 0 and math.isfinite(self.speed)):
            raise InputError(
                f"workers: a speed must be positive and finite, not {self.speed}; 1 is as profiled"
            )
        if not self.memory_bytes > 0:
            raise InputError(
                f"workers: memory must be positive, not {self.memory_bytes} bytes; leave it out for "
                "no limit"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """A stage and what it costs.

    ``workers`` per kind make replicas of ``shards`` workers each, which take the (micro)batches in
    turn. The shards of a replica split every layer; with ``splits_weights`` the replicas keep each
    a part of the weights. ``seconds`` is how long the stage is busy per (micro)batch, or per step
    where the schedule has a flush. ``receive_bytes`` cross its input cut per (micro)batch,
    ``forward_seconds`` are part of ``compute_seconds``, ``collective_seconds`` of a (micro)batch
    come on top, ``in_flight`` is how many (micro)batches a replica holds at most. Where workers have
    several stages, ``worker`` is whose this is (-1: nobody else's).
    """

    layers: tuple[int, ...]
    workers: tuple[int, ...]
    seconds: float
    compute_seconds: float
    forward_seconds: float
    receive_bytes: float
    parameter_bytes: float
    memory_bytes: float
    in_flight: int
    shards: int = 1
    splits_weights: bool = False
    collective_seconds: float = 0.0
    worker: int = -1

    @property
    def num_workers(self) -> int:
        """How many workers the stage has."""
        return sum(self.workers)

    @property
    def num_replicas(self) -> int:
        """How many (micro)batches it works on at a time."""
        return self.num_workers // self.shards


class Bar(NamedTuple):
    """An action of an order and when it runs: the stage, F, B, I or W, and the microbatch."""

    stage: int
    phase: str
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """Stages in order, and what the pipeline costs.

    ``seconds`` is what planners minimise: the bottleneck stage's seconds per minibatch, or, with a
    flush, the seconds of a step. ``bottleneck`` is the busiest stage's seconds. ``bound`` is below
    every pipeline of the model (0: not known). ``simulated_seconds`` is a step with a flush, in
    the event simulation. ``published_seconds`` is the bottleneck as PipeDream's published optimizer
    counts it (formula ``published``), where that was asked for. ``timeline``: what every worker runs
    when, where an order was replayed.
    """

    planner: str
    schedule: ScheduleKind
    stages: tuple[PipelineStage, ...]
    seconds: float
    bottleneck: float
    inputs_per_second: float
    bound: float = 0.0
    fits: bool = True
    simulated_seconds: float | None = None
    published_seconds: float | None = None
    note: str = ""
    timeline: tuple[tuple[Bar, ...], ...] = ()

    @property
    def num_workers(self) -> int:
        """How many workers are used."""
        if self.stages[0].worker >= 0:
            return len({stage.worker for stage in self.stages})
        return sum(stage.num_workers for stage in self.stages)

    @property
    def gap(self) -> float:
        """How far above the bound, as a share of it."""
        return self.seconds / self.bound - 1 if self.bound > 0 else math.inf


def per_second(inputs: int, seconds: float) -> float:
    """Return a rate, infinite where nothing takes time."""
    return inputs / seconds if seconds > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStudy:
    """The best pipeline, and what the published planners make of the same problem.

    ``rivals`` found something; ``refusals`` are (planner, why not).
    """

    best: PipelinePlan
    rivals: tuple[PipelinePlan, ...]
    refusals: tuple[tuple[str, str], ...]
