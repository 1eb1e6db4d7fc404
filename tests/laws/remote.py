"""Train by random strategies on the real ranks of a world, and compare with plain PyTorch.

``holds`` is the body of a rank, ``holds_on_host`` that of one that joins the world itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from shardwright.planner.lower import lower
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.launch import join_world
from tests.laws.models import MAX_NORM, OPTIMIZER, OUTPUTS, model, plain
from tests.laws.strategies import Shape, random_strategy
from tests.runtime.equivalence import Run, assert_close, copied, step_through

Case = tuple[str, Shape]


def holds(cases: Sequence[Case]) -> int:
    """Assert that this rank trains as plain PyTorch does; return how many messages it sent.

    Cases of one model should follow each other, since one model is kept.
    """
    num_messages = 0
    for name, shape in cases:
        one = model(name)
        program = lower(one.captured.graph, random_strategy(one.captured.graph, one.samples, shape))
        num_messages += len(program.messages)
        module = copy.deepcopy(one.module)
        options = RunOptions(max_norm=MAX_NORM if shape.clips else None, seed=5)
        executor = Executor(one.captured, program, module, optimizer=OPTIMIZER, options=options)
        losses, outputs = step_through(executor, one.batch, OUTPUTS.get(name, ()), shape.streams)
        executor.to_module(module)
        executor.close()
        run = Run(
            losses, copied(module.named_parameters()), copied(module.named_buffers()), outputs
        )
        assert_close(run, plain(name, shape.clips), f"{name}, {shape}", one.tolerance)
    return num_messages


def holds_on_host(cases: Sequence[Case]) -> int:
    """Do the same on a host that torchrun would start."""
    join_world()
    return holds(cases)
