"""Pipelines beside torch's own schedules, in the same processes: ``python benchmarks/torch_schedules.py``.

A model of equal layers is trained by torch.distributed.pipelining and by the executor, some steps each in turns: on
two ranks that compute, on four that sleep, which takes no core. Losses must agree; a ratio above 1 is
slower than torch. Where ranks sleep, the step that the order takes with these naps and nothing else stands beside
it. Exits 1 where a median ratio is above 1 or losses differ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processor import machine
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from shardwright.core.program import BACKWARD_KINDS, Kind
from shardwright.core.schedules import SCHEDULES, NamedSchedule
from shardwright.planner.schedule import StageTimes, folded, pipeline_order, replay
from shardwright.runtime.executor import Executor
from shardwright.runtime.launch import launch
from tests.beside_torch import THEIRS, Case, Torch, ours

COMPUTING = Case(devices=2, microbatches=8, layers=8, width=256, rows=256)
SLEEPING = Case(devices=4, microbatches=8, layers=8, width=32, rows=8, naps=(0.01, 0.01, 0.01))
WARM = 2  # steps before anything is timed


@dataclass(slots=True)
class Beside:
    """What a rank saw of one schedule: seconds of a step by turn, and losses where it knows them."""

    mine: list[float] = field(default_factory=list[float])
    theirs: list[float] = field(default_factory=list[float])
    losses: tuple[float, float | None] = (0.0, None)


def sleepy(executor: Executor, case: Case, schedule: str) -> None:
    """Let the executor sleep beside its F, I and W of every microbatch, as torch's stages do."""
    program, naps = executor.program, [nap / case.chunks(schedule) for nap in case.naps]
    seconds = {Kind.FORWARD: naps[0], Kind.BACKWARD: naps[1] + naps[2],
               Kind.INPUT_GRADIENT: naps[1], Kind.WEIGHT_GRADIENT: naps[2]}  # fmt: skip
    met, actions = set[tuple[int, int, int]](), list[Any]()
    for index, action in executor._training.actions:
        kind = Kind(int(program.kind[index]))
        if kind == Kind.FORWARD or kind in BACKWARD_KINDS:
            mesh = program.segments[int(program.item[index])].mesh
            key = int(kind), mesh, int(program.microbatch[index])
            if key not in met:
                actions.append((index, lambda nap=seconds[kind]: time.sleep(nap)))
            met.add(key)
        actions.append((index, action))
    executor._training = replace(executor._training, actions=tuple(actions))


def race(
    case: Case, schedules: tuple[NamedSchedule, ...], turns: int, steps: int
) -> dict[str, Beside]:
    """Return what this rank saw."""
    torch.set_num_threads(1)
    batch, found = case.batch(), dict[str, Beside]()
    for schedule in schedules:
        executor, other, seen = ours(case, schedule), Torch(case, schedule), Beside()
        if any(case.naps):
            sleepy(executor, case, schedule)
        for _ in range(WARM):
            seen.losses = float(executor.step(batch)), other.step(batch)
        runs = [(executor.step, seen.mine), (other.step, seen.theirs)]
        for turn in range(turns):
            for step, seconds in runs if turn % 2 == 0 else reversed(runs):
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(steps):
                    step(batch)
                dist.barrier()
                seconds.append((time.perf_counter() - begin) / steps)
        executor.close()
        found[schedule] = seen
    return found


def least(case: Case, schedule: str) -> float:
    """Return the seconds of a step that only sleeps."""
    chunks = case.chunks(schedule)
    count, parts = case.devices * chunks, [nap / chunks for nap in case.naps]
    stages = [StageTimes(forward=parts[0], backward=parts[1], weight=parts[2])] * count
    crews = tuple(tuple(range(k, count, case.devices)) for k in range(case.devices))
    crews = folded(count) if SCHEDULES[schedule].folds else crews
    return replay(pipeline_order(schedule, count, case.microbatches, crews), stages).seconds


def told(case: Case, ranks: list[dict[str, Beside]], table: Table) -> bool:
    """Write the rows of a case; return whether all bars are met."""
    is_met = True
    for name in ranks[0]:
        seen = [rank[name] for rank in ranks]
        mine, theirs = (
            [max(column) for column in zip(*rows, strict=True)]
            for rows in ([one.mine for one in seen], [one.theirs for one in seen])
        )
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        known = next(one.losses[1] for one in seen if one.losses[1] is not None)
        differs = max(abs(one.losses[0] / known - 1) for one in seen)
        ratio = statistics.median(ratios)
        met = ratio <= 1.0 and differs < 1e-5
        is_met &= met
        ideal = f"{least(case, name) * 1e3:.0f}" if any(case.naps) else ""
        table.add_row(
            f"{case.devices} ranks, {'sleeping' if any(case.naps) else 'computing'}", name,
            THEIRS[name], f"{statistics.median(mine) * 1e3:.1f}",
            f"{statistics.median(theirs) * 1e3:.1f}", ideal,
            f"{ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f})", f"{differs:.0e}",
            "met" if met else "missed",
        )  # fmt: skip
    return is_met


def main() -> int:
    """Race, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", default="", help="computing or sleeping")
    parser.add_argument("--schedules", default=",".join(THEIRS))
    options = parser.parse_args()
    table = Table(
        "case", "ours", "torch's", "ms", "torch ms", "naps ms", "ratio", "losses", "bar",
        title=f"{options.turns} turns of {options.steps} steps: medians (least-most)",
    )  # fmt: skip
    is_met = True
    names = tuple(options.schedules.split(","))
    for case in (COMPUTING, SLEEPING):
        if options.only in ("sleeping" if any(case.naps) else "computing"):
            found = launch(
                race, case.devices, (case, names, options.turns, options.steps), timeout=900
            )
            is_met &= told(case, found, table)
    console = Console(width=130)
    console.print(table)
    console.print(f"{machine()}, torch {torch.__version__}; 1 thread per rank, gloo")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
