"""Train the zoo's perceptron until the end of days under torchrun. Run by test_torchrun.py.

Arguments: the seconds that a collective may take, and a folder where every rank writes its process
once it trains.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch

from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor
from shardwright.runtime.launch import join_world
from tests import zoo


def main() -> None:
    """Train."""
    rank, _ = join_world(timeout=float(sys.argv[1]))
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(data=2)))
    executor = Executor(captured, program, module, optimizer=partial(torch.optim.SGD, lr=0.01))
    executor.step(batch)
    fresh = Path(sys.argv[2], f"{rank}.new")
    fresh.write_text(str(os.getpid()))
    fresh.rename(Path(sys.argv[2], str(rank)))
    while True:
        executor.step(batch)


if __name__ == "__main__":
    main()
