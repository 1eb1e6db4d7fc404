"""How long planning takes: `python benchmarks/planning.py`.

Plans Llama-3-8B's shape (built without weights) on 8 hosts of 8 H100, global batch 512, sequences
of 4,096 tokens, bfloat16, and prints the frontier with its lower bound. Planning time counts the
search (building the problems, exact solves, simulations), not the capture. All predicted numbers
are modelled: nothing is measured on such hardware here.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time

import numpy as np
import torch
from processor import processor_name
from rich.console import Console
from rich.table import Table

from shardwright import __version__
from shardwright.core.costs import CostTable
from shardwright.core.plan import Frontier
from shardwright.files.clusterfile import parse_cluster
from shardwright.planner.search import Limits, Progress, Training, search
from shardwright.runtime.capture import capture, load_model

BAR_SECONDS = 30.0


def show(console: Console, frontier: Frontier) -> None:
    """Print the frontier, the chosen plan first said why."""
    table = Table(title="Frontier (simulated; costs modelled from published hardware numbers)")
    for name in ("", "s/step", "GiB/device", "$/step", "gap to bound", "plan"):
        table.add_column(name, justify="left" if name in ("", "plan") else "right")
    for number, plan in enumerate(frontier.plans):
        predicted = plan.predicted
        table.add_row(
            "*" if number == frontier.chosen else "",
            f"{predicted.step_seconds:.3f}",
            f"{predicted.peak_bytes / 2**30:.1f}",
            f"{predicted.dollars:.3f}",
            f"{plan.bound.gap:.1%}" if plan.bound else "-",
            plan.strategy.label,
        )
    console.print(table)
    best = frontier.best
    console.print(best.reason)
    if best.bound:
        console.print(f"Bound {best.bound.step_seconds:.3f} s: {best.bound.model}.")


def main() -> int:
    """Capture, plan, print, and fail when planning took longer than the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="hf:llama3-8b")
    parser.add_argument("--cluster", default="8x8xH100")
    parser.add_argument("--global-batch", type=int, default=512)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--candidates", type=int, default=Limits().max_candidates)
    options = parser.parse_args()
    console = Console(width=140)
    source = load_model(options.model)
    begin = time.perf_counter()
    captured = capture(
        source.build(), source.example(1, options.seq), global_batch=options.global_batch,
        precision="bfloat16", name=options.model,
    )  # fmt: skip
    capture_seconds = time.perf_counter() - begin
    stages: dict[str, float] = {}

    def note(progress: Progress) -> None:
        name = progress.text if "devices" not in progress.text else "solving arrangements"
        name = name if progress.fraction > 0 else "simulating named strategies"
        stages[name] = time.perf_counter() - begin

    begin, busy = time.perf_counter(), time.process_time()
    frontier = search(
        captured.graph, parse_cluster(options.cluster), CostTable(),
        training=Training(precision="bfloat16"),
        limits=Limits(max_candidates=options.candidates), progress=note,
    )  # fmt: skip
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    show(console, frontier)
    times = Table(title="Planning time")
    times.add_column("until the end of")
    times.add_column("s", justify="right")
    for name, when in stages.items():
        times.add_row(name, f"{when:.1f}")
    console.print(times)
    console.print(
        f"{options.model}, {len(captured.graph.operators)} operators, captured in "
        f"{capture_seconds:.1f} s (not counted), on {options.cluster}.\n"
        f"{processor_name()}; {platform.system()}; Python {platform.python_version()}, "
        f"NumPy {np.__version__}, torch {torch.__version__}, shardwright {__version__}."
    )
    is_fast = seconds <= BAR_SECONDS
    verdict = "reached" if is_fast else "missed"
    console.print(
        f"Planned in {seconds:.1f} s ({busy:.1f} s of one core); "
        f"bar of {BAR_SECONDS:.0f} s: {verdict}"
    )
    return 0 if is_fast else 1


if __name__ == "__main__":
    sys.exit(main())
