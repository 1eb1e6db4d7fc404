"""What is measured before gradients are planned: when each is ready, what messages and selections take.

All ranks call these together and get equal numbers: those of the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwright.errors import InputError

Sizes = NDArray[np.float64]
Loss = Callable[[Any], Tensor]
SMALLEST = 4096  # bytes of the smallest message that is timed; below it time hardly changes
GROWTH = 4.0


@dataclass(frozen=True, slots=True)
class Backward:
    """Parameters in the order in which their gradients are ready, when that is (seconds from the
    beginning of backward), their bytes, and the seconds of forward."""

    names: tuple[str, ...]
    ready_seconds: tuple[float, ...]
    sizes_bytes: tuple[int, ...]
    forward_seconds: float


def run_model(model: nn.Module, batch: Any, loss: Loss | None = None) -> Tensor:
    """Return the loss of a batch: a mapping of keywords, a tuple of arguments, or one argument.

    Without ``loss`` the model returns it, or something whose ``loss`` it is.
    """
    if isinstance(batch, Mapping):
        found = model(**batch)
    else:
        found = model(*batch) if isinstance(batch, tuple) else model(batch)
    if loss is None:
        value = found if isinstance(found, Tensor) else getattr(found, "loss", None)
        who = f"this model returns {_named(found)}"
    else:
        value = loss(found)
        who = f"loss= returns {_named(value)}"
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise InputError(
            f"a step is timed from its loss, a tensor of one number that gradients flow from, but {who}; give "
            "loss=, a function from what the model returns to that"
        )
    return value


def _named(value: object) -> str:
    """Say what a value is, for complaints."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    grown = "" if value.requires_grad else " that needs no gradient"
    return f"a tensor of shape {tuple(value.shape)}{grown}"


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """Leave a model's gradients and buffers, and torch's random numbers, as they are, whatever happens to them."""
    gradients = [(one, one.grad) for one in model.parameters()]
    values = [(one, one.clone()) for one in model.buffers()]
    # A step may also put another tensor in a buffer's place.
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for now, before in places:
            now.clear()
            now.update(before)
        with torch.no_grad():
            for one, value in values:
                one.copy_(value)
        for one, gradient in gradients:
            one.grad = gradient


def measure_backward(
    model: nn.Module, batch: Any, loss: Loss | None, group: ProcessGroup, steps: int
) -> Backward:
    """Time the gradients of a model that nothing communicates yet: medians of some steps.

    The model is left as it was found. Raises InputError where a parameter gets no gradient.
    """
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    device = next(iter(named.values())).device
    with left_alone(model):
        laps = [_lap(model, batch, loss, named) for _ in range(steps + 1)][1:]  # the first warms up
    _check_used(named, laps[-1][1])
    order = _agreed(list(laps[-1][1]), group)
    medians = [statistics.median(ready[name] for _, ready in laps) for name in order]
    forward = statistics.median(seconds for seconds, _ in laps)
    slowest = _slowest([*medians, forward], group, device)
    return Backward(
        names=tuple(order),
        ready_seconds=tuple(np.maximum.accumulate(slowest[:-1]).tolist()),
        sizes_bytes=tuple(named[name].numel() * named[name].element_size() for name in order),
        forward_seconds=slowest[-1],
    )


def _check_used(named: Mapping[str, nn.Parameter], ready: Mapping[str, float]) -> None:
    unused = sorted(set(named) - set(ready))
    if unused:
        raise InputError(
            "every trained parameter must get a gradient, but these get none: "
            f"{', '.join(unused[:5])}; freeze them (requires_grad=False), or use the default buckets"
        )


def _lap(
    model: nn.Module, batch: Any, loss: Loss | None, named: Mapping[str, nn.Parameter]
) -> tuple[float, dict[str, float]]:
    """Run once; return the seconds of forward, and after how many of backward each gradient was ready."""
    device = next(iter(named.values())).device
    for one in named.values():
        one.grad = None
    begun = _now(device)
    value = run_model(model, batch, loss)
    start = _now(device)
    ready = _time_gradients(named, value, device)
    return start - begun, {name: at - start for name, at in ready.items()}


def _time_gradients(
    named: Mapping[str, nn.Parameter], value: Tensor, device: torch.device
) -> dict[str, float]:
    """Run backward; return when each gradient was ready, in that order."""
    ready = dict[str, float]()

    def note(name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            ready[name] = _now(device)

        return hook

    handles = [one.register_post_accumulate_grad_hook(note(name)) for name, one in named.items()]
    try:
        value.backward()
    finally:
        for handle in handles:
            handle.remove()
    return ready


def measure_messages(
    send: Callable[[int], None],
    largest: int,
    group: ProcessGroup,
    device: torch.device,
) -> Callable[[Sizes], Sizes]:
    """Time messages of some sizes up to the largest; return seconds by bytes, linear in between."""
    count = max(2, 1 + int(np.ceil(np.log(max(largest / SMALLEST, 2)) / np.log(GROWTH))))
    sizes = np.geomspace(SMALLEST, max(largest, 2 * SMALLEST), count)
    seconds = []
    for size in sizes:
        laps = [time_step(lambda size=size: send(int(size)), group, device) for _ in range(6)]
        seconds.append(statistics.median(laps[1:]))
    shared = np.array(_slowest(seconds, group, device))
    slope = (shared[-1] - shared[-2]) / (sizes[-1] - sizes[-2])

    def cost(asked: Sizes) -> Sizes:
        beyond = np.maximum(asked - sizes[-1], 0) * max(slope, 0.0)
        return np.interp(asked, sizes, shared) + beyond

    return cost


def measure_all_reduce(
    largest: int, group: ProcessGroup, device: torch.device, beside: int = 1
) -> Callable[[Sizes], Sizes]:
    """Time torch's own all-reduce, which DistributedDataParallel calls: alone, or one of so many that are under way at
    once, of whose bytes the largest has a share."""
    memory = torch.zeros(max(largest, 2 * SMALLEST) // 4, device=device)

    def send(size: int) -> None:
        parts = memory[: size // 4].chunk(beside)
        for work in [dist.all_reduce(one, group=group, async_op=True) for one in parts]:
            work.wait()  # type: ignore[union-attr]

    together = measure_messages(send, largest, group, device)
    return lambda asked: together(asked * beside) / beside


def _now(device: torch.device) -> float:
    """Return the time when all that was asked of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _agreed(order: Sequence[str], group: ProcessGroup) -> list[str]:
    """Return the first rank's order, by which DistributedDataParallel fills buckets, too."""
    shared: list[Any] = [list(order)]
    dist.broadcast_object_list(shared, src=dist.get_global_rank(group, 0), group=group)
    return shared[0]


def _slowest(seconds: Sequence[float], group: ProcessGroup, device: torch.device) -> list[float]:
    shared = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return shared.tolist()


def slowest_median(laps: Sequence[float], group: ProcessGroup, device: torch.device) -> float:
    """Return the median over steps of the slowest rank's seconds."""
    return statistics.median(_slowest(laps, group, device))


def time_step(run: Callable[[], None], group: ProcessGroup, device: torch.device) -> float:
    """Return the seconds of a step that all ranks begin together."""
    dist.barrier(group)
    start = _now(device)
    run()
    return _now(device) - start
