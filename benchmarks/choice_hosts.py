"""Chosen plans as they run between shaped hosts (network namespaces, root), for ``choice.py``.

For each number of hosts and rate: messages are measured between the hosts (``shardwright profile`` under
torchrun), then for each model its operators; the model is planned with what was measured, and the frontier is
run in turns beside plain data parallelism, as ``shardwright tune`` does. Every plan that ran has three predictions: from the
description of the hosts, from what was measured on them before any plan ran, and with the costs that were
fitted to the plans that ran, this one among them. Each plan runs once more alone for its memory: the bytes of
tensors on each rank as its allocator counts them. Hosts share this machine's cores: each is described with its
share of them.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from choice_models import ALL, spec
from ranks import inside, run_all

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.plan import Measured, Plan
from shardwright.core.strategy import GradientSync
from shardwright.files.planfile import PlanFile, read_plan_file, write_plan
from shardwright.planner.search import labels, surveyed
from shardwright.report.story import PlanStory
from shardwright.report.units import seconds_text
from shardwright.runtime.capture import load_model
from shardwright.runtime.executor import RunOptions
from shardwright.runtime.launch import join_world, meet
from shardwright.runtime.train import build_sharded, named_optimizer
from shardwright.verbs.execution import build_executor
from shardwright.verbs.measure import environment_of, known_costs, local_cluster
from shardwright.verbs.narrate import tell
from shardwright.verbs.racing import (
    LEARNING_RATE,
    MOST_STEPS,
    ROUND_SECONDS,
    TURN_SECONDS,
    TURNS,
    Task,
    trial_rank,
)
from shardwright.verbs.refit import refit
from shardwright.verbs.request import Watch
from shardwright.verbs.subject import capture, find_cluster, training_of
from shardwright.verbs.trials import runnable, with_measured
from tests.hosts import hosts, why_not

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
TIMEOUT = 400
MOST_PLANS = 8
WORDS = {"mbit": " Mbit/s", "gbit": " Gbit/s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One plan as it ran between hosts: seconds predicted from the description, from measurements and
    with fitted costs, and measured."""

    label: str
    predicted: tuple[float, ...]
    lap: Measured
    memory: (
        float  # predicted over measured bytes of tensors, less 1, of the stage that is farthest off
    )

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted over measured, less 1."""
        return tuple(one / self.lap.step_seconds - 1 for one in self.predicted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model between some hosts: all plans that ran, and those that were chosen."""

    name: str
    rows: tuple[Ran, ...]
    plain: Ran  # data parallelism
    chosen: Ran  # with trials
    believed: Ran  # what measurements alone predict to be the fastest of these

    @property
    def regret(self) -> tuple[float, float]:
        """Of the plan that was chosen with trials, and of that chosen without."""
        best = min(row.lap.step_seconds for row in self.rows)
        return self.chosen.lap.step_seconds / best - 1, self.believed.lap.step_seconds / best - 1

    def tau(self, which: int) -> float:
        """Kendall's tau of a prediction over pairs of plans that were told apart; NaN without any."""
        pairs = [(a, b) for n, a in enumerate(self.rows) for b in self.rows[n + 1 :]]
        signs = [
            (a.predicted[which] > b.predicted[which]) == (a.lap.step_seconds > b.lap.step_seconds)
            for a, b in pairs
            if a.lap.told_apart(b.lap)
        ]
        return 2 * sum(signs) / len(signs) - 1 if signs else float("nan")


class Hosts:
    """Some hosts, the file that describes them and the store of what is measured on them."""

    def __init__(
        self,
        names: Sequence[str],
        rate: str,
        rates: tuple[float, float],
        folder: Path,
        asked: Sequence[str] = (),
    ) -> None:
        self.names, self.folder, self.asked = names, folder, asked
        share = min(1.0, len(os.sched_getaffinity(0)) / len(names))
        for word, unit in WORDS.items():
            rate = rate.replace(word, unit)
        self.file = folder / "hosts.toml"
        self.file.write_text(
            DESCRIPTION.format(
                count=len(names),
                rate=rate,
                flops=share * rates[0] / 1e9,
                bandwidth=share * rates[1] / 1e9,
            )
        )
        self.cluster: Cluster = find_cluster(str(self.file))[0]

    def on_each(self, *words: str) -> None:
        """Run Python with these arguments under torchrun, a rank on each host."""
        where = ["--nproc-per-node", "1", "--master-addr", "10.84.0.1", "--master-port", "29517"]
        commands = [
            [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(self.names)),
             "--node-rank", str(number), *where, *words]
            for number, prefix in enumerate(inside(self.names))
        ]  # fmt: skip
        run_all(commands, {"GLOO_SOCKET_IFNAME": "eth0"}, TIMEOUT)

    def case(self, name: str) -> Case:
        """Measure, plan and tune one model."""
        model, where = spec(name), ["-c", str(self.file), "-b", str(ALL[name])]

        def planned(*more: str) -> PlanFile:
            path = self.folder / "plan.json"
            command = [sys.executable, "-m", "shardwright", "plan", model, *where, "-o", str(path)]
            words = [*command, *self.asked, *more]
            subprocess.run(words, check=True, capture_output=True, timeout=TIMEOUT)
            return read_plan_file(path)

        described = planned("--measure", "never").frontier
        self.on_each("-m", "shardwright", "profile", model, *where)
        document = planned()
        measured = known_costs(where=environment_of(self.cluster))
        graph = capture(model, global_batch=ALL[name], precision="float32").graph
        # Gradients travel whole in what all plans are held against.
        whole = replace(document.frontier.best.strategy, gradient_sync=GradientSync())
        survey = surveyed(graph, self.cluster, measured, document.frontier, training_of(whole))
        first, *others = survey.plain
        best = document.frontier.best  # which runs however long it takes, as what one has does
        every = [first, best, *others, *document.frontier.plans, *described.plans]
        # On fewer hosts plans would have all cores to themselves, which are shared here.
        wide = [one for one in every if len(one.strategy.devices) == len(self.names)]
        plans = runnable(survey, wide)[:MOST_PLANS]
        laps, peaks = self._laps(model, plans)
        known = dict(zip([one.strategy for one in plans], laps, strict=True))
        fitted = refit(survey.context, {one: lap.step_seconds for one, lap in known.items()})
        tables = CostTable(), measured, fitted
        rows = {
            one.strategy: Ran(
                label=named.strategy.label,
                predicted=tuple(
                    tell(one, graph, self.cluster, table).predicted.step_seconds for table in tables
                ),
                lap=known[one.strategy],
                memory=farthest_off(tell(one, graph, self.cluster, measured), seen),
            )
            for one, named, seen in zip(plans, labels.told_apart(plans), peaks, strict=True)
        }
        return Case(
            name=name,
            rows=tuple(rows.values()),
            plain=rows[plans[0].strategy],
            chosen=rows[with_measured(survey, known).best.strategy],
            believed=min(rows.values(), key=lambda row: row.predicted[1]),
        )

    def _laps(self, spec: str, plans: Sequence[Plan]) -> tuple[list[Measured], list[list[float]]]:
        """Run plans in turns, a rank on each host; return steps, and peaks of memory by stage."""
        names = [f"{number}.json" for number in range(len(plans))]
        for name, plan in zip(names, plans, strict=True):
            write_plan(self.folder / name, plan)
        slowest = max(plan.objective.step_seconds for plan in plans)
        steps = max(1, min(MOST_STEPS, round(TURN_SECONDS / slowest)))
        self.on_each(__file__, spec, str(self.folder), str(steps), *names)
        found = json.loads((self.folder / "laps.json").read_text())
        return [Measured(**one) for one in found["laps"]], found["peaks"]


def farthest_off(story: PlanStory, seen: Sequence[float]) -> float:
    """Return predicted over measured bytes of tensors, less 1, of the stage where that is farthest from 0."""
    predicted = [peak - story.process_bytes for peak in story.predicted.peak_bytes]
    return max((one / own - 1 for one, own in zip(predicted, seen, strict=True)), key=abs)


def host_part(
    names: Sequence[str], counts: Sequence[int], rates: Sequence[str], asked: Sequence[str]
) -> None:
    """Print every plan that ran between shaped hosts, and what choosing gained; ``asked`` are more words of
    ``shardwright plan``."""
    refusal = why_not()
    if refusal:
        print(f"hosts skipped: {refusal}")
        return
    kind = local_cluster(Watch()).kind_of(0)
    known = kind.flops_for("float32"), kind.memory_bandwidth
    print(
        "\n| model | hosts | rate | plan | described | measured on the hosts | fitted | ran | spread "
        "| memory |\n|---|--:|---|---|--:|--:|--:|--:|--:|--:|"
    )
    lines: list[str] = []
    cases: list[Case] = []
    for count in counts:
        for rate in rates:
            with tempfile.TemporaryDirectory() as folder, hosts(count, rate, "swc") as places:
                os.environ["SHARDWRIGHT_STORE"] = str(Path(folder, "records.sqlite"))
                where = Hosts(places, rate, known, Path(folder), asked)
                for name in names:
                    case = where.case(name)
                    cases.append(case)
                    told = f"| {name} | {count} | {rate} "
                    _print_rows(case, told)
                    lines.append(told + _line(case))
    print(
        "\n| model | hosts | rate | plain data parallelism | chosen | gain | regret | regret with --try 0 "
        "| tau: described | measured | fitted | plan |\n|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|---|"
    )
    print("\n".join(lines))
    _print_summary(cases)


def _print_rows(case: Case, told: str) -> None:
    for row in case.rows:
        errors = " | ".join(f"{error:+.0%}" for error in row.errors)
        seconds, spread = row.lap.step_seconds, row.lap.spread_seconds
        print(
            f"{told}| {row.label} | {errors} | {seconds_text(seconds)} | {spread / seconds:.1%} "
            f"| {row.memory:+.1%} |",
            flush=True,
        )


def _line(case: Case) -> str:
    lap, plain = case.chosen.lap, case.plain.lap.step_seconds
    regrets = " | ".join(f"{one:.1%}" for one in case.regret)
    taus = " | ".join(f"{case.tau(which):.2f}" for which in range(3))
    return f"| {seconds_text(plain)} | {seconds_text(lap.step_seconds)} | {plain / lap.step_seconds:.2f}x | {regrets} | {taus} | {case.chosen.label} |"


def _print_summary(cases: Sequence[Case]) -> None:
    rows = [row for case in cases for row in case.rows]
    for which, what in enumerate(("from the description", "measured on the hosts", "fitted")):
        errors = [abs(row.errors[which]) for row in rows]
        taus = [case.tau(which) for case in cases]
        known = [one for one in taus if not math.isnan(one)]
        print(
            f"\n{len(rows)} plans between hosts, {what}: median error of steps "
            f"{statistics.median(errors):.1%}, worst {max(errors):.1%}; mean tau "
            f"{statistics.mean(known or [float('nan')]):.2f}"
        )
    memory = [abs(row.memory) for row in rows]
    print(f"\nmemory: median error {statistics.median(memory):.1%}, worst {max(memory):.1%}")
    regret, believed = ([case.regret[which] for case in cases] for which in range(2))
    print(
        f"\nregret: median {statistics.median(regret):.1%}, worst {max(regret):.1%}; with --try 0 "
        f"{statistics.median(believed):.1%}, {max(believed):.1%}"
    )


def _rank(model: str, folder: str, steps: str, *names: str) -> None:
    """Run plans in turns as one rank, then each alone; rank 0 writes what they took."""
    rank, _ = join_world()
    task = Task(
        model=model,
        seq=None,
        optimizer="adamw",
        folder=folder,
        plans=names,
        turns=TURNS,
        steps=int(steps),
        budget_seconds=ROUND_SECONDS,
    )
    laps = [lap.measured for lap in trial_rank(task)]
    peaks = [_peaks(model, read_plan_file(Path(folder, name)).frontier.best) for name in names]
    if rank == 0:
        found = {"laps": [asdict(lap) for lap in laps], "peaks": peaks}
        Path(folder, "laps.json").write_text(json.dumps(found))
    meet("at the end of the trial")


def _peaks(model: str, plan: Plan) -> list[float]:
    """Return the most bytes that tensors take on any device of each stage, over all ranks."""
    source = load_model(model)
    batch = next(iter(source.batches(plan.global_batch, None)))
    executor = build_executor(
        plan,
        build_sharded(source).module,
        optimizer=named_optimizer("adamw", LEARNING_RATE),
        batch=source.sample(plan.global_batch, None),
        options=RunOptions(releases=True),
    )
    float(executor.step(batch))
    peaks = executor.profile_step(batch).peak_bytes
    executor.close()
    return list(peaks)


if __name__ == "__main__":
    _rank(*sys.argv[1:])
