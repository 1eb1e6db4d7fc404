"""Find out what this machine is: devices, memory, rates, and the conditions of measuring.

On a CPU every core we may use is one device: ranks of one thread each, sharing memory evenly. Rates
are measured briefly with all devices busy and rounded, unless they are known from an earlier time,
so that one machine keeps one description.
"""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch

from shardwright.core.cluster import Cluster, Device, DeviceKind, Link, Switch
from shardwright.core.costs import Record
from shardwright.files.presets import device_kind, find_kind
from shardwright.runtime.cores import of_host, settle
from shardwright.runtime.profile.clock import measure
from shardwright.runtime.workers import Progress, run_workers

LOOPBACK = Link(latency=2e-5, bandwidth=2e9, source="modelled")
CPU_LAUNCH_SECONDS = 4e-6
_MATRIX, _GPU_MATRIX = 512, 4096
_COPIED_BYTES = 64 * 2**20
# Named anew whenever measurements mean something else, so that old ones are not mixed with new.
METHOD = "in turns, from memory beyond shared caches, sums in rings, pieces exchanged, transfers one way and asked for ahead, fused updates at one time, cores of their own, sums from zeros, meetings by rounds and cores, messages and segments in rows, segments behind messages, way given before calls, sums of microbatches, operators in order, kernels of one by one as they lie"
METHOD_OF_GPUS = "each on its own GPU, kernels queued, fused updates, transfers one way"
RATES = ("peak_flops", "memory_bandwidth")


def num_local_devices() -> int:
    """Return how many ranks this machine runs: its GPUs, else the cores we may use."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return len(of_host())


def local_backend() -> Literal["cpu", "cuda"]:
    """Return the torch device type that this machine's ranks run on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_environment(concurrency: int) -> str:
    """Name what measurements depend on: processor, torch, threads, processes at one time, and how
    they are taken."""
    has_gpus = torch.cuda.is_available()
    name = torch.cuda.get_device_name(0) if has_gpus else _processor()
    method = METHOD_OF_GPUS if has_gpus else METHOD
    return f"{name}; torch {torch.__version__}; threads 1; processes {concurrency}; {method}"


def own_device(device: str, rank: int) -> str:
    """Return where a measuring process of a rank measures, if told ``cpu`` or ``cuda``: each of several
    processes on a GPU of its own."""
    return f"cuda:{rank}" if device == "cuda" else device


def _processor() -> str:
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    model = facts.get("model name") or platform.processor() or platform.machine()
    return f"{model} family {facts.get('cpu family', '?')} model {facts.get('model', '?')}"


def memory_bytes() -> int:
    """Return the memory this process may use: the machine's, or its control group's if smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def detect(
    known: Mapping[str, float] | None = None, *, progress: Progress | None = None
) -> Cluster:
    """Describe this machine as a cluster.

    ``known`` are overheads of an earlier measurement (``CostTable.overhead_map``); the rates they
    lack are measured now, in about two seconds.
    """
    facts = dict(known or {})
    if torch.cuda.is_available():
        return _detect_gpus(facts)
    count = num_local_devices()
    if any(name not in facts for name in RATES):
        facts |= {
            r.key.partition("|")[2]: r.seconds for r in measure_machine(count, progress=progress)
        }
    kind = DeviceKind(
        name=_processor(),
        peak_flops=(("float32", facts["peak_flops"]),),
        memory_bytes=float(memory_bytes() // count),
        memory_bandwidth=facts["memory_bandwidth"],
        backend="cpu",
        launch_seconds=CPU_LAUNCH_SECONDS,
        source="measured",
    )
    return Cluster(
        name="local",
        kinds=(kind,),
        switches=(Switch(name=platform.node() or "localhost", address="127.0.0.1"),),
        devices=(Device(kind=0, host=0, link=LOOPBACK),) * count,
        overlap_slowdown=max(1.0, facts.get("overlap_slowdown", 1.0)),
        notes=(f"this machine: {count} cores, one device each, memory shared evenly",),
    )


def _detect_gpus(facts: Mapping[str, float]) -> Cluster:
    """Take published rates where the GPU is known, else measure them."""
    kinds: list[DeviceKind] = []
    devices: list[Device] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        name = str(properties.name).replace("NVIDIA ", "")
        published = find_kind(name) or find_kind(name.split()[0].split("-")[0])
        if published is not None:
            base, link = device_kind(published)
            rates, bandwidth = base.peak_flops, base.memory_bandwidth
        else:
            link = Link(latency=2e-6, bandwidth=12e9, source="modelled")
            rates, bandwidth = _gpu_rates(index)
        kind = DeviceKind(
            name=published or name,
            peak_flops=rates,
            memory_bytes=float(properties.total_memory),
            memory_bandwidth=bandwidth,
            source="published" if published else "measured",
        )
        if kind not in kinds:
            kinds.append(kind)
        devices.append(Device(kind=kinds.index(kind), host=0, link=link))
    return Cluster(
        name="local",
        kinds=tuple(kinds),
        switches=(Switch(name=platform.node() or "localhost", address="127.0.0.1"),),
        devices=tuple(devices),
        overlap_slowdown=max(1.0, facts.get("overlap_slowdown", 1.0)),
        notes=(f"this machine: {len(devices)} GPUs",),
    )


def _gpu_rates(index: int) -> tuple[tuple[tuple[str, float], ...], float]:
    device = f"cuda:{index}"
    rates = tuple(
        (name, _round(_matmul_flops(device, getattr(torch, name), _GPU_MATRIX)))
        for name in ("float32", "bfloat16")
    )
    return rates, _round(_copy_bandwidth(device))


def _round(value: float) -> float:
    """Keep two digits: more would only record what else the machine was doing."""
    return float(f"{value:.2g}")


def measure_machine(concurrency: int, *, progress: Progress | None = None) -> list[Record]:
    """Measure matrix product and copy rates with all devices busy, as records of overheads."""
    results = run_workers(
        "shardwright.runtime.profile.machine:work",
        [local_backend()] * concurrency,
        timeout_seconds=120.0,
        progress=progress,
    )
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    slowest = [min(column) for column in zip(*results, strict=True)]
    return [
        Record(
            key=f"overhead|{name}",
            seconds=_round(value),
            spread=0.0,
            count=concurrency,
            environment=local_environment(concurrency),
            measured_at=now,
        )
        for name, value in zip(RATES, slowest, strict=True)
    ]


def work(rank: int, job: str, _directory: Path, report: Progress) -> tuple[float, float]:
    """Measure the rates of one device, of the type that is the job: the body of one process."""
    torch.set_num_threads(1)
    if job == "cpu":
        settle()
    device, size = own_device(job, rank), _MATRIX if job == "cpu" else _GPU_MATRIX
    rates = _matmul_flops(device, torch.float32, size), _copy_bandwidth(device)
    report(1, 1)
    return rates


def _matmul_flops(device: str, dtype: torch.dtype, size: int) -> float:
    left = torch.rand(size, size, device=device).to(dtype)
    right, out = left.clone(), left.clone()

    def run(number: int) -> None:
        for _ in range(number):
            torch.mm(left, right, out=out)
        _settle(device)

    return 2 * size**3 / measure(run, budget_seconds=0.5, clock=_clock(device)).seconds


def _copy_bandwidth(device: str) -> float:
    source = torch.rand(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)

    def run(number: int) -> None:
        for _ in range(number):
            target.copy_(source)
        _settle(device)

    return 2 * _COPIED_BYTES / measure(run, budget_seconds=0.5, clock=_clock(device)).seconds


def _clock(device: str) -> Callable[[], float]:
    return time.perf_counter if device.startswith("cuda") else time.thread_time


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def resident_bytes() -> int:
    """Return the physical memory this process occupies now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
