"""How exact the stall analyser is: loaders whose costs are known, found beside given.

    python benchmarks/stalls.py [--seconds 12]

Items sleep to fetch and keep a core busy to prepare; the step sleeps. Rates should be within 5 %, steps and stalls
within 10 %, and what binds right in every case, on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from itertools import product

import torch
from torch.utils.data import DataLoader, Dataset

from shardwright.core.stalls import InputRates
from shardwright.stalls import analyse

BATCH = 4
# Seconds of an item to fetch and prepare, and of a step.
COSTS = {
    "fetching": (0.004, 0.001, 0.005),
    "preparation": (0.001, 0.004, 0.005),
    "computation": (0.001, 0.001, 0.030),
}


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


def given(fetch: float, prepare: float, compute: float, workers: int, cores: int) -> InputRates:
    """Return the rates that follow from the costs."""
    return InputRates(
        compute=BATCH / compute,
        prepare=min(max(1, workers), cores) / prepare,
        storage=max(1, workers) / fetch,
        pipelined=False,
        is_ahead=workers > 0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="of one analysis")
    seconds = parser.parse_args().seconds
    print(f"{'workers':>7} {'case':>12} {'G':>7} {'P':>7} {'S':>7} {'step':>7}  binds")
    for workers, (name, costs) in product((0, 1, 2, 4), COSTS.items()):
        fetch, prepare, compute = costs
        loader = DataLoader(Items(fetch, prepare), batch_size=BATCH, num_workers=workers)
        found = analyse(loader, lambda batch, wait=compute: time.sleep(wait), seconds=seconds)
        known = given(fetch, prepare, compute, workers, found.cores)
        errors = [
            found.rates.compute / known.compute - 1,
            found.rates.prepare / known.prepare - 1,
            found.rates.storage / known.storage - 1,
            found.cold_seconds * known.speed(0.0) / BATCH - 1,
        ]
        right = "right" if found.rates.binding(0.0) == known.binding(0.0) else "WRONG"
        columns = " ".join(f"{error * 100:+6.1f}%" for error in errors)
        print(f"{workers:7d} {name:>12} {columns}  {found.rates.binding(0.0)}, {right}")


if __name__ == "__main__":
    main()
