"""What running a rank costs besides operators and the wire: entering segments, buffers of messages, updates,
compressing gradients.

Whatever is timed comes after other operators, whose instructions and data the caches then hold, as
in a step; run again and again it would take half as long. The clock is the thread's own.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.core.compression import Packing, kept_elements, packed_bytes
from shardwright.core.costs import ADD, BACKWARD_STARTS, PACK, PACK_DENSITIES, UPDATE, update_key
from shardwright.core.program import Transform, TransformName, Value
from shardwright.runtime.engine import edge_of, run_backward
from shardwright.runtime.profile.clock import ROUNDS, Timing, middle_of, summarise
from shardwright.runtime.profile.operators import on_device
from shardwright.runtime.profile.segments import Segment
from shardwright.runtime.saved_tensors import look_up_saved
from shardwright.runtime.transforms import RUNS

# Bytes of a tensor that is updated, and of all at once, of which there are no more than so many.
_SIZES = (1024, 64 * 1024, 2**20, 4 * 2**20, 16 * 2**20)
_UPDATED_BYTES, _MANY = 16 * 2**20, 32
_GPU_SIZES, _GPU_UPDATED_BYTES = (1024, 2**20, 16 * 2**20, 128 * 2**20), 256 * 2**20
_GPU_SECONDS, _STARTS = 0.4, 9
# In each round as many samples as the seconds allow, between these numbers.
_FEWEST, _MOST, _SECONDS = 3, 67, 0.13
_UPDATES = 8  # of one size: all ranks must make the same number
_ROW, _ROWS = 8, 15  # segments that follow each other, and how often they do
# Elements of a gradient that is compressed, the density of selections that are merged, and the seconds for one. What
# lies between the first and the last takes up to three tenths less than a straight line from one to the other says.
_ELEMENTS, _DENSITY, _PACK_SECONDS = (4096, 2**16, 2**18), 0.01, 0.01
_COLUMNS = (1, 4)  # of factors
_SUMMED = 4  # ranks whose packs are added up
_CHAIN = 16  # times four operators
# Among the other code of a step starting takes more than again and again: of GPT-2 and ResNet-50 on an H200,
# whose host bound them, 2.6 times (benchmarks/reports/gpu_h200_202611.md).
_IN_A_STEP = 2.6

Action = Callable[[], list[Tensor]]
Meet = Callable[[], object]


def time_overheads(seconds: float = _SECONDS, meet: Meet = lambda: None) -> dict[str, Timing]:
    """Return the fixed seconds of segments, messages and the optimizer, what it takes for one tensor and what adding
    gradients takes, by bytes, and what compressing takes, by elements; each is sampled for so many ``seconds`` at most
    in every one of some rounds (``middle_of``).

    ``meet``: where all ranks of a machine wait for each other, as they do for gradients; then they update at the
    same time, and share its memory.
    """
    others = Others(seconds, meet)
    return middle_of([_round(others) for _ in range(ROUNDS)])


def _round(others: Others) -> dict[str, Timing]:
    return {
        **_segment_seconds(others),
        "overhead|message_seconds": _message_seconds(others),
        "overhead|part_seconds": _part_seconds(others),
        **_updates_on_cpu(others),
        **{f"{ADD}|{size}": _add_seconds(size, others) for size in _SIZES},
        **_pack_seconds(others),
    }


def time_gpu(device: torch.device) -> dict[str, Timing]:
    """Return what the host takes to start an operator on a GPU, and what updates take there."""
    update = partial(_fused_seconds, device=device)
    return {
        "overhead|start_seconds": time_starts(device),
        **_update_seconds(update, _GPU_SIZES, _GPU_UPDATED_BYTES),
    }


class Others:
    """What else runs in a step: a dozen operators on some megabytes. ``seconds``: for how long at most
    something is sampled after them; ``meet``: see ``time_overheads``."""

    def __init__(self, seconds: float = _SECONDS, meet: Meet = lambda: None) -> None:
        self.seconds, self.meet = seconds, meet
        self.x = torch.rand(128, 256)
        self.weight = torch.rand(256, 256)
        self.gain = torch.rand(256, requires_grad=True)
        self.large = torch.rand(2**20)
        self.rows = torch.arange(128) % 256

    def __call__(self) -> None:
        """Run them once, some backward too."""
        y = F.layer_norm(self.x, (256,), self.gain)
        y = F.gelu(F.linear(y, self.weight)).view(128, 4, 64).transpose(0, 1)
        z = torch.softmax(y @ y.transpose(1, 2), -1)
        y = torch.cat([z, z], -1).reshape(128, -1)[:, :256] + F.embedding(self.rows, self.weight)
        torch.autograd.grad(y.sum(), self.gain)
        self.large.mul_(1)


def _after(others: Others, run: Callable[[], Any], seconds: float = _SECONDS) -> Timing:
    """Return what ``run`` takes after other operators ran, sampled for so many seconds."""
    deadline = time.perf_counter() + min(seconds, others.seconds)
    run()

    def goes_on(count: int) -> bool:
        return count < _FEWEST or (count < _MOST and time.perf_counter() < deadline)

    return _sampled(others, run, goes_on)


def _together(
    others: Others, run: Callable[[], Any], prepare: Callable[[], Any] = lambda: None
) -> Timing:
    """Return what ``run`` takes after other operators ran, and something else that is not timed, on all ranks at
    the same time and alike often."""

    def before() -> None:
        others()
        others.meet()
        prepare()

    return _sampled(before, run, lambda count: count < _UPDATES)


def _sampled(
    before: Callable[[], Any], run: Callable[[], Any], goes_on: Callable[[int], bool]
) -> Timing:
    samples: list[float] = []
    while goes_on(len(samples)):
        before()
        begin = time.thread_time()
        run()
        samples.append(time.thread_time() - begin)
    return summarise(samples)


def _segment_seconds(others: Others) -> dict[str, Timing]:
    """Time entering a segment's graph, and its autograd engine, as the interpreter does: the mean of both. Where that
    counts segments are small and follow each other, so several do here, with a layer before each; and by how much
    longer the first of them takes, with its layer, behind other operators."""
    segment = Segment()
    entries: list[float] = []
    begins: list[float] = []
    for _ in range(1 + _ROWS):
        ways = [_row(others, segment, enter) for enter in (segment.forward, segment.backward)]
        entries.append(statistics.mean(entry for entry, _ in ways))
        begins.append(statistics.mean(begin for _, begin in ways))
    return {
        "overhead|segment_seconds": summarise(entries[1:]),
        "overhead|begin_seconds": summarise([max(begin, 0.0) for begin in begins[1:]]),
    }


def _row(others: Others, segment: Segment, enter: Callable[[], None]) -> tuple[float, float]:
    """Return what entering a segment takes in a row of them, and by how much longer the first takes with its layer."""
    others()
    laps: list[tuple[float, float]] = []
    for _ in range(_ROW):
        begin = time.thread_time()
        segment.layer()
        ran = time.thread_time()
        enter()
        laps.append((ran - begin, time.thread_time() - ran))
    later = [statistics.mean(column) for column in zip(*laps[1:], strict=True)]
    return later[1], sum(laps[0]) - sum(later)


def time_starts(device: torch.device) -> Timing:
    """Return what the host takes to start one operator of a step on a GPU which has nothing to wait for:
    backward starts ``BACKWARD_STARTS`` for one of forward. A chain is started again and again here."""
    graph = torch.fx.Graph()
    names = ("x", "weight", "gain")
    x, weight, gain = (graph.placeholder(name) for name in names)
    for _ in range(_CHAIN):
        y = graph.call_function(torch.ops.aten.linear.default, (x, weight))
        y = graph.call_function(torch.ops.aten.layer_norm.default, (y, [32], gain))
        x = graph.call_function(
            torch.ops.aten.add.Tensor, (graph.call_function(torch.ops.aten.gelu.default, (y,)), x)
        )
    graph.output((x,))
    run = torch.fx.GraphModule({}, graph).forward
    data = [torch.rand(shape, device=device) for shape in ((8, 32), (32, 32), (32,))]
    seed = torch.rand((8, 32), device=device)
    samples: list[float] = []
    for _ in range(_STARTS):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        leaves = [one.detach().requires_grad_() for one in data]
        with torch.enable_grad(), look_up_saved([], ()):
            (edge,) = [edge_of(out) for out in run(*leaves)]
        assert edge is not None  # of leaves that want gradients
        run_backward([edge], [seed], leaves)
        each = (time.perf_counter() - begin) / (4 * _CHAIN * (1 + BACKWARD_STARTS))
        samples.append(_IN_A_STEP * each)
    return summarise(samples[1:])


def _message_seconds(others: Others) -> Timing:
    """Time making, filling and emptying a buffer: what a message costs besides the wire."""
    source, target = torch.rand(64), torch.empty(64)

    def run() -> None:
        buffer = torch.empty(64)
        buffer.copy_(source)
        target.copy_(buffer.view(64))

    return _after(others, run)


def _part_seconds(others: Others) -> Timing:
    """Time what each further gradient that travels in a message adds, as the executor lays them side by side."""
    sources = [torch.rand(64) for _ in range(_MANY)]

    def run(count: int) -> None:
        rows = [source.reshape(-1) for source in sources[:count]]
        for row in torch.cat(rows).split([row.numel() for row in rows]):
            row.view(64)

    return _each_further(*(_after(others, partial(run, count)) for count in (1, _MANY)))


def _each_further(one: Timing, many: Timing) -> Timing:
    """Return what each of ``_MANY`` takes besides the first."""
    seconds = max(many.seconds - one.seconds, 0.0) / (_MANY - 1)
    return replace(many, seconds=seconds, spread=many.spread / _MANY)


def _updates_on_cpu(others: Others) -> dict[str, Timing]:
    """Time optimizers by the states they keep, as the executor runs them there (``update.choose_kernels``)."""
    sgd, momentum = torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9)
    found: dict[str, Timing] = {}
    for states, make in enumerate((sgd, momentum, partial(torch.optim.AdamW, fused=True))):
        step = partial(_step_seconds, make, others)
        found |= _update_seconds(step, _SIZES, _UPDATED_BYTES, update_key(states))
    return found


def _update_seconds(
    update: Callable[[int, int], Timing],
    sizes: Sequence[int],
    most_bytes: int,
    name: str = UPDATE,
) -> dict[str, Timing]:
    """Time an optimizer: once a step, and per tensor of several sizes, no more than so many bytes at one time.

    Of large tensors caches hold less from one of the optimizer's kernels to the next.
    """
    one, many = update(1, sizes[0]), update(_MANY, sizes[0])
    small = _each_further(one, many)
    once = max(one.seconds - small.seconds, 0.0)
    found = {
        "overhead|update_seconds": replace(one, seconds=once),
        f"{name}|{sizes[0]}": small,
    }
    for size in sizes[1:]:
        count = max(1, min(_MANY, most_bytes // size))
        several = update(count, size)
        found[f"{name}|{size}"] = replace(
            several,
            seconds=max(several.seconds - once, 0.0) / count,
            spread=several.spread / count,
        )
    return found


def _step_seconds(
    make: Callable[..., torch.optim.Optimizer], others: Others, count: int, num_bytes: int
) -> Timing:
    optimizer = make(_with_gradients(count, num_bytes, torch.device("cpu")))
    optimizer.step()
    return _together(others, optimizer.step)


def _add_seconds(num_bytes: int, others: Others) -> Timing:
    """Time adding what was just made, which caches hold, to one sum of several: to that of its parameter a gradient is
    added once in a microbatch, after all other parameters'."""
    draw = partial(torch.rand, num_bytes // 4)
    sums = cycle([draw() for _ in range(max(1, min(_MANY, _UPDATED_BYTES // num_bytes)))])
    source, made = draw(), list[Tensor]()

    def make() -> None:
        made[:] = [source + 1]

    return _together(others, lambda: next(sums).add_(made[0]), make)


def _fused_seconds(count: int, num_bytes: int, device: torch.device) -> Timing:
    """Time it on a GPU, in one kernel (``update.choose_kernels``)."""
    optimizer = torch.optim.AdamW(_with_gradients(count, num_bytes, device), fused=True)

    def run(number: int) -> None:
        for _ in range(number):
            optimizer.step()

    return on_device(run, str(device), _GPU_SECONDS)


def _with_gradients(count: int, num_bytes: int, device: torch.device) -> list[torch.nn.Parameter]:
    draw = partial(torch.rand, num_bytes // 4, device=device)
    parameters = [torch.nn.Parameter(draw()) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = draw()
    return parameters


def _pack_seconds(others: Others) -> dict[str, Timing]:
    """Time what compresses gradients, the zeros of a sum and what adds one rank's, what merges two selections (by
    elements kept), and what makes factors: of one column more, and what does not depend on columns."""
    found: dict[str, Timing] = {}
    for elements in _ELEMENTS:
        kept = kept_elements(_DENSITY, elements)
        zeros = _after(others, lambda count=elements: torch.zeros(count), _PACK_SECONDS)
        found[f"{PACK}|zeros|{elements}"] = zeros
        ends = [(name, elements, run) for name, run in _packing(elements)]
        ends += [(name, kept, run) for name, run in _merging(elements)]
        for name, count, run in ends:
            timing = _after(others, run, _PACK_SECONDS)
            timing = _of_one(timing, zeros) if " sum" in name else timing
            found[f"{PACK}|{name}|{count}"] = timing
        found |= _factor_seconds(elements, others)
    return found


def _of_one(whole: Timing, zeros: Timing) -> Timing:
    """Return what adding one rank's takes, of a sum of ``_SUMMED`` that begins with zeros."""
    seconds = max(whole.seconds - zeros.seconds, 0.0) / _SUMMED
    return replace(whole, seconds=seconds, spread=whole.spread / _SUMMED)


def _packing(elements: int) -> Iterator[tuple[str, Action]]:
    """Yield what packs a gradient, and what adds the packs of ``_SUMMED`` ranks, in each way."""
    ways: list[tuple[Packing, TransformName, float]] = [
        ("int8", "int8 sum", 1.0),
        ("1-bit", "1-bit sum", 1.0),
        *(("top-k", "top-k sum", density) for density in PACK_DENSITIES),
    ]
    gradient, result = torch.randn(elements), _flat(elements, "float32")
    for name, addition, density in ways:
        wire = _flat(packed_bytes(name, density, elements, "float32"), "uint8")
        read, named = [gradient, torch.zeros(elements)], f"|{density:g}" if density < 1 else ""
        pack = _run(name, read, [wire])
        message = pack()[0].repeat(_SUMMED)
        yield f"{name}{named}", pack
        yield f"{addition}{named}", _run(addition, [message], [result])


def _merging(elements: int) -> Iterator[tuple[TransformName, Action]]:
    """Yield what merges the selections of two, and what takes back what that refused."""
    wire = _flat(packed_bytes("top-k", _DENSITY, elements, "float32"), "uint8")
    residual, state = torch.zeros(elements), _flat(elements, "float32")
    mine, theirs = (
        _run("top-k", [torch.randn(elements), torch.zeros(elements)], [wire])()[0] for _ in range(2)
    )
    merge = _run("merge", [mine, theirs, mine, residual], [wire, wire, state])
    yield "merge", merge
    yield "take back", _run("take back", [mine, merge()[0], residual], [state])


def _factor_seconds(elements: int, others: Others) -> dict[str, Timing]:
    """Time factors of few columns and of more."""
    few, many = (
        {name: _after(others, run, _PACK_SECONDS) for name, run in _factoring(elements, columns)}
        for columns in _COLUMNS
    )
    more = _COLUMNS[1] - _COLUMNS[0]
    slopes = [max(many[name].seconds - few[name].seconds, 0.0) / more for name in few]
    column = sum(slopes) / len(slopes)
    found = {
        f"{PACK}|{name}|{elements}": replace(
            one, seconds=max(one.seconds - _COLUMNS[0] * column, 0.0)
        )
        for name, one in few.items()
    }
    spread = max(one.spread for one in many.values()) / more
    count = min(one.count for one in many.values())
    found[f"{PACK}|rank|{elements}"] = Timing(seconds=column, spread=spread, count=count)
    return found


def _factoring(elements: int, columns: int) -> Iterator[tuple[TransformName, Action]]:
    """Yield PowerSGD's pieces of work on a square gradient."""
    side = math.isqrt(elements)
    gradient, residual = torch.randn(side, side), torch.zeros(side, side)
    factor, whole = torch.randn(side, columns), _flat(elements, "float32")
    first = _run("left factor", [gradient, residual, factor], [whole, whole])
    wide, left = first()
    second = _run("right factor", [wide, left], [whole, whole])
    basis, right = second()
    yield "left factor", first
    yield "right factor", second
    yield "factor sum", _run("factor sum", [wide, basis, right, residual, factor], [whole] * 3)


def _run(name: TransformName, tensors: Sequence[Tensor], results: Sequence[Value]) -> Action:
    """Return what runs a transform as the first of two ranks does, a sum as one of ``_SUMMED``."""
    said = {
        "compressor": "gtop-k", "dtype": "float32", "gradients": 1, "place": 0, "ranks": 2, "turn": 0,
    }  # fmt: skip
    if name.endswith(" sum") and name != "factor sum":
        said["ranks"] = _SUMMED
    transform = Transform(
        name=name, mesh=0, reads=(), writes=(), purpose="synchronise", constants=tuple(said.items())
    )
    return partial(RUNS[name], transform, tensors, results)


def _flat(size: int, dtype: str) -> Value:
    return Value(
        tensor=0, mesh=0, layout=(), shape=(size,), dtype=dtype, scope="step", role="gradient"
    )
