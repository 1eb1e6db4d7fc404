"""Train by a Program and by plain PyTorch, and say how far the two are apart.

The yardstick is the unmodified module in this process, in float64, on the whole batch. Plain
momentum SGD: what Adam does hardly depends on how large a gradient is, and would hide a gradient
that is counted twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardwright.core.program import Program
from shardwright.core.strategy import Precision
from shardwright.errors import InputError, RunError
from shardwright.runtime.capture import Captured, CapturedCall
from shardwright.runtime.capture.hooks import Opaque
from shardwright.runtime.capture.models import ModelSource, resize
from shardwright.runtime.capture.prepare import find_loss, in_precision, real_twin
from shardwright.runtime.deferred import copy_deferred
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.gather import whole_tensors
from shardwright.runtime.inputs import Batch, named
from shardwright.runtime.local_world import run_locally
from shardwright.runtime.randomness import WithoutDropout, is_dropout, is_random
from shardwright.runtime.segment import with_settings
from shardwright.runtime.store import DTYPES
from shardwright.runtime.world import World

OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
# Arguments of operators that drop elements with which they drop none.
NO_DROPOUT = {"p": 0.0, "dropout_p": 0.0, "dropout": 0.0}
MAX_NORM = 0.5  # for plans that clip: small, so that the bound is met
SMALLEST_SCALE = 1e-3  # what is smaller than this counts as being of this size
TOLERANCE = 1e-9
SINGLE_TOLERANCE = 1e-5  # where the model itself computes in less than float64

Batches = Sequence[dict[str, Tensor]]
Tell = Callable[[int], None]  # told the number of steps done


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """How a training ended: losses of the steps, then parameters and buffers by name."""

    losses: tuple[float, ...]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far one tensor is from the yardstick's, relative to its largest element."""

    name: str
    role: str
    shape: tuple[int, ...]
    difference: float


def exact_source(source: ModelSource, precision: Precision = "float64") -> ModelSource:
    """Return what builds a model in float64, or another precision, to be trained."""
    dtype = DTYPES[precision]
    return replace(source, make_module=lambda: in_precision(source.make_module(), dtype).train())


def without_dropout(module: nn.Module, captured: Captured) -> tuple[Captured, int]:
    """Set the dropout rates of a module and of its capture to zero; return how many there were."""
    count = switch_off_dropout(module)
    calls: list[CapturedCall] = []
    for call in captured.calls:
        args, kwargs = call.args, call.kwargs
        if isinstance(call.target, Opaque):
            switch_off_dropout(call.target.module)  # a copy, made at capture
        elif is_dropout(call.target):
            args, kwargs = with_settings(call.target, args, kwargs, NO_DROPOUT)
        calls.append(replace(call, args=args, kwargs=kwargs))
    return replace(captured, calls=tuple(calls)), count


def switch_off_dropout(module: nn.Module) -> int:
    """Set all dropout rates of a module to zero; return how many there were."""
    return sum(_without_dropout(part) for part in _parts(module))


def _parts(module: nn.Module) -> Iterator[object]:
    yield from module.modules()
    yield from {
        id(config): config
        for config in (getattr(part, "config", None) for part in module.modules())
        if config is not None
    }.values()


def _without_dropout(part: object) -> int:
    """Set to zero whatever names itself a dropout rate: masks depend on who draws them."""
    is_layer = isinstance(part, nn.modules.dropout._DropoutNd)
    held = getattr(part, "__dict__", {})  # what has slots or is a tuple names nothing
    names = ["p"] if is_layer else [name for name in held if "drop" in name]
    found = [name for name in names if isinstance(getattr(part, name), float)]
    found = [name for name in found if getattr(part, name) > 0]
    for name in found:
        with contextlib.suppress(
            AttributeError
        ):  # frozen: who asks it for a rate is told 0 by the graph
            setattr(part, name, 0.0)
    return len(found)


def random_operators(captured: Captured) -> tuple[str, ...]:
    """Return the names of operators that draw random numbers."""
    return tuple(
        operator.name
        for operator, call in zip(captured.graph.operators, captured.calls, strict=True)
        if is_random(call.target, call.args, call.kwargs)
    )


def draws_inside(module: nn.Module, captured: Captured, batch: dict[str, Tensor]) -> bool:
    """Whether opaque modules, which nobody can see into, draw random numbers besides dropout."""
    if not any(isinstance(call.target, Opaque) for call in captured.calls):
        return False
    losses: list[float] = []
    with torch.random.fork_rng(devices=[]), WithoutDropout():
        for seed in (0, 1):
            torch.manual_seed(seed)
            losses.append(float(find_loss(real_twin(module)(**batch)).detach()))
    return losses[0] != losses[1]


def is_exact(captured: Captured) -> bool:
    """Whether the model computes in float64 throughout, once it is asked to, in opaque modules too."""
    dtypes = {tensor.dtype for tensor in captured.graph.tensors}
    for call in captured.calls:
        if isinstance(call.target, Opaque):
            dtypes |= {str(dtype).removeprefix("torch.") for dtype in call.target.makes}
    return not dtypes & {"float32", "bfloat16", "float16"}


def exact_batches(source: ModelSource, size: int, seq: int | None, steps: int) -> Batches:
    """Return different batches in float64: the model's own data, else its example, rolled.

    An example of equal numbers would train nothing, and is replaced by normal ones.
    """
    found = source.first(size, seq, steps)
    if len(found) < steps:
        raise InputError(
            f"verifying takes a batch for each of its {steps} steps, but the data of model {source.name!r} "
            f"ends after {len(found)}; ask for fewer steps (--steps), or let it begin again"
        )
    if source.make_batches is not None:
        example = source.example(size, seq)
        found = [_as_planned(batch, example) for batch in found]
    else:
        filled = {name: _varied(tensor) for name, tensor in found[0].items()}
        found = [
            {
                name: tensor.roll(step * place, 0) if tensor.dim() else tensor
                for place, (name, tensor) in enumerate(filled.items(), 1)
            }
            for step in range(steps)
        ]
    return [{name: _double(tensor) for name, tensor in batch.items()} for batch in found]


def _as_planned(batch: Batch, example: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the planned model is given of a batch, which may be a sequence, or have more entries, or other
    numbers of samples than it was asked for."""
    entries = named(batch, example)
    wrong = [name for name in example if not isinstance(entries.get(name), Tensor)]
    if wrong:
        raise InputError(
            f"a batch must have the tensors {list(example)}, as the example batch has, but {wrong[0]!r} is none of "
            f"{type(batch).__name__} {list(entries)}; let the training data give it"
        )
    return {name: _of_size(entries[name], tensor) for name, tensor in example.items()}


def _of_size(tensor: Tensor, example: Tensor) -> Tensor:
    """Repeat or drop samples until there are as many as in the example."""
    return resize(tensor, len(example)) if tensor.dim() and example.dim() else tensor


def _varied(tensor: Tensor) -> Tensor:
    is_flat = tensor.is_floating_point() and tensor.numel() > 1
    if not is_flat or bool((tensor != tensor.flatten()[0]).any()):
        return tensor
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def in_single(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch in float32."""
    return {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}


def train_plainly(module: nn.Module, batches: Batches, *, clips: bool, tell: Tell) -> Trained:
    """Train a copy of a module with plain PyTorch in this process."""
    module = real_twin(module)
    optimizer = OPTIMIZER(module.parameters())
    losses: list[float] = []
    for number, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        with WithoutDropout():
            # A forward may write what it is given, which the ranks are to be given as it was.
            loss = find_loss(module(**{name: _copied(one) for name, one in batch.items()}))
            loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
        tell(number)
    named = [*module.named_parameters(), *module.named_buffers()]
    return Trained(losses=tuple(losses), tensors={name: one.detach() for name, one in named})


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def train_as_rank(
    captured: Captured,
    program: Program,
    module: nn.Module,
    batches: Batches,
    *,
    world: World | None = None,
    tell: Tell,
) -> Trained:
    """Train a module, which is this rank's to empty, by a Program; the first rank returns the tensors."""
    max_norm = MAX_NORM if program.strategy.clips else None
    executor = Executor(
        captured,
        program,
        module,
        optimizer=OPTIMIZER,
        options=RunOptions(max_norm=max_norm, world=world, releases=True),
    )
    losses: list[float] = []
    for number, batch in enumerate(batches, 1):
        with WithoutDropout():  # opaque modules may call it
            losses.append(float(executor.step(batch)))
        if executor.rank == 0:
            tell(number)
    is_first = executor.rank == 0
    whole = whole_tensors(executor.machine)  # one at a time: the other ranks keep none
    tensors = {name: tensor for name, tensor in whole if is_first}
    executor.close()
    return Trained(losses=tuple(losses), tensors=tensors)


def train_here(
    captured: Captured, program: Program, module: nn.Module, batches: Batches, tell: Tell
) -> list[Trained]:
    """Train copies of a module by a Program with all its ranks in this process."""

    def rank(world: World) -> Trained:
        own = copy_deferred(module)
        return train_as_rank(captured, program, own, batches, world=world, tell=tell)

    return run_locally(rank, len(program.strategy.devices))[0]


def gaps(ranks: Sequence[Trained], yardstick: Trained, captured: Captured) -> tuple[Gap, ...]:
    """Return the loss (of the worst rank and step) and every tensor, the largest gap first.

    Buffers that the graph does not have are left out: nothing trains them.
    """
    if not all(torch.tensor(yardstick.losses).isfinite()):
        raise RunError(
            f"plain training must have finite losses to compare with, but they are "
            f"{', '.join(f'{loss:.3g}' for loss in yardstick.losses)}; "
            "check the model and its example batch"
        )
    roles = {
        tensor.name: tensor.role
        for tensor in captured.graph.tensors
        if tensor.role in ("parameter", "buffer")
    }
    expected = torch.tensor(yardstick.losses, dtype=torch.float64)
    worst = [_gap(torch.tensor(rank.losses, dtype=torch.float64), expected) for rank in ranks]
    found = [Gap(name="loss", role="loss", shape=(), difference=_largest(worst))]
    for name, tensor in yardstick.tensors.items():
        if (role := roles.get(name)) is not None:
            difference = _gap(ranks[0].tensors[name], tensor)
            found.append(
                Gap(name=name, role=role, shape=tuple(tensor.shape), difference=difference)
            )
    return tuple(sorted(found, key=lambda gap: -gap.difference))


def _gap(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    found, expected = (_as_real(tensor).double() for tensor in (found, expected))
    # Masks are of minus infinity: less itself that is no number, and as a scale it would hide all else.
    apart = torch.where(found == expected, 0.0, (found - expected).abs())
    finite = torch.where(expected.isfinite(), expected, 0.0)
    gap = float(apart.max()) / max(float(finite.abs().max()), SMALLEST_SCALE)
    return gap if gap == gap else float("inf")  # noqa: PLR0124  # NaN is as far as can be


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _largest(numbers: Sequence[float]) -> float:
    return max(numbers, default=0.0)
