"""The order in which a pipeline stage runs forward (F) and backward (B) of its microbatches."""

from __future__ import annotations

from typing import Literal

from shardwright.core.strategy import ScheduleName

Phase = Literal["F", "B"]
Action = tuple[Phase, int]
StageOrder = tuple[Action, ...]


def pipeline_order(
    schedule: ScheduleName, num_stages: int, num_microbatches: int
) -> tuple[StageOrder, ...]:
    """Return, per stage, the (phase, microbatch) actions in the order they run.

    ``gpipe``: every forward, then every backward, both by ascending microbatch. ``1f1b`` (DAPPLE,
    PipeDream-Flush): stage k of p runs p-1-k forwards ahead, then one forward and one backward in
    turn, then the remaining backwards; it keeps at most p-k microbatches alive.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"a pipeline needs at least one stage and one microbatch, not {num_stages} and "
            f"{num_microbatches}; raise both to 1 or more"
        )
    if schedule not in ("gpipe", "1f1b"):
        raise ValueError(f"schedule {schedule!r} is unknown; choose 'gpipe' or '1f1b'")
    ahead = [
        num_microbatches if schedule == "gpipe" else min(num_stages - 1 - stage, num_microbatches)
        for stage in range(num_stages)
    ]
    return tuple(_stage_order(warm_up, num_microbatches) for warm_up in ahead)


def _stage_order(warm_up: int, num_microbatches: int) -> StageOrder:
    """Run ``warm_up`` forwards, then forward and backward in turn, then what is left."""
    order: list[Action] = []
    order.extend(("F", microbatch) for microbatch in range(warm_up))
    for microbatch in range(warm_up, num_microbatches):
        order.append(("F", microbatch))
        order.append(("B", microbatch - warm_up))
    order.extend(("B", m) for m in range(num_microbatches - warm_up, num_microbatches))
    return tuple(order)


def global_order(orders: tuple[StageOrder, ...]) -> list[tuple[int, Phase, int]]:
    """Merge the stages' orders into one list of (stage, phase, microbatch).

    The list keeps every stage's own order, and F(s, m) follows F(s-1, m), B(s, m) follows B(s+1, m)
    and F(s, m). Stages take turns, so that the list reads roughly in time order. Raises ValueError
    when no such list exists: run as they stand, the orders would wait for each other for ever.
    """
    next_action = [0] * len(orders)
    done: set[tuple[int, Phase, int]] = set()
    merged: list[tuple[int, Phase, int]] = []
    total = sum(map(len, orders))
    while len(merged) < total:
        ready: list[tuple[int, Phase, int]] = []
        for stage, order in enumerate(orders):
            if next_action[stage] == len(order):
                continue
            action = (stage, *order[next_action[stage]])
            if done.issuperset(_needs(action, len(orders))):
                ready.append(action)
        if not ready:
            waiting = zip(orders, next_action, strict=True)
            stuck = [(s, *order[i]) for s, (order, i) in enumerate(waiting) if i < len(order)]
            raise ValueError(
                f"pipeline stages wait for each other: none of the next actions {stuck} (stage, "
                "phase, microbatch) can start; reorder them so that every F(s, m) can follow "
                "F(s-1, m) and every B(s, m) can follow B(s+1, m)"
            )
        for action in ready:
            next_action[action[0]] += 1
        done.update(ready)
        merged += ready
    return merged


def _needs(action: tuple[int, Phase, int], num_stages: int) -> set[tuple[int, Phase, int]]:
    """Return what must have run before an action may start."""
    stage, phase, microbatch = action
    if phase == "F":
        return {(stage - 1, "F", microbatch)} if stage > 0 else set()
    needs: set[tuple[int, Phase, int]] = {(stage, "F", microbatch)}
    if stage < num_stages - 1:
        needs.add((stage + 1, "B", microbatch))
    return needs
