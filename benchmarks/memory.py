"""Predicted peak memory against what CPU ranks really allocate: `python benchmarks/memory.py`.

A GPT of 51 M parameters trains one step with AdamW under every plan, after two steps that make the
optimizer's state. Two measures per rank: the allocator's own count of every tensor (exact to the
byte, temporaries inside operators among them), and, independently, by how much the kernel's
high-water mark of resident pages rose over that step. Predictions rest on modelled costs alone.
Exits 1 where a prediction is more than 5 % off, or more than 2 % too low.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Resident pages follow the tensors only where free() gives pages back at once. The ranks inherit it.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "65536")

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shardwright.core.cluster import Cluster, Device, DeviceKind, Link, Switch
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.demo_model import ByteGPT
from shardwright.planner.cost import price
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space import Seed, seed_strategy
from shardwright.planner.space.grids import Grid, grid_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor
from shardwright.runtime.launch import launch

LAYERS, HEADS, BATCH = 4, 8, 8
OVER, UNDER = 0.05, 0.02
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-4)
PLANS: dict[int, tuple[Seed | Grid, ...]] = {
    1: (
        Seed(),
        Seed(recompute=True),
        Seed(num_microbatches=4),
        Seed(precision="bfloat16"),
    ),
    2: (
        Seed(data=2),
        Seed(data=2, zero=1),
        Seed(data=2, zero=2, num_microbatches=2),
        Seed(data=2, zero=3),
        Seed(data=2, zero=3, keeps=True),
        Seed(data=2, zero=3, recompute=True),
        Seed(tensor=2),
        Seed(tensor=2, sequence=True),
        Seed(stages=2, num_microbatches=4),
        Seed(stages=2, num_microbatches=4, schedule="gpipe"),
        Seed(stages=2, num_microbatches=4, recompute=True),
        Grid(name="cube", sizes=(2, 1, 1)),
        Grid(name="summa", sizes=(2, 1)),
    ),
    4: (
        Seed(data=4, zero=1),
        Seed(data=4, zero=3),
        Seed(data=4, zero=3, keeps=True),
        Seed(tensor=4, sequence=True),
        Seed(data=2, tensor=2),
        Seed(data=2, zero=1, stages=2, num_microbatches=4),
        Seed(data=2, zero=3, stages=2, num_microbatches=4),
        Seed(stages=4, num_microbatches=8),
        Seed(stages=4, num_microbatches=8, schedule="gpipe"),
        Grid(name="summa", sizes=(2, 2)),
        Grid(name="cube", sizes=(1, 2, 2)),
    ),
    8: (
        Seed(data=8, zero=3),
        Seed(data=2, tensor=2, stages=2, num_microbatches=2),
        Grid(name="tesseract", sizes=(2, 2, 2)),
        Grid(name="cube", sizes=(2, 2, 2)),
        Grid(name="cube", sizes=(2, 2, 2), keeps=True),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Width of the model and tokens in a sequence."""

    width: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Peaks of the fullest device of one mesh, bytes; ``rise`` is of resident pages in the step."""

    ranks: int
    plan: str
    mesh: int
    base: float
    predicted: float
    measured: float
    rise: float

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted / self.measured - 1


def make_model(size: Size) -> ByteGPT:
    """Make the model, equal on every rank."""
    torch.manual_seed(0)
    return ByteGPT(layers=LAYERS, width=size.width, heads=HEADS, seq=size.length)


def make_batch(size: Size) -> dict[str, Tensor]:
    """Make one global batch."""
    shape, generator = (BATCH, size.length + 1), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, shape, generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def strategy_of(graph: OperatorGraph, plan: Seed | Grid) -> Strategy:
    """Return a named plan's strategy."""
    return grid_strategy(graph, plan) if isinstance(plan, Grid) else seed_strategy(graph, plan)


def kibibytes(name: str) -> int:
    """Return a line of this process's status: VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def rise_of_pages(step: Callable[[], object]) -> float:
    """Run a step and return by how many bytes the high-water mark of resident pages rose."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = kibibytes("VmRSS")
    step()
    return 1024.0 * (kibibytes("VmHWM") - before)


def measured(
    plans: tuple[Seed | Grid, ...], size: Size
) -> list[tuple[tuple[float, ...], list[float]]]:
    """Train every plan on this rank; return (peaks per mesh, rise of pages per mesh)."""
    torch.set_num_threads(1)
    batch, result = make_batch(size), []
    captured = capture(make_model(size), batch)
    for plan in plans:
        program = lower(captured.graph, strategy_of(captured.graph, plan))
        executor = Executor(captured, program, make_model(size), optimizer=OPTIMIZER)
        executor.step(batch)
        rise = rise_of_pages(lambda run=executor: run.step(batch))
        peaks = executor.profile_step(batch).peak_bytes
        rises = [rise]
        if dist.is_initialized():
            gathered: list[tuple[int, float]] = [(0, 0.0)] * dist.get_world_size()
            dist.all_gather_object(gathered, (executor.stage, rise))
            rises = [
                max(one for mesh, one in gathered if mesh == index)
                for index in range(len(program.meshes))
            ]
        result.append((peaks, rises))
        executor.close()
        del executor
        gc.collect()
    return result


def this_host(ranks: int) -> Cluster:
    """Describe ranks on one host in round numbers; only the order of events depends on them."""
    kind = DeviceKind(
        name="core", peak_flops=(("float32", 4e10),), memory_bytes=8e9, memory_bandwidth=1e10,
        backend="cpu", source="modelled",
    )  # fmt: skip
    wire = Link(latency=5e-5, bandwidth=1e9)
    return Cluster(
        name="host",
        kinds=(kind,),
        switches=(Switch(name="host"),),
        devices=(Device(kind=0, host=0, link=wire),) * ranks,
    )


def cases_of(captured: Captured, ranks: int, size: Size) -> list[Case]:
    """Measure and predict all plans of so many ranks."""
    plans, graph, cluster = PLANS[ranks], captured.graph, this_host(ranks)
    found = launch(measured, ranks, (plans, size), timeout=1500)[0]
    cases: list[Case] = []
    for plan, (peaks, rises) in zip(plans, found, strict=True):
        program = lower(graph, strategy_of(graph, plan))
        prices = price(program, graph, cluster, CostTable())
        timeline = simulate(program, prices.seconds, scatter_copies=cluster.scatter_copies)
        cases += [
            Case(
                ranks=ranks,
                plan=plan.label,
                mesh=mesh,
                base=program.base_bytes[mesh],
                predicted=timeline.peak_bytes[mesh],
                measured=peaks[mesh],
                rise=rises[mesh],
            )
            for mesh in range(len(program.meshes))
        ]
    return cases


def show(cases: list[Case], console: Console) -> bool:
    """Print all cases and the worst; return whether the bars are met."""
    table = Table(
        "ranks", "plan", "stage", "at rest MB", "predicted MB", "measured MB", "error",
        "step's rise MB", "pages' rise MB",
    )  # fmt: skip
    for case in cases:
        table.add_row(
            str(case.ranks),
            case.plan,
            str(case.mesh),
            f"{case.base / 1e6:.1f}",
            f"{case.predicted / 1e6:.1f}",
            f"{case.measured / 1e6:.1f}",
            f"{100 * case.error:+.1f} %",
            f"{(case.measured - case.base) / 1e6:.1f}",
            f"{case.rise / 1e6:.1f}",
        )
    console.print(table)
    errors = [case.error for case in cases]
    missed = sum(not -UNDER <= error <= OVER for error in errors)
    console.print(
        f"{len(cases)} cases: median |error| {100 * statistics.median(map(abs, errors)):.1f} %, "
        f"worst {100 * max(errors):+.1f} % and {100 * min(errors):+.1f} % "
        f"(bars +{100 * OVER:.0f} % and -{100 * UNDER:.0f} %), {missed} outside"
    )
    return not missed


def main() -> int:
    """Measure, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, choices=sorted(PLANS), nargs="*", default=None)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    size = Size(width=options.width, length=options.length)
    console, model = Console(width=160), make_model(size)
    captured = capture(model, make_batch(size))
    cases: list[Case] = []
    for ranks in options.ranks or PLANS:
        cases += cases_of(captured, ranks, size)
    met = show(cases, console)
    console.print(
        f"GPT, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, batch {BATCH} x "
        f"{size.length}, AdamW; {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        "gloo, 1 thread per rank"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
