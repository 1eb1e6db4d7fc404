"""Measure operator shards, forward and backward, on real tensors of local shapes.

On a CPU as many processes measure at once as will train at once, because cores share caches and
memory bandwidth, and shards run as in a step (``passes``). On a GPU kernels queue up behind one that
does nothing, so that what is timed, by the GPU's events, is the GPU alone: what its host takes to
start them is measured by itself (``overheads.time_starts``). Several copies of a shard's tensors take
turns, so that caches are as warm as between the operators of a model, not warmer.
"""

from __future__ import annotations

import contextlib
import datetime
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwright.core.costs import Record
from shardwright.runtime.cores import settle
from shardwright.runtime.profile.clock import Timing, sampled
from shardwright.runtime.profile.layouts import Layouts, lay_out
from shardwright.runtime.profile.machine import own_device
from shardwright.runtime.profile.passes import (
    FAILURES,
    RECENT,
    gradient_outputs,
    time_in_passes,
)
from shardwright.runtime.profile.shards import Shard, Wanted, make_shard
from shardwright.runtime.workers import Progress, Stop, patience, run_workers

if TYPE_CHECKING:
    from shardwright.runtime.capture import Captured

# All copies of one shard's tensors together; beyond this caches hold nothing of the last turn.
ROTATED_BYTES = 32 * 2**20
MAX_COPIES = 8
# So much of what was made last is kept alive: more than caches hold.
KEPT_BYTES = 192 * 2**20
MAX_KEPT = 64
# A GPU's queue holds some 1,000 kernels, of which an operator starts a few.
MOST_QUEUED = 64
CYCLES = 2e9  # a second, at most: slower clocks wait longer
_QUEUED_SECONDS, _SLACK_SECONDS = 2e-3, 3e-4
_LONGEST_SLICE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Under which conditions to measure; ``environment`` names them, processes included."""

    environment: str
    concurrency: int = 1
    device: str = "cpu"
    precision: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process is to measure, in how many seconds, on which type of torch device: with GPUs each
    process has its own. ``from_memory``: the model is larger than caches."""

    runs: tuple[tuple[Shard, ...], ...]
    budget_seconds: float
    device: str
    from_memory: bool = False


def measure_operators(
    captured: Captured,
    wanted: Wanted,
    setting: Setting,
    *,
    budget_seconds: float = 60.0,
    progress: Progress | None = None,
    stop: Stop = lambda: False,
) -> list[Record]:
    """Measure what is wanted.

    Operators that fail, or that the budget does not reach, have no record and will be modelled; after ``stop``
    none has.
    """
    job = job_of(captured, wanted, setting, budget_seconds)
    if not job.runs:
        return []
    results = run_workers(
        "shardwright.runtime.profile.operators:work",
        [job] * max(setting.concurrency, 1),
        timeout_seconds=patience(budget_seconds),
        progress=progress,
        stop=stop,
    )
    return merged(wanted, results, setting.environment) if results else []


def job_of(captured: Captured, wanted: Wanted, setting: Setting, budget_seconds: float) -> Job:
    """Return what each process is to do: operators that cannot be sent to it are left out."""
    layouts = lay_out(captured, setting.device) if wanted.runs else Layouts()
    how = setting.device, setting.precision, layouts
    runs = [[make_shard(captured, request, *how) for request in run] for run in wanted.runs]
    sent = [tuple(shard for shard in run if shard is not None) for run in runs]
    return Job(
        runs=tuple(run for run in sent if run),
        budget_seconds=budget_seconds,
        device=setting.device,
        from_memory=captured.graph.outgrows_caches,
    )


def merged(
    wanted: Wanted, results: Sequence[Mapping[str, Timing]], environment: str
) -> list[Record]:
    """Return records of what every process has seen of what was wanted."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found: dict[str, list[Timing]] = {}
    for timings in results:
        for key in timings.keys() & wanted.keys:
            found.setdefault(key, []).append(timings[key])
    return [_record(key, found[key], environment, now) for key in sorted(found)]


def _record(key: str, timings: list[Timing], environment: str, now: str) -> Record:
    """Merge what the processes saw: the median, and the larger of their spreads and distance."""
    seconds = [timing.seconds for timing in timings]
    apart = (max(seconds) - min(seconds)) / 2
    return Record(
        key=key,
        seconds=statistics.median(seconds),
        spread=max(apart, *(timing.spread for timing in timings)),
        count=sum(timing.count for timing in timings),
        environment=environment,
        measured_at=now,
    )


def work(rank: int, job: Job, directory: Path, report: Progress) -> dict[str, Timing]:
    """Measure a job's shards: the body of one process."""
    torch.set_num_threads(1)
    if not job.device.startswith("cuda"):
        settle()
        return time_in_passes(job.runs, job.budget_seconds, report, from_memory=job.from_memory)
    device = own_device(job.device, rank)
    torch.cuda.set_device(device)
    deadline = time.perf_counter() + job.budget_seconds
    found: dict[str, Timing] = {}
    distinct = {shard.keys[0]: shard for run in reversed(job.runs) for shard in reversed(run)}
    for done, shard in enumerate(distinct.values()):
        left = deadline - time.perf_counter()
        share = min(left / (len(distinct) - done), _LONGEST_SLICE)
        if left > 0:
            with contextlib.suppress(*FAILURES):
                found |= time_queued(shard, device, share)
        report(done + 1, len(distinct))
    return found


def time_queued(shard: Shard, device: str, budget_seconds: float) -> dict[str, Timing]:
    """Return by key the timings of forward and, where a gradient flows, backward, of kernels that queue."""
    copies = max(1, min(MAX_COPIES, ROTATED_BYTES // max(shard.bytes, 1)))
    drawn = [[operand.make(device) for operand in shard.operands] for _ in range(copies)]
    calls = [shard.bind(tensors) for tensors in drawn]

    # Training keeps what an operator made; were it dropped at once, the next run would write into
    # memory that is still in the cache.
    kept: deque[Any] = deque(maxlen=max(1, min(MAX_KEPT, KEPT_BYTES // max(shard.bytes, 1))))

    def forward(number: int) -> None:
        for turn in range(number):
            target, args, kwargs = calls[turn % copies]
            kept.append(target(*args, **kwargs))

    ahead = {shard.keys[0]: on_device(forward, device, budget_seconds * 0.4)}
    wanted = [[t for t in tensors if t.requires_grad] for tensors in drawn]
    if not wanted[0]:
        return ahead
    made = [gradient_outputs(target(*args, **kwargs)) for target, args, kwargs in calls]
    if not made[0]:
        return ahead
    seeds = [shard.seeds_of(outs) for outs in made]
    recent: deque[Any] = deque(maxlen=RECENT)

    def backward(number: int) -> None:
        for turn in range(number):
            which = turn % copies
            gradients = torch.autograd.grad(
                made[which], wanted[which], seeds[which], retain_graph=True, allow_unused=True
            )
            recent.append(gradients)

    return ahead | {shard.keys[1]: on_device(backward, device, budget_seconds * 0.6)}


def on_device(run: Callable[[int], None], device: str, budget_seconds: float) -> Timing:
    """Return what the kernels of ``run(n)``, which starts the work n times, take on a GPU, per time.

    A kernel that does nothing keeps the GPU busy until all are queued. What waits for the GPU by itself is
    timed with its host's part.
    """
    deadline = time.perf_counter() + budget_seconds
    run(1)
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run(1)
    started = time.perf_counter() - begin
    torch.cuda.synchronize(device)
    once = time.perf_counter() - begin
    number = max(1, min(MOST_QUEUED, int(_QUEUED_SECONDS / max(once, started))))

    def sample() -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(CYCLES * (_SLACK_SECONDS + 2 * number * started)))
        first.record()
        run(number)
        last.record()
        torch.cuda.synchronize(device)
        return first.elapsed_time(last) / 1e3 / number

    return sampled(sample, number, deadline)
