"""Chosen plans as they run: beside plain data parallelism, on this machine and between shaped hosts.

On this machine every model is planned from an empty store, with ``--try 0`` and with trials; then both
chosen plans, plain data parallelism with 1, 2 and 4 microbatches, the plans predicted fastest, and
torch's DistributedDataParallel run in turns, and each plan once more alone for its memory: the bytes
of its tensors as their allocator counts them. Between hosts (network namespaces, root) the frontier of a
description of the hosts is run by ``shardwright tune``. Prints a table per part; regret is the chosen
plan's step over the best measured.

    python benchmarks/choice.py --only wide,decoder --hosts 2 --rates 100mbit,1gbit
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from choice_models import BATCHES, TUNED

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from shardwright.core.plan import Measured, Plan
from shardwright.files.planfile import read_plan_file
from shardwright.planner.search import labels
from shardwright.report.units import seconds_text
from shardwright.verbs.narrate import tell
from shardwright.verbs.request import Job, Request, Watch
from shardwright.verbs.results import Study
from shardwright.verbs.study import study
from shardwright.verbs.training import start
from shardwright.verbs.trials import LEARNING_RATE, Entry, run_trial, told_apart
from tests.hosts import hosts, why_not

FILE = Path(__file__).with_name("choice_models.py")
DESCRIPTION = """
name = "hosts"
[kind.core]
peak = {{ float32 = "{flops:.0f} GFLOP/s" }}
memory = "4 GiB"
memory_bandwidth = "{bandwidth:.0f} GB/s"
backend = "cpu"
launch = "10 us"
[[host]]
count = {count}
kind = "core"
devices = 1
link = "5 GB/s"
link_latency = "20 us"
uplink = "{rate}"
uplink_latency = "500 us"
"""
MOST_PLANS = 10
TIMEOUT = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One plan as it ran."""

    label: str
    predicted: float
    measured: float
    spread: float
    memory: float  # predicted over measured bytes of tensors

    @property
    def lap(self) -> Measured:
        """As trials have it."""
        return Measured(step_seconds=self.measured, spread_seconds=self.spread, num_steps=1)


def on_this_machine(name: str) -> tuple[list[Ran], float, float, float, float]:
    """Return what ran of a model, torch's own step, and the steps of the chosen plans: predicted
    only, tried; and of plain data parallelism."""
    spec, batch = f"{FILE}:{name}", BATCHES[name]
    believed = study(spec, None, Request(global_batch=batch, trials=0), Watch())
    told = study(spec, None, Request(global_batch=batch), Watch())
    plans: dict[object, Plan] = {}
    for plan in (
        *believed.plain,
        believed.frontier.best,
        told.frontier.best,
        *believed.frontier.plans,
        *told.frontier.plans,
    ):
        plans.setdefault(plan.strategy, plan)
    raced = list(plans.values())[:MOST_PLANS]
    entry = Entry(model=spec, seq=None, optimizer="adamw", environment="")
    laps = run_trial(raced, entry, Watch(), with_torch=True)
    rows = [
        Ran(
            label=named.strategy.label,
            predicted=plan.predicted.step_seconds,
            measured=lap.seconds,
            spread=lap.spread,
            memory=memory_ratio(plan, spec, told),
        )
        for plan, named, lap in zip(raced, labels.told_apart(raced), laps, strict=False)
    ]
    place = {plan.strategy: number for number, plan in enumerate(raced)}
    chosen = [rows[place[one.frontier.best.strategy]].measured for one in (believed, told)]
    plain = rows[place[believed.plain[0].strategy]].measured
    return rows, laps[-1].seconds, chosen[0], chosen[1], plain


def memory_ratio(plan: Plan, spec: str, told: Study) -> float:
    """Return the predicted over the measured peak of a plan's tensors, on the device with most."""
    job = Job(model=spec, steps=2, learning_rate=LEARNING_RATE, profiles=True)
    timeline = start(plan, told.origin, job, Watch()).timeline
    assert timeline is not None  # asked for
    predicted = tell(plan, told.graph, told.cluster, told.costs)
    tensors = predicted.predicted.worst_peak_bytes - predicted.process_bytes
    return tensors / timeline.worst_peak_bytes


def tau(rows: list[Ran], *, apart: bool = False) -> float:
    """Return Kendall's tau of predicted and measured step times, over all pairs or over those only
    whose measured times differ by more than the machine moves them; NaN where there are none."""
    pairs = [(a, b) for n, a in enumerate(rows) for b in rows[n + 1 :]]
    signs = [
        1 if (a.predicted - b.predicted) * (a.measured - b.measured) > 0 else -1
        for a, b in pairs
        if not apart or told_apart(a.lap, b.lap)
    ]
    return sum(signs) / len(signs) if signs else float("nan")


def between_hosts(
    name: str, count: int, rate: str, rates: tuple[float, float]
) -> tuple[Plan, list[tuple[float, Plan]]]:
    """Plan for so many hosts, tune on them; return the chosen plan, and every plan that ran and is on
    the frontier with what was predicted of it before (NaN where it was not there).

    Hosts share this machine's cores: each is described with its share of them.
    """
    spec = f"{FILE}:{name}"
    share = min(1.0, len(os.sched_getaffinity(0)) / count)
    with tempfile.TemporaryDirectory() as folder, hosts(count, rate, "swc") as names:
        cluster, plan = Path(folder, "hosts.toml"), Path(folder, "plan.json")
        words = {"mbit": " Mbit/s", "gbit": " Gbit/s"}
        text = rate.replace("mbit", words["mbit"]).replace("gbit", words["gbit"])
        cluster.write_text(
            DESCRIPTION.format(
                count=count,
                rate=text,
                flops=share * rates[0] / 1e9,
                bandwidth=share * rates[1] / 1e9,
            )
        )
        environment = os.environ | {
            "SHARDWRIGHT_STORE": str(Path(folder, "records.sqlite")),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        command = [sys.executable, "-m", "shardwright", "plan", spec, "-c", str(cluster)]
        command += ["-b", str(BATCHES[name]), "-o", str(plan)]
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=TIMEOUT)
        before = {
            one.strategy: one.predicted.step_seconds for one in read_plan_file(plan).frontier.plans
        }
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run",
                 "--nnodes", str(count), "--node-rank", str(number), "--nproc-per-node", "1",
                 "--master-addr", "10.84.0.1", "--master-port", "29517",
                 "-m", "shardwright", "tune", str(plan), spec, "--json"],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for number, host in enumerate(names)
        ]  # fmt: skip
        try:
            ends = [rank.communicate(timeout=TIMEOUT) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise RuntimeError("\n".join(err[-500:] for _, err in ends))
        frontier = read_plan_file(plan).frontier
        ran = [one for one in frontier.plans if one.measured is not None]
        return frontier.best, [(before.get(one.strategy, float("nan")), one) for one in ran]


def machine_part(names: list[str]) -> None:
    """Print every plan of every model on this machine, and what choosing gained."""
    lines, every, taus = [], list[Ran](), list[tuple[float, float]]()
    print(
        "| model | plan | predicted | measured | spread | memory, predicted / measured |\n"
        "|---|---|--:|--:|--:|--:|"
    )
    for name in names:
        rows, torch_seconds, believed, told, plain = on_this_machine(name)
        every += rows
        for row in rows:
            print(
                f"| {name} | {row.label} | {seconds_text(row.predicted)} "
                f"| {seconds_text(row.measured)} | {row.spread / row.measured:.1%} "
                f"| {row.memory - 1:+.1%} |",
                flush=True,
            )
        best = min(row.measured for row in rows)
        half = "tuned" if name in TUNED else "held out"
        taus.append((tau(rows), tau(rows, apart=True)))
        lines.append(
            f"| {name} ({half}) | {seconds_text(plain)} | {seconds_text(torch_seconds)} "
            f"| {seconds_text(told)} | {plain / told:.2f}x | {torch_seconds / told:.2f}x "
            f"| {told / best - 1:.1%} | {believed / best - 1:.1%} "
            f"| {taus[-1][0]:.2f} | {taus[-1][1]:.2f} |"
        )
    print(
        "\n| model | plain data parallelism | torch DDP | chosen (tried) | gain | over torch | regret "
        "| regret with --try 0 | tau, all pairs | tau, pairs told apart |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    print("\n".join(lines))
    errors = [abs(row.predicted / row.measured - 1) for row in every]
    memory = [abs(row.memory - 1) for row in every]
    print(
        f"\n{len(every)} plans, median error of predicted steps {statistics.median(errors):.1%}, "
        f"of memory {statistics.median(memory):.1%} (worst {max(memory):.1%}); mean tau of all pairs "
        f"{statistics.mean(one for one, _ in taus):.2f}, of pairs told apart "
        f"{statistics.mean(one for _, one in taus if not math.isnan(one)):.2f}"
    )


def host_part(names: list[str], counts: list[int], rates: list[str]) -> None:
    """Print what choosing gained between shaped hosts."""
    from shardwright.verbs.measure import local_cluster

    refusal = why_not()
    if refusal:
        print(f"hosts skipped: {refusal}")
        return
    kind = local_cluster(Watch()).kind_of(0)
    known = kind.flops_for("float32"), kind.memory_bandwidth
    print(
        "\n| model | hosts | rate | plain data parallelism | chosen | gain | predicted: modelled "
        "| with fitted costs | plan |\n|---|--:|---|--:|--:|--:|--:|--:|---|"
    )
    modelled, fitted = list[float](), list[float]()
    for name in names:
        for count in counts:
            for rate in rates:
                best, every = between_hosts(name, count, rate, known)
                ran = best.measured
                if ran is None:
                    raise RuntimeError(f"{name}: nothing ran")
                before = next(told for told, one in every if one.strategy == best.strategy)
                for told, one in every:
                    seconds = one.objective.step_seconds  # measured, where that was
                    modelled += [abs(told / seconds - 1)] if not math.isnan(told) else []
                    fitted.append(abs(one.predicted.step_seconds / seconds - 1))
                print(
                    f"| {name} | {count} | {rate} | {seconds_text(ran.plain_seconds)} "
                    f"| {seconds_text(ran.step_seconds)} "
                    f"| {ran.plain_seconds / ran.step_seconds:.2f}x "
                    f"| {before / ran.step_seconds - 1:+.0%} "
                    f"| {best.predicted.step_seconds / ran.step_seconds - 1:+.0%} "
                    f"| {best.strategy.label} |",
                    flush=True,
                )
    print(
        f"\n{len(fitted)} plans between hosts, median error of steps {statistics.median(modelled or [math.nan]):.1%} as "
        f"modelled ({len(modelled)} of them), {statistics.median(fitted):.1%} with fitted costs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(BATCHES), help="models, by comma")
    parser.add_argument("--hosts", default="2", help="numbers of hosts, by comma; 0 for none")
    parser.add_argument("--rates", default="100mbit,200mbit,1gbit")
    parser.add_argument("--no-machine", action="store_true", help="hosts only")
    words = parser.parse_args()
    names = words.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHARDWRIGHT_STORE"] = str(Path(folder, "records.sqlite"))
        if not words.no_machine:
            machine_part(names)
        counts = [int(one) for one in words.hosts.split(",") if int(one)]
        if counts:
            host_part(names, counts, words.rates.split(","))


if __name__ == "__main__":
    main()
