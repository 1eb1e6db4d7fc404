"""Chosen plans as they run: beside plain data parallelism, on this machine and between shaped hosts.

On this machine every model is planned from an empty store, with ``--try 0`` and with trials; then both
chosen plans, plain data parallelism with 1, 2 and 4 microbatches, the plans predicted fastest, and
torch's DistributedDataParallel run in turns, and each plan once more alone for its memory: the bytes
of its tensors as their allocator counts them. Between hosts: ``choice_hosts.py``. Prints a table per part;
regret is the chosen plan's step over the best measured.

    python benchmarks/choice.py --only wide,decoder --hosts 2 --rates 100mbit,1gbit
    python benchmarks/choice.py --no-machine --asked "--allow-compression --seed-plan megatron:2x1"
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from choice_hosts import host_part
from choice_models import ALL, BATCHES, TUNED, spec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from shardwright.core.plan import Measured, Plan
from shardwright.planner.search import labels
from shardwright.report.units import seconds_text
from shardwright.verbs.narrate import tell
from shardwright.verbs.racing import LEARNING_RATE, Entry, run_trial
from shardwright.verbs.request import Job, Request, Watch
from shardwright.verbs.results import Study
from shardwright.verbs.study import study
from shardwright.verbs.training import start

MOST_PLANS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One plan as it ran."""

    label: str
    predicted: float
    lap: Measured
    memory: float  # predicted over measured bytes of tensors

    @property
    def seconds(self) -> float:
        """The measured step."""
        return self.lap.step_seconds


def on_this_machine(name: str) -> tuple[list[Ran], float, float, float, float]:
    """Return what ran of a model, torch's own step, and the steps of the chosen plans: predicted
    only, tried; and of plain data parallelism."""
    model, batch = spec(name), ALL[name]
    believed = study(model, None, Request(global_batch=batch, trials=0), Watch())
    told = study(model, None, Request(global_batch=batch), Watch())
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
    entry = Entry(model=model, seq=None, optimizer="adamw", environment="")
    laps = run_trial(raced, entry, Watch(), with_torch=True)
    rows = [
        Ran(
            label=named.strategy.label,
            predicted=plan.predicted.step_seconds,
            lap=lap.measured,
            memory=memory_ratio(plan, model, told),
        )
        for plan, named, lap in zip(raced, labels.told_apart(raced), laps, strict=False)
    ]
    place = {plan.strategy: number for number, plan in enumerate(raced)}
    chosen = [rows[place[one.frontier.best.strategy]].seconds for one in (believed, told)]
    plain = rows[place[believed.plain[0].strategy]].seconds
    return rows, laps[-1].seconds, chosen[0], chosen[1], plain


def memory_ratio(plan: Plan, model: str, told: Study) -> float:
    """Return the predicted over the measured peak of a plan's tensors, on the device with most."""
    job = Job(model=model, steps=2, learning_rate=LEARNING_RATE, profiles=True)
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
        1 if (a.predicted - b.predicted) * (a.seconds - b.seconds) > 0 else -1
        for a, b in pairs
        if not apart or a.lap.told_apart(b.lap)
    ]
    return sum(signs) / len(signs) if signs else float("nan")


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
                f"| {seconds_text(row.seconds)} | {row.lap.spread_seconds / row.seconds:.1%} "
                f"| {row.memory - 1:+.1%} |",
                flush=True,
            )
        best = min(row.seconds for row in rows)
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
    errors = [abs(row.predicted / row.seconds - 1) for row in every]
    memory = [abs(row.memory - 1) for row in every]
    print(
        f"\n{len(every)} plans, median error of predicted steps {statistics.median(errors):.1%}, "
        f"of memory {statistics.median(memory):.1%} (worst {max(memory):.1%}); mean tau of all pairs "
        f"{statistics.mean(one for one, _ in taus):.2f}, of pairs told apart "
        f"{statistics.mean(one for _, one in taus if not math.isnan(one)):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(BATCHES), help=f"of {', '.join(ALL)}")
    parser.add_argument("--hosts", default="2", help="numbers of hosts, by comma; 0 for none")
    parser.add_argument("--rates", default="100mbit,200mbit,1gbit")
    parser.add_argument("--no-machine", action="store_true", help="hosts only")
    parser.add_argument(
        "--asked", default="", help="more words of `shardwright plan`, between hosts"
    )
    words = parser.parse_args()
    names = words.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHARDWRIGHT_STORE"] = str(Path(folder, "records.sqlite"))
        if not words.no_machine:
            machine_part(names)
        counts = [int(one) for one in words.hosts.split(",") if int(one)]
        if counts:
            host_part(names, counts, words.rates.split(","), words.asked.split())


if __name__ == "__main__":
    main()
