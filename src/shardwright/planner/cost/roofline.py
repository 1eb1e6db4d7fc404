"""The roofline: what a shard's flops and bytes take on a device, before any calibration.

It is max(flops / (efficiency x peak), bytes / (0.7 x memory bandwidth)) plus the device's launch time.

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
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.operators.counting.fusion import Passing, passing
from shardwright.operators.counting.products import (
    ATTENTION,
    HEAVY,
    MATMUL,
    RECURRENT,
    Product,
    phase_products,
)
from shardwright.operators.counting.rounding import rounding
from shardwright.operators.counting.work import Shard, work
from shardwright.operators.derivatives import OPAQUE, is_view
from shardwright.planner.cost.kernels import Kernels, kernels_of
from shardwright.planner.cost.software import PROFILES, Software, sustained

MEMORY_EFFICIENCY = 0.7
# Of devices without measured tables: what a large product reaches alone, looked up in this order by
# a part of the device's name; and attention, of the flops that a causal mask leaves.
MATMUL_EFFICIENCY = (("V100", 0.68), ("MI3", 0.45))
USUAL_EFFICIENCY = (0.75, 0.35)
CPU_EFFICIENCY = 0.9
VECTOR_EFFICIENCY = 0.5
# Measured on an H200 with torch 2.11 (benchmarks/reports/gpu_h200_202611.md). Rows of 16-bit operands that are no
# multiple of 16 bytes, such as GPT-2's 50,257 words, can only be read number by number: that share of the rate.
_MISALIGNED, _ALIGNED = 0.21, 8
# Statistics of channels, which lie far apart, are read and written as if they were so many times larger.
_STATISTICS = {"batch_norm": 5.0}


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


def _efficiency(kind: str, device: DeviceKind) -> float:
    """Return the share of the peak that a large product or attention reaches by itself."""
    if device.backend == "cpu":
        return CPU_EFFICIENCY if device.source == "measured" else CPU_EFFICIENCY * 0.8
    if kind in ATTENTION:
        return USUAL_EFFICIENCY[1]
    table = MATMUL_EFFICIENCY
    return next((value for name, value in table if name in device.name), USUAL_EFFICIENCY[0])


def roofline(shard: Shard, phase: str, rates: Rates) -> float:
    """Return modelled seconds of one phase of a shard, before calibration."""
    device = rates.kind
    if is_view(shard.kind):
        return device.launch_seconds if device.backend == "cpu" else 0.0
    flops, traffic, launches = work(shard, phase)
    peak = device.flops_for(shard.dtype)
    if not rates.is_gpu:
        busy = max(
            flops / (_efficiency(shard.kind, device) * peak), memory_seconds(traffic, device)
        )
        return busy + launches * device.launch_seconds
    software = rates.software
    passed = traffic / (software.memory * device.memory_bandwidth)
    passed *= _STATISTICS.get(shard.kind, 1.0)
    if shard.kind not in HEAVY and shard.kind not in RECURRENT and shard.kind != OPAQUE:
        # Element-wise kernels do not use matrix units.
        vector = min(peak, device.flops_for("float32")) * VECTOR_EFFICIENCY
        busy = max(flops / vector, passed) + launches * software.gap * device.launch_seconds
        return busy if traffic else 0.0  # nothing passes inside a chain
    busy = _matrix_seconds(shard, phase, flops, rates)
    # What is in an opaque operator runs one after another.
    busy = busy + passed if shard.kind == OPAQUE else max(busy, passed)
    seconds = busy + launches * software.gap * device.launch_seconds
    if shard.dtype == "float8":  # kernels of their own, before the products
        sizes = (shard.input_bytes, shard.output_bytes, shard.needs)
        rounded, more = rounding(*sizes, phase, software.rounding)
        seconds += rounded / (software.memory * device.memory_bandwidth)
        seconds += more * software.gap * device.launch_seconds
    return seconds


def _matrix_seconds(shard: Shard, phase: str, flops: float, rates: Rates) -> float:
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
    total, share = 0.0, _aligned_share(shard, shard.product)
    for product in phase_products(shard.kind, shard.needs, phase, shard.product):
        rate = share * (tables.product_rate(product, shard.dtype) or usual)
        if shard.grouped:
            rows = min(product.m, product.k) if phase == "backward" else product.m
            rate *= tables.grouped_share(rows, shard.grouped)
        total += product.flops / sustained(rate, peak, device.name)
    return total


def _aligned_share(shard: Shard, product: Product) -> float:
    """Return what is left of the rate where rows of an operand or of the result start anywhere; those of a few
    numbers are slow by themselves."""
    if shard.kind not in MATMUL or shard.grouped or shard.dtype not in {"bfloat16", "float16"}:
        return 1.0
    rows = (product.n, product.k)
    return _MISALIGNED if any(n > _ALIGNED and round(n) % _ALIGNED for n in rows) else 1.0


def _attention_rate(shard: Shard, tables: Kernels | None) -> float | None:
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
