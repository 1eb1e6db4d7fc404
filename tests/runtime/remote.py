"""Train the zoo's perceptron by a plan under torchrun; print the losses. Run by test_hosts.py.

The argument is the seed of the plan as JSON.
"""

from __future__ import annotations

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
    """Print every loss of three steps as one line of JSON."""
    join_world()
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(**json.loads(sys.argv[1])))
    program = lower(captured.graph, strategy)
    executor = Executor(captured, program, module, optimizer=partial(torch.optim.SGD, lr=1.0))
    losses = [float(executor.step(one)) for one in batches(batch)]
    executor.close()
    dist.destroy_process_group()
    sys.stdout.write(f"LOSSES {json.dumps(losses)}\n")


if __name__ == "__main__":
    main()
