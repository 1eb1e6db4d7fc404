"""Train the zoo's transformer, tied, by schedules of pipelines under torchrun. Run by test_schedules.py.

Argument: the file in which rank 0 leaves the runs.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

from shardwright.planner.space.seeds import Seed
from shardwright.runtime.launch import join_world
from tests import zoo
from tests.runtime.equivalence import train_each
from tests.runtime.strategies import strategy_of

FACTORY = partial(zoo.gpt, tied=True)
SGD = partial(torch.optim.SGD, lr=0.1)
SEEDS = (
    Seed(stages=2, chunks=2, num_microbatches=4, schedule="interleaved", recompute=True),
    Seed(stages=2, num_microbatches=4, schedule="1f1b-so"),
    Seed(stages=2, num_microbatches=4, schedule="zb-h1"),
    Seed(stages=2, chunks=2, num_microbatches=4, schedule="zb-v", recompute=True),
)


def main() -> None:
    """Train, and write what rank 0 ends with."""
    rank, _ = join_world(timeout=60)
    runs = train_each(FACTORY, [strategy_of(seed) for seed in SEEDS], SGD)
    if rank == 0:
        torch.save([(run.losses, run.parameters) for run in runs], Path(sys.argv[1]))


if __name__ == "__main__":
    main()
