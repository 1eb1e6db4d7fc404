"""What `plan --allow-compression` chooses, run on ranks beside the plan that sends gradients whole.

Ranks measure their own links and what compressing takes, and plan with that; then the chosen plan, all
others of its frontier, and the same plan with one way for all gradients run in turns. Data parallelism
only. **Computation is emulated**: forward, backward and updates sleep as long as they are predicted to
take, so that more ranks than cores can run; packing, adding up and sending are real. What messages cost
who computes is measured with ranks that sleep, too. Ranks beyond the
cores share them, and what their threads compute (packing, starting messages) is priced so much dearer.
Hosts are network namespaces (root).

    python benchmarks/compression.py --ranks 2,4 --links loopback,1gbit,100mbit

A choice is met where no plan that runs is faster by more than 3 %. With `--groupings 0.01` what runs instead is top-k of
that density of every layer alone (LAGS), of all at once (single), and in the groups that finish first (OMGS), the choice.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

import numpy as np
import torch
import torch.distributed as dist
from ranks import inside, run_ranks
from torch import Tensor, nn

from shardwright.core.compression import is_compressed, sent_share
from shardwright.core.costs import PACK, CostTable
from shardwright.core.program import BACKWARD_KINDS, Kind
from shardwright.core.strategy import Strategy
from shardwright.files.clusterfile import read_cluster
from shardwright.planner.cost.price import price
from shardwright.planner.judge.compress import packings
from shardwright.planner.judge.evaluate import evaluate, merge, run
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search import survey
from shardwright.planner.search.labels import packing_words
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.allocator import keep_freed_memory
from shardwright.runtime.capture import capture
from shardwright.runtime.cores import wait_when_woken
from shardwright.runtime.executor import Executor
from shardwright.runtime.profile.beneath import Chunk
from shardwright.runtime.profile.collectives import (
    Probe,
    name_records,
    scalar,
    time_alone,
    time_busy,
)
from shardwright.runtime.profile.overheads import time_overheads
from shardwright.runtime.race import Rules, race
from shardwright.verbs.records import build_costs
from tests.hosts import hosts, why_not

BEHIND = 0.03
LATE_SECONDS = 2e-5  # by which who sleeps may wake late, for which it keeps a core that others want
TIMER_SLACK = (
    29  # of prctl: nanoseconds by which the system may wake it later, 50,000 where nobody says
)
ROWS = 4
OWN = ("segment_seconds", "message_seconds")  # by a thread's own clock
BYTES_PER_SECOND = {"loopback": 1e9, "1gbit": 1.2e8, "100mbit": 1.2e7}
# Widths of layers, and computation over the seconds in which all gradients are sent whole.
CASES = {
    "even, r = 4": ((256,) * 6, 4.0),
    "even, r = 1": ((256,) * 6, 1.0),
    "deep, r = 1": ((192,) * 13, 1.0),
    "even, r = 1/4": ((256,) * 6, 0.25),
    "large last, r = 1": ((1024, 256, 128, 128, 128), 1.0),
    "large first, r = 1": ((128, 128, 128, 256, 1024), 1.0),
}
UNIFORM = (("int8", 1.0), ("1-bit", 1.0), ("top-k", 0.1), ("top-k", 0.01), ("top-k", 0.001))
DESCRIPTION = """
name = "emulated"
[kind.core]
peak = {{ float32 = "{flops:.0f} FLOP/s" }}
memory = "4 GiB"
memory_bandwidth = "20 GB/s"
backend = "cpu"
launch = "10 us"
[[host]]
count = {hosts}
kind = "core"
devices = {devices}
link = "5 GB/s"
link_latency = "20 us"
"""
UPLINK = 'uplink = "{rate}"\nuplink_latency = "500 us"\n'
SLEEPS = (Kind.FORWARD, *BACKWARD_KINDS, Kind.UPDATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A plan as it ran: seconds a step, predicted and measured; the share of bits it does not send."""

    case: str
    ways: str
    is_chosen: bool
    lost: float
    predicted: float
    measured: float
    spread: float


class Net(nn.Module):
    """Linear layers under a mean squared error."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(one for a, b in itertools.pairwise(widths) for one in (nn.Linear(a, b), nn.Tanh()))
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


class Asleep(Chunk):
    """Computation as it is here."""

    def __init__(self) -> None:
        self.once = 1e-3  # seconds

    def run(self, times: int) -> None:
        """Sleep."""
        rest(times * self.once)


def rest(seconds: float) -> None:
    """Sleep, and wake in time."""
    until = time.perf_counter() + seconds
    if seconds > LATE_SECONDS:
        time.sleep(seconds - LATE_SECONDS)
    while time.perf_counter() < until:
        pass


def measured_costs(link: str, label: str, ranks: int) -> CostTable:
    """Return what messages and packing take here, the same on all ranks."""
    keep_freed_memory()  # as when they run
    probe = Probe(primitives=("all_reduce", "all_gather"), sizes=(1024, 2**14, 2**16, 2**18, 2**20))
    group = dist.group.WORLD
    assert group is not None
    alone = time_alone(group, probe, 8.0, lambda done, total: None)
    busy = time_busy(group, probe, alone, chunk=Asleep())
    found = time_overheads() | alone | busy
    # Threads of the backend take nothing from who sleeps.
    found |= {name: scalar(0.0) for name in busy if name.startswith("stolen|")}
    table = build_costs(
        name_records(found, 1 if link == "loopback" else ranks, ranks, label, "here"), "here"
    )
    shares = max(1.0, ranks / len(os.sched_getaffinity(0)))
    points = tuple(
        (key, tuple((size, shares * s, shares * w) for size, s, w in line))
        if key.startswith((PACK, "held|"))
        else (key, line)
        for key, line in table.collectives
    )
    overheads = tuple((name, s * shares if name in OWN else s) for name, s in table.overheads)
    told = [replace(table, collectives=points, overheads=overheads)]
    dist.broadcast_object_list(told)
    return told[0]


def sleeping(executor: Executor, seconds: Sequence[float]) -> None:
    """Let instructions that compute take at least so long, what their thread itself took counted."""
    asleep = np.where(np.isin(executor.program.kind, SLEEPS), seconds, 0.0).tolist()

    def walk(compiled: Any) -> None:
        for index, several in itertools.groupby(compiled.actions, key=lambda one: one[0]):
            begin = time.thread_time()
            for _, action in several:
                action()
            if asleep[index]:
                rest(asleep[index] - (time.thread_time() - begin))

    executor._walk = walk


def bare(strategy: Strategy) -> Strategy:
    """Return a strategy without its name."""
    return replace(strategy, label="")


def plans_of(
    context: Context, least_sent: float, ranks: int
) -> list[tuple[Strategy, float, float]]:
    """Return the chosen plan, the others of its frontier, and one way for all: each with its predicted
    seconds and the share of bits that it loses."""
    allowing = replace(context.training, least_sent=least_sent)
    found = survey(
        context.graph,
        context.cluster,
        context.table,
        training=allowing,
        seed_plan=f"megatron:{ranks}x1",
    )
    known = {bare(one.strategy): one for one in found.findings.fitting}
    whole = min(
        (one for one in known.values() if not one.objective.lost), key=lambda one: one.seconds
    )
    # By what they do, not by what they are called: none runs twice.
    every = {bare(one.strategy): known[bare(one.strategy)] for one in (found.frontier.best, whole)}
    every |= {strategy: one for strategy, one in known.items() if one.objective.lost}
    for compressor, density in UNIFORM:
        alone = replace(whole.strategy.gradient_sync, method="wfbp", buckets=())
        sync = replace(alone, compressor=compressor, density=density)
        evaluation = evaluate(context, replace(whole.strategy, gradient_sync=sync))
        if sent_share(compressor, density, "float32") >= least_sent:
            alike = merge(context, evaluation)
            every.setdefault(bare(alike.strategy), alike)
    return [(one.strategy, one.seconds, one.objective.lost) for one in every.values()]


def groupings_of(
    context: Context, density: float, ranks: int
) -> list[tuple[Strategy, float, float]]:
    """Return the same selections in the groups that finish first (OMGS), layer by layer (LAGS) and all in one, each with
    its predicted seconds and the share of bits that it loses. What is small travels whole, in one bucket."""
    plain = evaluate(context, seed_strategy(context.graph, Seed(data=ranks)))
    how = ("top-k", density)
    omgs = next(
        one
        for one in packings(context, plain, density, partial(run, context))
        if (one.compressor, one.density) == how and not one.apart
    )
    shapes = {one: context.graph.tensors[one].shape for bucket in omgs.buckets for one in bucket}
    large = [bucket for bucket in omgs.buckets if is_compressed(omgs, "float32", shapes[bucket[0]])]
    small = tuple(bucket for bucket in omgs.buckets if bucket not in large)
    layers = tuple(itertools.chain.from_iterable(large))
    groups = {"OMGS": tuple(large), "LAGS": tuple((one,) for one in layers), "single": (layers,)}
    found = [
        evaluate(
            context,
            replace(
                plain.strategy,
                label=f"{name}, {len(buckets)} groups",
                gradient_sync=replace(omgs, buckets=(*buckets, *small)),
            ),
        )
        for name, buckets in groups.items()
    ]
    return [(one.strategy, one.seconds, one.objective.lost) for one in found]


def run_case(name: str, link: str, ranks: int, options: argparse.Namespace) -> list[Ran]:
    """Plan, run the plans in turns, and return what was seen: the body of every rank."""
    widths, ratio = CASES[name]
    params = sum(a * b + b for a, b in itertools.pairwise(widths))
    wire = 2 * (ranks - 1) / ranks * 4 * params / BYTES_PER_SECOND[link]
    text = DESCRIPTION.format(
        flops=6 * ROWS * params / (ratio * wire),
        hosts=1 if link == "loopback" else ranks,
        devices=ranks if link == "loopback" else 1,
    )
    if link != "loopback":
        text += UPLINK.format(rate=link.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s"))
    cluster = read_cluster(text)
    drawn = torch.Generator().manual_seed(1)
    batch = {
        part: torch.randn(ROWS * ranks, width, generator=drawn)
        for part, width in (("x", widths[0]), ("y", widths[-1]))
    }
    module = Net(widths)
    captured = capture(module, batch)
    table = options.table
    context = Context.of(captured.graph, cluster, table, Training(optimizer_states=0))
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        density = options.groupings
        told = [
            groupings_of(context, density, ranks)
            if density
            else plans_of(context, options.least_sent, ranks)
        ]
    dist.broadcast_object_list(told)
    executors = list[Executor]()
    for strategy, _, _ in told[0]:
        program = lower(captured.graph, strategy)
        optimizer = partial(torch.optim.SGD, lr=1e-3)
        executors.append(Executor(captured, program, Net(widths), optimizer=optimizer))
        free = replace(table, collectives=(), overheads=())
        sleeping(executors[-1], price(program, captured.graph, cluster, free).seconds)
    rules = Rules(turns=options.turns, steps=2, budget_seconds=options.seconds)
    laps = race([one.step for one in executors], [batch], rules)
    for one in executors:
        one.close()
    return [
        Ran(
            case=f"{name}, {ranks} ranks, {link}",
            ways=strategy.label
            if options.groupings
            else packing_words(strategy.gradient_sync)
            if strategy.gradient_sync.compressors
            else "whole",
            is_chosen=place == 0,
            lost=lost,
            predicted=predicted,
            measured=lap.seconds,
            spread=lap.spread,
        )
        for place, ((strategy, predicted, lost), lap) in enumerate(zip(told[0], laps, strict=True))
    ]


def rank_main(options: argparse.Namespace) -> None:
    """Run all cases as one rank; the first writes what was seen."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(TIMER_SLACK, 1)
    wait_when_woken()
    dist.init_process_group(
        "gloo", init_method=f"tcp://{options.meet}", rank=options.rank, world_size=options.world
    )
    link = options.links
    label = (
        "loopback"
        if link == "loopback"
        else f"{float(link[:-4]) / (1 if link.endswith('gbit') else 1e3):.4g}Gbit/s"
    )
    options.table = measured_costs(link, label, options.world)
    for name in CASES:
        if options.only in name:
            rows = run_case(name, link, options.world, options)
            if options.rank == 0:
                with Path(options.out).open("a") as out:
                    out.writelines(
                        json.dumps({field: getattr(row, field) for field in Ran.__slots__}) + "\n"
                        for row in rows
                    )
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def places(link: str, ranks: int) -> Iterator[tuple[list[list[str]], str]]:
    """Yield what comes before each rank's command, and where ranks meet."""
    if link == "loopback":
        yield [[] for _ in range(ranks)], "127.0.0.1:29533"
        return
    with hosts(ranks, link, "swk") as names:
        yield inside(names), "10.84.0.1:29533"


def run_setting(link: str, ranks: int, options: argparse.Namespace) -> list[Ran]:
    """Run all cases on so many ranks over a link."""
    with tempfile.TemporaryDirectory() as folder, places(link, ranks) as (before, meet):
        out = Path(folder, "rows")
        out.touch()
        extra = {} if link == "loopback" else {"GLOO_SOCKET_IFNAME": "eth0"}
        words = ["--links", link, "--world", str(ranks), "--meet", meet, "--out", str(out)]
        words += ["--only", options.only, "--turns", str(options.turns)]
        words += ["--groupings", str(options.groupings)]
        words += ["--seconds", str(options.seconds), "--least-sent", str(options.least_sent)]
        run_ranks(before, (__file__, *words), extra, 600)
        return [Ran(**json.loads(line)) for line in out.read_text().splitlines()]


def told(rows: Sequence[Ran]) -> tuple[int, int]:
    """Print the rows of every case; return how many choices are met, and of how many."""
    met = total = 0
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        (chosen,) = [row for row in mine if row.is_chosen]
        best = min(mine, key=lambda row: row.measured)
        behind = chosen.measured / best.measured - 1
        met, total = met + (behind <= BEHIND), total + 1
        print(
            f"\n{case}: chosen is {behind:.1%} behind the fastest, {'met' if behind <= BEHIND else 'missed'}"
        )
        print(
            "| gradients | bits lost | predicted | measured | spread | error |\n|---|--:|--:|--:|--:|--:|"
        )
        for row in sorted(mine, key=lambda row: row.measured):
            mark = " (chosen)" if row.is_chosen else ""
            print(
                f"| {row.ways}{mark} | {row.lost:.0%} | {row.predicted * 1e3:.1f} ms "
                f"| {row.measured * 1e3:.1f} ms | {row.spread / row.measured:.1%} "
                f"| {row.predicted / row.measured - 1:+.1%} |"
            )
    return met, total


def main() -> int:
    """Run all settings, and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--links", default="loopback,1gbit,100mbit")
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a case's steps")
    parser.add_argument("--least-sent", type=float, default=0.001)
    parser.add_argument("--groupings", type=float, default=0.0, help="of selections of a density")
    for hidden in ("--rank", "--world"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    for hidden in ("--meet", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options)
        return 0
    rows = list[Ran]()
    for ranks in map(int, options.ranks.split(",")):
        for link in options.links.split(","):
            if link != "loopback" and why_not():
                print(f"{link} skipped: {why_not()}")
                continue
            rows += run_setting(link, ranks, options)
    met, total = told(rows)
    errors = [abs(row.predicted / row.measured - 1) for row in rows]
    print(
        f"\n{met} of {total} choices within {BEHIND:.0%} of the fastest measured; median error of steps "
        f"{statistics.median(errors):.1%}. {len(os.sched_getaffinity(0))} cores, "
        f"{platform.machine()}, torch {torch.__version__}, gloo; computation emulated by sleeping"
    )
    return 0 if met >= 0.9 * total else 1


if __name__ == "__main__":
    sys.exit(main())
