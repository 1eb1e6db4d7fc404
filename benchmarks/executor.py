"""The executor against plain PyTorch in the same run: `python benchmarks/executor.py`.

A GPT of 10.8 M parameters trains on CPU ranks of one thread each, over gloo. In every case both
trainers live in the same processes and take turns, so that both see the same noise; the ratio is
taken turn by turn and its median reported. Exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from shardwright.demo_model import Attention, ByteGPT
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor
from shardwright.runtime.launch import launch

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 6, 384, 6, 128, 16
MICROBATCHES = 4
Step = Callable[[dict[str, Tensor]], object]
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A strategy of ours beside a trainer of PyTorch's; ``bar`` is the largest ratio allowed."""

    name: str
    seed: Seed
    peer: str
    ranks: int
    bar: float


CASES = (
    Case(name="1 rank", seed=Seed(), peer="eager", ranks=1, bar=1.05),
    Case(name="2 data-parallel ranks", seed=Seed(data=2), peer="DDP", ranks=2, bar=1.05),
    Case(
        name=f"2 stages, {MICROBATCHES} microbatches",
        seed=Seed(stages=2, num_microbatches=MICROBATCHES),
        peer="Schedule1F1B",
        ranks=2,
        bar=1.05,
    ),
    Case(name="ZeRO-3 on 2 ranks", seed=Seed(data=2, zero=3), peer="FSDP2", ranks=2, bar=1.10),
    Case(
        name="tensor parallel on 2 ranks",
        seed=Seed(tensor=2),
        peer="parallelize_module",
        ranks=2,
        bar=1.0,
    ),
)


def make_model() -> ByteGPT:
    """Make the model, equal on every rank."""
    torch.manual_seed(0)
    return ByteGPT(layers=LAYERS, width=WIDTH, heads=HEADS, seq=LENGTH)


def make_batch() -> dict[str, Tensor]:
    """Make one global batch."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (BATCH, LENGTH + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def local(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take this rank's share of the batch, as a data loader would."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {name: tensor.chunk(size)[rank] for name, tensor in batch.items()}


def ours(seed: Seed) -> Step:
    """Make the executor's step."""
    model, batch = make_model(), make_batch()
    captured = capture(model, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, seed))
    return Executor(captured, program, model, optimizer=OPTIMIZER).step


def whole_module(wrap: Callable[[ByteGPT], nn.Module]) -> Step:
    """Make the ordinary training loop around a wrapped module."""
    model = wrap(make_model())
    optimizer = OPTIMIZER(model.parameters())

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(**local(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def sharded(model: ByteGPT) -> nn.Module:
    """Wrap with FSDP2, one unit per block."""
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


class LocalAttention(Attention):
    """The demo's attention over however many heads this rank has."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Mix positions, each looking only back."""
        batch, seq, width = x_BSD.shape
        shape = (batch, seq, -1, width // self.heads)
        query, key, value = (
            layer(x_BSD).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))


def tensor_parallel() -> Step:
    """Make PyTorch's tensor parallelism: columns, then rows, twice per layer; plain local tensors."""
    model, mesh = make_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        block.attention.__class__ = LocalAttention
        names = ("attention.query", "attention.key", "attention.value", "up")
        styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in names}
        styles |= {name: RowwiseParallel() for name in ("attention.out", "down")}
        parallelize_module(block, mesh, styles)
    optimizer = OPTIMIZER(model.parameters())

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Half(nn.Module):
    """One of the two stages, split by hand where our partition splits: in the middle."""

    def __init__(self, model: ByteGPT, stage: int) -> None:
        super().__init__()
        middle = LAYERS // 2
        self.blocks = model.blocks[:middle] if stage == 0 else model.blocks[middle:]
        self.first = stage == 0
        if self.first:
            self.embed, self.position = model.embed, model.position
        else:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to activations, or activations to logits."""
        if self.first:
            x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.first else self.head(self.norm(x))


def pipelined() -> Step:
    """Make PyTorch's 1F1B schedule."""
    rank = dist.get_rank()
    stage_module = Half(make_model(), rank)
    optimizer = OPTIMIZER(stage_module.parameters())
    rows = BATCH // MICROBATCHES
    tokens = torch.zeros(rows, LENGTH, dtype=torch.int64)
    hidden = torch.zeros(rows, LENGTH, WIDTH, requires_grad=True)
    logits = torch.zeros(rows, LENGTH, 256, requires_grad=True)
    stage = PipelineStage(
        stage_module,
        rank,
        2,
        torch.device("cpu"),
        input_args=(tokens,) if rank == 0 else (hidden,),
        output_args=(hidden,) if rank == 0 else (logits,),
    )
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=token_loss)

    def step(batch: dict[str, Tensor]) -> object:
        if rank == 0:
            schedule.step(batch["tokens"])
        else:
            schedule.step(target=batch["targets"])
        optimizer.step()
        optimizer.zero_grad()
        return None

    return step


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all positions."""
    return nn.functional.cross_entropy(logits.reshape(-1, 256), targets.reshape(-1))


def peer(name: str) -> Step:
    """Make PyTorch's trainer by name."""
    makers: dict[str, Callable[[], Step]] = {
        "eager": lambda: whole_module(lambda model: model),
        "DDP": lambda: whole_module(DistributedDataParallel),
        "FSDP2": lambda: whole_module(sharded),
        "Schedule1F1B": pipelined,
        "parallelize_module": tensor_parallel,
    }
    return makers[name]()


def race(case: Case, turns: int, steps: int) -> list[tuple[float, float]]:
    """Return per turn the seconds per step of (ours, peer)."""
    torch.set_num_threads(1)
    batch = make_batch()
    runners = (ours(case.seed), peer(case.peer))
    for run in runners:
        for _ in range(3):
            run(batch)
    result: list[tuple[float, float]] = []
    for turn in range(turns):
        seconds = [0.0, 0.0]
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                runners[which](batch)
            if dist.is_initialized():
                dist.barrier()
            seconds[which] = (time.perf_counter() - begin) / steps
        result.append((seconds[0], seconds[1]))
    return result


def main() -> int:
    """Race all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="steps per turn")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    parameters = sum(p.numel() for p in make_model().parameters())
    table = Table(
        "case", "peer", "ours ms", "peer ms", "ratio", "quartiles", "bar", "verdict",
        title=f"GPT, {parameters / 1e6:.1f} M parameters, batch {BATCH} x {LENGTH}, float32, AdamW",
    )  # fmt: skip
    missed = 0
    for case in (case for case in CASES if options.only in case.name):
        arguments: tuple[Any, ...] = (case, options.turns, options.steps)
        rows = launch(race, case.ranks, arguments, timeout=900)[0]
        ratios = [mine / other for mine, other in rows]
        low, middle, high = statistics.quantiles(ratios, n=4)
        missed += middle > case.bar
        table.add_row(
            case.name,
            case.peer,
            f"{1e3 * statistics.median(mine for mine, _ in rows):.1f}",
            f"{1e3 * statistics.median(other for _, other in rows):.1f}",
            f"{middle:.3f}",
            f"{low:.3f}-{high:.3f}",
            f"{case.bar:.2f}",
            "met" if middle <= case.bar else "missed",
        )
    console = Console(width=110)
    console.print(table)
    console.print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}; 1 thread per rank, gloo; "
        f"{options.turns} turns of {options.steps} steps, median of the turns' ratios"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
