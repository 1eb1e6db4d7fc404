"""Merged and compressed gradients of plain DistributedDataParallel between hosts: ``python benchmarks/merging.py``.

Merged, communication as long as computation (r = 1): ``ddp.wrap``, torch's default and eight other caps in turns.
Compressed, communication four times as long (r = 4): hooks of ours beside torch's PowerSGD in one bucket. Hosts are
network namespaces (root). **Computation is emulated**: every layer sleeps, a third of it forward, before its real,
small products; so four ranks share two cores. Gradients are real, and so is what sends and compresses them.
"""

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

import numpy as np
import torch
import torch.distributed as dist
from ranks import inside, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shardwright import ddp
from shardwright.ddp.buckets import default_buckets
from shardwright.planner.schedule import finish_time
from shardwright.runtime.cores import wait_when_woken
from tests.hosts import hosts, why_not

NOTHING = "nothing sent"
CAPS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16)  # MiB
WARM = 3  # steps until buckets have been made anew and PowerSGD has begun
# Weights in the order of forward, of links of 1 Gbit/s; slower ones have fewer rows.
BLOCK = ((768, 256), (256, 256), (1024, 256), (256, 1024))
MODELS: dict[str, Sequence[tuple[int, int]]] = {
    "even": ((512, 512),) * 20,
    "many small": ((128, 256),) * 100,
    "large last": (*((256, 256),) * 12, (4096, 1024)),
    "large first": ((4096, 1024), *((256, 256),) * 12),
    "growing": (*((64, 576),) * 6, *((128, 1152),) * 6, *((256, 2304),) * 3),
    "decoder": ((8192, 256), *BLOCK * 4),
}
RATES = {"1gbit": 1.0, "500mbit": 0.5, "200mbit": 0.2, "100mbit": 0.1}


@dataclass(frozen=True, slots=True)
class Ran:
    """A way: seconds a step of the slowest rank, the median of turns and half their quartiles' distance; ``of_a_core``
    are those that all threads of this rank compute in it, and ``computing`` those that all layers sleep."""

    way: str
    seconds: float
    spread: float
    of_a_core: float
    computing: float


class Rest(torch.autograd.Function):
    """Passes on what comes, after a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: float, back: float) -> Tensor:
        ctx.back = back
        time.sleep(there)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.back)
        return given[0], None, None


class Net(nn.Module):
    """Layers that sleep as long each, and whose weights have gradients."""

    def __init__(self, shapes: Sequence[tuple[int, int]], computing: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(shape) for shape in shapes])
        each = computing / len(shapes)
        self.there, self.back = each / 3, 2 * each / 3

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            row = x[: weight.shape[1]]
            x = Rest.apply(x + (weight @ row).sin().mean(), self.there, self.back)  # type: ignore[assignment]
        return x.sum()


def timed(
    ways: dict[str, Callable[[], DistributedDataParallel]], turns: int, computing: float
) -> list[Ran]:
    """Let ways have turns, and return what their steps took."""
    # Of equal numbers the largest would be found otherwise than of gradients.
    batch = torch.randn(4096, generator=torch.Generator().manual_seed(dist.get_rank()))
    models = {name: make() for name, make in ways.items()}
    laps: dict[str, list[float]] = {name: [] for name in ways}
    cores: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM + turns):
        for name, model in models.items():
            model.zero_grad()
            dist.barrier()
            begin, of_a_core = time.perf_counter(), time.process_time()
            model(batch).backward()
            took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            of_a_core = time.process_time() - of_a_core
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn >= WARM:
                laps[name].append(took.item())
                cores[name].append(of_a_core)
    del models, model
    gc.collect()
    found = list[Ran]()
    for name, steps in laps.items():
        low, middle, high = np.quantile(steps, (0.25, 0.5, 0.75)).tolist()
        of_a_core = float(np.median(cores[name]))
        found.append(Ran(name, middle, (high - low) / 2, of_a_core, computing))
    return found


def merged(net: Net, options: argparse.Namespace, computing: float) -> list[Ran]:
    """Planned buckets, the default, and caps."""
    batch = torch.ones(4096)
    choice = ddp.choose_buckets(net, batch, turns=options.turns)
    ways: dict[str, Callable[[], DistributedDataParallel]] = {
        "default": lambda: DistributedDataParallel(copy.deepcopy(net)),
        f"ddp.wrap, {len(choice.plan.sizes_bytes)} buckets"
        + ("" if choice.is_kept else " (default kept)"): lambda: ddp.wrap(
            copy.deepcopy(net), batch, choice=choice
        ),
    }
    for cap in CAPS:
        ways[f"cap of {cap:g} MiB"] = lambda cap=cap: DistributedDataParallel(
            copy.deepcopy(net), bucket_cap_mb=cap
        )
    return timed(ways, options.turns, computing)


def hooked(net: Net, settings: ddp.Compression | None) -> DistributedDataParallel:
    """Wrap a model with a hook of ours, or torch's PowerSGD in one bucket: with more it may hang on gloo."""
    total = sum(one.nbytes for one in net.parameters()) / 2**20
    if settings is None:
        model = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb_list=[total])  # type: ignore[arg-type]
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model
    model = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=1)
    ddp.hooks.register(model, settings)
    return model


def silent(net: Net) -> DistributedDataParallel:
    """Wrap a model with a hook that sends nothing."""
    model = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=1)
    model.register_comm_hook(None, kept)
    return model


def kept(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """Leave a bucket as it is."""
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


def compressed(net: Net, options: argparse.Namespace, computing: float) -> list[Ran]:
    """Hooks, and gradients that nothing sends."""
    every: dict[str, ddp.Compression | None] = {
        "top-k of 0.001": ddp.Compression(method="top-k", density=0.001),
        "top-k of 0.01": ddp.Compression(method="top-k", density=0.01),
        "gtop-k of 0.001": ddp.Compression(method="gtop-k", density=0.001),
        "powersgd, rank 1": ddp.Compression(method="powersgd"),
        "torch's PowerSGD, rank 1": None,
    }
    ways: dict[str, Callable[[], DistributedDataParallel]] = {
        name: lambda settings=settings: hooked(net, settings) for name, settings in every.items()
    }
    ways["default"] = lambda: DistributedDataParallel(copy.deepcopy(net))
    ways[NOTHING] = lambda: silent(net)
    return timed(ways, options.turns, computing)


def rank_main(options: argparse.Namespace) -> None:
    """Run all cases as one rank."""
    torch.set_num_threads(1)
    wait_when_woken()  # torch's default, too: hosts with cores of their own have no threads of others to interrupt
    dist.init_process_group(
        "gloo", init_method="tcp://10.84.0.1:29541", rank=options.rank, world_size=options.hosts
    )
    rate = RATES[options.links]
    for name in [one for one in MODELS if options.only in one]:
        rows_kept = 1.0 if options.whole else rate
        shapes = [(max(1, int(rows * rows_kept)), columns) for rows, columns in MODELS[name]]
        whole = torch.zeros(sum(rows * columns for rows, columns in shapes))
        sending = min(lap(whole) for _ in range(3))
        for part, share in (("merged", options.computation), ("compressed", 0.25)):
            if part not in options.parts:
                continue
            case = f"{name}, {options.hosts} hosts, {options.links}, {part}"
            run = merged if part == "merged" else compressed
            rows = run(Net(shapes, share * sending), options, share * sending)
            if options.rank == 0:
                print(f"{case}: {sending * 1e3:.0f} ms to send all")
                told(rows)
                if part == "merged":
                    print(at_best(shapes, sending, share * sending), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def at_best(shapes: Sequence[tuple[int, int]], sending: float, computing: float) -> str:
    """Say what the best buckets would gain if a message cost nothing but its share of sending all at once."""
    layers = len(shapes)
    sizes = [4 * rows * columns for rows, columns in reversed(shapes)]
    ready = [2 / 3 * computing * (place + 1) / layers for place in range(layers)]
    alone, default = [
        computing / 3 + finish_time(buckets, ready, sizes, lambda size: size * sending / sum(sizes))
        for buckets in (tuple((place,) for place in range(layers)), default_buckets(tuple(sizes)))
    ]
    return (
        f"if messages cost their bytes only: {alone * 1e3:.0f} ms by the best buckets, {default * 1e3:.0f} by the "
        f"default, so {default / alone:.2f}x at most"
    )


def lap(whole: Tensor) -> float:
    """Return what summing all gradients at once takes, the same on all ranks."""
    dist.barrier()
    begin = time.perf_counter()
    dist.all_reduce(whole)
    took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def run_link(link: str, options: argparse.Namespace) -> None:
    """Run all cases on hosts with links of a rate; the first rank prints what it sees."""
    with hosts(options.hosts, link, "swm") as names:
        words = ["--links", link, "--hosts", str(options.hosts), "--parts", options.parts]
        words += ["--only", options.only, "--turns", str(options.turns)]
        words += ["--computation", str(options.computation), *(["--whole"] * options.whole)]
        run_ranks(inside(names), (__file__, *words), {"GLOO_SOCKET_IFNAME": "eth0"}, 1200)


def told(rows: Sequence[Ran]) -> None:
    """Print the ways of a case, fastest first, beside the default."""
    (default,) = [row for row in rows if row.way == "default"]
    print(f"layers sleep {default.computing * 1e3:.0f} ms")
    print(
        "| way | step | spread | beside the default | beside computation | of a core |\n|---|--:|--:|--:|--:|--:|"
    )
    for row in sorted(rows, key=lambda row: row.seconds):
        print(
            f"| {row.way} | {row.seconds * 1e3:.0f} ms | {row.spread / row.seconds:.1%} "
            f"| {default.seconds / row.seconds:.2f}x | {row.seconds / row.computing:.2f}x "
            f"| {row.of_a_core * 1e3:.1f} ms |",
            flush=True,
        )


def main() -> int:
    """Run all links."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--links", default="1gbit,200mbit", help=f"some of {', '.join(RATES)}")
    parser.add_argument("--parts", default="merged,compressed")
    parser.add_argument("--only", default="", help="a part of the names of models")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--computation", type=float, default=1.0, help="over communication, merged")
    parser.add_argument("--whole", action="store_true", help="slow links have all rows")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options)
        return 0
    if why_not():
        print(f"not run: {why_not()}")
        return 0
    for link in options.links.split(","):
        run_link(link, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
