"""From a plan to this rank's executor: capture, compare, lower, build."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwright.core.plan import Plan
from shardwright.planner.lower import lower
from shardwright.verbs.legality import check_plan
from shardwright.verbs.subject import Batch, capture

if TYPE_CHECKING:
    from torch import nn

    from shardwright.runtime.executor import Executor, RunOptions


def build_executor(
    plan: Plan,
    model: nn.Module,
    *,
    optimizer: Callable[..., Any],
    batch: Batch,
    options: RunOptions | None = None,
) -> Executor:
    """Join the world and make the executor; see ``api.build``."""
    from shardwright.runtime.executor import Executor
    from shardwright.runtime.launch import join_world

    join_world(device=str((options and options.device) or "cpu"))
    captured = capture(
        model,
        batch,
        global_batch=plan.global_batch,
        precision=plan.strategy.precision,
        batch_norm=plan.strategy.batch_norm,
        outputs=plan.outputs,
    )
    check_plan(plan, captured.graph)
    program = lower(captured.graph, plan.strategy)
    return Executor(captured, program, model, optimizer=optimizer, options=options)
