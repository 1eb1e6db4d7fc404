"""Train the zoo's perceptron until the end of days under torchrun, or only sum, which takes less to
begin. Run by test_torchrun.py.

Arguments: the seconds that a collective may take, a folder where every rank writes its process once
it is under way, and ``train`` or ``sum``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.runtime.launch import join_world


def trains() -> Callable[[], object]:
    """Return what takes a step of the perceptron."""
    from shardwright.planner.lower import lower
    from shardwright.planner.space.seeds import Seed, seed_strategy
    from shardwright.runtime.executor import Executor
    from tests import zoo
    from tests.runtime.equivalence import captured_of

    module, batch, captured = captured_of(zoo.mlp)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(data=2)))
    executor = Executor(captured, program, module, optimizer=partial(torch.optim.SGD, lr=0.01))
    return lambda: executor.step(batch)


def sums() -> Callable[[], object]:
    """Return what sums a number over the ranks."""
    return lambda: dist.all_reduce(torch.ones(1))


def main() -> None:
    """Go on for ever."""
    rank, _ = join_world(timeout=float(sys.argv[1]))
    step = {"train": trains, "sum": sums}[sys.argv[3]]()
    step()
    fresh = Path(sys.argv[2], f"{rank}.new")
    fresh.write_text(str(os.getpid()))
    fresh.rename(Path(sys.argv[2], str(rank)))
    while True:
        step()


if __name__ == "__main__":
    main()
