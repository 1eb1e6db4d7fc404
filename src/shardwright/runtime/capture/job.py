"""One capture: what it is given, and what is seen of the model on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.errors import CaptureError
from shardwright.runtime.capture.counting import Answering, Flops, Work
from shardwright.runtime.capture.drawing import drawn_numbers
from shardwright.runtime.capture.halves import HALVES, names_half, refuse
from shardwright.runtime.capture.known import known_of
from shardwright.runtime.capture.observe import Observation, observe, watch_runs
from shardwright.runtime.capture.prepare import Batch, LossOnly
from shardwright.runtime.capture.record import Unsupported
from shardwright.runtime.capture.skipping import Skips


@dataclass(frozen=True, kw_only=True)
class Job:
    """One capture: the user's module, its batch, and how to make a fake copy. ``knows``: it is traced with the
    values of what says sizes."""

    module: nn.Module
    named: dict[str, Any]
    batch: Batch
    outputs: tuple[str, ...]
    name: str
    synchronised: bool
    dtype: torch.dtype | None
    copied: Callable[[], nn.Module]
    skips: Skips | None = None
    knows: bool = False

    @cached_property
    def twin(self) -> nn.Module:
        """The fake copy."""
        return self.wrapper.module

    @cached_property
    def wrapper(self) -> LossOnly:
        """The fake copy, wrapped, in training mode."""
        batch = self.batch
        wrapper = LossOnly(self.copied(), batch.tensors, batch.constants, self.outputs)
        wrapper.skips = self.skips
        if not self.module.training:
            wrapper.train()
        return wrapper

    @property
    def arguments(self) -> dict[str, Tensor]:
        """What the wrapper is called with."""
        return dict(zip(self.wrapper.names, self.batch.tensors.values(), strict=True))

    @property
    def written(self) -> frozenset[str]:
        """The frozen parameters that a run has written, where the model was run."""
        seen = vars(self).get("seen")
        return frozenset() if seen is None else seen.written

    def renew(self) -> None:
        """Forget the fake copy: tracing has changed what it holds in Python."""
        for name in ("twin", "wrapper"):
            vars(self).pop(name, None)

    @cached_property
    def seen(self) -> Observation | None:
        """What a run shows of the model, None where it cannot be run here."""
        try:
            with drawn_numbers(self.module if self.skips else None):
                return observe(self.module, self.named, self.dtype)
        except Unsupported:
            pass
        except CaptureError as error:  # some kernel may have no such precision
            if self.dtype is None:
                raise
            seen = observe(self.module, self.named)
            if self.dtype in HALVES:
                refuse(self.dtype, error)
            return seen
        try:
            return self.seen_without_values
        except CaptureError as error:  # without values this may have any reason
            if names_half(error, self.dtype):
                refuse(self.dtype, error)
            return None

    @property
    def mode(self) -> FakeTensorMode:
        """In which the copies and the batch have no values."""
        return next(iter(self.batch.tensors.values())).fake_mode  # type: ignore[attr-defined, no-any-return]

    @cached_property
    def seen_without_values(self) -> Observation:
        """What a run of a fake copy shows: cheap, but not what depends on values."""
        twin = self.copied().train()
        with self.mode:
            return watch_runs(twin, {**self.batch.tensors, **self.batch.constants})

    @property
    def work_without_values(self) -> Work:
        """What a run of a fake copy takes that asks for values and is told nothing; where that fails, too, it is taken to
        use every parameter once for every number or element of the batch's largest integer tensor."""
        self.renew()
        twin, counted = self.copied().train(), Flops(lambda: None, lambda _: None)
        try:
            with torch.random.fork_rng(), self.mode, counted, Answering():
                result = twin(**self.batch.tensors, **self.batch.constants)
                return counted.since((0.0, 0), result)
        except Exception:  # noqa: BLE001 - what cannot be answered so may have any reason
            numbers = [
                one.numel() for one in self.batch.tensors.values() if not one.is_floating_point()
            ]
            parameters = sum(parameter.numel() for parameter in self.twin.parameters())
            return Work(2.0 * parameters * max(numbers, default=self.rows))

    @property
    def says_sizes(self) -> bool:
        """Whether entries of the batch say sizes."""
        return any(known_of(one) is not None for one in self.batch.tensors.values())

    @property
    def rows(self) -> int:
        """The rows of the batch's first tensor."""
        first = next(iter(self.batch.tensors.values()))
        return first.shape[0] if first.dim() else 1

    def is_harmless(self) -> bool:
        """Whether what forward changes in Python is sure to be without influence on later calls."""
        try:
            seen = self.seen_without_values
        except CaptureError:
            return False
        return seen.is_sure and not seen.whole
