"""Train the zoo's perceptron by plans under torchrun; print the losses. Run by test_hosts.py.

The argument is the seeds of the plans as JSON.
"""

from __future__ import annotations

import copy
import json
import sys
from functools import partial

import torch
import torch.distributed as dist

from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor
from shardwright.runtime.launch import join_world
from tests import zoo
from tests.runtime.equivalence import batches


def main() -> None:
    """Print every loss of three steps by each plan as one line of JSON."""
    join_world()
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    losses: list[list[float]] = []
    for seed in json.loads(sys.argv[1]):
        program = lower(captured.graph, seed_strategy(captured.graph, Seed(**seed)))
        fresh, sgd = copy.deepcopy(module), partial(torch.optim.SGD, lr=1.0)
        executor = Executor(captured, program, fresh, optimizer=sgd)
        losses.append([float(executor.step(one)) for one in batches(batch)])
        executor.close()
    dist.destroy_process_group()
    sys.stdout.write(f"LOSSES {json.dumps(losses)}\n")


if __name__ == "__main__":
    main()
