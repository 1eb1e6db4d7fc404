"""How long planning takes, case by case: `python benchmarks/planning.py [--only NAME ...]`.

Every case captures a model's shape (built without weights; not counted), plans it, and prints the
seconds of every phase, two gaps, peak memory, and whether its bar was reached. Each runs in a
process of its own. Seconds are those of one core (the planner has one thread), so other work on the
machine does not count; `--wall` judges by the clock.

The two gaps. *Additive*: between the best plan of the additive model within the memory limit and
the proved bound of that model (equal blocks treated alike). *Simulated*: between the answer's
simulated step and the same bound; it also holds what the additive model leaves out. All step times
are simulated from published hardware numbers.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from processor import processor_name
from rich.console import Console
from rich.table import Table

from shardwright import __version__
from shardwright.cli.planning import COLLECTED
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.files.clusterfile import parse_cluster
from shardwright.planner.search import Progress, Training, search
from shardwright.runtime.capture import capture, load_model

HERE = Path(__file__).resolve().parent
OWN = f"{HERE / 'planning_models.py'}:"
MAX_GIB = 4.0


@dataclass(frozen=True)
class Case:
    """A model on a cluster with its bar in seconds. ``gap``: the largest simulated gap allowed."""

    model: str
    cluster: str
    global_batch: int
    seq: int
    bar: float
    gap: float = math.inf


@dataclass
class Row:
    """What one case gave; ``phases`` are seconds until the end of each."""

    name: str
    operators: int = 0
    devices: int = 0
    seconds: float = 0.0
    wall: float = 0.0
    phases: dict[str, float] = field(default_factory=dict[str, float])
    step: float = 0.0
    bound: float = 0.0
    gap: float = math.nan
    gib: float = 0.0
    capture: float = 0.0
    plan: str = ""


LLAMA = "hf:llama3-8b"
CASES: dict[str, Case] = {
    "gpt2-8": Case("hf:gpt2", "1x8xH100", 64, 1024, 5.0),
    "llama3-8b-64": Case(LLAMA, "8x8xH100", 512, 4096, 3.0),
    "llama3-70b-512": Case("hf:llama3-70b", "64x8xH100", 1024, 4096, 30.0),
    "gpt-1024-layers-8": Case(f"{OWN}deep_gpt", "1x8xH100", 64, 1024, 20.0),
    "bert-32-2048": Case(f"{OWN}bert_32", "256x8xH100", 4096, 512, 30.0),
    "llama3.1-405b-16384": Case("hf:llama3.1-405b", "2048x8xH100", 2048, 8192, 15.0, 0.15),
    "inception-v3-64": Case(f"{HERE / 'inception.py'}:inception", "8x8xH100", 2048, 0, 5.0),
    "encoder-decoder-64": Case("hf:bart-base", "8x8xH100", 1024, 512, 10.0),
}
# Growth is fitted over these, name by factor.
LAYERS = {n: Case(f"{OWN}gpt_{n}", "1x8xH100", 64, 1024, math.inf) for n in (16, 64, 256, 512)}
DEVICES = {8 * n: Case(LLAMA, f"{n}x8xH100", 1024, 4096, math.inf) for n in (1, 4, 16, 64)}
GROWTH = {"growth-layers": (LAYERS, 1.1), "growth-devices": (DEVICES, 1.2)}


def captured(case: Case) -> OperatorGraph:
    """Build the model without weights and capture it."""
    source = load_model(case.model)
    batch = source.example(1, case.seq or None)
    return capture(
        source.build(), batch, global_batch=case.global_batch, precision="bfloat16",
        name=case.model.rpartition(":")[2],
    ).graph  # fmt: skip


def run(name: str, case: Case, graph: OperatorGraph) -> Row:
    """Plan one case."""
    cluster = parse_cluster(case.cluster)
    row = Row(name, operators=len(graph.operators), devices=cluster.num_devices)
    begin, clock = time.process_time(), time.perf_counter()

    def note(progress: Progress) -> None:
        phase = "solving" if "devices" in progress.text else progress.text
        if phase not in ("solving", "simulating", "correcting memory", "merging gradients"):
            phase = "named"
        row.phases[phase] = time.process_time() - begin

    frontier = search(
        graph, cluster, CostTable(), training=Training(precision="bfloat16"), progress=note
    )
    row.seconds, row.wall = time.process_time() - begin, time.perf_counter() - clock
    row.gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    best = frontier.best
    row.step, row.plan = best.predicted.step_seconds, best.strategy.label
    if best.bound is not None:
        row.bound, row.gap = best.bound.step_seconds, best.bound.gap
    return row


def alone(name: str) -> None:
    """Run one case in this process and print its row as JSON."""
    kind, _, number = name.partition(":")
    case = GROWTH[kind][0][int(number)] if number else CASES[name]
    begin = time.perf_counter()
    graph = captured(case)
    seconds = time.perf_counter() - begin
    # As `shardwright plan` does before it imports anything; so nothing counts of what capturing made.
    gc.set_threshold(COLLECTED, 10, 10)
    gc.collect()
    row = run(name, case, graph)
    row.capture = seconds
    print(json.dumps(asdict(row)))


def apart(name: str) -> Row:
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, "--alone", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def show(console: Console, rows: list[Row], passed: Callable[[Row], bool]) -> None:
    """Print a line per case."""
    table = Table(title="Planning time without capture (steps simulated, costs modelled)")
    for name in (
        "case",
        "ops",
        "devices",
        "s",
        "wall s",
        "bar s",
        "",
        "until the end of",
        "step s",
    ):
        table.add_column(
            name, justify="left" if name in ("case", "", "until the end of") else "right"
        )
    for name in ("bound s", "gap", "GiB", "capture s", "plan"):
        table.add_column(name, justify="left" if name == "plan" else "right", overflow="fold")
    for row in rows:
        case = CASES.get(row.name)
        bar = f"{case.bar:g}" if case else "-"
        verdict = "" if case is None else "reached" if passed(row) else "missed"
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.phases.items())
        table.add_row(
            row.name, str(row.operators), str(row.devices), f"{row.seconds:.2f}",
            f"{row.wall:.2f}", bar, verdict, phases, f"{row.step:.4g}", f"{row.bound:.4g}",
            f"{row.gap:.2%}", f"{row.gib:.2f}", f"{row.capture:.0f}", row.plan,
        )  # fmt: skip
    console.print(table)


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Fit seconds = c * size ** exponent by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def main() -> int:
    """Run what was asked for; fail when a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*CASES, *GROWTH]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--wall", action="store_true", help="judge by the clock")
    options = parser.parse_args()
    if options.alone:
        alone(options.alone)
        return 0

    def passed(row: Row) -> bool:
        case, seconds = CASES[row.name], row.wall if options.wall else row.seconds
        return seconds <= case.bar and row.gib <= MAX_GIB and not row.gap > case.gap

    console = Console(width=200)
    rows = [apart(name) for name in options.only if name in CASES]
    if rows:
        show(console, rows, passed)
    good = all(passed(row) for row in rows)
    for kind, (family, bar) in GROWTH.items():
        if kind in options.only:
            found = [apart(f"{kind}:{size}") for size in family]
            show(console, found, passed)
            power = exponent(list(family), [row.seconds for row in found])
            good &= power <= bar
            verdict = "reached" if power <= bar else "missed"
            console.print(f"{kind}: exponent {power:.2f}, bar {bar}: {verdict}")
    console.print(
        f"{processor_name()}; {platform.system()}; Python {platform.python_version()}, "
        f"NumPy {np.__version__}, torch {torch.__version__}, shardwright {__version__}."
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
