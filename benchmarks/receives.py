"""What transfers between hosts cost pipelines, predicted beside measured: ``python benchmarks/receives.py`` (root).

Hosts are network namespaces with shaped links. Stages sleep instead of computing (emulated: two cores hold four ranks), in
forward and in backward, and a boundary takes half of that forward on its link, as two ranks alone measure it. The
prediction is the simulator's, of the same Program, given what each stage's forwards and backwards, and a transfer, took. Schedules run in
turns in the same processes: a step that all ranks begin together, and steps in a row, which none of them begins with others. Exits 1
where a prediction is off by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from processor import machine
from ranks import inside, run_ranks
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from shardwright.core.program import BACKWARD_KINDS, Kind, Program
from shardwright.core.schedules import NamedSchedule
from shardwright.planner.simulate import simulate
from shardwright.runtime.collectives import receive, send
from shardwright.runtime.executor import Executor
from shardwright.runtime.launch import join_world
from tests.beside_torch import Case, ours
from tests.hosts import hosts, why_not

SCHEDULES: tuple[NamedSchedule, ...] = (
    "gpipe",
    "1f1b",
    "1f1b-so",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "zb-v",
)
# A boundary of 512 KiB, and what a device sleeps for a microbatch: F, then I and W.
CASE = Case(devices=2, microbatches=8, layers=4, width=32, rows=4096, naps=(0.04, 0.04, 0.04))
BYTES = CASE.rows * CASE.width * 4
SHARE = 0.5  # of a forward, that a transfer takes
WARM, ROW, MOST_OFF, TIMEOUT = 1, 4, 0.05, 300  # ROW: steps, behind one that is not counted
COMPUTES = (Kind.FORWARD, *BACKWARD_KINDS)
Sort = tuple[int, int]  # a kind, and a mesh


def each(program: Program) -> Iterator[tuple[int, bool]]:
    """Yield the instructions that compute, and whether each is the first of its microbatch and kind on its mesh."""
    met = set[tuple[int, int, int]]()
    for index in np.flatnonzero(np.isin(program.kind, COMPUTES)).tolist():
        key = int(program.kind[index]), int(program.group[index]), int(program.microbatch[index])
        yield index, key not in met
        met.add(key)


class Sleepy:
    """An executor whose actions take their naps, computing included, and are timed."""

    def __init__(self, case: Case, schedule: NamedSchedule) -> None:
        self.executor: Executor = ours(case, schedule)
        program, part = self.executor.program, 1 / case.chunks(schedule)
        naps = {Kind.FORWARD: case.naps[0], Kind.BACKWARD: case.naps[1] + case.naps[2],
                Kind.INPUT_GRADIENT: case.naps[1], Kind.WEIGHT_GRADIENT: case.naps[2]}  # fmt: skip
        self.seconds: dict[Sort, list[float]] = {}
        first = {index for index, is_first in each(program) if is_first}
        actions = list[Any]()
        for index, action in self.executor._training.actions:
            kind = Kind(int(program.kind[index]))
            if kind in COMPUTES:
                nap = part * naps[kind] if index in first else 0.0
                first.discard(index)  # what it lets go of is an action, too
                sort = int(kind), int(program.group[index])
                actions.append((index, self._timed(self.seconds.setdefault(sort, []), action, nap)))
            else:
                actions.append((index, action))
        self.executor._training = replace(self.executor._training, actions=tuple(actions))

    def _timed(self, seconds: list[float], action: Any, nap: float) -> Any:
        def run() -> None:
            begin = time.perf_counter()
            action()
            time.sleep(max(0.0, nap - (time.perf_counter() - begin)))
            if nap:
                seconds.append(0.0)
            seconds[-1] += time.perf_counter() - begin

        return run

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """Return the seconds of a step."""
        dist.barrier()
        begin = time.perf_counter()
        self.executor.step(batch)
        return time.perf_counter() - begin

    def row(self, batch: dict[str, torch.Tensor]) -> float:
        """Return the seconds from one step to the next."""
        self.step(batch)
        begin = time.perf_counter()
        for _ in range(ROW):
            self.executor.step(batch)
        return (time.perf_counter() - begin) / ROW


def one_way(source: int, size: int, times: int = 9) -> float:
    """Return the seconds of so many bytes from one rank to the next, with nothing beside it."""
    tensor, found = torch.zeros(size // 4), list[float]()
    group, note = dist.group.WORLD, torch.zeros(1)
    for _ in range(times):
        dist.barrier()
        if dist.get_rank() == source:
            begin = time.perf_counter()
            send(tensor, source + 1, group, 1).wait()  # type: ignore[arg-type]
            receive(note, source + 1, group, 2).wait()  # type: ignore[arg-type]
            found.append(time.perf_counter() - begin)
        elif dist.get_rank() == source + 1:
            receive(tensor, source, group, 1).wait()  # type: ignore[arg-type]
            send(note, source, group, 2).wait()  # type: ignore[arg-type]
    return statistics.median(found) if found else 0.0


def durations(program: Program, took: dict[Sort, float], transfer: float) -> NDArray[np.float64]:
    """Return what every instruction takes: a microbatch's work on a mesh, and what crosses to another device."""
    found = np.zeros(program.num_instructions)
    for index, is_first in each(program):
        sort = int(program.kind[index]), int(program.group[index])
        found[index] = took[sort] if is_first else 0.0
    for index in np.flatnonzero(program.kind == Kind.SEND).tolist():
        message = program.messages[int(program.item[index])]
        ends = [program.meshes[m].devices for m in (message.mesh, message.destination)]
        if program.microbatch[index] >= 0 and ends[0] != ends[1]:
            found[index] = transfer
    return found


def rank(count: int, turns: int, out: str) -> None:
    """Run the schedules in turns as one rank; the first writes what they took, and what was predicted."""
    torch.set_num_threads(1)
    number, _ = join_world()
    case = replace(CASE, devices=count, layers=2 * count)
    batch, executors = case.batch(), {name: Sleepy(case, name) for name in SCHEDULES}
    transfers = list[Any]([None] * count)
    dist.all_gather_object(transfers, max(one_way(source, BYTES) for source in range(count - 1)))
    steps = {name: list[tuple[float, float]]() for name in SCHEDULES}
    for turn in range(WARM + turns):
        for name in SCHEDULES if turn % 2 else reversed(SCHEDULES):
            one = executors[name]
            if turn < WARM:
                one.step(batch)
            else:
                steps[name].append((one.step(batch), one.row(batch)))
    rows = list[Any]()
    for name, one in executors.items():
        mine = {sort: statistics.mean(times) for sort, times in one.seconds.items()}
        every = list[Any]([None] * count)
        dist.all_gather_object(every, (steps[name], mine))
        took = {sort: seconds for ranks in every for sort, seconds in ranks[1].items()}
        turned = list(zip(*(ranks[0] for ranks in every), strict=True))
        program = one.executor.program
        for place, meets in enumerate((True, False)):
            measured = [max(ranks[place] for ranks in turn) for turn in turned]
            predicted, free = (
                simulate(program, durations(program, took, transfer), meets=meets).step_seconds
                for transfer in (max(transfers), 0.0)
            )
            rows.append((name, "together" if meets else "in a row", free, predicted, measured))
        one.executor.close()
    if number == 0:
        Path(out).write_text(json.dumps({"transfer": max(transfers), "rows": rows}))


def between(names: list[str], turns: int) -> Any:
    """Run a rank on each host; return what they wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder, "rows.json"))
        words = ["--out", out, "--hosts", str(len(names)), "--turns", str(turns)]
        meet = {"MASTER_ADDR": "10.84.0.1", "MASTER_PORT": "29519", "GLOO_SOCKET_IFNAME": "eth0"}
        run_ranks(inside(names), (__file__, *words), meet, TIMEOUT)
        return json.loads(Path(out).read_text())


def main() -> int:
    """Print every schedule between two hosts and four."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options.hosts[0], options.turns, options.out)
        return 0
    if refusal := why_not():
        print(f"skipped: {refusal}")
        return 0
    rate = f"{round(BYTES * 8 / (SHARE * CASE.naps[0]) / 1e6)}mbit"
    table = Table(
        "hosts", "schedule", "steps", "free links ms", "predicted ms", "measured ms", "off", "transfers felt: predicted", "measured", "",
        title=f"{rate} links, {options.turns} turns: median (least-most)",
    )  # fmt: skip
    is_met = True
    for count in options.hosts:
        with hosts(count, rate, "swr") as names:
            found = between(names, options.turns)
        transfer = found["transfer"]
        for name, how, free, predicted, measured in found["rows"]:
            step = statistics.median(measured)
            off = predicted / step - 1
            met = abs(off) <= MOST_OFF
            is_met &= met
            table.add_row(
                str(count), name, how, f"{free * 1e3:.0f}", f"{predicted * 1e3:.0f}",
                f"{step * 1e3:.0f} ({min(measured) * 1e3:.0f}-{max(measured) * 1e3:.0f})", f"{off:+.1%}",
                f"{(predicted - free) / transfer:.1f}", f"{(step - free) / transfer:.1f}",
                "met" if met else "missed",
            )  # fmt: skip
    console = Console(width=150)
    console.print(table)
    console.print(
        f"{machine()}, torch {torch.__version__}; 1 thread per rank, gloo, compute emulated by sleeping"
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
