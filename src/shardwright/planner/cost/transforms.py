"""What transforms cost: one function per name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.core.cluster import DeviceKind
from shardwright.core.compression import INDEX_BYTES, merge_rounds, packed_by, wide_dtype
from shardwright.core.costs import PACK, PACK_DENSITIES, Cost, CostTable
from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.program import Transform, TransformName, Value
from shardwright.planner.cost.collective import interpolate
from shardwright.planner.cost.roofline import memory_seconds
from shardwright.planner.cost.totals import total

Price = Callable[[Transform, Sequence[Value], DeviceKind, CostTable], Cost]


def transform_cost(
    transform: Transform,
    values: Sequence[Value],
    table: CostTable,
    kinds: Sequence[Sequence[DeviceKind]],
) -> Cost:
    """Return the seconds of a transform on the slowest of the devices of its mesh; ``values`` are the
    Program's, ``kinds`` those of every mesh's devices."""
    price = COSTS[transform.name]
    found = [price(transform, values, kind, table) for kind in kinds[transform.mesh]]
    return max(found, key=lambda cost: cost.seconds)


def _cast(transform: Transform, values: Sequence[Value], kind: DeviceKind, _: CostTable) -> Cost:
    """Read each value and write it, one kernel each."""
    touched = sum(values[one].bytes for one in (*transform.reads, *transform.writes))
    return _passing(touched, len(transform.reads), kind)


def _feedback(
    transform: Transform, values: Sequence[Value], kind: DeviceKind, _: CostTable
) -> Cost:
    """Add each value to its residual, round that, and take off what was written: three kernels."""
    half = len(transform.reads) // 2
    touched = sum(
        values[source].bytes + 5 * values[residual].bytes + 2 * values[sent].bytes
        for source, residual, sent in zip(
            transform.reads[:half], transform.reads[half:], transform.writes[:half], strict=True
        )
    )
    return _passing(touched, 3 * half, kind)


@dataclass(frozen=True, slots=True)
class _Work:
    """What a tensor takes that is compressed, or a rank's part of a sum: kernels; seconds an element on a
    core; and passes over an element's bytes on an accelerator, whose memory is what counts there.

    Seconds are measured: 2 shared AMD EPYC cores, torch 2.13, one thread, float32, 65,536 to 8 million
    elements (they differ by up to a half). Passes are counted in the kernels that are started; a radix
    selection reads its input four times.
    """

    kernels: int
    core_seconds: float
    passes: float


_WORK = {
    "top-k": _Work(14, 7e-9, 17),
    "int8": _Work(15, 5.2e-9, 19),
    "1-bit": _Work(30, 19e-9, 30),
    "merge": _Work(28, 220e-9, 200),  # by elements kept
    "take back": _Work(20, 120e-9, 80),
    "left factor": _Work(10, 0.6e-9, 6),
    "right factor": _Work(10, 0.1e-9, 1),
    "factor sum": _Work(4, 0.6e-9, 4),
    "rank": _Work(0, 0.1e-9, 0),  # a product with a matrix, by elements times its columns
    "zeros": _Work(1, 0.3e-9, 1),  # to which packs are added
    "top-k sum": _Work(4, 0.05e-9, 0),
    "int8 sum": _Work(4, 0.7e-9, 3.5),
    "1-bit sum": _Work(8, 3.8e-9, 10),
}
HALF_WIDTH = 0.5


def pack_cost(
    name: str, elements: int, width: int, kind: DeviceKind, table: CostTable, density: float = 1.0
) -> Cost:
    """Return the seconds of compressing so many elements of some bytes each, or of adding a rank's;
    ``density``: of those that are selected.

    Doubted by half where how fast a device selects was not measured.
    """
    known = _measured(name, elements, density, table) if kind.backend == "cpu" else None
    if known is not None:
        return known
    work = _WORK[name]
    if kind.backend == "cpu":
        seconds = elements * work.core_seconds
    else:
        seconds = memory_seconds(work.passes * elements * width, kind)
    seconds += work.kernels * kind.launch_seconds
    return Cost(seconds=seconds, spread=HALF_WIDTH * seconds)


def _measured(name: str, elements: int, density: float, table: CostTable) -> Cost | None:
    """Return what was measured, between densities on a straight line, too; None where nothing was."""
    known = table.collective_map
    if points := known.get(f"{PACK}|{name}"):
        return interpolate(points, elements)
    ends = [(one, known.get(f"{PACK}|{name}|{one:g}")) for one in PACK_DENSITIES]
    costs = [(one, interpolate(points, elements)) for one, points in ends if points]
    if not costs:
        return None
    return interpolate(tuple([(one, cost.seconds, cost.spread) for one, cost in costs]), density)


def _density(pack_bytes: int, elements: int, width: int) -> float:
    """Return the share of so many elements that a pack of values and places has."""
    return pack_bytes / (width + INDEX_BYTES) / elements


def _pack(
    transform: Transform, values: Sequence[Value], kind: DeviceKind, table: CostTable
) -> Cost:
    """Each gradient by itself; residuals come behind them."""
    packed = [values[source] for source in packed_by(transform)]
    costs = list[Cost]()
    for one, pack in zip(packed, transform.writes, strict=False):
        elements, width = math.prod(one.shape), _wide_bytes(one)
        density = _density(values[pack].shape[0], elements, width)
        costs.append(pack_cost(transform.name, elements, width, kind, table, density))
    # A velocity is read and written, and with a mask read and written again; a norm reads a gradient, and
    # bounding it writes one.
    passes = (4 + 2 * transform.number("masked", 0)) * (transform.number("momentum", 0) > 0)
    passes += 3 * (transform.number("bound", 0) > 0)
    more = sum(math.prod(one.shape) * _wide_bytes(one) for one in packed)
    return total([*costs, Cost(seconds=memory_seconds(passes * more, kind))])


def _wide_bytes(gradient: Value) -> int:
    return DTYPE_BYTES[wide_dtype(gradient.dtype)]


def _merge(
    transform: Transform, values: Sequence[Value], kind: DeviceKind, table: CostTable
) -> Cost:
    """By what is kept of each gradient; nothing where what came is held instead."""
    width = DTYPE_BYTES[transform.word("dtype")]
    if transform.name == "merge":
        rounds = merge_rounds(transform.word("compressor"), transform.count("ranks"))
        if rounds[transform.count("turn")].replaces:
            return Cost(seconds=0.0)
    packs = [values[one] for one in transform.reads if values[one].role == "gradient"]
    costs = [
        pack_cost(transform.name, one.shape[0] // (width + INDEX_BYTES), width, kind, table)
        for one in packs[: transform.count("gradients", len(packs) // 2)]
    ]
    return total(costs)


def _factor(
    transform: Transform, values: Sequence[Value], kind: DeviceKind, table: CostTable
) -> Cost:
    """By the elements of each gradient and the rank of its factors: a product, and what is added up."""
    costs = list[Cost]()
    forms = [values[one].shape for one in transform.reads if values[one].role == "factor"]
    count = len(forms)
    whole = [values[one] for one in transform.writes[:count]]
    if transform.name == "right factor":
        count = len(transform.writes) // 2
        whole = [values[one] for one in transform.reads[:count]]
        forms = [values[one].shape for one in transform.writes[count:]]
    for one, form in zip(whole, forms, strict=True):
        elements, width = math.prod(one.shape), _wide_bytes(one)
        cost = pack_cost(transform.name, elements, width, kind, table)
        ranked = pack_cost("rank", elements * form[1], width, kind, table)
        costs += [cost, ranked]
    return total(costs)


def _sum(transform: Transform, values: Sequence[Value], kind: DeviceKind, table: CostTable) -> Cost:
    """Zeros, to which each rank's pack is added."""
    width, ranks = DTYPE_BYTES[transform.word("dtype")], transform.count("ranks")
    costs = list[Cost]()
    for packs, result in zip(transform.reads, transform.writes, strict=True):
        elements = math.prod(values[result].shape)
        density = _density(values[packs].shape[0] // ranks, elements, width)
        each = pack_cost(transform.name, elements, width, kind, table, density)
        costs += [pack_cost("zeros", elements, width, kind, table), *[each] * ranks]
    return total(costs)


def _version(transform: Transform, values: Sequence[Value], kind: DeviceKind, _: CostTable) -> Cost:
    """Read each parameter and write it; where it is predicted, read two states of the optimizer too, by a few
    kernels. Nothing where it is the parameter itself."""
    constants = dict(transform.constants)
    if not constants["copies"]:
        return Cost(seconds=0.0)
    predicts = constants["forward"] or constants["lag"]
    return _over_all(transform, values, kind, (6, 4) if predicts else (2, 1))


def _buffer(transform: Transform, values: Sequence[Value], kind: DeviceKind, _: CostTable) -> Cost:
    """Read each parameter and write it; where an average of updates is kept, behind the update read it again, with that
    average, and write this."""
    is_average = bool(dict(transform.constants)["averages"])
    return _over_all(transform, values, kind, (8, 4) if is_average else (2, 1))


def _over_all(
    transform: Transform, values: Sequence[Value], kind: DeviceKind, each: tuple[int, int]
) -> Cost:
    """Return what it takes to touch all that is read so often, by so many kernels (``each``)."""
    touched, kernels = each
    size = sum(values[one].bytes for one in transform.reads)
    return _passing(touched * size, kernels * len(transform.reads), kind)


def _passing(touched: int, kernels: int, kind: DeviceKind) -> Cost:
    """Return what kernels take that read and write so many bytes in all."""
    return Cost(seconds=memory_seconds(touched, kind) + kernels * kind.launch_seconds)


COSTS: dict[TransformName, Price] = {
    "cast": _cast,
    "feedback": _feedback,
    "top-k": _pack,
    "int8": _pack,
    "1-bit": _pack,
    "top-k sum": _sum,
    "int8 sum": _sum,
    "1-bit sum": _sum,
    "merge": _merge,
    "take back": _merge,
    "left factor": _factor,
    "right factor": _factor,
    "factor sum": _factor,
    "version": _version,
    "buffer": _buffer,
}
