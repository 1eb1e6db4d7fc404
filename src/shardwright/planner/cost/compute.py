"""Seconds of one operator shard: measured where the table knows it, else a calibrated roofline.

Where the table holds measurements of the same operator kind at other shapes, the roofline is scaled by
their ratio to it, the more the nearer in flops and bytes, so that measured and unmeasured shards stay
comparable in a search.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shardwright.core.costs import Cost, operator_key
from shardwright.core.float8 import FLOAT8, is_float8_product
from shardwright.core.graph import DTYPE_BYTES, KEPT_AS, Operator, OperatorGraph, tensor_bytes
from shardwright.operators.counting.products import Shape, Shapes, grouped_by, product_of
from shardwright.operators.counting.work import Shard, arguments, has_backward, local_flops, work
from shardwright.operators.derivatives import (
    OPAQUE,
    base_kind,
    hands_on,
    is_view,
)
from shardwright.operators.keeping.kept import saved_tensors
from shardwright.planner.cost.collective import MODEL_SPREAD
from shardwright.planner.cost.roofline import Rates, roofline

# Octaves: nearer measurements of one kind count alike.
NEAR = 0.25


def operator_costs(
    graph: OperatorGraph, operator_index: int, shapes: tuple[Shapes, Shapes], rates: Rates
) -> dict[str, Cost]:
    """Return the seconds of one operator on a device, of these local input and output shapes, by phase (``forward``
    and ``backward``): measured, else modelled."""
    operator, shard = graph.operators[operator_index], None
    found = {"backward": Cost(seconds=0.0)}
    for phase in ("forward", "backward") if has_backward(graph, operator) else ("forward",):
        cost = _measured(graph, operator, shapes, phase, rates)
        if cost is None:
            shard = shard or _shard(graph, operator_index, shapes, rates)
            scale, deviation = _scale(shard, phase, rates)
            seconds = roofline(shard, phase, rates) * scale
            cost = Cost(seconds=seconds, spread=seconds * deviation)
        found[phase] = rates.table.fitted("compute", cost)
    return found


def _in_float8(graph: OperatorGraph, operator: Operator, inputs: Shapes, rates: Rates) -> bool:
    return rates.precision in FLOAT8 and is_float8_product(graph, operator, inputs)


def _measured(
    graph: OperatorGraph,
    operator: Operator,
    shapes: tuple[Shapes, Shapes],
    phase: str,
    rates: Rates,
) -> Cost | None:
    """Return what an operator shard took by itself, if anyone measured it."""
    if not rates.table.operators or _in_float8(graph, operator, shapes[0], rates):
        return None
    key = operator_key(graph, operator, *shapes, phase, rates.precision)
    return rates.table.operator_map.get(key)


def _shard(
    graph: OperatorGraph, operator_index: int, shapes: tuple[Shapes, Shapes], rates: Rates
) -> Shard:
    """Return what the roofline needs of an operator shard."""
    operator, (inputs, outputs) = graph.operators[operator_index], shapes
    kept_as = KEPT_AS.get(rates.precision, rates.precision)
    in_float8, bare = _in_float8(graph, operator, inputs, rates), base_kind(operator.kind)
    read = _bytes(graph, operator.inputs, inputs, kept_as)
    made = _bytes(graph, operator.outputs, outputs, kept_as)
    kept_in, kept_out, extra = saved_tensors(graph, operator)
    saved = sum(read[i] for i in kept_in) + sum(made[i] for i in kept_out)
    return Shard(
        kind=bare,
        inputs=inputs,
        outputs=outputs,
        input_bytes=read,
        output_bytes=made,
        needs=tuple(graph.tensors[i].needs_gradient for i in operator.inputs),
        saved=saved + extra(inputs, outputs),
        flops=_fallback_flops(graph, operator, inputs, outputs, rates),
        dtype="float8" if in_float8 else _compute_dtype(graph, operator, kept_as),
        product=product_of(bare, inputs, outputs, *arguments(operator)),
        passes=rates.passing(graph, operator_index),
        hands_on=rates.is_gpu and hands_on(graph, operator),
        grouped=grouped_by(bare, operator.attribute("kernel")),
    )


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
    exact = local_flops(base_kind(operator.kind), inputs, outputs, *arguments(operator))
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


def _scale(shard: Shard, phase: str, rates: Rates) -> tuple[float, float]:
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


def _place(shard: Shard, phase: str) -> NDArray[np.float64]:
    """Return where a shard lies among others of its kind: octaves of flops and of bytes."""
    flops, traffic, _ = work(shard, phase)
    return np.log2(np.maximum([flops, traffic], 1.0))


def _all_ratios(rates: Rates) -> dict[tuple[str, str], NDArray[np.float64]]:
    """Return, by kind and phase, the logarithm of measured over modelled seconds and the place of every
    record; those that are no views also by the empty kind."""
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for key, cost in rates.table.operators:
        shard, phase = _parse(key)
        if shard is None or shard.kind == OPAQUE:  # whose flops the key does not say
            continue
        modelled = roofline(shard, phase, rates)
        if modelled > 0 and cost.seconds > 0:
            row = (math.log(cost.seconds / modelled), *_place(shard, phase).tolist())
            found.setdefault((shard.kind, phase), []).append(row)
            if not is_view(shard.kind):
                found.setdefault(("", phase), []).append(row)
    return {name: np.array(rows) for name, rows in found.items()}


def _parse(key: str) -> tuple[Shard | None, str]:
    """Read a shard back from its operator key (see ``core.costs.operator_key``)."""
    parts = key.split("|", 6)
    if len(parts) != 7 or parts[0] != "operator":
        return None, ""
    _, phase, kind, tensors, needs, outputs, _ = parts
    return _shard_of(base_kind(kind), tensors, needs, outputs), phase


def _shard_of(bare: str, tensors: str, needs: str, outputs: str) -> Shard:
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
    return Shard(
        kind=bare, inputs=inputs, outputs=results, input_bytes=sizes, output_bytes=output_bytes,
        needs=wanted, saved=sum(sizes), flops=flops or 0.0, dtype=dtype,
        product=product_of(bare, inputs, results) if inputs else None,
        grouped=grouped_by(bare, None),
    )  # fmt: skip


def _read_shape(text: str) -> Shape:
    return tuple(int(size) for size in text.split("x") if size)
