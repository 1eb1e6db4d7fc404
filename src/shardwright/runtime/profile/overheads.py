"""What running a rank costs besides operators and the wire: entering segments, buffers of messages, updates,
compressing gradients.

Whatever is timed comes after other operators, whose instructions and data the caches then hold, as
in a step; run again and again it would take half as long. The clock is the thread's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.core.compression import Packing, packed_bytes
from shardwright.core.costs import PACK, UPDATE
from shardwright.core.program import Transform, TransformName, Value
from shardwright.runtime.engine import edge_of, run_backward
from shardwright.runtime.profile.clock import Timing, summarise
from shardwright.runtime.saved_tensors import look_up_saved
from shardwright.runtime.transforms import RUNS

# Bytes of a tensor that is updated, and of all at once, of which there are no more than so many.
_SIZES = (1024, 64 * 1024, 2**20, 4 * 2**20, 16 * 2**20)
_UPDATED_BYTES, _MANY = 16 * 2**20, 32
# As many samples as the seconds allow, between these numbers.
_FEWEST, _MOST, _SECONDS = 9, 200, 0.4
# Elements of a gradient that is compressed, the density of top-k, and the seconds for one of them.
_ELEMENTS, _DENSITY, _PACK_SECONDS = (4096, 2**18), 0.01, 0.03


def time_overheads() -> dict[str, Timing]:
    """Return the fixed seconds of segments, messages and the optimizer, what it takes for one tensor, by
    bytes, and what compressing takes, by elements."""
    others = Others()
    return {
        "overhead|segment_seconds": _segment_seconds(others),
        "overhead|message_seconds": _message_seconds(others),
        **_update_seconds(others),
        **_pack_seconds(others),
    }


class Others:
    """What else runs in a step: a dozen operators on some megabytes."""

    def __init__(self) -> None:
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
    """Return what ``run`` takes after other operators ran."""
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    run()
    while len(samples) < _FEWEST or (len(samples) < _MOST and time.perf_counter() < deadline):
        others()
        begin = time.thread_time()
        run()
        samples.append(time.thread_time() - begin)
    return summarise(samples)


def _segment_seconds(others: Others) -> Timing:
    """Time entering a segment's graph, and its autograd engine, as the interpreter does: halved."""
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.view.default, (node, [8])),))
    run = torch.fx.GraphModule({}, graph).forward
    data: list[Tensor | None] = [torch.rand(8), None]
    seed = torch.rand(8)

    def forward() -> tuple[list[Any], list[Tensor]]:
        held = data[0]
        assert held is not None
        leaf = held.detach().requires_grad_()
        with torch.enable_grad(), look_up_saved(data, ()):
            outputs = run(leaf)
            edges = [edge_of(out) for out in outputs]
        data[1] = outputs[0].detach()
        return edges, [leaf]

    def both() -> None:
        edges, leaves = forward()
        (data[1],) = run_backward(edges, [seed], leaves)

    pair = _after(others, both)
    return replace(pair, seconds=pair.seconds / 2, spread=pair.spread / 2)


def _message_seconds(others: Others) -> Timing:
    """Time making, filling and emptying a buffer: what a message costs besides the wire."""
    source, target = torch.rand(64), torch.empty(64)

    def run() -> None:
        buffer = torch.empty(64)
        buffer.copy_(source)
        target.copy_(buffer.view(64))

    return _after(others, run)


def _update_seconds(others: Others) -> dict[str, Timing]:
    """Time AdamW, as torch chooses to run it: once a step, and per tensor of several sizes.

    Of large tensors caches hold less from one of the optimizer's kernels to the next.
    """
    one = _adamw_seconds(1, _SIZES[0], others)
    many = _adamw_seconds(_MANY, _SIZES[0], others)
    small = max(many.seconds - one.seconds, 0.0) / (_MANY - 1)
    once = max(one.seconds - small, 0.0)
    found = {
        "overhead|update_seconds": replace(one, seconds=once),
        f"{UPDATE}|{_SIZES[0]}": replace(many, seconds=small, spread=many.spread / _MANY),
    }
    for size in _SIZES[1:]:
        count = max(1, min(_MANY, _UPDATED_BYTES // size))
        several = _adamw_seconds(count, size, others)
        found[f"{UPDATE}|{size}"] = replace(
            several,
            seconds=max(several.seconds - once, 0.0) / count,
            spread=several.spread / count,
        )
    return found


def _adamw_seconds(count: int, num_bytes: int, others: Others) -> Timing:
    parameters = [torch.nn.Parameter(torch.rand(num_bytes // 4)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    return _after(others, optimizer.step)


def _pack_seconds(others: Others) -> dict[str, Timing]:
    """Time what compresses gradients, and what adds those of ranks, one rank's."""
    ways: tuple[tuple[Packing, TransformName], ...] = (
        ("top-k", "top-k sum"),
        ("int8", "int8 sum"),
        ("1-bit", "1-bit sum"),
    )
    found: dict[str, Timing] = {}
    for elements in _ELEMENTS:
        gradient = torch.randn(elements)
        for name, addition in ways:
            pack, add = _transform(name), _transform(addition)
            wire = _flat(packed_bytes(name, _DENSITY, elements, "float32"), "uint8")
            read, result = [gradient, torch.zeros(elements)], _flat(elements, "float32")
            message = RUNS[name](pack, read, [wire])[0]
            ends = (partial(RUNS[name], pack, read, [wire]),
                    partial(RUNS[addition], add, [message], [result]))  # fmt: skip
            for what, run in zip((name, addition), ends, strict=True):
                found[f"{PACK}|{what}|{elements}"] = _after(others, run, _PACK_SECONDS)
    return found


def _transform(name: TransformName) -> Transform:
    said = (("dtype", "float32"), ("ranks", 1))
    return Transform(name=name, mesh=0, reads=(), writes=(), purpose="synchronise", constants=said)


def _flat(size: int, dtype: str) -> Value:
    return Value(
        tensor=0, mesh=0, layout=(), shape=(size,), dtype=dtype, scope="step", role="gradient"
    )
