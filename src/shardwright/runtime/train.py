"""The loop around an Executor: seeds, optimizer, resuming, checkpoints, stopping, measuring.

It decides nothing about parallelism. Every rank runs it with the same options and the same batches.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.timeline import Timeline
from shardwright.errors import InputError
from shardwright.runtime.capture.models import ModelSource
from shardwright.runtime.deferred import Built, build_deferred
from shardwright.runtime.executor import Executor, OptimizerFactory
from shardwright.runtime.forecast import Forecast
from shardwright.runtime.profile import num_local_devices
from shardwright.runtime.status import INTERRUPTION
from shardwright.runtime.stream import TrainingStep

SEED = 0

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step as it went. ``gradient_norm`` is that before clipping, None without it.
    ``input_seconds``: how long it waited for its batch, before its ``seconds``. ``forecast``: of predicted weights,
    of an earlier batch, where one is new."""

    number: int
    loss: float
    seconds: float
    gradient_norm: float | None = None
    input_seconds: float = 0.0
    forecast: Forecast | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """How long to train, and where and how often checkpoints are written ("" for none).

    ``steps`` counts from the beginning of training, not from a resume. ``held_out`` batches are
    evaluated at the end; where it ``profiles``, a timeline is measured in further steps.
    """

    steps: int
    checkpoint_dir: str = ""
    checkpoint_every: int = 100
    resume: bool = False
    held_out: tuple[dict[str, Tensor], ...] = ()
    profiles: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEnd:
    """How training ended. ``checkpoint`` is the last one written, "" if none; ``signal``: which ended it
    early, 0 for none. ``waits``: seconds that each step of this rank waited for its batch."""

    first_step: int
    checkpoint: str
    is_complete: bool
    signal: int = 0
    timeline: Timeline | None = None
    held_out: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    waits: tuple[float, ...] = ()


def named_optimizer(name: str, learning_rate: float) -> OptimizerFactory:
    """Return a factory of a torch optimizer by its plan name."""
    return functools.partial(OPTIMIZERS[name], lr=learning_rate)


def build_seeded(source: ModelSource) -> nn.Module:
    """Build a model with equal random weights on every rank."""
    torch.manual_seed(SEED)
    return source.build("cpu")


def build_sharded(source: ModelSource) -> Built:
    """Build the same model without memory for its parameters, where that is possible: an executor
    makes them one at a time, with the same numbers."""
    torch.manual_seed(SEED)
    return build_deferred(lambda: source.build("cpu"))


def train(
    executor: Executor,
    batches: Callable[[int], Iterator[dict[str, Tensor]]],
    options: LoopOptions,
    tell: Callable[[Step], bool],
    loader: Any = None,
) -> LoopEnd:
    """Train to ``options.steps``, telling every step. ``batches(start)`` yields from step
    ``start``; where there is a ``loader``, epochs of that are trained on instead.

    Stops after a step once any rank was interrupted, or was told so by ``tell``, writing a
    checkpoint where they are kept. Of an asynchronous pipeline a step is told when its loss is known, some steps
    later, and the last ones when it is flushed at the end.
    """
    if options.resume:
        executor.load(options.checkpoint_dir)
    first, trained_on = executor.steps, list[dict[str, Tensor]]()
    checkpoint, before, waits = "", time.perf_counter(), list[float]()
    known: Forecast | None = None
    if loader is None:
        drawn = itertools.islice(batches(first), max(options.steps - first, 0))
        steps = executor.train(_keeping(drawn, trained_on) if options.profiles else drawn)
    else:
        steps = _epochs(executor, loader, options.steps)
    for step in steps:
        loss = float(step.loss)  # waits for the device, so that its time counts
        waits.append(step.input_seconds)
        news = executor.forecast if executor.forecast is not known else None
        known = executor.forecast
        seconds = time.perf_counter() - before - step.input_seconds
        if step.left is not None and tell(_told(step, step.left, loss, seconds, news)):
            INTERRUPTION.ask()  # all ranks agree on it in the next step
        if _is_due(executor, options, step):
            extra: dict[str, Any] = {"step": step.number}
            extra |= {} if step.left is None else {"loss": loss}
            checkpoint = str(executor.save(options.checkpoint_dir, extra))
        if executor.interrupted:
            break
        before = time.perf_counter()
    _tell_rest(executor, tell)
    is_complete = executor.steps >= options.steps
    if not is_complete and not executor.interrupted:
        raise InputError(
            f"training needs a batch for each of its steps, but they ended after "
            f"{executor.steps} of {options.steps}; ask for fewer steps, or let them begin again"
        )
    end = LoopEnd(
        first_step=first,
        checkpoint=checkpoint,
        is_complete=is_complete,
        signal=0 if is_complete else INTERRUPTION.number,
        waits=tuple(waits),
    )
    held_out = [float(executor.evaluate(batch)) for batch in options.held_out]
    profiles = options.profiles and executor.program.strategy.pipeline.is_flushed
    # Any batch will do: data may have ended with the last step.
    timeline = executor.profile_step((trained_on or [next(batches(0))])[0]) if profiles else None
    return replace(end, timeline=timeline, held_out=tuple(held_out))


def _keeping(
    batches: Iterator[dict[str, Tensor]], first: list[dict[str, Tensor]]
) -> Iterator[dict[str, Tensor]]:
    """Yield batches, and keep the first of them."""
    for batch in batches:
        if not first:
            first.append(batch)
        yield batch


def _told(
    step: TrainingStep, number: int, loss: float, seconds: float, forecast: Forecast | None
) -> Step:
    norm = step.gradient_norm
    return Step(
        number=number,
        loss=loss,
        seconds=seconds,
        gradient_norm=None if norm is None else float(norm),
        input_seconds=step.input_seconds,
        forecast=forecast,
    )


def _is_due(executor: Executor, options: LoopOptions, step: TrainingStep) -> bool:
    """Whether a checkpoint is to be written after a step."""
    if executor.interrupted or step.number == options.steps:
        return bool(options.checkpoint_dir)
    return bool(options.checkpoint_dir) and step.number % options.checkpoint_every == 0


def _epochs(executor: Executor, loader: Any, last: int) -> Iterator[TrainingStep]:
    """Train epoch after epoch to the step ``last``, as long as they have batches."""
    empty = 0  # one may be: a checkpoint was saved behind its last batch
    while executor.steps < last and empty < 2:
        before = executor.steps
        for step in executor.train(loader):
            yield step
            if executor.interrupted or executor.steps >= last:
                return
        empty = 0 if executor.steps > before else empty + 1


def _tell_rest(executor: Executor, tell: Callable[[Step], bool]) -> None:
    """Tell the steps whose losses come only when an asynchronous pipeline is flushed."""
    before = time.perf_counter()
    left = executor.flush()
    seconds = (time.perf_counter() - before) / max(len(left), 1)
    for one in left:
        tell(Step(number=one.number, loss=float(one.loss), seconds=seconds))


def train_alone(
    source: ModelSource,
    batches: Iterator[dict[str, Tensor]],
    optimizer: OptimizerFactory,
    steps: int,
    tell: Callable[[Step], None],
) -> nn.Module:
    """Train in this process with plain PyTorch on all cores: the yardstick of a plan's losses."""
    torch.set_num_threads(num_local_devices())
    module = build_seeded(source).train()
    engine = optimizer(list(module.named_parameters()))
    for number in range(steps):
        start = time.perf_counter()
        loss = module(**next(batches))
        loss = loss if isinstance(loss, Tensor) else loss.loss
        loss.backward()
        engine.step()
        engine.zero_grad()
        tell(
            Step(number=number + 1, loss=float(loss.detach()), seconds=time.perf_counter() - start)
        )
    return module
