"""Time collectives of ranks of this machine.

Real processes, the transport that training uses, and the very functions that the executor calls.
Every rank does the same number of runs in the same order; rank 0's clock counts. Ranks of GPUs talk by
NCCL about tensors on their own GPUs, and times are those of events; what runs on their host besides
(segments, buffers, updates) is not measured but modelled.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwright.core.cluster import Cluster
from shardwright.core.costs import (
    ADD,
    PACK,
    UPDATE,
    Record,
    beneath_key,
    collective_key,
    link_label,
    meeting_name,
)
from shardwright.errors import InputError
from shardwright.runtime import collectives as verbs
from shardwright.runtime.clocks import Ticks, ticks_of
from shardwright.runtime.cores import settle
from shardwright.runtime.profile.beneath import SIZES as SIZES_BENEATH
from shardwright.runtime.profile.beneath import (
    SLOWEST_SECONDS,
    Chunk,
    Exchange,
    ThereAndBack,
    time_beneath,
)
from shardwright.runtime.profile.clock import ROUNDS, Timing, middle_of, summarise
from shardwright.runtime.profile.crowds import wait_in_crowd
from shardwright.runtime.profile.machine import resident_bytes
from shardwright.runtime.profile.overheads import time_gpu, time_overheads
from shardwright.runtime.workers import Progress, Stop, patience, run_workers

PRIMITIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "transfer")
SIZES = tuple(1024 * 4**power for power in range(8))  # 1 KiB to 16 MiB
# Of the budget at most in a round, for each of what running a rank costs besides.
OVERHEAD_SHARE = 0.03
_GROUP_TIMEOUT = datetime.timedelta(seconds=60)
# Of one round.
_MIN_RUNS = 3
_MAX_RUNS = 70

Run = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Which collectives at which sizes (bytes), and whether the overheads of running a rank too."""

    primitives: tuple[str, ...] = PRIMITIVES
    sizes: tuple[int, ...] = SIZES
    overheads: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a world of ranks is to measure."""

    ranks: int
    probe: Probe
    budget_seconds: float
    places: tuple[str, ...] = ()

    def place(self, rank: int) -> torch.device:
        """Return the torch device of a rank, the CPU where none is named."""
        return torch.device(self.places[rank] if self.places else "cpu")


WHOLE = Probe()
HOST = torch.device("cpu")


def places_of(
    cluster: Cluster, devices: tuple[int, ...], gpus: int | None = None
) -> tuple[str, ...]:
    """Return the torch devices of this machine's devices; GPU i is the i-th device. ``gpus``: how many
    torch can use, looked up where it is None."""
    kinds = {cluster.kind_of(device).backend for device in devices}
    if kinds == {"cpu"}:
        return ("cpu",) * len(devices)
    if gpus is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if "cpu" in kinds or max(devices) >= gpus:
        raise InputError(
            f"messages between GPUs are measured between those GPUs, but of devices {list(devices)} "
            f"torch can use {gpus} here; measure on their machine, or plan with modelled costs "
            "(--measure never)"
        )
    return tuple(f"cuda:{device}" for device in devices)


def measure_collectives(
    cluster: Cluster,
    devices: tuple[int, ...],
    *,
    environment: str,
    probe: Probe = WHOLE,
    budget_seconds: float = 20.0,
    progress: Progress | None = None,
    stop: Stop = lambda: False,
) -> list[Record]:
    """Measure a group of devices of this machine; after ``stop`` there is no record.

    A transfer is measured between two ranks whatever the group's size. Raises InputError where they are
    GPUs that this process cannot use.
    """
    job = Job(
        ranks=len(devices),
        probe=probe,
        budget_seconds=budget_seconds,
        places=places_of(cluster, devices),
    )
    results = run_workers(
        "shardwright.runtime.profile.collectives:work",
        [job] * len(devices),
        timeout_seconds=patience(budget_seconds),
        progress=progress,
        stop=stop,
    )
    if not results:
        return []
    hosts = len({cluster.devices[device].host for device in devices})
    label = link_label(cluster, devices)
    return name_records(results[0], hosts, len(devices), label, environment)


def name_records(
    found: dict[str, Timing], hosts: int, num_devices: int, label: str, environment: str
) -> list[Record]:
    """Turn what rank 0 measured into records: ``PRIMITIVE|BYTES`` and ``WHAT|PRIMITIVE|BYTES``, scalars
    of the group, ``update|BYTES``, ``pack|NAME|...|ELEMENTS`` and ``overhead|NAME``."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    records: list[Record] = []
    for name, timing in found.items():
        records.append(
            Record(
                key=_key(name, hosts, num_devices, label),
                seconds=timing.seconds,
                spread=timing.spread,
                count=timing.count,
                environment=environment,
                measured_at=now,
            )
        )
    return records


def _key(name: str, hosts: int, num_devices: int, label: str) -> str:
    """Name the record of a measurement of a group."""
    if name.startswith(("overhead|", UPDATE, f"{ADD}|", PACK)):
        return name
    if "|" not in name:
        return f"overhead|{meeting_name(name, hosts, num_devices, label)}"
    *what, primitive, size = name.split("|")
    is_pair = primitive == "transfer"
    ends = (min(hosts, 2), 2, label) if is_pair else (hosts, num_devices, label)
    group = beneath_key(what[0], primitive, *ends) if what else collective_key(primitive, *ends)
    return f"{group}|{size}"


def work(rank: int, job: Job, directory: Path, report: Progress) -> dict[str, Timing]:
    """Join a process group of our own and measure: the body of one process."""
    torch.set_num_threads(1)
    probe, found, place = job.probe, dict[str, Timing](), job.place(rank)
    measures_host = probe.overheads and place.type == "cpu"
    if place.type == "cuda":
        torch.cuda.set_device(place)
        if probe.overheads:
            found |= time_gpu(place)
    if job.ranks < 2:
        report(1, 1)
        return time_overheads(OVERHEAD_SHARE * job.budget_seconds) if measures_host else found
    if place.type == "cpu":
        settle()
    dist.init_process_group(
        "nccl" if place.type == "cuda" else "gloo",
        init_method=f"file://{directory / 'rendezvous'}",
        rank=rank,
        world_size=job.ranks,
        timeout=_GROUP_TIMEOUT,
    )
    try:
        group = cast(ProcessGroup, dist.group.WORLD)
        if measures_host:
            found["overhead|process_bytes"] = scalar(float(resident_bytes()))
            dist.barrier()  # all cores are busy while any of them is measured
            found |= time_overheads(OVERHEAD_SHARE * job.budget_seconds, dist.barrier)
        found |= time_collectives(group, probe, job.budget_seconds, report, place)
        if measures_host:
            # What computation loses to messages is priced message by message.
            found["overhead|overlap_slowdown"] = scalar(1.0)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return found


def time_collectives(
    group: ProcessGroup,
    probe: Probe,
    budget_seconds: float,
    report: Progress,
    place: torch.device = HOST,
) -> dict[str, Timing]:
    """Measure messages alone, and what they cost ranks that compute."""
    alone = time_alone(group, probe, budget_seconds, report, place)
    return {**alone, **time_busy(group, probe, alone, place)}


def time_alone(
    group: ProcessGroup,
    probe: Probe,
    budget_seconds: float,
    report: Progress,
    place: torch.device = HOST,
) -> dict[str, Timing]:
    """Measure on a group that exists already; every rank must call it with equal arguments, but for
    the device that is its ``place``.

    Sizes are bytes as ``core.program.Message`` counts them. Everything has its turn in each of some rounds
    (``middle_of``).
    """
    deadline = time.perf_counter() + budget_seconds
    rounds = [dict[str, Timing]() for _ in range(ROUNDS)]
    ticks = ticks_of(place)
    # Small sizes of everything first, so that a short budget still sees every primitive.
    wanted = [(primitive, size) for size in sorted(probe.sizes) for primitive in probe.primitives]
    total = ROUNDS * len(wanted)
    for done in range(total):
        primitive, size = wanted[done % len(wanted)]
        share = max(deadline - time.perf_counter(), 0.0) / (total - done)
        run = _prepare(primitive, size, group, place).run
        if primitive == "transfer":
            run = partial(_there_and_back(size, group, place), _nothing)
        runs = _agree(_runs_within(run, share, ticks), group, place)
        if runs > 0:
            name = f"{primitive}|{size}"
            timing = timed(run, runs, ticks)
            timing = _halved(timing) if primitive == "transfer" else timing
            rounds[done // len(wanted)][name] = timing
        report(done + 1, total)
    return middle_of(rounds)


def time_busy(
    group: ProcessGroup,
    probe: Probe,
    alone: dict[str, Timing],
    place: torch.device = HOST,
    chunk: Chunk | None = None,
    *,
    cores: float = math.inf,
) -> dict[str, Timing]:
    """Measure what the same collectives, timed ``alone``, cost CPU ranks that compute (``time_beneath``)."""
    if place.type != "cpu":
        return {}
    sizes = [size for size in sorted(probe.sizes) if size in SIZES_BENEATH]
    wanted = [(primitive, size) for size in sizes for primitive in probe.primitives]
    exchanges = {one: _prepare(*one, group, place) for one in wanted}
    turns = {size: _there_and_back(size, group, place) for size in sizes}
    return time_beneath(group, exchanges, turns, alone, chunk or Chunk(), cores=cores)


def time_crowding(
    group: ProcessGroup, alone: Mapping[str, Timing], offset: float
) -> dict[str, Timing]:
    """Measure how long messages wait for cores that ranks share, by the largest all-reduce that is not slow by
    itself: small ones come nowhere meanwhile. ``offset``: see ``crowds.shared_cores``."""
    known = {size: alone.get(f"all_reduce|{size}") for size in SIZES_BENEATH}
    fast = [size for size, one in known.items() if one and one.seconds < SLOWEST_SECONDS]
    size = _agree(max(fast, default=0), group, HOST)
    if not size:
        return {}
    exchange = _prepare("all_reduce", size, group, HOST)
    return {
        "crowding": scalar(
            wait_in_crowd(exchange, alone[f"all_reduce|{size}"].seconds, group, offset)
        )
    }


def _runs_within(run: Run, seconds: float, ticks: Ticks) -> int:
    """Return how many runs fit, judged by the second of two; 0 when the time is over."""
    run()
    ticks.settle()
    start = time.perf_counter()
    run()
    ticks.settle()
    once = max(time.perf_counter() - start, 1e-6)
    return 0 if seconds <= 0 else max(_MIN_RUNS, min(_MAX_RUNS, int(seconds / once)))


def _agree(number: int, group: ProcessGroup, place: torch.device) -> int:
    """Return rank 0's number on every rank."""
    shared = torch.tensor([number], device=place)
    dist.broadcast(shared, group=group, group_src=0)
    return int(shared.item())


def timed(run: Run, runs: int, ticks: Ticks) -> Timing:
    """Time runs one after another; nobody waits for a device between them."""
    marks: list[tuple[Any, Any]] = []
    for _ in range(runs):
        begin = ticks.mark()
        run()
        marks.append((begin, ticks.mark()))
    ticks.settle()
    return summarise([ticks.seconds(end) - ticks.seconds(begin) for begin, end in marks])


def _prepare(primitive: str, size: int, group: ProcessGroup, place: torch.device) -> Exchange:
    """Return a primitive on flat float32 buffers made beforehand."""
    ranks = group.size()
    count = max(size // 4 // ranks, 1) * ranks
    whole, other = torch.ones(count, device=place), torch.empty(count, device=place)
    piece = torch.ones(count // ranks, device=place)
    if primitive == "transfer":
        return _transfer(whole, other, group)
    starts: dict[str, Callable[[], verbs.Pending]] = {
        "all_reduce": lambda: verbs.all_reduce(other, group),
        "all_gather": lambda: verbs.all_gather(other, piece, group),
        "reduce_scatter": lambda: verbs.reduce_scatter(piece, whole, group),
        "all_to_all": lambda: verbs.all_to_all(other, whole, group),
    }
    start = starts[primitive]
    other.zero_()
    return Exchange(lambda: [start()])


def _transfer(whole: Tensor, other: Tensor, group: ProcessGroup) -> Exchange:
    """Both of the first two ranks receive and send, as stages do that are busy."""
    rank = group.rank()
    if rank > 1:
        return Exchange(list)
    peer = dist.get_global_rank(group, 1 - rank)
    return Exchange(
        start=lambda: [verbs.send(whole, peer, group, 0)],
        ask=lambda: [verbs.receive(other, peer, group, 0)],
    )


def _there_and_back(size: int, group: ProcessGroup, place: torch.device) -> ThereAndBack:
    """The first two ranks send in turns: a pipeline's messages seldom travel both ways at once."""
    rank = group.rank()
    if rank > 1:
        return _nothing
    peer = dist.get_global_rank(group, 1 - rank)
    flat = torch.ones(max(size // 4, 1), device=place)

    def run(before: Callable[[], object]) -> None:
        for turn in range(2):
            if turn == rank:
                before()
                verbs.send(flat, peer, group, 0).wait()
            else:
                verbs.receive(flat, peer, group, 0).wait()

    return run


def _nothing(*_: object) -> None:
    pass


def _halved(timing: Timing) -> Timing:
    """Return what one way takes, of both."""
    return replace(timing, seconds=timing.seconds / 2, spread=timing.spread / 2)


def scalar(value: float) -> Timing:
    """Return what is no duration as a measurement."""
    return Timing(seconds=value, spread=0.0, count=1)
