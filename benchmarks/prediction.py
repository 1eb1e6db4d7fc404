"""Predicted against measured step time and peak memory: `python benchmarks/prediction.py`.

Named plans of three models run on two ranks of this machine and on four hosts (network namespaces,
100 Mbit/s links). Costs are measured first (operators per shard, collectives in the very world that
trains), then every plan is predicted from them and trained for real. Every case is printed.
Four hosts share this machine's cores, so that their compute costs are scaled by hosts per core.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import inside, run_ranks
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from shardwright.core.cluster import Cluster, Device, Link, Switch
from shardwright.core.costs import CostTable, Record, link_label
from shardwright.core.graph import OperatorGraph
from shardwright.demo_model import ByteGPT
from shardwright.planner.cost import price
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor
from shardwright.runtime.launch import join_world, launch
from shardwright.runtime.profile import Probe, Setting, local_environment, measure_operators
from shardwright.runtime.profile.collectives import name_records, time_collectives
from shardwright.store import Store
from shardwright.verbs.measure import local_cluster, measure_links, missing
from shardwright.verbs.records import build_costs
from shardwright.verbs.request import Watch
from tests.hosts import hosts, why_not

RATE = "100mbit"
TURN = 2  # steps of a plan before the next plan's
WARM, OPTIMIZER = 2, functools.partial(torch.optim.AdamW, lr=1e-4)
Example = tuple[nn.Module, dict[str, Tensor]]


class ConvNet(nn.Module):
    """A residual convolutional classifier with group norm."""

    def __init__(self, width: int = 48, blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(width, 64)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class Residual(nn.Module):
    """Two convolutions around a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(8, width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Transform and add."""
        return x + self.second(torch.relu(self.norm(self.first(x))))


class WidePerceptron(nn.Module):
    """A residual stack of wide linears: much to send for little to compute."""

    def __init__(self, width: int = 512, layers: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 64)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        for block in self.blocks:
            features = features + block(features)
        return nn.functional.cross_entropy(self.head(features), labels)


def gpt() -> Example:
    """Make the demo's GPT, 2.8 M parameters, on 16 x 128 bytes."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (16, 129))
    return ByteGPT(), {
        "tokens": tokens[:, :-1].contiguous(),
        "targets": tokens[:, 1:].contiguous(),
    }


def convnet() -> Example:
    """Make the convolutional network on 32 images of 24 x 24."""
    torch.manual_seed(0)
    batch = {"images": torch.randn(32, 3, 24, 24), "labels": torch.randint(0, 64, (32,))}
    return ConvNet(), batch


def perceptron() -> Example:
    """Make the wide perceptron, 4.2 M parameters, on 1024 vectors."""
    torch.manual_seed(0)
    batch = {"features": torch.randn(1024, 512), "labels": torch.randint(0, 64, (1024,))}
    return WidePerceptron(), batch


MODELS: dict[str, Callable[[], Example]] = {"gpt": gpt, "conv": convnet, "mlp": perceptron}
PLANS = {
    "machine": (
        Seed(data=2),
        Seed(data=2, zero=1),
        Seed(data=2, zero=3),
        Seed(data=2, zero=3, keeps=True),
        Seed(data=2, num_microbatches=4),
        Seed(tensor=2),
        Seed(stages=2, num_microbatches=4),
        Seed(stages=2, num_microbatches=4, schedule="gpipe", recompute=True),
    ),
    "hosts": (
        Seed(data=4),
        Seed(data=4, zero=3),
        Seed(data=4, zero=3, keeps=True),
        Seed(data=2, stages=2, zero=1, num_microbatches=4),
        Seed(stages=4, num_microbatches=8),
        Seed(data=2, tensor=2),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan of one model, predicted and measured."""

    setup: str
    model: str
    plan: str
    predicted_seconds: float
    measured_seconds: float
    spread_seconds: float
    predicted_bytes: float
    measured_bytes: float

    @property
    def time_error(self) -> float:
        """Signed relative error of the step time."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def memory_error(self) -> float:
        """Signed relative error of the peak."""
        return self.predicted_bytes / self.measured_bytes - 1


def train(setup: str, steps: int, groups: tuple[int, ...]) -> dict[str, object]:
    """Run on every rank: measure collectives where asked, then train every plan."""
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    for size in groups:
        group = dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            probe = Probe(sizes=(1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22), overheads=False)
            found[f"collectives {size}"] = time_collectives(group, probe, 40.0, lambda *_: None)
        dist.barrier()
    for name, make in MODELS.items():
        module, batch = make()
        captured = capture(module, batch)
        executors: dict[str, Executor] = {}
        for seed in PLANS[setup]:
            program = lower(captured.graph, seed_strategy(captured.graph, seed))
            executor = Executor(captured, program, make()[0], optimizer=OPTIMIZER)
            executors[seed.label] = executor
            for _ in range(WARM):
                executor.step(batch)
        seconds: dict[str, list[float]] = {label: [] for label in executors}
        # In turns, so that whatever else the machine does befalls all plans alike.
        for _ in range(-(-steps // TURN)):
            for label, executor in executors.items():
                executor.step(batch)
                seconds[label] += [_timed(executor, batch) for _ in range(TURN)]
        for label, executor in executors.items():
            peak = executor.profile_step(batch).worst_peak_bytes
            found[f"{name}|{label}"] = (seconds[label], peak)
            executor.close()
    return found


def _timed(executor: Executor, batch: dict[str, Tensor]) -> float:
    """Return the seconds of one step of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    executor.step(batch)
    dist.barrier()
    return time.perf_counter() - begin


def worker(steps: int, groups: tuple[int, ...], result: Path) -> None:
    """Be one host's rank, started inside its namespace."""
    rank, _ = join_world(timeout=120)
    found = train("hosts", steps, groups)
    if rank == 0:
        result.write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train_on_hosts(steps: int, groups: tuple[int, ...]) -> dict[str, object]:
    """Start one rank in each of four namespaces and return what rank 0 found."""
    with hosts(4, RATE) as names, tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        words = ["--out", str(result), "--steps", str(steps), "--groups", *map(str, groups)]
        meet = {"LOCAL_RANK": "0", "MASTER_ADDR": "10.84.0.1", "MASTER_PORT": "29400",
                "GLOO_SOCKET_IFNAME": "eth0"}  # fmt: skip
        run_ranks(inside(names), (__file__, *words), meet, 1500)
        return pickle.loads(result.read_bytes())  # written by our own child, above


def four_hosts(local: Cluster) -> Cluster:
    """Describe the namespaces: each host one device like ours, 100 Mbit/s to the others."""
    kind = local.kinds[0]
    wire = Link(latency=1e-3, bandwidth=12.5e6)
    switches = (
        Switch(name="switch", is_host=False),
        *(Switch(name=f"host{i}", parent=0, link=wire) for i in range(4)),
    )
    loop = Link(latency=1e-6, bandwidth=1e10)
    devices = tuple(Device(kind=0, host=i + 1, link=loop) for i in range(4))
    return Cluster(name="four hosts", kinds=(kind,), switches=switches, devices=devices)


def costs_for(setup: str, captures: dict[str, Captured]) -> CostTable:
    """Measure every operator shard that the plans run, and return all costs of this machine."""
    environment = local_environment(2)
    for captured in captures.values():
        strategies = [seed_strategy(captured.graph, seed) for seed in PLANS[setup]]
        setting = Setting(environment=environment, concurrency=2)
        wanted = missing(captured.graph, strategies, "float32", set())
        records = measure_operators(captured, wanted, setting, budget_seconds=40.0)
        with Store() as store:
            store.put(records)
    with Store() as store:
        records = store.find(None, environment)
    return build_costs(records, environment)


def on_hosts(table: CostTable, cluster: Cluster, found: dict[str, object]) -> CostTable:
    """Replace collectives by those measured on the hosts; scale compute by hosts per core."""
    records: list[Record] = []
    for name, timings in found.items():
        if name.startswith("collectives "):
            size = int(name.split()[1])
            label = link_label(cluster, tuple(range(size)))
            records += name_records(timings, size, size, label, "hosts")  # type: ignore[arg-type]
    share = cluster.num_devices / (os.cpu_count() or 1)
    operators = tuple(
        (key, replace(cost, seconds=cost.seconds * share)) for key, cost in table.operators
    )
    overheads = tuple(
        (name, value * share if name.startswith(("segment", "message", "update")) else value)
        for name, value in table.overheads
    )
    measured = build_costs(records, "hosts")
    return CostTable(operators=operators, collectives=measured.collectives, overheads=overheads)


def predict(
    graph: OperatorGraph, seed: Seed, cluster: Cluster, table: CostTable
) -> tuple[float, float]:
    """Return (step seconds, peak bytes) of a plan."""
    program = lower(graph, seed_strategy(graph, seed))
    prices = price(program, graph, cluster, table)
    timeline = simulate(
        program,
        prices.seconds,
        overlap_slowdown=cluster.overlap_slowdown,
        scatter_copies=cluster.scatter_copies,
    )
    return timeline.step_seconds, timeline.worst_peak_bytes


def cases_of(
    setup: str,
    found: dict[str, object],
    captures: dict[str, Captured],
    cluster: Cluster,
    table: CostTable,
) -> list[Case]:
    """Lay predictions beside measurements."""
    result: list[Case] = []
    for name, captured in captures.items():
        for seed in PLANS[setup]:
            seconds, peak = found[f"{name}|{seed.label}"]  # type: ignore[misc]
            predicted = predict(captured.graph, seed, cluster, table)
            low, middle, high = statistics.quantiles(seconds, n=4)
            result.append(
                Case(
                    setup=setup,
                    model=name,
                    plan=seed.label,
                    predicted_seconds=predicted[0],
                    measured_seconds=middle,
                    spread_seconds=(high - low) / 2,
                    predicted_bytes=predicted[1],
                    measured_bytes=peak,
                )
            )
    return result


def kendall(cases: list[Case]) -> float:
    """Return the rank correlation of predicted and measured step times (tau-a)."""
    agree = total = 0
    for i, one in enumerate(cases):
        for other in cases[:i]:
            sign = (one.predicted_seconds - other.predicted_seconds) * (
                one.measured_seconds - other.measured_seconds
            )
            agree += (sign > 0) - (sign < 0)
            total += 1
    return agree / total if total else 1.0


def show(cases: list[Case], console: Console) -> bool:
    """Print every case and the summary; return whether all bars are met."""
    table = Table(
        "setup", "model", "plan", "predicted ms", "measured ms", "error", "predicted MB",
        "measured MB", "error", title="Predicted against measured",
    )  # fmt: skip
    for case in cases:
        table.add_row(
            case.setup,
            case.model,
            case.plan,
            f"{1e3 * case.predicted_seconds:.1f}",
            f"{1e3 * case.measured_seconds:.1f} ± {1e3 * case.spread_seconds:.1f}",
            f"{100 * case.time_error:+.1f} %",
            f"{case.predicted_bytes / 1e6:.1f}",
            f"{case.measured_bytes / 1e6:.1f}",
            f"{100 * case.memory_error:+.1f} %",
        )
    console.print(table)
    time_error = statistics.median(abs(case.time_error) for case in cases)
    memory_error = statistics.median(abs(case.memory_error) for case in cases)
    tau = kendall(cases)
    within = statistics.mean(
        kendall([case for case in cases if (case.setup, case.model) == group])
        for group in {(case.setup, case.model) for case in cases}
    )
    console.print(
        f"{len(cases)} cases: median |error| of step time {100 * time_error:.1f} % (bar 15 %), of "
        f"peak memory {100 * memory_error:.1f} % (bar 10 %), Kendall tau {tau:.2f} (bar 0.85), within one model {within:.2f}"
    )
    return time_error <= 0.15 and memory_error <= 0.10 and tau >= 0.85


def main() -> int:
    """Measure, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", choices=sorted(PLANS), default=None)
    parser.add_argument("--json", default="", help="also write all cases to this file")
    for name, sort in (("--rank", int), ("--out", Path)):
        parser.add_argument(name, type=sort, help=argparse.SUPPRESS)
    parser.add_argument("--groups", type=int, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        worker(options.steps, tuple(options.groups), options.out)
        return 0
    console, watch = Console(width=150), Watch()
    captures = {name: capture(*make()) for name, make in MODELS.items()}
    local = local_cluster(watch)
    cases: list[Case] = []
    if options.only in (None, "machine"):
        measure_links(local, watch)
        local = local_cluster(watch)
        table = costs_for("machine", captures)
        found = launch(train, 2, ("machine", options.steps, ()), timeout=1500)[0]
        cases += cases_of("machine", found, captures, local, table)
    if options.only in (None, "hosts"):
        if why_not():
            console.print(f"hosts left out: {why_not()}")
        else:
            cluster = four_hosts(local)
            table = costs_for("hosts", captures)
            found = train_on_hosts(options.steps, (4, 2))
            table = on_hosts(table, cluster, found)
            cases += cases_of("hosts", found, captures, cluster, table)
    met = show(cases, console)
    console.print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch {torch.__version__}, gloo, 1 thread per rank; medians "
        f"of {options.steps} steps"
    )
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(case) for case in cases], indent=1))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
