"""What one plain training step takes of a device's memory, measured."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.allocations import allocations
from shardwright.runtime.capture.prepare import find_loss
from shardwright.runtime.capture.source import ModelSource
from shardwright.runtime.endings import is_exhaustion
from shardwright.runtime.settings import recomputed
from shardwright.runtime.train import OPTIMIZERS, build_seeded

STEPS = 2  # an optimizer makes its states in the first one


def step_bytes(
    source: ModelSource,
    batch_size: int,
    seq: int | None = None,
    *,
    optimizer: str = "adamw",
    precision: str = "float32",
    recompute: bool = False,
) -> float:
    """Return the most bytes that tensors of a training step take on this machine's device, model and optimizer
    included; inf where there is no memory for it. Other than float32, ``precision`` is autocast's."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def train() -> None:
        module = build_seeded(source).to(device).train()
        batch = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in source.example(batch_size, seq).items()
        }
        _train(recomputed(module) if recompute else module, batch, optimizer, precision)

    is_gpu = device.type == "cuda"
    try:
        found = _gpu_peak(train, device) if is_gpu else _cpu_peak(train)
    except Exception as error:
        if not is_exhaustion(error):
            raise
        found = math.inf
    if is_gpu or math.isinf(found):
        gc.collect()  # what a step left in cycles, a failed one above all
    if is_gpu:
        torch.cuda.empty_cache()
    return found


def _train(module: nn.Module, batch: Mapping[str, Any], optimizer: str, precision: str) -> None:
    update = OPTIMIZERS[optimizer](module.parameters(), lr=0.0)
    dtype = getattr(torch, precision)
    kind = next(module.parameters()).device.type
    for _ in range(STEPS):
        with torch.autocast(kind, dtype, enabled=dtype != torch.float32):
            loss = find_loss(module(**batch))
        loss.backward()
        update.step()
        update.zero_grad(set_to_none=True)


def _gpu_peak(train: Any, device: torch.device) -> float:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    train()
    return float(torch.cuda.max_memory_allocated(device) - before)


def _cpu_peak(train: Any) -> float:
    """Add up what torch's allocator gives and takes back."""
    held = most = 0
    for _, change in allocations(train):
        held += change
        most = max(most, held)
    return float(most)
