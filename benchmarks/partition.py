"""Pipelines of profiled layers, ours beside PipeDream's and BaPipe's: `python benchmarks/partition.py`.

Without arguments on generated profiles (chains, residual networks, encoder-decoders, cells with
branches); with arguments on PipeDream-format graph.txt files, or folders that are searched for
them, such as a clone of PipeDream's repository. Every planner is judged by one cost model. The
seconds are those of finding the cuts and the exact solve, kernels compiled, of one thread's own time
(CPU) so that other work on the machine does not count. The three bars: never a larger bottleneck
than PipeDream's planner; nor by its own count, which leaves out what the first stage sends, where
ours is planned by that count; and at most a second for 400 layers and 64 workers.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numba
import numpy as np
from processor import processor_name
from rich.console import Console
from rich.table import Table

from shardwright.core.profile import Layer, LayerGraph, PipelinePlan, WorkerKind
from shardwright.errors import NoPlan, ShardwrightError
from shardwright.files.layergraph import read_layer_graph
from shardwright.layerwise import (
    PipelineProblem,
    find_cuts,
    judged_as,
    plan_bapipe,
    plan_exact,
    plan_pipedream,
)

BAR_SECONDS, BAR_LAYERS, BAR_WORKERS = 1.0, 400, 64
WORKERS = (4, 8, 16, 32, 64)


def generated(count: int) -> Iterator[LayerGraph]:
    """Yield profiles of ``count`` layers whose costs look like a convolutional or attention net's."""
    shapes = {
        "chain": lambda i: [i - 1],
        "residual": lambda i: [i - 1, i - 4] if i % 4 == 0 else [i - 1],
        "encoder-decoder": lambda i: [i - 1, count // 2] if i > count // 2 and i % 8 == 0 else [i - 1],
        "branches": lambda i: [i - 1] if i % 6 else [i - 1, i - 3],
    }  # fmt: skip
    for seed, (name, producers) in enumerate(shapes.items()):
        rng = random.Random(seed)
        layers, edges = [], set()
        for i in range(count):
            depth = i / count
            forward = 1e-3 * rng.choice([0.05, 0.1, 1.0, 3.0])
            heavy = forward > 5e-4
            layers.append(
                Layer(
                    name=f"layer{i}",
                    forward_seconds=forward,
                    backward_seconds=2 * forward * rng.uniform(0.8, 1.2),
                    activation_bytes=rng.uniform(0.2, 1.0) * 4e7 * (1 - depth) + 1e6,
                    parameter_bytes=heavy * rng.uniform(0.5, 1.5) * 1e7 * depth**2,
                )
            )
            edges |= {(p, i) for p in producers(i) if i and p >= 0}
        if name == "branches":  # the third layer after a fork starts a second branch
            edges -= {(i - 1, i) for i in range(3, count, 6) if i % 6 == 3}
            edges |= {(i - 3, i) for i in range(3, count, 6) if i % 6 == 3}
            edges |= {(i - 1, i + 3) for i in range(3, count - 3, 6) if i % 6 == 3}
        yield LayerGraph(name=name, layers=tuple(layers), edges=tuple(sorted(edges)))


def profiles(paths: list[str]) -> Iterator[LayerGraph]:
    """Yield the profiles at the paths, folders searched for graph.txt."""
    for text in paths:
        path = Path(text)
        for file in sorted(path.rglob("graph.txt")) if path.is_dir() else [path]:
            graph = read_layer_graph(file)
            name = file.parent.name if file.name == "graph.txt" else file.stem
            yield dataclasses.replace(graph, name=name)


def rival(planner: object, problem: PipelineProblem, **options: bool) -> PipelinePlan | None:
    """Run a published planner; None where it finds nothing or what it finds does not fit."""
    try:
        plan = planner(problem, **options)  # type: ignore[operator]
    except NoPlan:
        return None
    return plan if plan.fits else None


def by_its_count(problem: PipelineProblem, rival: PipelinePlan | None) -> float | None:
    """Return how many times longer PipeDream's pipeline takes than ours, both by its own count; None
    where it found none, or counts otherwise."""
    if rival is None or problem.microbatches or problem.formula != "code":
        return None
    counted = dataclasses.replace(problem, formula="published")
    return judged_as(counted, rival).seconds / plan_exact(counted).seconds


def against(plan: PipelinePlan | None, best: PipelinePlan) -> str:
    """Write how many times slower."""
    return f"{plan.seconds / best.seconds:.3f}" if plan is not None else "none fits"


def main() -> int:
    """Plan everything, print the table, and fail when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", help="graph.txt files, or folders with them")
    parser.add_argument("--layers", type=int, default=BAR_LAYERS, help="of a generated profile")
    parser.add_argument("--bandwidth", type=float, default=1e9, help="bytes per second")
    parser.add_argument("--memory", type=float, default=float("inf"), help="bytes per worker")
    parser.add_argument("--microbatches", type=int, default=0)
    parser.add_argument("--formula", choices=("code", "paper"), default="code")
    parser.add_argument("--shards", type=int, default=1, help="ours may split a stage over so many")
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS)
    options = parser.parse_args()
    console = Console(width=132)
    table = Table(title="Seconds per minibatch (with --microbatches: per step)")
    for name in ("profile", "layers", "cuts", "workers", "ours", "gap", "PipeDream/ours",
                 "by its count", "it without transfers/ours", "BaPipe/ours", "planning CPU s"):  # fmt: skip
        table.add_column(name, justify="left" if name == "profile" else "right")
    lost, slow, compared = [], [], 0
    for graph in profiles(options.paths) if options.paths else generated(options.layers):
        begin = time.process_time()
        cuts = find_cuts(graph)
        cutting = time.process_time() - begin
        for count in options.workers:
            problem = PipelineProblem(
                cuts=cuts,
                workers=(WorkerKind(count=count, memory_bytes=options.memory),),
                bandwidth=options.bandwidth,
                schedule="1f1b-so" if options.microbatches else "pipedream",
                microbatches=options.microbatches,
                formula=options.formula,
                shards=options.shards,
            )
            row = [graph.name, str(len(graph.layers)), f"{cuts.num_cuts}{'' if cuts.is_complete else '*'}", str(count)]  # fmt: skip
            try:
                if not compared:
                    plan_exact(problem)  # compiles, or loads what was compiled
                begin = time.process_time()
                best = plan_exact(problem)
                seconds = time.process_time() - begin + cutting
            except ShardwrightError:
                table.add_row(*row, "none fits")
                continue
            rivals = [
                rival(plan_pipedream, problem, counts_transfers=True),
                rival(plan_pipedream, problem),
                rival(plan_bapipe, problem),
            ]
            compared += sum(plan is not None for plan in rivals)
            if any(p is not None and p.seconds < best.seconds * (1 - 1e-9) for p in rivals):
                lost.append((graph.name, count))
            ratio = by_its_count(problem, rivals[0])
            if ratio is not None and ratio < 1 - 1e-9:
                lost.append((graph.name, count, "by its count"))
            if (
                options.shards == 1
                and seconds > BAR_SECONDS
                and len(graph.layers) <= BAR_LAYERS
                and count <= BAR_WORKERS
            ):
                slow.append((graph.name, count))
            table.add_row(
                *row, f"{best.seconds:.5f}", f"{best.gap:.1%}", against(rivals[0], best),
                "-" if ratio is None else f"{ratio:.3f}",
                *(against(plan, best) for plan in rivals[1:]), f"{seconds:.3f}",
            )  # fmt: skip
    console.print(table)
    console.print(
        f"* some cuts of too many; bandwidth {options.bandwidth:g} B/s, memory "
        f"{options.memory:g} B, formula {options.formula}, shards {options.shards}. {processor_name()}; {platform.system()}; Python "
        f"{platform.python_version()}, NumPy {np.__version__}, Numba {numba.__version__}; one thread."
    )
    console.print(
        f"Never worse than a published planner ({compared} comparisons): {lost or 'reached'}"
    )
    console.print(
        f"At most {BAR_SECONDS:g} s for {BAR_LAYERS} layers and {BAR_WORKERS} workers: "
        f"{slow or 'reached'}"
    )
    return 1 if lost or slow else 0


if __name__ == "__main__":
    sys.exit(main())
