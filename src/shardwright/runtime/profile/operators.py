"""Time operator shards, forward and backward, on real tensors of local shapes.

On a CPU as many processes measure at once as will train at once, because cores share caches and
memory bandwidth; the clock is the thread's own, so that other programs do not count. Several copies
of the tensors take turns, so that caches are as warm as between the operators of a model, not
warmer. The time of starting the autograd engine is taken off the backward.
"""

from __future__ import annotations

import datetime
import math
import pickle
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwright.core.costs import Record, operator_key
from shardwright.core.graph import DTYPE_BYTES, KEPT_AS, OperatorGraph
from shardwright.runtime.localise import localise
from shardwright.runtime.offsets import with_offset
from shardwright.runtime.profile.clock import Timing, measure
from shardwright.runtime.profile.workers import Progress, run_workers

if TYPE_CHECKING:
    from shardwright.runtime.capture import Captured

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Request = tuple[int, Shapes, Shapes]

# All copies of one shard's tensors together; beyond this caches hold nothing of the last turn.
ROTATED_BYTES = 32 * 2**20
MAX_COPIES = 8
# So much of what was made last is kept alive: more than caches hold.
KEPT_BYTES = 192 * 2**20
MAX_KEPT = 64
RECENT = 4
START_SECONDS = 60.0
_LONGEST_SLICE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """How to make one input: ``order`` lists its dims from outermost to innermost in memory."""

    shape: Shape
    dtype: str
    needs_gradient: bool
    high: int
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One operator with local shapes, in a form that can be sent to another process."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[Operand, ...]
    bytes: int
    keys: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """A torch operator by name; torch's own objects cannot be pickled."""

    name: str

    def find(self) -> Callable[..., Any]:
        found: Any = torch.ops
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Under which conditions to measure; ``environment`` names them, processes included."""

    environment: str
    concurrency: int = 1
    device: str = "cpu"
    precision: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process is to measure, in how many seconds, on which torch device."""

    shards: tuple[Shard, ...]
    budget_seconds: float
    device: str


def measure_operators(
    captured: Captured,
    requests: Sequence[Request],
    setting: Setting,
    *,
    budget_seconds: float = 60.0,
    progress: Progress | None = None,
) -> list[Record]:
    """Measure (operator index, local input shapes, local output shapes) requests.

    Equal shards are measured once. Requests that fail, or that the budget does not reach, have no
    record and will be modelled.
    """
    shards: dict[str, Shard] = {}
    for index, inputs, outputs in requests:
        shard = make_shard(captured, (index, inputs, outputs), setting.device, setting.precision)
        if shard is not None:
            shards.setdefault(shard.keys[0], shard)
    if not shards:
        return []
    job = Job(shards=tuple(shards.values()), budget_seconds=budget_seconds, device=setting.device)
    results = run_workers(
        "shardwright.runtime.profile.operators:work",
        [job] * max(setting.concurrency, 1),
        timeout_seconds=2 * budget_seconds + START_SECONDS,
        progress=progress,
    )
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    records: list[Record] = []
    for shard, *timings in zip(job.shards, *results, strict=True):
        for phase, key in enumerate(shard.keys):
            found = [pair[phase] for pair in timings if pair[phase] is not None]
            if found:
                records.append(_record(key, found, setting.environment, now))
    return records


def _record(key: str, timings: list[Timing], environment: str, now: str) -> Record:
    """Merge what the processes saw: the median, and the larger of their spreads and distance."""
    seconds = [timing.seconds for timing in timings]
    apart = (max(seconds) - min(seconds)) / 2
    return Record(
        key=key,
        seconds=statistics.median(seconds),
        spread=max(apart, *(timing.spread for timing in timings)),
        count=sum(timing.count for timing in timings),
        environment=environment,
        measured_at=now,
    )


def make_shard(captured: Captured, request: Request, device: str, precision: str) -> Shard | None:
    """Describe a request's operator with its local arguments; None where it cannot be sent."""
    index, inputs, outputs = request
    graph, call = captured.graph, captured.calls[index]
    operator = graph.operators[index]
    if not outputs:
        return None
    unpadded = _with_halos(graph, index, inputs, outputs)
    args, kwargs = localise(call, operator, outputs, device, unpadded)
    target = call.target
    is_causal = operator.attribute("is_causal") is True
    if is_causal and inputs[0][-2] < graph.tensors[operator.inputs[0]].shape[-2]:
        # The last queries see most keys: the device that has them is waited for.
        target, kwargs = with_offset(operator), {**kwargs, "offset": inputs[1][-2] - inputs[0][-2]}
    if isinstance(target, torch._ops.OpOverload):
        target = Overload(name=str(target))
    operands = tuple(
        Operand(
            shape=shape,
            dtype=_dtype(graph, tensor, precision),
            needs_gradient=graph.tensors[tensor].needs_gradient,
            high=_largest_index(graph, index, position, inputs),
            order=_memory_order(graph, tensor, len(shape)),
        )
        for position, (tensor, shape) in enumerate(zip(operator.inputs, inputs, strict=True))
    )
    sizes = [math.prod(o.shape) * DTYPE_BYTES[o.dtype] for o in operands]
    sizes += [
        math.prod(shape) * DTYPE_BYTES[_dtype(graph, tensor, precision)]
        for tensor, shape in zip(operator.outputs, outputs, strict=True)
    ]
    shard = Shard(
        target=target,
        args=args,
        kwargs=tuple(kwargs.items()),
        operands=operands,
        bytes=sum(sizes),
        keys=tuple(
            operator_key(graph, operator, inputs, outputs, phase, precision)
            for phase in ("forward", "backward")
        ),  # type: ignore[arg-type]
    )
    try:
        pickle.dumps(shard)
    except Exception:  # noqa: BLE001  # pickling runs foreign code; what cannot travel is not timed
        return None
    return shard


def _with_halos(
    graph: OperatorGraph, index: int, inputs: Shapes, outputs: Shapes
) -> tuple[int, ...]:
    """Return the dims in which a shard of an image has rows of its neighbours: those in which it is
    a larger part of its tensor than the result is.
    """
    operator = graph.operators[index]
    if not inputs or len(inputs[0]) != len(outputs[0]):
        return ()
    before, after = (graph.tensors[t].shape for t in (operator.inputs[0], operator.outputs[0]))
    sizes = enumerate(zip(inputs[0], before, outputs[0], after, strict=True))
    return tuple(dim for dim, (a, whole, b, result) in sizes if a * result > b * whole)


def _dtype(graph: OperatorGraph, tensor: int, precision: str) -> str:
    dtype = graph.tensors[tensor].dtype
    return KEPT_AS.get(precision, precision) if dtype == "float32" else dtype


def _largest_index(graph: OperatorGraph, index: int, position: int, inputs: Shapes) -> int:
    """Return the exclusive bound of an integer input: rows, classes or positions it may name."""
    operator = graph.operators[index]
    kind = operator.kind.split(".")[1]
    if not inputs or not inputs[0]:
        return 2
    if kind == "embedding":
        return inputs[operator.input_named("weight")][0]
    if kind in {"cross_entropy_sum", "cross_entropy_loss", "nll_sum", "nll_loss", "nll_loss_nd"}:
        return inputs[0][1] if len(inputs[0]) > 1 else max(inputs[0])
    if kind in {"token_cross_entropy_sum", "vocabulary_cross_entropy_sum"}:
        return inputs[0][-1]
    if kind in {"gather", "index_select", "scatter", "scatter_add", "index_add", "take_along_dim"}:
        dim = operator.attribute("dim", 0)
        return inputs[0][dim] if isinstance(dim, int) else 1
    if kind in {"index", "index_put"} and position > 0:
        return min(inputs[0])
    return 2


def _memory_order(graph: OperatorGraph, tensor: int, rank: int) -> tuple[int, ...]:
    """Return a tensor's dims from outermost to innermost, following transposes back."""
    plain = tuple(range(rank))
    producer = graph.tensors[tensor].producer
    if producer < 0:
        return plain
    operator = graph.operators[producer]
    kind = operator.kind.split(".")[1]
    if kind == "scaled_dot_product_attention" and rank == 4:
        return (0, 2, 1, 3)
    if kind not in {"transpose", "permute", "t"} or not operator.inputs:
        return plain
    before = _memory_order(graph, operator.inputs[0], rank)
    if kind == "permute":
        dims = operator.attribute("dims")
        moved = (
            tuple(d % rank for d in dims if isinstance(d, int)) if isinstance(dims, tuple) else ()
        )
    else:
        ends = (0, 1) if kind == "t" else (operator.attribute("dim0"), operator.attribute("dim1"))
        swap = {int(str(ends[0])) % rank: int(str(ends[1])) % rank}
        swap |= {b: a for a, b in swap.items()}
        moved = tuple(swap.get(d, d) for d in range(rank))
    return tuple(moved.index(d) for d in before) if sorted(moved) == list(plain) else plain


def work(
    rank: int, job: Job, directory: Path, report: Progress
) -> list[tuple[Timing | None, Timing | None]]:
    """Measure a job's shards one after another: the body of one process."""
    torch.set_num_threads(1)
    engine = _engine_seconds(job.device)
    deadline = time.perf_counter() + job.budget_seconds
    found: list[tuple[Timing | None, Timing | None]] = []
    for done, shard in enumerate(job.shards):
        left = deadline - time.perf_counter()
        share = min(left / (len(job.shards) - done), _LONGEST_SLICE)
        pair: tuple[Timing | None, Timing | None] = (None, None)
        if left > 0:
            try:
                pair = time_shard(shard, job.device, share, engine)
            except (
                RuntimeError,
                TypeError,
                ValueError,
                IndexError,
                NotImplementedError,
                MemoryError,
            ):
                pair = (None, None)
        found.append(pair)
        report(done + 1, len(job.shards))
    return found


def time_shard(
    shard: Shard, device: str, budget_seconds: float, engine_seconds: float
) -> tuple[Timing, Timing | None]:
    """Return the timings of forward and, where a gradient flows, backward."""
    copies = max(1, min(MAX_COPIES, ROTATED_BYTES // max(shard.bytes, 1)))
    target = shard.target.find() if isinstance(shard.target, Overload) else shard.target
    calls: list[tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
    for _ in range(copies):
        tensors = [_make(operand, device) for operand in shard.operands]
        args = tuple(_fill(argument, tensors) for argument in shard.args)
        calls.append((args, {name: _fill(v, tensors) for name, v in shard.kwargs}, tensors))
    on_gpu = device.startswith("cuda")
    wait = torch.cuda.synchronize if on_gpu else _no_wait
    clock = time.perf_counter if on_gpu else time.thread_time

    # Training keeps what an operator made; were it dropped at once, the next run would write into
    # memory that is still in the cache.
    kept: deque[Any] = deque(maxlen=max(1, min(MAX_KEPT, KEPT_BYTES // max(shard.bytes, 1))))

    def forward(number: int) -> None:
        for turn in range(number):
            args, kwargs, _ = calls[turn % copies]
            kept.append(target(*args, **kwargs))
        wait()

    ahead = measure(forward, budget_seconds=budget_seconds * 0.4, clock=clock)
    wanted = [[t for t in tensors if t.requires_grad] for _, _, tensors in calls]
    if not wanted[0]:
        return ahead, None
    made = [_gradient_outputs(target(*args, **kwargs)) for args, kwargs, _ in calls]
    if not made[0]:
        return ahead, None
    seeds = [[torch.rand_like(out) for out in outs] for outs in made]

    # Backward frees as it goes: only what it made last is still alive.
    recent: deque[Any] = deque(maxlen=RECENT)

    def backward(number: int) -> None:
        for turn in range(number):
            which = turn % copies
            gradients = torch.autograd.grad(
                made[which], wanted[which], seeds[which], retain_graph=True, allow_unused=True
            )
            recent.append(gradients)
        wait()

    back = measure(backward, budget_seconds=budget_seconds * 0.6, clock=clock)
    return ahead, Timing(
        seconds=max(back.seconds - engine_seconds, 0.0), spread=back.spread, count=back.count
    )


def _no_wait() -> None:
    """A CPU operator is over when its call returns."""


def _gradient_outputs(result: Any) -> list[Tensor]:
    results = result if isinstance(result, (list, tuple)) else [result]
    return [out for out in results if isinstance(out, Tensor) and out.requires_grad]


def _engine_seconds(device: str) -> float:
    """Return what ``autograd.grad`` costs on one view: a segment pays it once, not per operator."""
    leaf = torch.rand(8, device=device, requires_grad=True)
    out, seed = leaf.view(8), torch.rand(8, device=device)

    def run(number: int) -> None:
        for _ in range(number):
            torch.autograd.grad(out, leaf, seed, retain_graph=True)

    clock = time.perf_counter if device.startswith("cuda") else time.thread_time
    return measure(run, budget_seconds=0.1, clock=clock).seconds


def _make(operand: Operand, device: str) -> Tensor:
    """Make a tensor with the strides it would have: positive numbers, indices in range."""
    shape = [operand.shape[dim] for dim in operand.order]
    dtype = getattr(torch, operand.dtype)
    if operand.dtype == "bool":
        base = torch.rand(shape, device=device) < 0.5
    elif dtype.is_floating_point or dtype.is_complex:
        base = torch.rand(shape, device=device).add_(0.1).to(dtype)
    else:
        base = torch.randint(0, max(operand.high, 1), shape, device=device).to(dtype)
    place = [operand.order.index(dim) for dim in range(len(shape))]
    tensor = base.permute(place) if place else base
    return tensor.detach().requires_grad_(operand.needs_gradient)


def _fill(argument: Any, tensors: list[Tensor]) -> Any:
    if isinstance(argument, (list, tuple)):
        return type(argument)(_fill(item, tensors) for item in argument)
    is_slot = type(argument).__name__ == "Slot"
    return tensors[argument.index] if is_slot else argument
