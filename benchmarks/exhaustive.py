"""Optimality against trying everything: `python benchmarks/exhaustive.py`.

Draws random planning problems of at most a million plans, solves each for every objective (least time,
memory and money, least time within a memory limit, the frontier of time and memory, the frontier of
time, memory and money, the lower bound), and tries all plans. Three sorts: random tables on devices of
random speeds and prices, small models on clusters of two kinds of devices as the search states them, and
pipelines of profiled layers on workers of two kinds. The bar is 0 mismatches in 1,000 instances.

What is tried is the additive model, which is what the search proves things about; the simulator is not
part of it.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from processor import processor_name
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shardwright import __version__
from tests.planner.solve.bruteforce import (
    Instance,
    mismatches,
    pipeline_mismatches,
    random_model,
    random_tables,
)

# Of a thousand instances so many are of each sort.
SHARES = (("random tables", 0.5), ("small models", 0.2), ("pipelines", 0.3))


def tried(sort: str, count: int, seed: int, console: Console) -> tuple[Counter[str], list[int]]:
    """Return the mismatches of instances of one sort, and how many plans each instance had."""
    wrong: Counter[str] = Counter()
    plans: list[int] = []
    for number in range(count):
        rng = random.Random(f"{sort} {seed} {number}")
        if sort == "pipelines":
            found = pipeline_mismatches(rng)
        else:
            instance: Instance = (
                random_tables(rng) if sort == "random tables" else random_model(rng)
            )
            plans.append(instance.num_plans)
            found = mismatches(instance, rng)
        wrong.update(found)
        for name in found:
            console.print(f"{sort}, seed {seed}, instance {number}: {name}", style="red")
    return wrong, plans


def main() -> int:
    """Try, print the counts, and fail on any mismatch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console(width=120)
    table = Table(title="Solvers against brute force (additive model)")
    for name in ("sort", "instances", "plans each (median)", "most", "mismatches", "CPU s"):
        table.add_column(name, justify="left" if name == "sort" else "right")
    total = 0
    for sort, share in SHARES:
        begin = time.process_time()
        count = round(share * options.instances)
        wrong, plans = tried(sort, count, options.seed, console)
        total += sum(wrong.values())
        table.add_row(
            sort, str(count), f"{int(np.median(plans)):,}" if plans else "-",
            f"{max(plans):,}" if plans else "-", str(sum(wrong.values())),
            f"{time.process_time() - begin:.0f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"{processor_name()}; Python {platform.python_version()}, NumPy {np.__version__}, "
        f"shardwright {__version__}; {options.instances} instances, seed {options.seed}: "
        f"{total} mismatches."
    )
    return 1 if total else 0


if __name__ == "__main__":
    raise SystemExit(main())
