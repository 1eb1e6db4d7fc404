"""Synchronous SGD on traced layers, as a Program that the simulator plays (Shi et al., ICPADS 2018).

All workers do the same; so there is one group. Reading a batch and copying it work for the next
minibatch (shift -1), forward and backward follow layer by layer, gradients leave on one link in the
order in which backward makes them, and the update waits for all. What exchanges differ in is which
layers travel together, what a message waits for and how long it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.core.layertrace import Exchange, Iteration, LayerTrace
from shardwright.core.program import Kind, Program, resource_classes
from shardwright.core.strategy import Mesh, Strategy
from shardwright.layerwise.allreduce import Sizes
from shardwright.layerwise.steady import steady_seconds
from shardwright.planner.schedule import merge_gradients
from shardwright.planner.schedule.merge import MergeMethod
from shardwright.planner.simulate import simulate

EXCHANGES: tuple[Exchange, ...] = (
    "naive", "wait-free", "merged", "mg-wfbp", "top-k", "gtop-k",
)  # fmt: skip
SPARSE: tuple[Exchange, ...] = ("top-k", "gtop-k")
_MERGES: dict[Exchange, MergeMethod] = {"merged": "optimal", "mg-wfbp": "mgwfbp"}
_RESOURCES = ("compute:0", "link:0", "host:0")
_COMPUTE, _LINK, _HOST = range(3)
NUMBER_BYTES = 4  # of a gradient's numbers
Seconds = Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class Network:
    """What exchanging gradients costs ``workers``: seconds of all-reduces, each by its bytes, of a sparse exchange by
    the numbers kept of each worker's, and of choosing them by how many there are."""

    workers: int
    dense: Callable[[Sizes], Sizes]
    sparse: Mapping[Exchange, Seconds]
    select: Seconds
    density: float

    def kept(self, num_bytes: int) -> int:
        """How many numbers of so many bytes are sent."""
        return max(1, int(self.density * num_bytes / NUMBER_BYTES)) if num_bytes else 0


def predict(trace: LayerTrace, network: Network, exchange: Exchange) -> Iteration:
    """Return one iteration once it repeats. Deterministic; O(layers^2) for merging, else linear."""
    buckets = _buckets(trace, network, exchange)
    steps = _lay_out(trace, network, exchange, buckets)
    program, seconds = steps.program(network.workers), np.array(steps.seconds)
    end = simulate(program, seconds).end
    kinds = np.array(steps.kinds)
    sent, computed = kinds == Kind.MESSAGE, np.isin(kinds, (Kind.BACKWARD, Kind.TRANSFORM))
    finished = float(end[computed].max())
    layers = trace.layers
    compute = sum(one.forward_seconds + one.backward_seconds for one in layers)
    given = trace.fetch_seconds + trace.copy_seconds
    return Iteration(
        exchange=exchange,
        workers=network.workers,
        seconds=steady_seconds(program, seconds),
        compute_seconds=compute + trace.update_seconds,
        select_seconds=float(seconds[kinds == Kind.TRANSFORM].sum()),
        input_seconds=given,
        network_seconds=float(seconds[sent].sum()),
        exposed_seconds=max(0.0, float(end[sent].max(initial=0.0)) - finished),
        single_seconds=max(given, compute + trace.update_seconds),
        messages=buckets,
    )


def _buckets(
    trace: LayerTrace, network: Network, exchange: Exchange
) -> tuple[tuple[int, ...], ...]:
    """Return which layers travel together, the last layers first, as backward makes them."""
    order = [i for i in reversed(range(len(trace.layers))) if trace.layers[i].bytes]
    if network.workers < 2:
        return ()
    if exchange not in _MERGES:
        return tuple((index,) for index in order)
    sizes = [trace.layers[index].bytes for index in order]
    found = merge_gradients(_ready(trace, order), sizes, network.dense, _MERGES[exchange])
    return tuple(tuple(order[place] for place in bucket) for bucket in found)


def _ready(trace: LayerTrace, order: Sequence[int]) -> list[float]:
    """Return when the gradients of layers are there if nothing is waited for."""
    begun = sum(layer.forward_seconds for layer in trace.layers)
    backward = np.array([layer.backward_seconds for layer in trace.layers])
    return [begun + float(backward[index:].sum()) for index in order]


@dataclass(slots=True)
class _Steps:
    """Instructions under way, in columns."""

    kinds: list[Kind] = field(default_factory=list[Kind])
    resources: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])
    waits: list[list[int]] = field(default_factory=list[list[int]])

    def add(self, kind: Kind, resource: int, seconds: float, waits: Sequence[int]) -> int:
        self.kinds.append(kind)
        self.resources.append(resource)
        self.seconds.append(seconds)
        self.waits.append(list(waits))
        return len(self.kinds) - 1

    def program(self, workers: int) -> Program:
        """Return them as a Program made for its times alone: it holds no values and no messages."""
        count, none = len(self.kinds), np.zeros(len(self.kinds), dtype=np.int64)
        kind = np.array(self.kinds, dtype=np.int8)
        mesh = Mesh(axes=("data",), sizes=(workers,), devices=tuple(range(workers)))
        lengths = [len(waits) for waits in self.waits]
        return Program(
            strategy=Strategy(meshes=(mesh,), configs=(), parameters=()),
            values=(),
            segments=(),
            messages=(),
            loss=-1,
            kind=kind,
            group=none.astype(np.int32),
            item=np.full(count, -1, dtype=np.int32),
            microbatch=np.full(count, -1, dtype=np.int32),
            resource=np.array(self.resources, dtype=np.int32),
            resource_names=_RESOURCES,
            resource_class=resource_classes(_RESOURCES),
            offset=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            predecessor=np.array([i for waits in self.waits for i in waits], dtype=np.int32),
            free_offset=np.zeros(count + 1, dtype=np.int64),
            free_value=np.zeros(0, dtype=np.int32),
            allocated=none,
            freed=none,
            temporary=none,
            base_bytes=(0,),
            shift=-np.isin(kind, (Kind.FETCH, Kind.COPY)).astype(np.int32),
        )


def _lay_out(
    trace: LayerTrace,
    network: Network,
    exchange: Exchange,
    buckets: tuple[tuple[int, ...], ...],
) -> _Steps:
    """Return the instructions of one iteration."""
    steps, layers = _Steps(), trace.layers
    fetched = steps.add(Kind.FETCH, _HOST, trace.fetch_seconds, ())
    copied = steps.add(Kind.COPY, _HOST, trace.copy_seconds, [fetched])
    for place, layer in enumerate(layers):
        steps.add(Kind.FORWARD, _COMPUTE, layer.forward_seconds, () if place else [copied])
    closes = {bucket[-1]: bucket for bucket in buckets}
    pending: list[float] = []  # messages that wait for the whole backward
    sent: list[int] = []
    done = len(steps.kinds) - 1
    for index in reversed(range(len(layers))):
        done = steps.add(Kind.BACKWARD, _COMPUTE, layers[index].backward_seconds, [done])
        if index not in closes:
            continue
        size = sum(layers[one].bytes for one in closes[index])
        if exchange in SPARSE:
            done = steps.add(Kind.TRANSFORM, _COMPUTE, network.select(size / NUMBER_BYTES), [done])
            seconds = network.sparse[exchange](network.kept(size))
        else:
            seconds = float(network.dense(np.array(float(size))))
        if exchange == "naive":
            pending.append(seconds)
        else:
            sent.append(steps.add(Kind.MESSAGE, _LINK, seconds, [done]))
    sent += [steps.add(Kind.MESSAGE, _LINK, seconds, [done]) for seconds in pending]
    steps.add(Kind.UPDATE, _COMPUTE, trace.update_seconds, [done, *sent])
    return steps


def selection(rate: float) -> Seconds:
    """Return the seconds of choosing the largest of n numbers: ``rate`` x n x log2 n (Shi et al., INFOCOM 2020)."""
    return lambda count: rate * count * math.log2(max(count, 2.0))
