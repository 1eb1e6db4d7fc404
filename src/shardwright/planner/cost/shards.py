"""Prices of operator shards on one cluster, each asked for once: layers repeat, and so do shards."""

from __future__ import annotations

from shardwright.core.cluster import Cluster
from shardwright.core.costs import Cost, CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Mesh
from shardwright.operators.counting.products import Shapes
from shardwright.operators.derivatives import hands_on
from shardwright.planner.cost.compute import operator_costs
from shardwright.planner.cost.groups import peer_groups
from shardwright.planner.cost.roofline import Rates
from shardwright.planner.remember import remembered

Groups = list[tuple[tuple[int, ...], int]]


class ShardPrices:
    """Remembers ``operator_costs`` by what decides it, and what meshes have in common with equal ones, however many
    devices they have; graphs of one search may share it.

    ``wires`` are costs of messages by what decides them.
    """

    def __init__(self, cluster: Cluster, table: CostTable) -> None:
        self.cluster = cluster
        self.table = table
        self._rates: dict[tuple[int, str], Rates] = {}
        self._sorts: dict[object, int] = {}
        self._costs: dict[tuple[object, ...], dict[str, Cost]] = {}
        self.wires: dict[tuple[object, ...], Cost] = {}

    def rates(self, device: int, precision: str) -> Rates:
        """Return what durations on a device are read from, the same for all of its kind."""
        key = (self.cluster.devices[device].kind, precision)
        if key not in self._rates:
            self._rates[key] = Rates(
                cluster=self.cluster, table=self.table, device=device, precision=precision
            )
        return self._rates[key]

    @remembered
    def rates_of(self, mesh: Mesh, precision: str) -> list[Rates]:
        """Return the rates of one device of each kind in a mesh, the first: a group waits for its slowest."""
        first: dict[int, int] = {}
        for device in mesh.devices:
            first.setdefault(self.cluster.devices[device].kind, device)
        return [self.rates(device, precision) for device in first.values()]

    @remembered
    def groups(self, mesh: Mesh, axes: tuple[int, ...]) -> Groups:
        """Return one group of each shape over hosts, with how many groups share its uplinks."""
        return peer_groups(self.cluster, mesh, axes)

    def sort(self, graph: OperatorGraph, index: int) -> int:
        """Number operators by all that decides their cost besides local shapes."""
        operator = graph.operators[index]
        specs = [graph.tensors[tensor] for tensor in (*operator.inputs, *operator.outputs)]
        whole = tuple([(spec.dtype, spec.needs_gradient, spec.shape) for spec in specs])
        key = (
            operator.kind, operator.attributes, operator.input_names, operator.flops, whole,
            self.rates(0, "float32").passing(graph, index), hands_on(graph, operator),
        )  # fmt: skip
        return self._sorts.setdefault(key, len(self._sorts))

    def cost(
        self, graph: OperatorGraph, index: int, sort: int, shapes: tuple[Shapes, Shapes],
        phase: str, rates: Rates,
    ) -> Cost:  # fmt: skip
        """Return the cost of a shard with these local input and output shapes; ``sort`` is its
        operator's, ``rates`` one of ``rates``."""
        key = (sort, shapes, id(rates))
        if key not in self._costs:
            self._costs[key] = operator_costs(graph, index, shapes, rates)
        return self._costs[key][phase]
