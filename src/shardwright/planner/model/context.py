"""What every part of one search shares: facts about the graph, prices on the cluster, and how many devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.planner.model.facts import Facts
from shardwright.planner.model.prices import Prices, slowest
from shardwright.planner.model.training import Training


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """One graph on the first ``num_devices`` of a cluster.

    ``is_strict``: an axis called tensor splits no samples. A search may, where it likes.
    """

    facts: Facts
    prices: Prices
    num_devices: int
    is_strict: bool = False

    @classmethod
    def of(
        cls, graph: OperatorGraph, cluster: Cluster, table: CostTable, training: Training
    ) -> Context:
        """Return the context of plans on all devices."""
        facts = Facts(graph.run_on(cluster.backend))
        count = cluster.num_devices
        prices = Prices(facts, cluster, table, training, slowest(cluster, count))
        return cls(facts=facts, prices=prices, num_devices=count)

    def on(self, num_devices: int) -> Context:
        """Return the same facts for plans on the first so many devices, at the prices of these."""
        return replace(self, prices=self.prices.on(num_devices), num_devices=num_devices)

    def at(self, *, table: CostTable | None = None, training: Training | None = None) -> Context:
        """Return the same facts at other prices."""
        prices = Prices(
            self.facts,
            self.cluster,
            table or self.table,
            training or self.training,
            self.prices.device,
        )
        return replace(self, prices=prices)

    @property
    def graph(self) -> OperatorGraph:
        """What is planned."""
        return self.facts.graph

    @property
    def cluster(self) -> Cluster:
        """What it is planned for, whole."""
        return self.prices.cluster

    @property
    def table(self) -> CostTable:
        """What was measured there."""
        return self.prices.table

    @property
    def training(self) -> Training:
        """How the model is trained."""
        return self.prices.training

    @property
    def starting(self) -> float:
        """About the seconds of starting a message: what merging two saves."""
        return self.prices.starting(self.num_devices)

    def work_seconds(
        self, index: int, dims: tuple[str, ...], sizes: tuple[int, ...], pieces: int
    ) -> float:
        """Return the seconds of an operator under a config over axes of these sizes, forward and backward in one of
        so many microbatches."""
        return sum(self.prices.seconds(index, *self.facts.local(index, dims, sizes, pieces)))
