"""Seconds of one operator shard: measured where the table knows it, else a calibrated roofline.

The roofline is max(flops / (efficiency x peak), bytes / (0.7 x memory bandwidth)) plus the device's
launch time. Where the table holds measurements of the same operator kind at other shapes, the
roofline is scaled by their ratio to it, the more the nearer in flops and bytes, so that measured and
unmeasured shards stay comparable in a search.

Efficiencies are fitted, not data-sheet: those of A100 and H100 to 38 published single-node FSDP
runs without recomputation (llm-foundry, 350M to 13B parameters, sequences of 512 to 8192), whose
step they give with 5 % (A100) and 4 % (H100) mean error, at worst 24 % and 14 %; that of V100 to 80
published fp16 products, ``30 us + flops / (0.68 x peak)``, 4 % mean error. The other devices take
what their best published product reaches (``files/hardware.csv``), lowered as H100's is from best to
fitted. Software newer than the fit is faster, most of all attention on H100. The model is wrong for
operators whose kernels are far from either roof (sorting, scans), and knows no caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster, DeviceKind
from shardwright.core.costs import Cost, CostTable, operator_key
from shardwright.core.float8 import FLOAT8, is_float8_product
from shardwright.core.graph import DTYPE_BYTES, KEPT_AS, Operator, OperatorGraph, tensor_bytes
from shardwright.planner.cost.derivatives import (
    OPAQUE,
    base_kind,
    hands_on,
    is_view,
    saved_tensors,
)
from shardwright.planner.cost.fusion import Passing, passing
from shardwright.planner.cost.kernels import Kernels, kernels_of
from shardwright.planner.cost.products import (
    ADDED_FIRST,
    ATTENTION,
    HEAVY,
    RECURRENT,
    Product,
    attention_flops,
    grouped_by,
    phase_products,
    product_of,
)
from shardwright.planner.cost.rounding import rounding
from shardwright.planner.cost.software import PROFILES, Software, sustained

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]

MEMORY_EFFICIENCY = 0.7
# Of devices without measured tables: what a large product reaches alone, looked up in this order by
# a part of the device's name; and attention, of the flops that a causal mask leaves.
MATMUL_EFFICIENCY = (("V100", 0.68), ("MI3", 0.45))
USUAL_EFFICIENCY = (0.75, 0.35)
CPU_EFFICIENCY = 0.9
MODEL_SPREAD = 0.25
# Octaves: nearer measurements of one kind count alike.
NEAR = 0.25
VECTOR_EFFICIENCY = 0.5


@dataclass(frozen=True, eq=False)
class Rates:
    """What durations are read from: measurements, the device, and the dtype that float32 runs in.

    ``ratios`` caches, per operator kind, how far measurements lie from the roofline.
    """

    cluster: Cluster
    table: CostTable = field(default_factory=CostTable)
    device: int = 0
    precision: str = "float32"
    ratios: dict[tuple[str, str], NDArray[np.float64]] = field(
        default_factory=dict[tuple[str, str], NDArray[np.float64]], repr=False
    )
    passes: dict[int, tuple[OperatorGraph, tuple[Passing | None, ...]]] = field(
        default_factory=dict[int, tuple[OperatorGraph, tuple[Passing | None, ...]]], repr=False
    )

    @cached_property
    def kind(self) -> DeviceKind:
        """The device's kind."""
        return self.cluster.kind_of(self.device)

    @cached_property
    def software(self) -> Software:
        """The constants of the cluster's software profile."""
        return PROFILES[self.cluster.software]

    @cached_property
    def is_gpu(self) -> bool:
        """Whether kernels are started by a host that runs ahead of them."""
        return self.kind.backend == "cuda"

    def passing(self, graph: OperatorGraph, index: int) -> Passing | None:
        """Return what an operator reads and writes where chains of operators are one kernel."""
        if not (self.is_gpu and self.software.is_fused):
            return None
        if id(graph) not in self.passes:
            self.passes[id(graph)] = (graph, passing(graph, self.software.apart))
        return self.passes[id(graph)][1][index]


def operator_cost(
    graph: OperatorGraph,
    operator_index: int,
    input_local_shapes: Shapes,
    output_local_shapes: Shapes,
    phase: str,
    rates: Rates,
) -> Cost:
    """Return the seconds of one operator on a device; ``phase`` is ``forward`` or ``backward``."""
    operator = graph.operators[operator_index]
    if phase == "backward" and not has_backward(graph, operator):
        return Cost(seconds=0.0)
    cost = _alone(graph, operator_index, input_local_shapes, output_local_shapes, phase, rates)
    return rates.table.fitted("compute", cost)


def _alone(
    graph: OperatorGraph,
    operator_index: int,
    input_local_shapes: Shapes,
    output_local_shapes: Shapes,
    phase: str,
    rates: Rates,
) -> Cost:
    """Return what an operator shard takes by itself: measured, else modelled."""
    operator = graph.operators[operator_index]
    kept_as = KEPT_AS.get(rates.precision, rates.precision)
    in_float8 = rates.precision in FLOAT8 and is_float8_product(graph, operator, input_local_shapes)
    if rates.table.operators and not in_float8:
        key = operator_key(
            graph, operator, input_local_shapes, output_local_shapes, phase, rates.precision
        )
        measured = rates.table.operator_map.get(key)
        if measured is not None:
            return measured
    bare = base_kind(operator.kind)
    shard = _Shard(
        kind=bare,
        inputs=input_local_shapes,
        outputs=output_local_shapes,
        input_bytes=_bytes(graph, operator.inputs, input_local_shapes, kept_as),
        output_bytes=_bytes(graph, operator.outputs, output_local_shapes, kept_as),
        needs=tuple(graph.tensors[i].needs_gradient for i in operator.inputs),
        saved=_saved_bytes(graph, operator, input_local_shapes, output_local_shapes, kept_as),
        flops=_fallback_flops(graph, operator, input_local_shapes, output_local_shapes, rates),
        dtype="float8" if in_float8 else _compute_dtype(graph, operator, kept_as),
        product=product_of(bare, input_local_shapes, output_local_shapes, *_arguments(operator)),
        passes=rates.passing(graph, operator_index),
        hands_on=rates.is_gpu and hands_on(graph, operator),
        grouped=grouped_by(bare, operator.attribute("kernel")),
    )
    scale, deviation = _scale(shard, phase, rates)
    seconds = _roofline(shard, phase, rates) * scale
    return Cost(seconds=seconds, spread=seconds * deviation)


def has_backward(graph: OperatorGraph, operator: Operator) -> bool:
    """Whether a gradient comes in and goes on."""
    return all(
        any(graph.tensors[tensor].needs_gradient for tensor in tensors)
        for tensors in (operator.inputs, operator.outputs)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """What the roofline needs of one operator shard."""

    kind: str
    inputs: Shapes
    outputs: Shapes
    input_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    needs: tuple[bool, ...]
    saved: int
    flops: float
    dtype: str
    product: Product | None = None
    passes: Passing | None = None
    hands_on: bool = False
    grouped: str = ""


def local_flops(
    kind: str,
    inputs: Shapes,
    outputs: Shapes,
    equation: str = "",
    is_transposed: bool = False,
) -> float | None:
    """Return the forward flops of a shard from its shapes, None where shapes do not say.

    ``kind`` is the bare name (``linear``). A multiply-add counts two. See ``product_of``.
    """
    if kind in ATTENTION:
        return attention_flops(kind, inputs)
    product = product_of(kind, inputs, outputs, equation, is_transposed)
    return product.flops if product is not None else None


def _bytes(
    graph: OperatorGraph, indices: tuple[int, ...], shapes: Shapes, precision: str
) -> tuple[int, ...]:
    sizes: list[int] = []
    for index, shape in zip(indices, shapes, strict=True):
        dtype = graph.tensors[index].dtype
        dtype = precision if dtype == "float32" else dtype
        sizes.append(tensor_bytes(shape, dtype))
    return tuple(sizes)


def _compute_dtype(graph: OperatorGraph, operator: Operator, precision: str) -> str:
    for index in (*operator.inputs, *operator.outputs):
        if graph.tensors[index].is_floating:
            dtype = graph.tensors[index].dtype
            return precision if dtype == "float32" else dtype
    return precision


def _fallback_flops(
    graph: OperatorGraph, operator: Operator, inputs: Shapes, outputs: Shapes, rates: Rates
) -> float:
    """Scale the captured flops by the share of the largest tensor that is local."""
    exact = local_flops(base_kind(operator.kind), inputs, outputs, *_arguments(operator))
    if exact is not None:
        if operator.attribute("is_causal") is not True:
            return exact
        if rates.is_gpu and rates.software.balances_attention:
            return exact / 2
        # The device with the last queries of the sequence has the most to do.
        share = inputs[0][-2] / graph.tensors[operator.inputs[0]].shape[-2]
        return exact * (1.0 - share / 2)
    here = max((math.prod(shape) for shape in (*inputs, *outputs)), default=0)
    whole = max((graph.tensors[i].numel for i in (*operator.inputs, *operator.outputs)), default=0)
    return operator.flops * here / whole if whole else 0.0


def _arguments(operator: Operator) -> tuple[str, bool]:
    """Return einsum's equation and whether a convolution is transposed."""
    equation = operator.attribute("equation", "")
    return str(equation), operator.attribute("transposed") is True


def _saved_bytes(
    graph: OperatorGraph, operator: Operator, inputs: Shapes, outputs: Shapes, precision: str
) -> int:
    kept_in, kept_out, extra = saved_tensors(graph, operator)
    sizes_in = _bytes(graph, operator.inputs, inputs, precision)
    sizes_out = _bytes(graph, operator.outputs, outputs, precision)
    return (
        sum(sizes_in[i] for i in kept_in)
        + sum(sizes_out[i] for i in kept_out)
        + extra(inputs, outputs)
    )


def _efficiency(kind: str, device: DeviceKind) -> float:
    """Return the share of the peak that a large product or attention reaches by itself."""
    if device.backend == "cpu":
        return CPU_EFFICIENCY if device.source == "measured" else CPU_EFFICIENCY * 0.8
    if kind in ATTENTION:
        return USUAL_EFFICIENCY[1]
    table = MATMUL_EFFICIENCY
    return next((value for name, value in table if name in device.name), USUAL_EFFICIENCY[0])


def _roofline(shard: _Shard, phase: str, rates: Rates) -> float:
    """Return modelled seconds of one phase of a shard, before calibration."""
    device = rates.kind
    if is_view(shard.kind):
        return device.launch_seconds if device.backend == "cpu" else 0.0
    flops, traffic, launches = _work(shard, phase)
    peak = device.flops_for(shard.dtype)
    if not rates.is_gpu:
        busy = max(
            flops / (_efficiency(shard.kind, device) * peak), memory_seconds(traffic, device)
        )
        return busy + launches * device.launch_seconds
    software = rates.software
    passed = traffic / (software.memory * device.memory_bandwidth)
    if shard.kind not in HEAVY and shard.kind not in RECURRENT and shard.kind != OPAQUE:
        # Element-wise kernels do not use matrix units.
        vector = min(peak, device.flops_for("float32")) * VECTOR_EFFICIENCY
        busy = max(flops / vector, passed) + launches * software.gap * device.launch_seconds
        return busy if traffic else 0.0  # nothing passes inside a chain
    busy = _matrix_seconds(shard, phase, flops, rates)
    seconds = max(busy, passed) + launches * software.gap * device.launch_seconds
    if shard.dtype == "float8":  # kernels of their own, before the products
        sizes = (shard.input_bytes, shard.output_bytes, shard.needs)
        rounded, more = rounding(*sizes, phase, software.rounding)
        seconds += rounded / (software.memory * device.memory_bandwidth)
        seconds += more * software.gap * device.launch_seconds
    return seconds


def _matrix_seconds(shard: _Shard, phase: str, flops: float, rates: Rates) -> float:
    """Return the seconds on matrix units: from measured kernels where the device has them."""
    software, device = rates.software, rates.kind
    tables, peak = kernels_of(device.name), device.flops_for(shard.dtype)
    usual = _efficiency(shard.kind, device) * peak
    if shard.kind in ATTENTION:
        rate = _attention_rate(shard, tables) or usual
        share = software.attention_share(device.name) * (
            software.attention_backward if phase == "backward" else 1.0
        )
        return flops / (rate * share)
    if tables is None or shard.product is None:
        return flops / sustained(usual, peak, device.name)
    total = 0.0
    for product in phase_products(shard.kind, shard.needs, phase, shard.product):
        rate = tables.product_rate(product, shard.dtype) or usual
        if shard.grouped:
            rows = min(product.m, product.k) if phase == "backward" else product.m
            rate *= tables.grouped_share(rows, shard.grouped)
        total += product.flops / sustained(rate, peak, device.name)
    return total


def _attention_rate(shard: _Shard, tables: Kernels | None) -> float | None:
    """Return flop/s of forward attention of these shapes, None where it was not measured."""
    if tables is None or shard.dtype not in {"bfloat16", "float16"}:
        return None
    query, key = shard.inputs[0], shard.inputs[1]
    length = math.sqrt(query[-2] * key[-2])
    return tables.attention_rate(math.prod(query[:-2]), length, query[-1])


def memory_seconds(num_bytes: float, device: DeviceKind) -> float:
    """Return how long so many bytes, read and written together, take to pass the memory."""
    efficiency = 1.0 if device.source == "measured" else MEMORY_EFFICIENCY
    return num_bytes / (efficiency * device.memory_bandwidth)


def _work(shard: _Shard, phase: str) -> tuple[float, float, int]:
    """Return (flops, bytes moved, kernels started) of a phase."""
    inputs, outputs = shard.input_bytes, shard.output_bytes
    if shard.passes is not None:
        return _fused_work(shard, phase, shard.passes)
    if phase == "forward":
        read = _touched(shard.kind, inputs, outputs)
        return shard.flops, float(read + sum(outputs)), 1
    wanted = sum(size for size, needed in zip(inputs, shard.needs, strict=True) if needed)
    traffic = float(sum(outputs) + shard.saved + wanted) * (not shard.hands_on)
    num_wanted = sum(shard.needs)
    if shard.kind in ATTENTION:
        # Scores are computed again: 5 products for the forward's 2.
        return 2.5 * shard.flops, traffic, 1
    if shard.kind in HEAVY:
        # One product per operand whose gradient is wanted (a bias only needs a sum).
        start = 1 if shard.kind in ADDED_FIRST else 0
        products = sum(shard.needs[start : start + 2])
        return products * shard.flops, traffic, max(products, 1)
    return 2.0 * shard.flops, traffic, 1 if num_wanted else 0


def _fused_work(shard: _Shard, phase: str, passes: Passing) -> tuple[float, float, int]:
    """Return the work of one operator in a chain that is one kernel: only its ends are touched."""
    read = sum(
        size for size, is_read in zip(shard.input_bytes, passes.inputs, strict=True) if is_read
    )
    written = sum(
        size for size, is_out in zip(shard.output_bytes, passes.outputs, strict=True) if is_out
    )
    if phase == "forward":
        return shard.flops, float(read + written), int(any(passes.outputs))
    ends = zip(shard.input_bytes, passes.inputs, shard.needs, strict=True)
    wanted = sum(size for size, is_read, needed in ends if is_read and needed)
    traffic = float(written + read + wanted) * (not shard.hands_on)
    return 2.0 * shard.flops, traffic, int(any(passes.inputs))


def _touched(kind: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> int:
    """Return the input bytes really read: a lookup reads only the rows it returns."""
    if kind in {"embedding", "gather", "index_select", "index"}:
        return min(inputs[0], sum(outputs)) + sum(inputs[1:])
    return sum(inputs)


def _scale(shard: _Shard, phase: str, rates: Rates) -> tuple[float, float]:
    """Return how much longer a shard takes than its roofline, and the ratio's relative spread.

    Read off the table's records of the same kind and phase, or of any kind where there are none, each
    weighted by the inverse square of its distance in octaves of flops and bytes; (1, MODEL_SPREAD)
    without any.
    """
    if not rates.table.operators:
        return 1.0, rates.software.spread if rates.is_gpu else MODEL_SPREAD
    if not rates.ratios:
        rates.ratios.update(_all_ratios(rates))
    known = rates.ratios.get((shard.kind, phase), rates.ratios.get(("", phase)))
    if known is None:
        return 1.0, MODEL_SPREAD
    logarithms = known[:, 0]
    weights = 1 / (NEAR**2 + ((known[:, 1:] - _place(shard, phase)) ** 2).sum(axis=1))
    middle = float(np.average(logarithms, weights=weights))
    deviation = float(np.average(np.abs(logarithms - middle), weights=weights))
    return math.exp(middle), max(deviation, MODEL_SPREAD / 2)


def _place(shard: _Shard, phase: str) -> NDArray[np.float64]:
    """Return where a shard lies among others of its kind: octaves of flops and of bytes."""
    flops, traffic, _ = _work(shard, phase)
    return np.log2(np.maximum([flops, traffic], 1.0))


def _all_ratios(rates: Rates) -> dict[tuple[str, str], NDArray[np.float64]]:
    """Return, by kind and phase, the logarithm of measured over modelled seconds and the place of every
    record; those that are no views also by the empty kind."""
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for key, cost in rates.table.operators:
        shard, phase = _parse(key)
        if shard is None or shard.kind == OPAQUE:  # whose flops the key does not say
            continue
        modelled = _roofline(shard, phase, rates)
        if modelled > 0 and cost.seconds > 0:
            row = (math.log(cost.seconds / modelled), *_place(shard, phase).tolist())
            found.setdefault((shard.kind, phase), []).append(row)
            if not is_view(shard.kind):
                found.setdefault(("", phase), []).append(row)
    return {name: np.array(rows) for name, rows in found.items()}


def _parse(key: str) -> tuple[_Shard | None, str]:
    """Read a shard back from its operator key (see ``core.costs.operator_key``)."""
    parts = key.split("|", 6)
    if len(parts) != 7 or parts[0] != "operator":
        return None, ""
    _, phase, kind, tensors, needs, outputs, _ = parts
    return _shard_of(base_kind(kind), tensors, needs, outputs), phase


def _shard_of(bare: str, tensors: str, needs: str, outputs: str) -> _Shard:
    """Read a shard from the parts of its key."""
    named = [item.rsplit(":", 1) for item in tensors.split(";") if item]
    inputs = tuple(_read_shape(text) for text, _ in named)
    results = tuple(_read_shape(text) for text in outputs.split(";"))
    dtypes = [dtype for _, dtype in named]
    dtype = next((one for one in dtypes if one.startswith(("float", "bfloat"))), "float32")
    sizes = tuple(
        math.prod(shape) * DTYPE_BYTES.get(name, 4)
        for shape, name in zip(inputs, dtypes, strict=True)
    )
    output_bytes = tuple(tensor_bytes(shape, dtype) for shape in results)
    flops = local_flops(bare, inputs, results) if inputs else 0.0
    wanted = tuple(letter == "g" for letter in needs)
    return _Shard(
        kind=bare, inputs=inputs, outputs=results, input_bytes=sizes, output_bytes=output_bytes,
        needs=wanted, saved=sum(sizes), flops=flops or 0.0, dtype=dtype,
        product=product_of(bare, inputs, results) if inputs else None,
        grouped=grouped_by(bare, None),
    )  # fmt: skip


def _read_shape(text: str) -> Shape:
    return tuple(int(size) for size in text.split("x") if size)
