"""Trials: several ways to train one model, run in turns by the same ranks, so that what else the
machine does befalls all of them alike.

Every rank calls ``race`` with the same contestants and batches. Rank 0's clock counts: a step ends
when its loss is known, as in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwright.core.plan import WARM_STEPS, Measured
from shardwright.runtime.capture.prepare import find_loss
from shardwright.runtime.executor import OptimizerFactory

Batch = dict[str, Tensor]
Step = Callable[[Batch], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Laps:
    """Seconds of every step of one contestant, turn by turn."""

    turns: tuple[tuple[float, ...], ...]

    @property
    def num_steps(self) -> int:
        """How many steps were timed."""
        return sum(len(turn) for turn in self.turns)

    @property
    def seconds(self) -> float:
        """The median step."""
        return statistics.median([step for turn in self.turns for step in turn])

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the turns' medians: how far the machine, not
        the plan, moves the figure."""
        middles = [statistics.median(turn) for turn in self.turns]
        if len(middles) < 2:
            return 0.0
        low, _, high = statistics.quantiles(middles, n=4, method="inclusive")
        return (high - low) / 2

    @property
    def measured(self) -> Measured:
        """What of it is kept beside a plan."""
        return Measured(
            step_seconds=self.seconds, spread_seconds=self.spread, num_steps=self.num_steps
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How often everybody has a turn, of how many steps that count, and after how many seconds no
    further turn is begun. Where more than one counts, one before them does not: caches hold what the
    contestant before has left."""

    turns: int = 10
    steps: int = 2
    budget_seconds: float = 60.0


def race(
    contestants: Sequence[Step],
    batches: Sequence[Batch],
    rules: Rules,
    tell: Callable[[int], None] = lambda turns: None,
) -> tuple[Laps, ...]:
    """Return every contestant's laps. ``tell`` is called after each turn of all of them."""
    for step in contestants:
        for number in range(WARM_STEPS):
            _meet()  # ranks that have no part in a step wait for one of them, not for all
            float(step(batches[number % len(batches)]))
    begin = time.perf_counter()
    turns: list[list[tuple[float, ...]]] = [[] for _ in contestants]
    for turn in range(rules.turns):
        # Who comes first is another one each time.
        for place in range(len(contestants)):
            who = (place + turn) % len(contestants)
            turns[who].append(_turn(contestants[who], batches, rules.steps))
        tell(turn + 1)
        if _agreed(time.perf_counter() - begin > rules.budget_seconds):
            break
    return steadied([Laps(turns=tuple(found)) for found in turns])


def steadied(laps: Sequence[Laps]) -> tuple[Laps, ...]:
    """Take off what made a turn slower, or faster, for everybody: it was the machine.

    A turn's pace is the median, over contestants, of its median step over that of all turns. Two
    contestants or fewer stay as they are: there, a turn's pace would be their own noise.
    """
    if len(laps) < 3:
        return tuple(laps)
    middles = [[statistics.median(turn) for turn in one.turns] for one in laps]
    usual = [statistics.median(row) for row in middles]
    paces = [
        statistics.median([row[turn] / own for row, own in zip(middles, usual, strict=True)])
        for turn in range(len(middles[0]))
    ]
    return tuple(
        Laps(
            turns=tuple(
                tuple(step / pace for step in turn)
                for turn, pace in zip(one.turns, paces, strict=True)
            )
        )
        for one in laps
    )


def _turn(step: Step, batches: Sequence[Batch], count: int) -> tuple[float, ...]:
    """Time steps, all ranks beginning together."""
    _meet()
    laps: list[float] = []
    settling = int(count > 1)
    for number in range(settling + count):
        start = time.perf_counter()
        float(step(batches[number % len(batches)]))
        laps.append(time.perf_counter() - start)
    return tuple(laps[settling:])


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _agreed(wish: bool) -> bool:
    """Return rank 0's wish on every rank."""
    if not dist.is_initialized():
        return wish
    shared = torch.tensor([float(wish)])
    dist.broadcast(shared, src=0)
    return bool(shared.item())


class PlainData:
    """What users have without a plan: torch's DistributedDataParallel, each rank on its equal share
    of the global batch, its gradients clipped to ``max_norm`` where that is not 0."""

    def __init__(
        self, module: nn.Module, optimizer: OptimizerFactory, max_norm: float = 0.0
    ) -> None:
        self.max_norm = max_norm
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.module = module
        self.optimizer = optimizer(list(module.named_parameters()))

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's share and return its loss."""
        size = next(iter(batch.values())).shape[0]
        share = size // self.ranks
        mine = {
            name: tensor[self.rank * share : (self.rank + 1) * share]
            if tensor.dim() and tensor.shape[0] == size
            else tensor
            for name, tensor in batch.items()
        }
        if self.ranks > 1 and not isinstance(self.module, DistributedDataParallel):
            _freeze_unreached(self.module, find_loss(self.module(**mine)))
            self.module = DistributedDataParallel(self.module)
        loss = find_loss(self.module(**mine))
        loss.backward()
        if self.max_norm:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _freeze_unreached(module: nn.Module, loss: Tensor) -> None:
    """Let torch wait for no gradient of a parameter that has none: it ends in an error at the second step."""
    trained = [one for one in module.parameters() if one.requires_grad]
    for one, gradient in zip(
        trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True
    ):
        one.requires_grad_(gradient is not None)
