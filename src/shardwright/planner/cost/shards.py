"""Prices of operator shards on one cluster, each asked for once: layers repeat, and so do shards."""

from __future__ import annotations

from shardwright.core.cluster import Cluster
from shardwright.core.costs import Cost, CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.planner.cost.compute import Rates, Shapes, operator_cost


class ShardPrices:
    """Remembers ``operator_cost`` by what decides it; graphs of one search may share it."""

    def __init__(self, cluster: Cluster, table: CostTable) -> None:
        self.cluster = cluster
        self.table = table
        self._rates: dict[tuple[int, str], Rates] = {}
        self._sorts: dict[object, int] = {}
        self._costs: dict[tuple[object, ...], Cost] = {}

    def rates(self, device: int, precision: str) -> Rates:
        """Return what durations on a device are read from, the same for all of its kind."""
        key = (self.cluster.devices[device].kind, precision)
        if key not in self._rates:
            self._rates[key] = Rates(
                cluster=self.cluster, table=self.table, device=device, precision=precision
            )
        return self._rates[key]

    def sort(self, graph: OperatorGraph, index: int) -> int:
        """Number operators by all that decides their cost besides local shapes."""
        operator = graph.operators[index]
        specs = [graph.tensors[tensor] for tensor in (*operator.inputs, *operator.outputs)]
        whole = tuple([(spec.dtype, spec.needs_gradient, spec.shape) for spec in specs])
        key = (
            operator.kind, operator.attributes, operator.input_names, operator.flops, whole,
            self.rates(0, "float32").passing(graph, index),
        )  # fmt: skip
        return self._sorts.setdefault(key, len(self._sorts))

    def cost(
        self, graph: OperatorGraph, index: int, sort: int, shapes: tuple[Shapes, Shapes],
        phase: str, rates: Rates,
    ) -> Cost:  # fmt: skip
        """Return the cost of a shard with these local input and output shapes; ``sort`` is its
        operator's, ``rates`` one of ``rates``."""
        key = (sort, shapes, phase, id(rates))
        if key not in self._costs:
            self._costs[key] = operator_cost(graph, index, *shapes, phase, rates)
        return self._costs[key]
