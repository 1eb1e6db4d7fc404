"""Plan a captured graph for two clusters. The planner needs no torch, so this starts at once."""

import sys
from pathlib import Path

from shardwright.core.costs import CostTable
from shardwright.files.clusterfile import parse_cluster
from shardwright.files.planfile import read_graph
from shardwright.planner.search import search

# Written by `shardwright capture model.py:build --out mlp.graph.json`: nine linear layers.
graph = read_graph(Path(__file__).parent / "mlp.graph.json")
print(f"{graph.num_parameters / 1e6:.1f} M parameters, {len(graph.operators)} operators")

for name in ("1x2xA100", "2x1xL4"):
    frontier = search(graph, parse_cluster(name), CostTable())
    print(f"\n{name}")
    for plan in frontier.plans:
        mark = ">" if plan is frontier.best else " "
        step, peak = plan.predicted.step_seconds, plan.predicted.peak_bytes
        print(f"{mark} {step * 1e3:7.2f} ms {peak / 2**30:5.2f} GiB  {plan.strategy.label}")

print("\ntorch imported:", "torch" in sys.modules)
