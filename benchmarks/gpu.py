"""One GPU: predicted beside measured steps and memory, and the Executor beside plain PyTorch.

    python benchmarks/gpu.py [--only gpt2,vit] [--steps 20] [--cluster 1xH100] [--together 4]

Every case is planned for the described cluster (published tables), and, on this machine, from operators that are measured on
its GPU. The plans of the frontier that differ in microbatches or recomputation train; so does the model by itself, eagerly,
under autocast where the plan is mixed, by AdamW in one kernel, with one microbatch and with as many as the plan has. They
take turns, step by step; told is the median by a clock that waits for the GPU. Memory is what tensors took at most
(`torch.cuda.max_memory_allocated`). Cases are captured beside each other; only one at a time is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.api import build
from shardwright.core.plan import Plan
from shardwright.errors import InputError
from shardwright.files.presets import find_kind
from shardwright.report.units import bytes_text, seconds_text
from shardwright.runtime.capture import load_model
from shardwright.verbs.narrate import tell
from shardwright.verbs.request import Request
from shardwright.verbs.study import study

FILE = Path(__file__).with_name("gpu_models.py")
HEAD = (
    "| model | plan | predicted | from measured operators | measured | plain PyTorch, one batch | its step / the plan's "
    "| as many microbatches | its step / the plan's | memory predicted | measured | plain PyTorch, one batch "
    "| as many microbatches |\n|---|---" + "|--:" * 11 + "|"
)
WARM, MOST_PLANS, LIMIT_SECONDS = 4, 3, 440
RATE = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """A model by the name that ``plan`` knows, and how it is trained."""

    model: str
    batch: int
    seq: int | None = None
    precision: str = "bfloat16"
    is_measured: bool = False  # its operators, on the GPU


class Ran(NamedTuple):
    """The median and half the middle spread of a step's seconds, and the most bytes that tensors took."""

    seconds: float
    spread: float
    peak: int


CASES = {
    "gpt2": Case("hf:gpt2", 16, 1024, is_measured=True),
    "gpt2-float32": Case("hf:gpt2", 8, 1024, "float32"),
    "gpt2-medium": Case("hf:gpt2-medium", 8, 1024),
    "bert-large": Case("hf:bert-large", 16, 512),
    "opt-1.3b": Case("hf:opt-1.3b", 4, 2048),
    "t5-base": Case("hf:t5-base", 16, 512),
    "switch-base-8": Case("hf:switch-base-8", 16, 256),
    "llama-1.2b": Case(f"{FILE}:llama", 4, 2048, is_measured=True),
    "resnet50": Case(f"{FILE}:resnet", 64, None, is_measured=True),
    "vit": Case(f"{FILE}:vit", 64),
    "gpt2-tiny": Case("hf:gpt2-tiny", 8, 64, "float32"),
}


@dataclass(slots=True)
class Runner:
    """What trains, and what its steps took. ``peak``: most bytes of tensors beyond those that were there before."""

    step: Callable[[], Tensor]
    close: Callable[[], object]
    peak: int
    laps: list[float] = field(default_factory=list[float])

    def ran(self) -> Ran:
        """Return the median of the steps."""
        low, middle, high = statistics.quantiles(self.laps, n=4)
        return Ran(middle, (high - low) / 2, self.peak)


def wait(device: str) -> None:
    """Wait until the device has done everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def ready(
    make: Callable[[], tuple[Callable[[], Tensor], Callable[[], object]]], device: str
) -> Runner:
    """Make what trains, warm, and see how much memory it takes."""
    gc.collect()  # what the one before held
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    step, close = make()
    for number in range(WARM):
        step()
        wait(device)
        if device == "cuda" and number == 0:
            torch.cuda.reset_peak_memory_stats()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return Runner(step, close, peak - before)


def race(runners: Sequence[Runner], device: str, steps: int) -> None:
    """Time steps in turns: a host is faster one second than the next."""
    for _ in range(steps):
        for one in runners:
            wait(device)
            start = time.perf_counter()
            one.step()
            wait(device)
            one.laps.append(time.perf_counter() - start)


def plain(
    case: Case, make: Callable[[], nn.Module], batch: Mapping[str, Tensor], pieces: int, device: str
) -> Runner:
    """Train the model by itself, in so many microbatches."""

    def begin() -> tuple[Callable[[], Tensor], Callable[[], object]]:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
        here = {name: value.to(device).chunk(pieces) for name, value in batch.items()}
        mixed = case.precision != "float32"

        def step() -> Tensor:
            loss = torch.zeros(())
            for number in range(pieces):
                part = {name: values[number] for name, values in here.items()}
                with torch.autocast(device, torch.bfloat16) if mixed else contextlib.nullcontext():
                    loss = model(**part)
                loss = loss if isinstance(loss, Tensor) else loss.loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, lambda: None

    return ready(begin, device)


def planned(
    plan: Plan, make: Callable[[], nn.Module], batch: Mapping[str, Tensor], device: str
) -> Runner:
    """Train by a plan."""

    def begin() -> tuple[Callable[[], Tensor], Callable[[], object]]:
        torch.manual_seed(0)
        optimizer = functools.partial(torch.optim.AdamW, lr=RATE)
        executor = build(plan, make(), optimizer=optimizer, batch=dict(batch))
        here = {name: value.to(device) for name, value in batch.items()}
        return lambda: executor.step(here), executor.close

    return ready(begin, device)


def run_case(name: str, cluster: str, steps: int, lock: str) -> list[dict[str, Any]]:
    """Return a row for every plan that ran."""
    case = CASES[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.init()
    model = load_model(case.model)
    make = functools.partial(model.build, device)
    batch = model.make_batch(case.batch, case.seq)
    asked = Request(global_batch=case.batch, seq=case.seq, precision=case.precision, trials=0)
    start = time.perf_counter()
    found = study(case.model, cluster, asked)
    seconds = time.perf_counter() - start
    plans: dict[object, Plan] = {}
    for plan in (*found.plain[:1], found.frontier.best, *found.plain, *found.frontier.plans):
        plans.setdefault(plan.strategy, plan)
    told = None
    if case.is_measured:
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            told = study(case.model, None, asked)
    rows: list[dict[str, Any]] = []
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for plan in list(plans.values())[:MOST_PLANS]:
            pieces = plan.strategy.pipeline.num_microbatches
            raced = [plain(case, make, batch, count, device) for count in sorted({1, pieces})]
            mine = planned(plan, make, batch, device)
            race([*raced, mine], device, steps)
            ran, alone, same = mine.ran(), raced[0].ran(), raced[-1].ran()
            mine.close()
            del mine, raced
            story = tell(plan, found.graph, found.cluster, found.costs)
            here = tell(plan, told.graph, told.cluster, told.costs).predicted if told else None
            rows.append(
                {
                    "case": name,
                    "plan": plan.strategy.label,
                    "predicted": plan.predicted.step_seconds,
                    "half_width": story.spread_seconds,
                    "from_measured": here.step_seconds if here else None,
                    "measured": ran.seconds,
                    "spread": ran.spread,
                    "eager": alone.seconds,
                    "eager_spread": alone.spread,
                    "eager_same": same.seconds,
                    "peak_predicted": story.predicted.worst_peak_bytes - story.process_bytes,
                    "peak": ran.peak,
                    "peak_eager": alone.peak,
                    "peak_same": same.peak,
                    "planned_in": seconds,
                }
            )
    return rows


def main() -> None:
    """Run every case in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(list(CASES)[:-1]))
    parser.add_argument(
        "--cluster", default="", help="by default what this GPU is called in the presets"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--together", type=int, default=4, help="cases captured at one time")
    parser.add_argument("--json", default="", help="also write the rows to this file")
    parser.add_argument("--lock", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.cluster = given.cluster or this_gpu()
    if given.lock:
        print(json.dumps(run_case(given.only, given.cluster, given.steps, given.lock)), flush=True)
        return
    print(HEAD, flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for found in all_cases(given, Path(folder) / "gpu.lock"):
            print(*map(line, found), sep="\n", flush=True)
            rows += found
            if given.json:
                Path(given.json).write_text(json.dumps(rows, indent=1))
    print_sums([row for row in rows if "failed" not in row])


def this_gpu() -> str:
    """Return a cluster of one of this machine's GPUs. Raises InputError where nothing is published of it."""
    name = (
        torch.cuda.get_device_name(0).replace("NVIDIA ", "")
        if torch.cuda.is_available()
        else "none"
    )
    kind = find_kind(name) or find_kind(name.split()[0])
    if kind is None:
        raise InputError(
            f"GPU {name!r} has no published rates; name a cluster that has, such as --cluster 1xH100"
        )
    return f"1x{kind}"


def all_cases(given: argparse.Namespace, lock: Path) -> Iterator[list[dict[str, Any]]]:
    """Run every case in a process of its own, some beside each other."""

    def one(name: str) -> list[dict[str, Any]]:
        same = ["--cluster", given.cluster, "--steps", str(given.steps), "--lock", str(lock)]
        command = [sys.executable, __file__, "--only", name, *same]
        try:
            ended = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return [{"case": name, "failed": f"not done after {LIMIT_SECONDS} s"}]
        last = ended.stdout.strip().rpartition("\n")[2]
        return json.loads(last) if last else [{"case": name, "failed": ended.stderr[-3000:]}]

    with ThreadPoolExecutor(given.together) as pool:
        started = [pool.submit(one, name) for name in given.only.split(",")]
        yield from (done.result() for done in as_completed(started))


def line(row: dict[str, Any]) -> str:
    """Return a line of the table, or why there is none."""
    if "failed" in row:
        return f"{row['case']} failed:\n{row['failed']}"
    here, took, alone, same, peak = (
        row[name] for name in ("from_measured", "measured", "eager", "eager_same", "peak")
    )
    return (
        f"| {row['case']} | {row['plan']} | {against(row['predicted'], took)} "
        f"| {against(here, took) if here else ''} | {seconds_text(took)} ±{row['spread'] / took:.1%} "
        f"| {seconds_text(alone)} ±{row['eager_spread'] / alone:.1%} | {alone / took:.2f}x "
        f"| {seconds_text(same)} | {same / took:.2f}x "
        f"| {row['peak_predicted'] / (peak or math.nan) - 1:+.1%} | {bytes_text(peak)} "
        f"| {bytes_text(row['peak_eager'])} | {bytes_text(row['peak_same'])} |"
    )


def print_sums(rows: list[dict[str, Any]]) -> None:
    """Print what all plans add up to."""
    for what in ("predicted", "from_measured"):
        errors = [abs(row[what] / row["measured"] - 1) for row in rows if row[what]]
        if errors:
            middle, worst = statistics.median(errors), max(errors)
            print(
                f"{what}: {len(errors)} plans, off by {middle:.1%} (median), {worst:.1%} at worst"
            )


def against(predicted: float, measured: float) -> str:
    """Return a prediction, and by how much it is off."""
    return f"{seconds_text(predicted)} ({predicted / measured - 1:+.1%})"


if __name__ == "__main__":
    main()
