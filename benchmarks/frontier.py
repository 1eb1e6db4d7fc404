"""How long exact answers of one arrangement take: `python benchmarks/frontier.py`.

GPT-2 small (124 M parameters, 64 x 1,024 tokens) on 8 devices, two microbatches, under every mesh of data
x tensor: the optimum of the additive model, its hull (all supported points), and a frontier that misses
no point by more than 1 % in time or memory. Seconds are of one thread's own time (CPU), tables built.
"""

from __future__ import annotations

import argparse
import platform
import time

import numpy as np
from processor import processor_name
from rich.console import Console
from rich.table import Table

from shardwright.core.costs import CostTable
from shardwright.files.clusterfile import parse_cluster
from shardwright.planner.search.arrangements import Arrangement
from shardwright.planner.search.candidates import search_weights
from shardwright.planner.search.context import Context, Training
from shardwright.planner.search.elimination import Elimination
from shardwright.planner.search.frontier import hull
from shardwright.planner.search.gaps import whole_frontier
from shardwright.planner.search.problem import Problem
from shardwright.runtime.capture import capture, load_model

OPTIMUM, HULL, FRONTIER = 0.05, 0.5, 5.0
EPSILON, EXPOSED = 0.01, 0.3


def main() -> int:
    """Solve, print, and fail where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="hf:gpt2")
    parser.add_argument("--cluster", default="2x4xA100")
    parser.add_argument("--global-batch", type=int, default=64)
    options = parser.parse_args()
    source = load_model(options.model)
    captured = capture(
        source.build(), source.example(2, None), global_batch=options.global_batch,
        precision="bfloat16", name=options.model,
    )  # fmt: skip
    cluster = parse_cluster(options.cluster)
    context = Context(captured.graph, cluster, CostTable(), Training(precision="bfloat16"))
    table = Table(title=f"{options.model} on {options.cluster}, additive model, CPU seconds")
    for name in ("data x tensor", "build", "optimum", "hull", "points", "1 % frontier", "points"):
        table.add_column(name, justify="right")
    is_met, count = True, cluster.num_devices
    for tensor in [size for size in range(1, count + 1) if count % size == 0]:
        one = Arrangement(stages=1, data=count // tensor, tensor=tensor, microbatches=2)
        marks = [time.process_time()]
        graph = Problem(context, one.mesh(0), 2).factor_graph(search_weights(one, EXPOSED, EXPOSED))
        solver = Elimination.of(graph)
        marks.append(time.process_time())
        solver.solve(np.array([(1.0, 0.0)]))
        marks.append(time.process_time())
        corners = hull(solver, 10**6).points
        marks.append(time.process_time())
        whole = whole_frontier(graph, EPSILON)
        marks.append(time.process_time())
        build, optimum, corner, front = np.diff(marks)
        is_met &= bool(optimum <= OPTIMUM and corner <= HULL and front <= FRONTIER)
        is_met &= whole.epsilon == EPSILON
        table.add_row(
            f"{one.data} x {tensor}", f"{build:.2f}", f"{optimum:.3f}", f"{corner:.2f}",
            str(len(corners)), f"{front:.2f}", str(len(whole.points)),
        )  # fmt: skip
    console = Console(width=110)
    console.print(table)
    console.print(
        f"{processor_name()}; Python {platform.python_version()}, NumPy {np.__version__}; bars "
        f"{OPTIMUM} s, {HULL} s, {FRONTIER} s: {'met' if is_met else 'missed'}."
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
