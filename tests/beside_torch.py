"""One model trained by torch.distributed.pipelining and by us, on the same ranks: for a test and a benchmark."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from shardwright.core.schedules import SCHEDULES, NamedSchedule
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor

# By our name: torch's, where both run the same kind of schedule.
THEIRS: dict[NamedSchedule, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved": "Interleaved1F1B",
    "zb-interleaved": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
}
OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Equal layers on devices, two chunks a device where a schedule has chunks. ``naps``: what the F, I and W of
    a device sleep for a microbatch, in seconds, beside what they compute."""

    devices: int
    microbatches: int
    layers: int
    width: int
    rows: int  # of a microbatch
    dtype: torch.dtype = torch.float32
    naps: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def chunks(self, schedule: str) -> int:
        """Return how many parts of the model a device has."""
        return 2 if SCHEDULES[schedule].chunks else 1

    def batch(self) -> dict[str, Tensor]:
        """Draw a batch, the same on all ranks."""
        drawn = torch.Generator().manual_seed(1)
        shape = self.rows * self.microbatches, self.width
        return {n: torch.randn(*shape, generator=drawn, dtype=self.dtype) for n in ("x", "y")}


class Layer(nn.Module):
    """x + down(tanh(up(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Layers under a mean squared error."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(case.width) for _ in range(case.layers))
        self.to(case.dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)


def ours(case: Case, schedule: NamedSchedule) -> Executor:
    """Return the executor of this rank, every device with as many layers."""
    module = Net(case)
    captured = capture(module, case.batch())
    seed = Seed(
        stages=case.devices, chunks=case.chunks(schedule), num_microbatches=case.microbatches,
        schedule=schedule,
    )  # fmt: skip
    program = lower(captured.graph, seed_strategy(captured.graph, seed))
    executor = Executor(captured, program, module, optimizer=OPTIMIZER)
    held = sum(m.parameter.numel() for m in executor.machine.parameters.masters)
    if held * case.devices != sum(p.numel() for p in module.parameters()):
        raise ValueError(f"{case.layers} layers are not cut evenly for {schedule}")
    return executor


class Napping(PipelineStage):
    """A stage that sleeps beside what it computes."""

    naps: tuple[float, float, float]

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.naps[0])
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:  # fmt: skip
        time.sleep(self.naps[1] + (self.naps[2] if full_backward else 0.0))
        return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.naps[2])
        return super().backward_weight_one_chunk(*args, **kwargs)


class Torch:
    """The same model, batch and optimizer by a schedule of torch's own."""

    def __init__(self, case: Case, schedule: NamedSchedule) -> None:
        rank, chunks = dist.get_rank(), case.chunks(schedule)
        self.case, count = case, case.devices * chunks
        places = (
            [rank, count - 1 - rank]
            if SCHEDULES[schedule].folds
            else range(rank, count, case.devices)
        )
        layers, each = Net(case).layers, case.layers // count
        shape = case.rows, case.width
        inside = torch.zeros(shape, dtype=case.dtype, requires_grad=True)
        outside = torch.zeros(shape, dtype=case.dtype)
        stages = list[PipelineStage]()
        for place in places:
            part = nn.Sequential(*layers[place * each : (place + 1) * each])
            kind = Napping if any(case.naps) else PipelineStage
            stage = kind(
                part, place, count, torch.device("cpu"),
                input_args=(inside if place else outside,), output_args=(inside,),
            )  # fmt: skip
            stage.naps = tuple(nap / chunks for nap in case.naps)  # type: ignore[attr-defined]
            stages.append(stage)
        kind = get_schedule_class(THEIRS[schedule])
        given: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self.schedule: Any = kind(given, case.microbatches, loss_fn=nn.functional.mse_loss)
        self.optimizer = OPTIMIZER([p for one in stages for p in one.submod.parameters()])
        self.is_first, self.is_last = (
            any(place == end for place in places) for end in (0, count - 1)
        )

    def step(self, batch: dict[str, Tensor]) -> float | None:
        """Train on a batch; return the loss where the last stage is."""
        losses = list[Tensor]()
        inputs = (batch["x"],) if self.is_first else ()
        target = {"target": batch["y"], "losses": losses} if self.is_last else {}
        self.schedule.step(*inputs, return_outputs=False, **target)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if self.is_last else None


def losses_beside(case: Case, schedules: tuple[NamedSchedule, ...], steps: int) -> list[Any]:
    """Return by schedule the losses of our steps, and those of torch's where this rank sees them."""
    torch.set_num_threads(1)
    batch, found = case.batch(), list[Any]()
    for schedule in schedules:
        executor = ours(case, schedule)
        mine = [float(executor.step(batch)) for _ in range(steps)]
        executor.close()
        other = Torch(case, schedule)
        found.append((mine, [other.step(batch) for _ in range(steps)]))
    return found
