"""Out of and into an executor: parameters, checkpoints and weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.runtime import checkpoint, gather, weights
from shardwright.runtime.flushless import Left
from shardwright.runtime.interpreter import Machine
from shardwright.runtime.loss import LossSum
from shardwright.runtime.reading import Reader
from shardwright.runtime.scaling import LossScaler
from shardwright.runtime.world import TorchWorld, World


class Keeping(ABC):
    """What an executor can do with what it trains, besides training it."""

    machine: Machine
    world: World
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    loss: LossSum
    reader: Reader

    @abstractmethod
    def drain(self) -> None:
        """Let all batches leave; their losses are returned by the steps, or the flush, to come."""
        ...

    @abstractmethod
    def flush(self) -> list[Left]:
        """Let all batches leave; return the losses that no step returned yet."""
        ...

    def full_parameters(self) -> dict[str, Tensor]:
        """Gather every parameter whole, by name, on every rank (a collective call)."""
        self.drain()
        return gather.full_parameters(self.machine)

    def to_module(self, module: nn.Module) -> None:
        """Write parameters and buffers into a plain module on every rank (a collective call)."""
        self.drain()
        gather.to_module(self.machine, module)

    def save(self, directory: str | Path, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint atomically (a collective call); returns its own directory.

        ``extra`` is the script's own state: numbers, text, lists, tuples, dicts and tensors, such
        as a scheduler's ``state_dict()``; that of rank 0 is kept.
        """
        self.check_processes("a checkpoint")
        self.drain()
        self.loss.check_last()
        more = self.reader.beside(extra or {})
        return checkpoint.save(self.machine, self.optimizer, Path(directory), more, self.scaler)

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Load a checkpoint of any plan for this model (a collective call); returns ``extra``."""
        self.check_processes("a checkpoint")
        self.flush()
        extra = checkpoint.load(self.machine, self.optimizer, Path(directory), self.scaler)
        return self.reader.restore(extra, Path(directory))

    def export(self, path: str | Path) -> Path:
        """Write the weights as one safetensors file (a collective call); returns its path."""
        self.check_processes("an export")
        self.drain()
        self.loss.check_last()
        return weights.export(self.machine, path)

    def load_weights(self, path: str | Path) -> None:
        """Start from a safetensors file, or a folder of them (a collective call)."""
        self.check_processes("loading weights")
        self.drain()
        weights.load_weights(self.machine, path)

    def check_processes(self, what: str) -> None:
        """Refuse what ranks that are threads cannot do."""
        if not isinstance(self.world, TorchWorld):
            raise InputError(
                f"{what} needs one process per rank, but all ranks are in this one; use the "
                "launcher, or torchrun"
            )
