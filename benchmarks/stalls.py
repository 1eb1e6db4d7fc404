"""How exact the stall analyser is: loaders whose costs are known, found beside given.

    python benchmarks/stalls.py [--seconds 8] [--workers 0,1,2,4] [--ranks 1]

Items sleep to fetch and keep a core busy to prepare; the step sleeps.
What each takes by itself is measured beside it. Rates should be within 5 %, stalls within 10 % (of
themselves, or of a step where they are less than half of one), and what binds right in every case, on an idle machine.
With two ranks every figure is that of the slower, whose step takes a tenth longer.
The last line is what measuring adds to a step, which should be 2 % at most.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
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
TURNS = 5  # of what measuring costs


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


def apart(fetch: float, prepare: float) -> tuple[float, float]:
    """Return what an item's sleep and its work take by themselves, sleeping late and collating included."""
    begin = time.perf_counter()
    for _ in range(50):
        time.sleep(fetch)
    slept = (time.perf_counter() - begin) / 50
    drawn = iter(DataLoader(Items(0.0, prepare), batch_size=BATCH))
    next(drawn)
    begin = time.thread_time()
    for _ in islice(drawn, 10):
        pass
    return slept, (time.thread_time() - begin) / 10 / BATCH


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
    fetch, prepare, compute = *apart(*COSTS[name][:2]), COSTS[name][2]
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
    """Return what the analyser adds to a step: what is left of one that does nothing."""
    data = [torch.zeros(BATCH)] * 500
    found = [analyse(data, lambda batch: None, batches=200) for _ in range(TURNS)]
    with_loader, resident = (
        min(getattr(one, name) for one in found) * 1e6
        for name in ("cold_seconds", "resident_seconds")
    )
    return (
        f"the analyser adds {with_loader:.2f} us to a step with a loader, {resident:.2f} us to one of a resident batch "
        f"(least of {TURNS}): 2 % of steps of {max(with_loader, resident) * 50:.0f} us"
    )


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
        # None is another's child, whose work would count as its parent's.
        ranks = [context.Process(target=look, args=(rank, *words)) for rank in range(chosen.ranks)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    if chosen.ranks == 1:
        print(overhead())


if __name__ == "__main__":
    main()
