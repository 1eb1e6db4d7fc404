"""Name strategies yourself, lower each to a Program, and run the Programs with a clock."""

from pathlib import Path

from shardwright.core.costs import CostTable
from shardwright.files.clusterfile import parse_cluster
from shardwright.files.planfile import read_graph
from shardwright.planner.cost import price
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space import Seed, seed_strategy

graph = read_graph(Path(__file__).parent / "mlp.graph.json")
cluster, table = parse_cluster("1x4xA100"), CostTable()

print(f"{'strategy':38} {'step':>9} {'peak':>9} instructions")
for seed in (
    Seed(data=4),
    Seed(data=4, zero=3),
    Seed(tensor=4),
    Seed(data=2, tensor=2, zero=1),
    Seed(stages=4, num_microbatches=8),
    Seed(stages=4, num_microbatches=8, schedule="gpipe"),
):
    strategy = seed_strategy(graph, seed)
    program = lower(graph, strategy)
    prices = price(program, graph, cluster, table)
    timeline = simulate(program, prices.seconds, overlap_slowdown=cluster.overlap_slowdown)
    print(
        f"{strategy.label:38} {timeline.step_seconds * 1e3:6.2f} ms "
        f"{timeline.worst_peak_bytes / 2**30:5.2f} GiB {program.num_instructions:6}"
    )
