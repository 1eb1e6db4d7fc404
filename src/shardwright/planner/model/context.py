"""What every part of one search shares: facts about the graph, and prices asked for only once."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import DTYPE_BYTES, OperatorGraph, tensor_bytes
from shardwright.core.halo import Halos, extended_shape, most_moved
from shardwright.core.layout import Layout, local_shape
from shardwright.core.strategy import (
    MIXED,
    Accumulation,
    Mesh,
    Precision,
    Recomputation,
    WireDtype,
)
from shardwright.planner.cost import ShardPrices, collective_seconds
from shardwright.planner.cost.burden import message_burden
from shardwright.planner.cost.collective import halo_seconds
from shardwright.planner.cost.compute import memory_seconds
from shardwright.planner.cost.groups import peer_groups
from shardwright.planner.cost.recomputation import needed_again, recomputed_operators
from shardwright.planner.cost.update import update_seconds
from shardwright.planner.lower.fold import Folder
from shardwright.planner.lower.spread import Spreader
from shardwright.planner.model.facts import read_last, slowest
from shardwright.planner.model.flows import Flow, find_flows, find_passing
from shardwright.planner.model.losses import Losses
from shardwright.planner.model.saves import find_saves
from shardwright.planner.model.ties import tie_blocks
from shardwright.planner.space import find_samples, iterate, placements, reshard_steps
from shardwright.planner.space.configs import Placements
from shardwright.planner.space.iteration import PLUS, Iteration
from shardwright.planner.space.redistribute import Step
from shardwright.planner.space.samples import State
from shardwright.planner.space.seeds import data_dims

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
LOCAL = frozenset({"slice", "copy"})
# So many equal gradients in one message make the cost of starting it invisible.
MANY = 1024
STARTING = 5e-5  # about the seconds of starting a message, where nobody measured them


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How the model is trained, as far as plans depend on it (see ``Strategy``).

    ``recompute``: what every repeated block makes again, or ``auto``: as memory requires.
    """

    precision: Precision = "float32"
    optimizer_states: int = 2
    clips: bool = False
    max_norm: float = 0.0
    accumulation: Accumulation = "float32"
    gradient_dtype: WireDtype = "parameter"
    error_feedback: bool = False
    batch_norm: Literal["local", "synchronised"] = "local"
    recompute: Recomputation | Literal["auto"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Forward and backward of one operator shard."""

    forward: float
    backward: float


class Context:
    """Facts about graph, cluster and costs, with caches. Equal questions get equal answers.

    ``is_strict``: an axis called tensor splits no samples. A search may, where it likes.
    """

    def __init__(
        self, graph: OperatorGraph, cluster: Cluster, table: CostTable, training: Training
    ) -> None:
        self.graph = graph
        self.cluster = cluster
        self.table = table
        self.training = training
        self.num_devices = cluster.num_devices
        self.is_strict = False
        self.samples = find_samples(graph)
        self.ties = tie_blocks(graph, self.samples)
        self.saves = find_saves(graph, self.ties.block)
        self.segment_seconds = table.overhead_map.get("segment_seconds", 0.0)
        self.message_seconds = table.overhead_map.get("message_seconds", 0.0)
        self.read_last = read_last(graph, self.ties)
        self.shards = ShardPrices(cluster, table)
        self._rates = self.shards.rates(slowest(cluster), training.precision)
        self._iterations: dict[int, Iteration] = {}
        self._sorts: dict[object, int] = {}
        self._sort_of: dict[int, int] = {}
        self._shard_sort_of: dict[int, int] = {}
        self._once: dict[int, bool] = {}
        self._seconds: dict[tuple[int, Shapes, Shapes], Seconds] = {}
        self._placements: dict[tuple[int, tuple[str, ...]], Placements] = {}
        self._wires: dict[Mesh, MessageCosts] = {}
        self._recomputed: dict[str, frozenset[int]] = {}
        self._idle: dict[frozenset[int], frozenset[int]] = {}

    def on(self, num_devices: int) -> Context:
        """Return the same facts, and the same caches, for plans on the first so many devices."""
        other = copy.copy(self)
        other.num_devices = num_devices
        return other

    def iteration(self, index: int) -> Iteration:
        """Return the iteration space of an operator."""
        root = self.ties.root[index]
        if root not in self._iterations:
            self._iterations[root] = iterate(self.graph, root)
        return self._iterations[root]

    def placements(self, index: int, dims: tuple[str, ...]) -> Placements:
        """Return the layouts of an operator's tensors under one config."""
        key = (self.ties.root[index], dims)
        if key not in self._placements:
            self._placements[key] = placements(self.iteration(index), dims)
        return self._placements[key]

    def recomputed(self, name: Literal["selective", "attention"]) -> frozenset[int]:
        """Return the operators that run again in blocks that are recomputed in part."""
        if name not in self._recomputed:
            again = recomputed_operators(self.graph, name)
            tied = frozenset(i for i, root in enumerate(self.ties.root) if root in again)
            self._recomputed[name] = tied
        return self._recomputed[name]

    def idle(self, asked: frozenset[int]) -> frozenset[int]:
        """Return those of the operators asked to run again that no backward needs to."""
        if asked not in self._idle:
            self._idle[asked] = asked - needed_again(self.graph, asked)
        return self._idle[asked]

    def wires(self, mesh: Mesh) -> MessageCosts:
        """Return the prices of messages on a mesh, the same for every number of microbatches."""
        if mesh not in self._wires:
            self._wires[mesh] = MessageCosts(self, mesh)
        return self._wires[mesh]

    def seconds(self, index: int, inputs: Shapes, outputs: Shapes) -> Seconds:
        """Price an operator shard; one sort of operator with equal local shapes has one price."""
        sort = self._shard_sort(index)
        key = (sort, inputs, outputs)
        if key not in self._seconds:
            forward, backward = [
                self.shards.cost(self.graph, index, sort, (inputs, outputs), phase, self._rates)
                for phase in ("forward", "backward")
            ]
            self._seconds[key] = Seconds(forward=forward.seconds, backward=backward.seconds)
        return self._seconds[key]

    def sort(self, index: int) -> int:
        """Number operators by all that decides what configs each may have and how long they take."""
        if index not in self._sort_of:
            tensors, operator = self.graph.tensors, self.graph.operators[index]
            roles = tuple(
                [tensors[t].role if tensors[t].producer < 0 else "" for t in operator.inputs]
            )
            sample = (self.samples.operator_dim[index], self.sample_names[index])
            key = (self._shard_sort(index), self.is_once(index), roles, *sample)
            self._sort_of[index] = self._sorts.setdefault(key, len(self._sorts))
        return self._sort_of[index]

    def _shard_sort(self, index: int) -> int:
        """Number operators by everything but local shapes that decides their duration."""
        if index not in self._shard_sort_of:
            self._shard_sort_of[index] = self.shards.sort(self.graph, index)
        return self._shard_sort_of[index]

    def is_once(self, index: int) -> bool:
        """Whether an operator runs once per step: before the microbatches, or free of the batch."""
        if index not in self._once:
            operator, tensors = self.graph.operators[index], self.graph.tensors
            is_free = all(self.samples.state[tensor] is State.FREE for tensor in operator.outputs)
            trained = any(tensors[t].needs_gradient for t in operator.outputs) or any(
                tensors[t].role == "parameter" for t in operator.inputs
            )
            self._once[index] = index in self.samples.prologue or (is_free and not trained)
        return self._once[index]

    @cached_property
    def sample_names(self) -> tuple[str, ...]:
        """Per operator the dim which the data axis splits, "" where it has none."""
        graph, samples = self.graph, self.samples
        iterations = [self.iteration(index) for index in range(len(graph.operators))]
        names = data_dims(graph, samples, iterations)
        return tuple("" if names[i] == PLUS else names[i] for i in range(len(names)))

    @cached_property
    def flows(self) -> tuple[Flow, ...]:
        """The activations, equal blocks taken together."""
        return find_flows(self.graph, self.ties)

    @cached_property
    def passing(self) -> tuple[tuple[int, int, int], ...]:
        """The activations that pass from block to block, with the first and the last of these."""
        return find_passing(self.graph, self.ties)

    @cached_property
    def folder(self) -> Folder:
        """Leaves out equal blocks where strategies of deep graphs are judged."""
        return Folder(self.graph, self.samples)

    @cached_property
    def spreader(self) -> Spreader:
        """Makes strategies of deep graphs, quickly."""
        return Spreader(self.folder)

    @property
    def block_buckets(self) -> tuple[tuple[int, ...], ...]:
        """The gradients of each block, to travel together."""
        return self.spreader.buckets

    @cached_property
    def widest(self) -> dict[int, int]:
        """Per block, the operator with the largest result."""
        found: dict[int, int] = {}
        sizes = [
            max((self.graph.tensors[tensor].bytes for tensor in operator.outputs), default=0)
            for operator in self.graph.operators
        ]
        for index, block in enumerate(self.ties.block):
            if block not in found or sizes[index] > sizes[found[block]]:
                found[block] = index
        return found

    @cached_property
    def starting(self) -> float:
        """About the seconds of starting a message: what merging two saves."""
        everyone = tuple(range(self.num_devices))
        return STARTING + message_burden("all_reduce", 1.0, everyone, self.cluster, self.table).held

    @cached_property
    def serial_work(self) -> dict[int, float]:
        """The seconds of every (root) operator on one device, unsplit."""
        graph, found = self.graph, dict[int, float]()
        for index in dict.fromkeys(self.ties.root):
            operator = graph.operators[index]
            inputs = tuple(graph.tensors[tensor].shape for tensor in operator.inputs)
            outputs = tuple(graph.tensors[tensor].shape for tensor in operator.outputs)
            cost = self.seconds(index, inputs, outputs)
            found[index] = cost.forward + cost.backward
        return found

    @cached_property
    def serial_seconds(self) -> float:
        """The seconds of all operators on one device, unsplit."""
        return sum(self.serial_work[root] for root in self.ties.root)

    @cached_property
    def hands_on(self) -> tuple[bool, ...]:
        """Whether an operator sees no samples but its readers do (a position embedding).

        Along the data axis it runs in full while its gradient comes as partial sums; lowering hands
        those on to the parameter instead of adding them up on the way.
        """
        graph, dims = self.graph, self.sample_names
        found = [False] * len(graph.operators)
        for index in reversed(range(len(found))):
            readers = [
                reader
                for tensor in graph.operators[index].outputs
                if graph.tensors[tensor].needs_gradient
                for reader in graph.consumers[tensor]
            ]
            below = all(dims[reader] != "" or found[reader] for reader in readers)
            found[index] = dims[index] == "" and bool(readers) and below
        return tuple(found)

    def master_dtype(self, dtype: str) -> str:
        """Return the dtype in which the optimizer keeps a parameter of ``dtype``."""
        return "float32" if self.training.precision in MIXED else dtype

    def sum_dtype(self, dtype: str, num_microbatches: int) -> str:
        """Return the dtype in which gradients of so many microbatches of a parameter add up."""
        adds_wide = num_microbatches > 1 and self.training.accumulation == "float32"
        return self.master_dtype(dtype) if adds_wide else dtype

    def update_seconds(self, num_bytes: float) -> float:
        """Return the seconds of the optimizer on a master parameter of so many bytes."""
        states, kind = self.training.optimizer_states, self._rates.kind
        return update_seconds(num_bytes, states, kind, self.table).seconds

    def touch_seconds(self, num_bytes: float) -> float:
        """Return the seconds of so many bytes, read and written together, through the memory."""
        return memory_seconds(num_bytes, self._rates.kind)

    def shape(self, tensor: int, num_microbatches: int) -> Shape:
        """Return a tensor's shape in one of so many microbatches, before sharding."""
        spec = self.graph.tensors[tensor]
        dim = self.samples.tensor_dim[tensor]
        if dim < 0 or num_microbatches == 1 or spec.role in ("parameter", "buffer", "constant"):
            return spec.shape
        shape = list(spec.shape)
        shape[dim] //= num_microbatches
        return tuple(shape)


def local_shapes(
    context: Context, index: int, dims: tuple[str, ...], sizes: tuple[int, ...], count: int
) -> tuple[Shapes, Shapes]:
    """Return the local input and output shapes of an operator in one of so many microbatches."""
    operator, placed = context.graph.operators[index], context.placements(index, dims)
    inputs = tuple(
        extended_shape(local_shape(context.shape(tensor, count), pair.value, sizes), pair.halos)
        for tensor, pair in zip(operator.inputs, placed.inputs, strict=True)
    )
    outputs = tuple(
        local_shape(context.shape(tensor, count), pair.value, sizes)
        for tensor, pair in zip(operator.outputs, placed.outputs, strict=True)
    )
    return inputs, outputs


class MessageCosts:
    """Seconds of messages on one mesh, as ``planner.cost.price`` would price them."""

    def __init__(self, context: Context, mesh: Mesh) -> None:
        self.context = context
        self.mesh = mesh
        self._groups = {
            axes: peer_groups(context.cluster, mesh, axes)
            for count in range(1, len(mesh.sizes) + 1)
            for axes in itertools.combinations(range(len(mesh.sizes)), count)
        }
        self._groups[()] = [((mesh.devices[0],), 1)]
        self.losses = Losses(context.cluster, context.table, self._groups)
        self._messages: dict[tuple[str, tuple[int, ...], int], float] = {}
        self._reshards: dict[tuple[Shape, str, Layout, Layout], float] = {}
        self.parameters: dict[object, NDArray[np.float64]] = {}

    def message(self, primitive: str, axes: tuple[int, ...], num_bytes: int) -> float:
        """Price one message."""
        key = (primitive, axes, num_bytes)
        if key not in self._messages:
            context = self.context
            slowest = max(
                collective_seconds(
                    primitive, num_bytes, devices, context.cluster, context.table, concurrent
                ).seconds
                for devices, concurrent in self._groups[axes]
            )
            self._messages[key] = slowest + (0.0 if primitive in LOCAL else context.message_seconds)
        return self._messages[key]

    def reshard(self, shape: Shape, dtype: str, source: Layout, target: Layout) -> float:
        """Price a change of layout; infinite where there is none."""
        if source == target:
            return 0.0
        key = (shape, dtype, source, target)
        if key not in self._reshards:
            try:
                self._reshards[key] = sum(one for _, one in self.by_axes(*key))
            except ValueError:
                self._reshards[key] = float("inf")
        return self._reshards[key]

    def merged(self, shape: Shape, dtype: str, source: Layout, target: Layout) -> float:
        """Price a gradient's share of a message that carries many: no cost of starting one."""
        try:
            steps = _steps(shape, dtype, source, target, self.mesh.sizes)
        except ValueError:
            return math.inf
        return sum(
            self.message(step.primitive, axes, step.bytes * MANY) / MANY for step, axes in steps
        )

    def held(self, shape: Shape, dtype: str, source: Layout, target: Layout) -> float:
        """Return the computing thread's own seconds of a change of layout."""
        steps = _steps(shape, dtype, source, target, self.mesh.sizes)
        return sum(self.losses.held(step.primitive, axes, step.bytes) for step, axes in steps)

    def lost(self, shape: Shape, dtype: str, source: Layout, target: Layout) -> float:
        """Return the least computation that a tensor's share of a message of many costs."""
        steps = _steps(shape, dtype, source, target, self.mesh.sizes)
        total = 0.0
        for step, axes in steps:
            many = (step.primitive, axes, step.bytes * MANY)
            own = self.message(step.primitive, axes, step.bytes)
            total += self.losses.least(*many, self.message(*many), own) / MANY
        return total

    def by_axes(
        self, shape: Shape, dtype: str, source: Layout, target: Layout
    ) -> list[tuple[tuple[int, ...], float]]:
        """Return the seconds of every message of a change of layout, with the axes it spans.

        Raises ValueError where there is no such change.
        """
        return [
            (axes, self.message(step.primitive, axes, step.bytes))
            for step, axes in _steps(shape, dtype, source, target, self.mesh.sizes)
        ]

    def halos(self, local: Shape, dtype: str, halos: Halos) -> float:
        """Price bringing a shard's halos, or giving their gradients back."""
        context, total = self.context, 0.0
        for halo in halos:
            moved = most_moved(local, halo, self.mesh.sizes) * DTYPE_BYTES[dtype]
            local = extended_shape(local, (halo,))
            copied = tensor_bytes(local, dtype)
            key = (f"halo {copied}", halo.axes, moved)
            if key not in self._messages:
                slowest = max(
                    halo_seconds(
                        moved, copied, devices, context.cluster, context.table, share
                    ).seconds
                    for devices, share in self._groups[halo.axes]
                )
                self._messages[key] = slowest + context.message_seconds
            total += self._messages[key]
        return total


def _steps(
    shape: Shape, dtype: str, source: Layout, target: Layout, sizes: tuple[int, ...]
) -> list[tuple[Step, tuple[int, ...]]]:
    """Return the steps of a change of layout with the axes they span.

    Where the first axis shards one dim before and after, and the second another or none, only the
    second has work to do: a smaller problem, and the same one for many data-parallel widths.
    """
    kept = source[0]
    is_inner = len(sizes) == len(("data", "tensor")) and kept == target[0] and kept >= 0
    if not is_inner or kept in (source[1], target[1]) or shape[kept] % sizes[0]:
        return [(step, step.axes) for step in reshard_steps(shape, dtype, source, target, sizes)]
    local = tuple(n // sizes[0] if dim == kept else n for dim, n in enumerate(shape))
    return [(step, (1,)) for step in reshard_steps(local, dtype, source[1:], target[1:], sizes[1:])]
