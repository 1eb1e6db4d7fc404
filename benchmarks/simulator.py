"""How many instructions a CPU second the simulator gets through: `python benchmarks/simulator.py`.

A 1F1B pipeline with sends, receives and gradient messages, as lowering makes them, is simulated
whole (times, memory and critical path), with and without overlap slow-down. The first run of each,
which compiles or loads the cache, is not counted.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray
from processor import processor_name
from rich.console import Console
from rich.table import Table

from shardwright.core.program import Kind, Program, resource_classes
from shardwright.core.strategy import Mesh, Strategy
from shardwright.planner.schedule import global_order, pipeline_order
from shardwright.planner.simulate import simulate

SLOWDOWN = 1.2
BARS = {1.0: 4e6, SLOWDOWN: 4e6}  # by slow-down


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One instruction before it becomes columns."""

    kind: Kind
    stage: int
    microbatch: int
    resource: str
    after: tuple[int, ...]
    seconds: float


def pipeline_rows(num_stages: int, num_microbatches: int, num_pieces: int) -> list[Row]:
    """Return a pipeline whose stages compute in pieces; each backward piece sends its gradient."""
    rows: list[Row] = []

    def add(
        kind: Kind, where: tuple[int, int], queue: str, after: tuple[int, ...], seconds: float
    ) -> int:
        rows.append(
            Row(
                kind=kind,
                stage=where[0],
                microbatch=where[1],
                resource=queue,
                after=after,
                seconds=seconds,
            )
        )
        return len(rows) - 1

    arrived: dict[tuple[int, str, int], int] = {}
    orders = pipeline_order("1f1b", num_stages, num_microbatches)
    for stage, phase, microbatch in global_order(orders):
        forward, here = phase == "F", (stage, microbatch)
        kind, target = (Kind.FORWARD, stage + 1) if forward else (Kind.BACKWARD, stage - 1)
        action = (stage, phase, microbatch)
        waits = (arrived[action],) if action in arrived else ()
        for piece in range(num_pieces):
            waits = (add(kind, here, f"compute:{stage}", waits, 1e-3 * (1 + piece % 3)),)
            if not forward:
                add(Kind.MESSAGE, here, f"link:{stage}", waits, 5e-4)
        if 0 <= target < num_stages:
            sent = add(Kind.SEND, here, f"send:{stage}-{target}", waits, 3e-4)
            there, queue = (target, microbatch), f"receive:{stage}-{target}"
            arrived[target, phase, microbatch] = add(Kind.RECEIVE, there, queue, (sent,), 0.0)
    return rows


def pipeline_program(
    num_stages: int, num_microbatches: int, num_pieces: int
) -> tuple[Program, NDArray[np.float64]]:
    """Return the Program of ``pipeline_rows`` and its durations."""
    rows = pipeline_rows(num_stages, num_microbatches, num_pieces)
    names = {name: index for index, name in enumerate(dict.fromkeys(row.resource for row in rows))}
    meshes = tuple(
        Mesh(axes=("data",), sizes=(1,), devices=(stage,)) for stage in range(num_stages)
    )
    program = Program(
        strategy=Strategy(meshes=meshes, configs=(), parameters=()),
        values=(),
        segments=(),
        messages=(),
        loss=-1,
        kind=np.array([row.kind for row in rows], dtype=np.int8),
        group=np.array([row.stage for row in rows], dtype=np.int32),
        item=np.full(len(rows), -1, dtype=np.int32),
        microbatch=np.array([row.microbatch for row in rows], dtype=np.int32),
        resource=np.array([names[row.resource] for row in rows], dtype=np.int32),
        resource_names=tuple(names),
        resource_class=resource_classes(names),
        offset=np.cumsum([0, *(len(row.after) for row in rows)], dtype=np.int64),
        predecessor=np.array([other for row in rows for other in row.after], dtype=np.int32),
        free_offset=np.zeros(len(rows) + 1, dtype=np.int64),
        free_value=np.zeros(0, dtype=np.int32),
        allocated=np.array([100 * (row.kind == Kind.FORWARD) for row in rows], dtype=np.int64),
        freed=np.array([100 * (row.kind == Kind.BACKWARD) for row in rows], dtype=np.int64),
        temporary=np.zeros(len(rows), dtype=np.int64),
        base_bytes=(0,) * num_stages,
    )
    return program, np.array([row.seconds for row in rows], dtype=np.float64)


def time_runs(
    program: Program, seconds: NDArray[np.float64], slowdown: float, repeats: int
) -> list[float]:
    """Return the CPU seconds of each whole simulation, after one that is not counted."""
    runs: list[float] = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        simulate(program, seconds, overlap_slowdown=slowdown)
        runs.append(time.process_time() - begin)
    return runs[1:]


def main() -> int:
    """Measure, print the table, and fail when the simulator is below its bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="instructions")
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    pieces = 12
    per_microbatch = options.stages * (3 * pieces + 4)
    table = Table(title="Simulator: tasks (instructions) per second, whole simulation")
    for column in ("slow-down", "tasks", "min/s", "median/s", "max/s"):
        table.add_column(column, justify="right", no_wrap=True)
    medians: dict[float, float] = {}
    count = max(1, options.tasks // per_microbatch)
    program, seconds = pipeline_program(options.stages, count, pieces)
    for slowdown in BARS:
        runs = time_runs(program, seconds, slowdown, options.repeats)
        rates = sorted(program.num_instructions / run for run in runs)
        medians[slowdown] = statistics.median(rates)
        numbers = [f"{rate:,.0f}" for rate in (rates[0], medians[slowdown], rates[-1])]
        table.add_row(f"{slowdown}", f"{program.num_instructions:,}", *numbers)
    console = Console()
    console.print(table)
    console.print(
        f"{processor_name()}; {platform.system()}; Python {platform.python_version()}, "
        f"NumPy {np.__version__}, Numba {numba.__version__}; {options.repeats} repeats, "
        f"one thread; {options.stages} stages, 1F1B."
    )
    reached = True
    for slowdown, bar in BARS.items():
        met = medians[slowdown] >= bar
        reached &= met
        verdict = "reached" if met else "MISSED"
        console.print(f"slow-down {slowdown}: bar of {bar:,.0f} a second {verdict}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
