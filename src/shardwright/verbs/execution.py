"""From a plan to this rank's executor: capture, compare, lower, build."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwright.core.cluster import Cluster
from shardwright.core.plan import Plan
from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.verbs.legality import lowered
from shardwright.verbs.resizing import resize
from shardwright.verbs.subject import Batch, capture

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardwright.core.program import Program
    from shardwright.runtime.capture import Captured
    from shardwright.runtime.executor import Executor, RunOptions


def build_executor(
    plan: Plan,
    model: nn.Module | Callable[[], Any],
    cluster: Cluster | None = None,
    *,
    optimizer: Callable[..., Any],
    batch: Batch,
    options: RunOptions | None = None,
) -> Executor:
    """Join the world and make the executor; see ``api.build``. ``cluster`` is what the plan is for, where
    that is known."""
    from shardwright.runtime.capture.assemble import with_modules_of
    from shardwright.runtime.capture.prepare import named_batch
    from shardwright.runtime.deferred import built_from
    from shardwright.runtime.executor import Executor, RunOptions
    from shardwright.runtime.launch import join_world
    from shardwright.runtime.place import choose, stand_on

    if not callable(optimizer):
        raise InputError(
            "an executor makes its optimizer itself, of the parameters that its rank keeps, so it needs a function of them, such as "
            f"functools.partial(torch.optim.AdamW, lr=1e-3), not {str(optimizer).strip():.40}; give one"
        )
    options = replace(options or RunOptions(), lower=lower)
    if options.world is None:
        planned = cluster.kind_of(plan.strategy.devices[0]).backend if cluster else ""
        device = choose(options.device, planned)
        join_world(device=device)
        stand_on(device)
        options = replace(options, device=device)
    strategy = plan.strategy
    built = built_from(model)
    if built.module is not model:  # ours, so nobody else needs its values
        options = replace(options, releases=True)
        if built.note:
            warnings.warn(built.note, stacklevel=3)

    module = built.module

    def captured_with(example: Batch, global_batch: int | None) -> Captured:
        return capture(
            module,
            example,
            global_batch=global_batch,
            precision=strategy.precision,
            batch_norm=strategy.batch_norm,
            outputs=plan.outputs,
        )

    captured = captured_with(batch, plan.global_batch)
    program = lowered(plan, captured.graph)
    example = named_batch(module, batch)

    def resized(other: Mapping[str, Tensor]) -> tuple[Captured, Program]:
        given = {name: other[name] for name in captured.batch_names}
        again = with_modules_of(captured_with({**example, **given}, None), module)
        return again, lower(again.graph, resize(captured.graph, again.graph, strategy))

    return Executor(captured, program, module, optimizer=optimizer, options=options, resize=resized)
