"""How exact the stall analyser is: loaders whose costs are known, found beside given.

    python benchmarks/stalls.py [--seconds 8] [--workers 0,1,2,4] [--ranks 1]

Items sleep to fetch and keep a core busy to prepare; the step sleeps. Rates should be within 5 %, stalls within 10 % (of
themselves, or of a step where they are less than half of one), and what binds right in every case, on an idle machine.
With two ranks every figure is that of the slower, whose step takes a tenth longer.
The last line is what measuring costs: steps of an analysis beside those of a plain loop, in turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice, product

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from shardwright.core.stalls import InputRates, Stalls
from shardwright.stalls import analyse

BATCH = 4
# Seconds of an item to fetch and prepare, and of a step.
COSTS = {
    "fetching": (0.004, 0.001, 0.005),
    "preparation": (0.001, 0.004, 0.005),
    "computation": (0.001, 0.001, 0.030),
}
TURNS, STEPS = 5, 60  # of the comparison with a plain loop


class Items(Dataset):
    """Items of known costs."""

    def __init__(self, fetch: float, prepare: float) -> None:
        self.fetch, self.prepare = fetch, prepare

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.fetch)
        end = time.thread_time() + self.prepare
        while time.thread_time() < end:
            pass
        return torch.tensor([float(index)])


def given(fetch: float, prepare: float, compute: float, workers: int, cores: float) -> InputRates:
    """Return the rates that follow from the costs."""
    return InputRates(
        compute=BATCH / compute,
        prepare=min(max(1, workers), cores) / prepare,
        storage=max(1, workers) / fetch,
        pipelined=False,
        is_ahead=workers > 0,
    )


def row(workers: int, name: str, found: Stalls, ranks: int) -> str:
    """Return errors of rates and stalls."""
    fetch, prepare, compute = COSTS[name]
    slowest = compute * (1.1 if ranks > 1 else 1.0)
    known = given(fetch, prepare, slowest, workers, found.cores / ranks)
    whole, cached = BATCH / known.speed(0.0), BATCH / known.speed(1.0)
    stalls = cached - slowest, whole - cached
    errors = [
        found.rates.compute / known.compute - 1,
        found.rates.prepare / known.prepare - 1,
        found.rates.storage / known.storage - 1,
        *(
            (one - other) / max(other, whole / 2)
            for one, other in zip((found.prep_stall, found.fetch_stall), stalls, strict=True)
        ),
    ]
    right = "right" if found.rates.binding(0.0) == known.binding(0.0) else "WRONG"
    columns = " ".join(f"{error * 100:+6.1f}%" for error in errors)
    return f"{ranks:5d} {workers:7d} {name:>12} {columns}  {found.rates.binding(0.0)}, {right}"


def look(rank: int, ranks: int, store: str, workers: list[int], seconds: float) -> None:
    """Analyse every loader on one rank of several; the first one tells."""
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{store}", world_size=ranks, rank=rank)
    for count, (name, (fetch, prepare, compute)) in product(workers, COSTS.items()):
        loader = DataLoader(Items(fetch, prepare), batch_size=BATCH, num_workers=count)
        wait = compute * (1.1 if rank else 1.0)
        found = analyse(loader, lambda batch, wait=wait: time.sleep(wait), seconds=seconds)
        if not rank:
            print(row(count, name, found, ranks), flush=True)


def overhead() -> str:
    """Return what steps take while they are analysed, against a plain loop over the same loader."""
    weights = torch.randn(600, 600)

    def step(batch: torch.Tensor) -> None:
        for _ in range(4):
            weights @ weights

    loader = DataLoader(Items(0.0005, 0.0005), batch_size=BATCH, num_workers=1)
    pairs = [(analysed(loader, step), plain(loader, step)) for _ in range(TURNS)]
    ratios = [(one / other - 1) * 100 for one, other in pairs]
    return (
        f"a step that is analysed takes {statistics.median(ratios):+.1f} % longer (turns: "
        f"{', '.join(f'{ratio:+.1f}' for ratio in sorted(ratios))}), {pairs[0][1] * 1e3:.1f} ms plain"
    )


def analysed(loader: DataLoader, step: Callable[[torch.Tensor], None]) -> float:
    return analyse(loader, step, batches=STEPS).cold_seconds


def plain(loader: DataLoader, step: Callable[[torch.Tensor], None]) -> float:
    """Return the seconds of a step, the first batches left out as the analyser does."""
    drawn: Iterator[torch.Tensor] = iter(loader)
    for batch in islice(drawn, 5):
        step(batch)
    begin = time.perf_counter()
    for batch in islice(drawn, STEPS):
        step(batch)
    return (time.perf_counter() - begin) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of one analysis")
    parser.add_argument("--workers", default="0,1,2,4")
    parser.add_argument("--ranks", type=int, default=1)
    chosen = parser.parse_args()
    print(
        f"{'ranks':>5} {'workers':>7} {'case':>12} {'G':>7} {'P':>7} {'S':>7} {'prep':>7} {'fetch':>7}  binds"
    )
    workers = [int(one) for one in chosen.workers.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        words = chosen.ranks, os.path.join(folder, "store"), workers, chosen.seconds
        context = multiprocessing.get_context("spawn")
        others = [
            context.Process(target=look, args=(rank, *words)) for rank in range(1, chosen.ranks)
        ]
        for other in others:
            other.start()
        look(0, *words)
        for other in others:
            other.join()
    if chosen.ranks == 1:
        print(overhead())


if __name__ == "__main__":
    main()
