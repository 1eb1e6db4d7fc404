"""Host memory of a rank while it starts: `python benchmarks/start.py`.

A GPT of 101 M parameters (403 MB in float32) starts under ZeRO-3 on two and four ranks, built whole,
as `shardwright.build` gets it from a script, and deferred, as `shardwright run` builds it. Measured
in each rank, from before the build until the executor stands: by how much the kernel's high-water
mark of resident pages rises (VmHWM, reset before), capture and all, and the CPU seconds. A small
model of the same kind starts before, so that what Python and torch load once does not count.
Exits 1 where a deferred start takes more than the shards and a quarter of the model.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

# Resident pages follow the tensors only where free() gives pages back at once. The ranks inherit it.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "65536")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from shardwright.demo_model import ByteGPT
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.deferred import build_deferred, deferred_of
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.launch import launch

ALLOWED = 0.25  # of the model, beside the shards


def build(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return ByteGPT(layers=layers, width=width, heads=8)


def pages(name: str) -> float:
    """Return a line of the process's status in bytes: VmRSS, or its high-water mark VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def start(ranks: int, is_deferred: bool, width: int, layers: int) -> tuple[float, float, float]:
    """Start a rank; return by how much resident memory rose at most, the model's bytes, seconds."""
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = pages("VmRSS"), time.process_time()
    make = functools.partial(build, width, layers)
    module = build_deferred(make).module if is_deferred else make()
    assert (deferred_of(module) is not None) == is_deferred
    tokens = torch.zeros(4, 33, dtype=torch.long)
    batch: dict[str, Tensor] = {"tokens": tokens[:, 1:], "targets": tokens[:, :-1]}
    captured = capture(module, batch)
    seed = Seed(data=ranks, zero=3)
    executor = Executor(
        captured,
        lower(captured.graph, seed_strategy(captured.graph, seed)),
        module,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        options=RunOptions(releases=is_deferred),
    )
    risen = pages("VmHWM") - before
    seconds = time.process_time() - begun
    executor.close()
    return risen, 4.0 * sum(parameter.numel() for parameter in module.parameters()), seconds


def measure(ranks: int, is_deferred: bool) -> tuple[float, float, float]:
    """Start a small model, then the large one."""
    start(ranks, is_deferred, 64, 2)
    return start(ranks, is_deferred, 1024, 8)


def main() -> None:
    table = Table("ranks", "built", "model", "shards", "memory risen by", "of the model", "CPU")
    is_bad = False
    for ranks in (2, 4):
        for is_deferred in (False, True):
            results = launch(measure, ranks, (ranks, is_deferred), timeout=600)
            risen, model, seconds = map(max, zip(*results, strict=True))
            is_bad |= is_deferred and risen > model / ranks + ALLOWED * model
            table.add_row(
                str(ranks), "deferred" if is_deferred else "whole", f"{model / 1e6:.0f} MB",
                f"{model / ranks / 1e6:.0f} MB", f"{risen / 1e6:.0f} MB", f"{risen / model:.2f}",
                f"{seconds:.1f} s",
            )  # fmt: skip
    Console().print(table)
    sys.exit(is_bad)


if __name__ == "__main__":
    main()
