"""What operators, messages and updates cost on one cluster, asked for once."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.strategy import Mesh, master_dtype
from shardwright.planner.cost import ShardPrices
from shardwright.planner.cost.burden import message_burden
from shardwright.planner.cost.roofline import memory_seconds
from shardwright.planner.cost.transforms import pack_cost
from shardwright.planner.cost.update import added_seconds, update_seconds
from shardwright.planner.model.facts import Facts, Shapes
from shardwright.planner.model.messages import MessageCosts
from shardwright.planner.model.training import Training
from shardwright.planner.remember import remembered

# About the seconds of starting a message, where nobody measured them.
STARTING = 5e-5


class Seconds(NamedTuple):
    """Forward and backward of one operator shard."""

    forward: float
    backward: float


class Prices:
    """What the operators, messages and updates of a graph cost on a cluster, asked for once: on devices like
    ``device``."""

    def __init__(
        self,
        facts: Facts,
        cluster: Cluster,
        table: CostTable,
        training: Training,
        device: int,
    ) -> None:
        self.device = device
        self.facts = facts
        self.cluster = cluster
        self.table = table
        self.training = training
        self.segment_seconds = table.overhead_map.get("segment_seconds", 0.0)
        self.message_seconds = table.overhead_map.get("message_seconds", 0.0)
        self.shards = ShardPrices(cluster, table)
        self._rates = self.shards.rates(device, training.precision)
        self._sorts: dict[object, int] = {}
        self._seconds: dict[tuple[int, Shapes, Shapes], Seconds] = {}

    def on(self, num_devices: int) -> Prices:
        """Return the prices of plans on the first so many devices: those of the slowest of them."""
        devices, device = self.cluster.devices, slowest(self.cluster, num_devices)
        return self if devices[device].kind == devices[self.device].kind else self._like(device)

    @remembered
    def _like(self, device: int) -> Prices:
        return Prices(self.facts, self.cluster, self.table, self.training, device)

    @remembered
    def wires(self, mesh: Mesh) -> MessageCosts:
        """Return the prices of messages on a mesh, the same for every number of microbatches."""
        return MessageCosts(self.cluster, self.table, self.message_seconds, mesh)

    def seconds(self, index: int, inputs: Shapes, outputs: Shapes) -> Seconds:
        """Price an operator shard; one sort of operator with equal local shapes has one price."""
        sort = self._shard_sort(index)
        key = (sort, inputs, outputs)
        if key not in self._seconds:
            forward, backward = [
                self.shards.cost(
                    self.facts.graph, index, sort, (inputs, outputs), phase, self._rates
                )
                for phase in ("forward", "backward")
            ]
            self._seconds[key] = Seconds(forward.seconds, backward.seconds)
        return self._seconds[key]

    @remembered
    def sort(self, index: int) -> int:
        """Number operators by all that decides what configs each may have and how long they take."""
        tensors, operator = self.facts.graph.tensors, self.facts.graph.operators[index]
        roles = tuple([tensors[t].role if tensors[t].producer < 0 else "" for t in operator.inputs])
        sample = (self.facts.samples.operator_dim[index], self.facts.sample_names[index])
        key = (self._shard_sort(index), self.facts.is_once(index), roles, *sample)
        return self._sorts.setdefault(key, len(self._sorts))

    @remembered
    def _shard_sort(self, index: int) -> int:
        """Number operators by everything but local shapes that decides their duration."""
        return self.shards.sort(self.facts.graph, index)

    @cached_property
    def serial_work(self) -> dict[int, float]:
        """The seconds of every (root) operator on one device, unsplit."""
        graph, found = self.facts.graph, dict[int, float]()
        for index in dict.fromkeys(self.facts.ties.root):
            operator = graph.operators[index]
            inputs = tuple(graph.tensors[tensor].shape for tensor in operator.inputs)
            outputs = tuple(graph.tensors[tensor].shape for tensor in operator.outputs)
            found[index] = sum(self.seconds(index, inputs, outputs))
        return found

    @cached_property
    def serial_seconds(self) -> float:
        """The seconds of all operators on one device, unsplit."""
        return sum(self.serial_work[root] for root in self.facts.ties.root)

    @cached_property
    def least_serial_seconds(self) -> float:
        """The same on a device of whichever kind is fastest: no plan on n devices is faster than an nth of it."""
        kinds: dict[int, Prices] = {self.cluster.devices[self.device].kind: self}
        for number, device in enumerate(self.cluster.devices):
            if device.kind not in kinds:
                kinds[device.kind] = self._like(number)
        return min(prices.serial_seconds for prices in kinds.values())

    def master_dtype(self, dtype: str) -> str:
        """Return the dtype in which the optimizer keeps a parameter of ``dtype``."""
        return master_dtype(self.training.precision, dtype)

    def sum_dtype(self, dtype: str, num_microbatches: int) -> str:
        """Return the dtype in which gradients of so many microbatches of a parameter add up."""
        adds_wide = num_microbatches > 1 and self.training.accumulation == "float32"
        return self.master_dtype(dtype) if adds_wide else dtype

    def update_seconds(self, num_bytes: float) -> float:
        """Return the seconds of the optimizer on a master parameter of so many bytes."""
        states, kind = self.training.optimizer_states, self._rates.kind
        return update_seconds(num_bytes, states, kind, self.table).seconds

    def added_seconds(self, num_bytes: float) -> float:
        """Return the seconds of adding a gradient of a later microbatch, so many bytes being read and written."""
        return added_seconds((num_bytes,), self._rates.kind, self.table)

    def touch_seconds(self, num_bytes: float) -> float:
        """Return the seconds of so many bytes, read and written together, through the memory."""
        return memory_seconds(num_bytes, self._rates.kind)

    def pack_seconds(self, name: str, elements: int, dtype: str, density: float) -> float:
        """Return the seconds of compressing so many elements, some selected, or of adding those of a rank."""
        width, kind = DTYPE_BYTES[dtype], self._rates.kind
        return pack_cost(name, elements, width, kind, self.table, density).seconds

    @remembered
    def starting(self, num_devices: int) -> float:
        """About the seconds of starting a message over so many devices: what merging two saves."""
        everyone = tuple(range(num_devices))
        return STARTING + message_burden("all_reduce", 1.0, everyone, self.cluster, self.table).held


def slowest(cluster: Cluster, num_devices: int) -> int:
    """Return the one of the first so many devices that computes slowest in float32: a group waits for it."""
    return min(range(num_devices), key=lambda device: cluster.kind_of(device).flops_for("float32"))
