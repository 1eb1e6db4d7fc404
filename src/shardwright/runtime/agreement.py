"""Agreement among ranks: doing things so that all of them learn whether they worked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.errors import CheckpointError, InputError, RunError
from shardwright.runtime.endings import cause

T = TypeVar("T")


def rank() -> int:
    """Return this process's rank, 0 where it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return how many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gathered(value: T) -> list[T]:
    """Return what every rank has, in rank order (a collective call). Raises RunError where one does not
    answer."""
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    try:
        dist.all_gather_object(found, value)
    except RuntimeError as error:
        where = "where all ranks must agree, as they do around a checkpoint"
        raise RunError(cause(error, rank(), where), rank=rank()) from None
    return found


def check_alike(settings: Any, group: ProcessGroup) -> None:
    """Raise InputError on all ranks of a group where their settings (a dataclass) differ: messages would, and would be
    waited for for ever."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, settings, group)
    for place, other in enumerate(said):
        for one in fields(settings) if other != said[0] else ():
            first, theirs = getattr(said[0], one.name), getattr(other, one.name)
            if first != theirs:
                raise InputError(
                    f"all ranks must be given equal settings, but {one.name} is {first!r:.80} on rank 0 and "
                    f"{theirs!r:.80} on rank {place}; give each the same"
                )


def together(act: Callable[[], T]) -> list[T]:
    """Do something on every rank and return all results in rank order, or raise the first error
    on all ranks."""
    outcome: tuple[Any, Exception | None]
    try:
        outcome = (act(), None)
    except CheckpointError as error:
        outcome = (None, type(error)(*error.args))
    except OSError as error:  # which its arguments do not name
        named = () if error.filename is None else (error.filename,)
        outcome = (None, type(error)(*error.args, *named))
    outcomes: list[Any] = gathered(outcome)
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise errors[0]
    return [result for result, _ in outcomes]


def from_first(act: Callable[[], T]) -> T:
    """Do something on rank 0 and return its result on all ranks, or raise its error on all."""
    return together(lambda: act() if rank() == 0 else None)[0]  # type: ignore[return-value]
