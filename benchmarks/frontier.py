"""How long exact answers of one arrangement take: `python benchmarks/frontier.py`.

GPT-2 small (124 M parameters, 64 x 1,024 tokens) on 8 devices, two microbatches, under every mesh of data
x tensor: the optimum of the additive model, its hull (all supported points), and a frontier that misses
no point by more than 1 % in time or memory. Seconds are of one thread's own time (CPU), tables built.

`--meshes`: Llama-3-8B's shape (512 x 4,096 tokens, four microbatches) on 64 H100 in hosts of 8: the fastest
plan within the memory of a device, less a reserve, on an 8x8 and on a 4x4x4 mesh, with its proved gap;
seconds with tables.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path

import numpy as np
from processor import processor_name
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from shardwright.core.costs import CostTable
from shardwright.core.strategy import Mesh
from shardwright.files.clusterfile import parse_cluster
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.context import Context
from shardwright.planner.model.problem import Problem
from shardwright.planner.model.terms import Weights
from shardwright.planner.model.training import Training
from shardwright.planner.search.candidates import search_weights
from shardwright.planner.solve.frontier import hull, nearest_within
from shardwright.reasons.factors import factor_graph
from shardwright.runtime.capture import capture, load_model
from tests.planner.solve.whole import fastest_within, whole_frontier

OPTIMUM, HULL, FRONTIER = 0.05, 0.5, 5.0
EPSILON, EXPOSED = 0.01, 0.3
# Axes, sizes, seconds and gap allowed.
MESHES = (
    (("data", "tensor"), (8, 8), 3.0, 0.0),
    (("data", "middle", "tensor"), (4, 4, 4), 20.0, 0.001),
)


def machine() -> str:
    """Name what the figures were taken on."""
    return f"{processor_name()}; Python {platform.python_version()}, NumPy {np.__version__}"


def on_meshes(console: Console) -> bool:
    """Solve for the fastest plan within a limit; tell whether all bars are met."""
    source = load_model("hf:llama3-8b")
    graph = capture(
        source.build(), source.example(1, 4096), global_batch=512, precision="bfloat16",
        name="llama3-8b",
    ).graph  # fmt: skip
    cluster = parse_cluster("8x8xH100")
    context = Context.of(graph, cluster, CostTable(), Training(precision="bfloat16"))
    limit = 0.95 * cluster.kind_of(0).memory_bytes
    table = Table(title="Llama-3-8B on 8x8xH100, fastest within the memory, CPU seconds")
    for name in ("mesh", "tables", "solving", "bar", "step", "bound", "gap", "bar"):
        table.add_column(name, justify="right")
    is_met = True
    weights = Weights(each=4.0, once=1.0, exposed=0.08, synced=0.08)
    for axes, sizes, bar, most in MESHES:
        mesh = Mesh(axes=axes, sizes=sizes, devices=tuple(range(64)))
        begin = time.process_time()
        problem = Problem.of(context, mesh, 4)
        view = problem.elimination(weights)
        built = time.process_time()
        curve = hull(view, 2, limit)
        best, bound = nearest_within(view, curve, limit), curve.bound(limit)
        if not problem.is_wide:  # what lies between the corners, exactly
            best = fastest_within(factor_graph(problem, weights), limit)
            bound = best.seconds if best else bound
        done = time.process_time()
        gap = 1 - bound / best.seconds if best else 1.0
        is_met &= done - begin <= bar and gap <= most
        table.add_row(
            "x".join(map(str, sizes)), f"{built - begin:.2f}", f"{done - built:.2f}", f"{bar:g}",
            f"{best.seconds if best else 0:.4f} s", f"{bound:.4f} s", f"{gap:.3%}", f"{most:.1%}",
        )  # fmt: skip
    console.print(table)
    return is_met


def main() -> int:
    """Solve, print, and fail where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--meshes", action="store_true", help="Llama-3-8B on 8x8 and 4x4x4")
    parser.add_argument("--model", default="hf:gpt2")
    parser.add_argument("--cluster", default="2x4xA100")
    parser.add_argument("--global-batch", type=int, default=64)
    options = parser.parse_args()
    if options.meshes:
        console = Console(width=110)
        is_met = on_meshes(console)
        console.print(f"{machine()}: bars {'met' if is_met else 'missed'}.")
        return 0 if is_met else 1
    source = load_model(options.model)
    captured = capture(
        source.build(), source.example(2, None), global_batch=options.global_batch,
        precision="bfloat16", name=options.model,
    )  # fmt: skip
    cluster = parse_cluster(options.cluster)
    context = Context.of(captured.graph, cluster, CostTable(), Training(precision="bfloat16"))
    table = Table(title=f"{options.model} on {options.cluster}, additive model, CPU seconds")
    for name in ("data x tensor", "build", "optimum", "hull", "points", "1 % frontier", "points"):
        table.add_column(name, justify="right")
    is_met, count = True, cluster.num_devices
    for tensor in [size for size in range(1, count + 1) if count % size == 0]:
        one = Arrangement(stages=1, data=count // tensor, tensor=tensor, microbatches=2)
        marks = [time.process_time()]
        graph = factor_graph(
            Problem.of(context, one.mesh(0), 2), search_weights(one, EXPOSED, EXPOSED)
        )
        solver = graph.elimination()
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
        f"{machine()}; bars {OPTIMUM} s, {HULL} s, {FRONTIER} s: {'met' if is_met else 'missed'}."
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
