"""Pipelines that are never flushed, against their bound and torch's 1F1B: ``python benchmarks/asynchronous.py``.

Throughput: windows of 200 minibatches without a flush, and as many of torch's Schedule1F1B with as many
microbatches as stages, each of a minibatch's size, in turns, in the same processes. On two ranks the layers
compute; on four they sleep, which takes no core. A window begins when the pipeline has its rhythm: ranks that begin at
one moment, as behind the barrier between windows, first fall into it. The bound of a window is the longest forward and
backward of a stage, measured within it. Ranks of N minibatches under way cannot make up for a core that is slow for some
of them, so beside that stands what the order takes with every forward and backward as it was measured, and nothing between them. Beside each period stands what the simulator makes of the same Program, given what
instructions took by kind, and what messages were measured to take, and to cost the ranks, by the profiler, between
these ranks. Exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from processor import machine
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from shardwright.core.costs import CostTable, Record
from shardwright.core.program import BACKWARD_KINDS, Kind, Program
from shardwright.core.staleness import ACCUMULATES, ASYNCHRONOUS
from shardwright.files.clusterfile import read_cluster
from shardwright.planner.cost import collective_seconds
from shardwright.planner.cost.burden import NUM_COLUMNS, charge, charge_telling, message_burden
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor
from shardwright.runtime.launch import launch
from shardwright.runtime.profile import Probe
from shardwright.runtime.profile.collectives import name_records, time_collectives
from shardwright.verbs.records import build_costs

WINDOW = 200  # if nobody says
COMPUTES = frozenset(map(int, (Kind.FORWARD, *BACKWARD_KINDS)))
TIMED = (*COMPUTES, Kind.TRANSFORM, Kind.UPDATE)
OPTIMIZER = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
LEAST_OF_BOUND, LEAST_GAIN, MOST_OFF = 0.95, 1.3, 0.05
# What the profiler measures of messages between ranks, and for how many seconds those alone.
PROBE, PROBE_SECONDS = Probe(primitives=("all_reduce", "transfer"), sizes=(1024, 65536, 2**20)), 3.0
HERE = "these ranks"
# Some ranks on one host; nothing else of it is asked.
HOST = """[kind.core]
peak = {float32 = "0.1 TFLOP/s"}
memory = "1 GB"
memory_bandwidth = "10 GB/s"
backend = "cpu"
[[host]]
kind = "core"
devices = 4
link = "2 GB/s"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Layers on stages; ``naps`` are the seconds that each layer sleeps in forward and in backward."""

    stages: int
    layers: int
    width: int
    batch: int
    naps: tuple[float, float]

    @property
    def bytes(self) -> int:
        """Of what stages send."""
        return 4 * self.batch * self.width

    def drawn(self) -> dict[str, Tensor]:
        """Draw a batch, the same on all ranks."""
        drawn = torch.Generator().manual_seed(1)
        return {name: torch.randn(self.batch, self.width, generator=drawn) for name in ("x", "y")}

    @property
    def name(self) -> str:
        """What computes."""
        return f"{self.stages} ranks, {'sleeping' if self.naps[0] else 'computing'}"


COMPUTING = Case(stages=2, layers=16, width=256, batch=1024, naps=(0.0, 0.0))
SLEEPING = Case(stages=4, layers=4, width=32, batch=8, naps=(0.04, 0.08))


# Messages that take a larger share of the time.
SMALL = (replace(COMPUTING, layers=8, batch=256), replace(SLEEPING, naps=(0.02, 0.04)))


@torch.library.custom_op("benchmark::nap", mutates_args=())
def nap(x: Tensor, forward: float, backward: float) -> Tensor:
    """Sleep, and sleep again in backward; the tensor stays as it is."""
    time.sleep(forward)
    return x.clone()


@nap.register_fake
def _(x: Tensor, forward: float, backward: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("benchmark::nap_back", mutates_args=())
def nap_back(x: Tensor, seconds: float) -> Tensor:
    """Sleep; the gradient stays as it is."""
    time.sleep(seconds)
    return x.clone()


@nap_back.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[2]


def _wake(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return nap_back(gradient, ctx.seconds), None, None


nap.register_autograd(_wake, setup_context=_keep)


class Layer(nn.Module):
    """x + down(tanh(up(x))), or that and a nap."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(case.width, 2 * case.width),
            nn.Linear(2 * case.width, case.width),
        )
        self.naps = case.naps

    def forward(self, x: Tensor) -> Tensor:
        """Add to what comes in."""
        x = x + self.down(torch.tanh(self.up(x)))
        return nap(x, *self.naps) if self.naps[0] else x


class Net(nn.Module):
    """Layers under a mean squared error."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(case) for _ in range(case.layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds per minibatch: of the window, and of this stage's instructions within it by kind; of each minibatch's
    forward and backward, by its number."""

    period: float
    by_kind: dict[int, float]
    halves: dict[int, list[float]]

    @property
    def compute(self) -> float:
        """Of forward and backward."""
        return sum(seconds for kind, seconds in self.by_kind.items() if kind in COMPUTES)

    @property
    def whole(self) -> float:
        """With updates and versions."""
        return sum(self.by_kind.values())


def lowered(case: Case, staleness: str, batch: dict[str, Tensor]) -> tuple[Net, Captured, Program]:
    """Return the model, and its Program."""
    module = Net(case)
    captured = capture(module, batch)
    seed = Seed(stages=case.stages, staleness=staleness)  # type: ignore[arg-type]
    return module, captured, lower(captured.graph, seed_strategy(captured.graph, seed))


class Ours:
    """The executor, whose instructions of the last window are timed by kind."""

    def __init__(self, case: Case, staleness: str, batch: dict[str, Tensor]) -> None:
        module, captured, program = lowered(case, staleness, batch)
        self.executor = Executor(captured, program, module, optimizer=OPTIMIZER)
        self.batch, self.seconds = batch, dict.fromkeys(map(int, TIMED), 0.0)
        self.halves: dict[int, list[float]] = {}
        self.lead = 2 * case.stages
        kinds, act = program.kind.tolist(), self.executor._act
        clock = self.executor.machine.clock

        def timing(index: int, action: Any) -> None:
            begin = time.perf_counter()
            act(index, action)
            if (kind := kinds[index]) in self.seconds:
                took = time.perf_counter() - begin
                self.seconds[kind] += took
                if kind in COMPUTES:
                    minibatch = clock.minibatch(program.shift_of(index))
                    self.halves.setdefault(minibatch, [0.0, 0.0])[kind in BACKWARD_KINDS] += took

        self.executor._act = timing

    def window(self, count: int) -> Window:
        """Run minibatches; those under way stay so."""
        dist.barrier()
        for _ in range(self.lead):
            self.executor.step(self.batch)
        self.seconds, self.halves = dict.fromkeys(self.seconds, 0.0), {}
        begin = time.perf_counter()
        for _ in range(count):
            self.executor.step(self.batch)
        period = (time.perf_counter() - begin) / count
        by_kind = {kind: one / count for kind, one in self.seconds.items()}
        return Window(period, by_kind, self.halves)


class Torch:
    """Schedule1F1B with as many microbatches as stages."""

    def __init__(self, case: Case, batch: dict[str, Tensor]) -> None:
        rank, count = dist.get_rank(), case.layers // case.stages
        net = Net(case)
        module = nn.Sequential(*net.layers[rank * count : (rank + 1) * count])
        hidden = torch.zeros(case.batch, case.width, requires_grad=True)
        first = torch.zeros(case.batch, case.width)
        stage = PipelineStage(
            module, rank, case.stages, torch.device("cpu"),
            input_args=(hidden if rank else first,), output_args=(hidden,),
        )  # fmt: skip
        self.schedule = Schedule1F1B(stage, case.stages, loss_fn=nn.functional.mse_loss)
        self.optimizer = OPTIMIZER(module.parameters())
        self.case = case
        self.batch = {name: torch.cat([one] * case.stages) for name, one in batch.items()}

    def window(self, count: int) -> Window:
        """Run as many minibatches, some a step."""
        rank, case = dist.get_rank(), self.case
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count // case.stages):
            target = self.batch["y"] if rank == case.stages - 1 else None
            self.schedule.step(*(() if rank else (self.batch["x"],)), target=target)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return Window((time.perf_counter() - begin) / count, {}, {})


def messages() -> list[Record]:
    """Measure messages between ranks, alone and beneath computation, as a profile does (a collective call)."""
    group = dist.group.WORLD
    assert group is not None
    found = time_collectives(group, PROBE, PROBE_SECONDS, lambda *_: None)
    return name_records(found, 1, group.size(), "loopback", HERE)


def race(
    case: Case, modes: tuple[str, ...], turns: int, count: int
) -> tuple[dict[str, list[Window]], list[Record]]:
    """Return this rank's windows by trainer, and what messages between ranks cost."""
    torch.set_num_threads(1)
    batch, known = case.drawn(), messages()
    trainers: dict[str, Ours | Torch] = {mode: Ours(case, mode, batch) for mode in modes}
    trainers["torch"] = Torch(case, batch)
    for trainer in trainers.values():
        for _ in range(2 * case.stages):
            if isinstance(trainer, Ours):
                trainer.executor.step(batch)
    found: dict[str, list[Window]] = {name: [] for name in trainers}
    for turn in range(turns):
        names = list(trainers)
        for name in names if turn % 2 == 0 else reversed(names):
            found[name].append(trainers[name].window(count))
    dist.barrier()
    for trainer in trainers.values():
        if isinstance(trainer, Ours):
            trainer.executor.flush()
            trainer.executor.close()
    return found, known


def predicted(case: Case, mode: str, windows: list[Window], table: CostTable) -> float:
    """Return the simulator's period, given what the instructions of each stage took together by kind; in that is what
    messages under way steal of them."""
    _, _, program = lowered(case, mode, case.drawn())
    seconds, cluster = np.zeros(program.num_instructions), read_cluster(HOST)
    for stage, window in enumerate(windows):
        for kind, took in window.by_kind.items():
            mine = (program.kind == kind) & (program.group == stage)
            seconds[mine] = took / max(1, mine.sum())
    burdens = np.zeros((NUM_COLUMNS, len(program.messages)))
    for item, message in enumerate(program.messages):
        facts = message.bytes, (0, 1), cluster, table
        sent = (program.kind == Kind.SEND) & (program.item == item)
        seconds[sent] = collective_seconds("transfer", *facts).seconds
        burdens[:, item] = message_burden("transfer", *facts)._replace(stolen=0.0)
    charge(program, seconds, np.zeros_like(seconds), burdens)
    charge_telling(program, seconds, np.zeros_like(seconds), (cluster, table))
    return simulate(program, seconds).step_seconds


def played(windows: list[Window]) -> float:
    """Return the seconds per minibatch in which stages, each N - 1 - k forwards ahead, run what was measured of the
    minibatches that all of them ran both halves of."""
    both = [{n for n, halves in one.halves.items() if all(halves)} for one in windows]
    numbers, count = sorted(set.intersection(*both)), len(windows)
    free = [0.0] * count
    ends: list[list[float]] = [[] for _ in windows]  # of backwards
    for place, number in enumerate(numbers):
        arrives = 0.0
        for stage, window in enumerate(windows):
            free[stage] = arrives = max(arrives, free[stage]) + window.halves[number][0]
        for stage in reversed(range(count)):
            if (late := place - (count - 1 - stage)) >= 0:
                comes = ends[stage + 1][late] if stage < count - 1 else 0.0
                free[stage] = max(comes, free[stage]) + windows[stage].halves[numbers[late]][1]
                ends[stage].append(free[stage])
    return (ends[0][-1] - ends[0][0]) / (len(ends[0]) - 1)


def _spread(rows: list[tuple[float, ...]], place: int) -> str:
    column = [row[place] for row in rows]
    return f"{min(column):.2f}-{max(column):.2f}"


def told(
    case: Case, ranks: list[tuple[dict[str, list[Window]], list[Record]]], table: Table
) -> bool:
    """Write the rows of a case; return whether all bars are met."""
    is_met, costs = True, build_costs(ranks[0][1], HERE)
    turns = len(ranks[0][0]["torch"])
    theirs = [max(rank["torch"][turn].period for rank, _ in ranks) for turn in range(turns)]
    for name in ranks[0][0]:
        if name == "torch":
            continue
        rows = list[tuple[float, ...]]()
        for turn in range(turns):
            windows = [rank[name][turn] for rank, _ in ranks]
            period = max(one.period for one in windows)
            bound = max(one.compute for one in windows)
            whole = max(one.whole for one in windows)
            said = predicted(case, name, windows, costs)
            rows.append(
                (
                    period, bound / period, played(windows) / period, whole / period,
                    theirs[turn] / period, said / period - 1,
                )
            )  # fmt: skip
        period, share, order, whole, gain, off = (
            statistics.median(column) for column in zip(*rows, strict=True)
        )
        met = share >= LEAST_OF_BOUND and gain >= LEAST_GAIN and abs(off) <= MOST_OFF
        is_met &= met
        table.add_row(
            case.name, name, f"{period * 1e3:.1f}", f"{off:+.1%}", f"{share:.3f} ({_spread(rows, 1)})", f"{order:.3f}", f"{whole:.3f}",
            f"{statistics.median(theirs) * 1e3:.1f}", f"{gain:.2f} ({_spread(rows, 4)})",
            "met" if met else "missed",
        )  # fmt: skip
    return is_met


def main() -> int:
    """Race, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--modes", default="spectrain-v2", help="names, or all")
    parser.add_argument("--only", default="", help="computing or sleeping")
    parser.add_argument("--window", type=int, default=WINDOW, help="minibatches without a flush")
    parser.add_argument("--small", action="store_true", help="less work between messages")
    options = parser.parse_args()
    table = Table(
        "case", "mode", "ms", "predicted", "F+B / period", "order / period", "with updates", "1F1B ms", "gain", "bars",
        title=f"windows of {options.window} minibatches, {options.turns} turns: median (least-most)",
    )  # fmt: skip
    is_met = True
    for case in SMALL if options.small else (COMPUTING, SLEEPING):
        if options.only in case.name:
            # A nap is no operator that could be cut into microbatches.
            every = tuple(mode for mode in ASYNCHRONOUS if mode not in ACCUMULATES)
            modes = every if options.modes == "all" else tuple(options.modes.split(","))
            arguments: tuple[Any, ...] = (case, modes, options.turns, options.window)
            is_met &= told(case, launch(race, case.stages, arguments, timeout=900), table)
    console = Console(width=130)
    console.print(table)
    console.print(f"{machine()}, torch {torch.__version__}; 1 thread per rank, gloo")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
