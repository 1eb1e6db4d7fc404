"""Gradients that are compressed on their way: each device packs its own, all packs are gathered, and
everyone adds them up in the same order.

A sum over devices becomes pack, all-gather, sum of packs. What packing loses stays with the device, as
a state, and is added to the parameter's next gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.core.compression import is_compressed, packed_bytes, wide_dtype
from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.layout import REPLICATE
from shardwright.core.program import Message, Transform, TransformName
from shardwright.core.strategy import Compressor, GradientSync
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.space.redistribute import is_sum

Pair = tuple[int, int]
SUMS: dict[str, TransformName] = {
    "top-k": "top-k sum", "int8": "int8 sum", "1-bit": "1-bit sum",
}  # fmt: skip


def compressible(
    builder: ProgramBuilder, pairs: Sequence[Pair]
) -> tuple[list[Pair], Sequence[Pair]]:
    """Divide (source, result) pairs of gradients into those that are compressed and the others.

    Those are summed over devices once a step, and needed whole by all that sum.
    """
    if not builder.strategy.gradient_sync.compressors:
        return [], pairs
    found = [pair for pair in pairs if _is_compressed(builder, *pair)]
    return found, [pair for pair in pairs if pair not in found]


def _is_compressed(builder: ProgramBuilder, source: int, result: int) -> bool:
    entry, several = builder.values[source], builder.strategy.pipeline.num_microbatches > 1
    if entry.scope == "microbatch" and several:
        return False
    if not is_compressed(_sync(builder, source), entry.dtype, math.prod(entry.shape)):
        return False
    return is_sum(builder.reshard(source, builder.values[result].layout))


def _sync(builder: ProgramBuilder, gradient: int) -> GradientSync:
    return builder.strategy.gradient_sync.of(builder.values[gradient].tensor)


def compressed(
    builder: ProgramBuilder, pairs: Sequence[Pair], last_only: bool
) -> tuple[list[Step], list[Step]]:
    """Return the steps that pack gradients and send them, those of each compressor together, and those
    that wait for packs of others and sum gradients over devices."""
    found: dict[Compressor, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(_sync(builder, pair[0]).compressor, []).append(pair)
    groups = [_compressed(builder, alike, last_only) for alike in found.values()]
    return [step for group in groups for step in group[:2]], [group[2] for group in groups]


def _compressed(builder: ProgramBuilder, pairs: Sequence[Pair], last_only: bool) -> list[Step]:
    compressor = _sync(builder, pairs[0][0]).compressor
    if compressor == "none":
        raise ValueError("nothing says how gradients are compressed")
    first = builder.values[pairs[0][0]]
    (change,) = builder.reshard(pairs[0][0], builder.values[pairs[0][1]].layout)
    ranks = math.prod([builder.mesh(first.mesh).sizes[axis] for axis in change.axes])
    sources, results = (tuple([pair[end] for pair in pairs]) for end in (0, 1))
    residuals = tuple([residual_of(builder, source) for source in sources])
    packs = [
        _pack(builder, source, residual)
        for source, residual in zip(sources, residuals, strict=True)
    ]
    mine = tuple([_bytes_value(builder, source, size, change.axes, 0)
                  for source, size in zip(sources, packs, strict=True)])  # fmt: skip
    everyone = tuple([_bytes_value(builder, source, size * ranks, change.axes, REPLICATE)
                      for source, size in zip(sources, packs, strict=True)])  # fmt: skip
    pack = Transform(
        name=compressor,
        mesh=first.mesh,
        reads=(*sources, *residuals),
        writes=(*mine, *residuals),
        purpose="synchronise",
    )
    gather = Message(
        primitive="all_gather",
        mesh=first.mesh,
        axes=change.axes,
        sources=mine,
        results=everyone,
        dims=((0, -1),) * len(pairs),
        bytes=ranks * sum(packs),
        purpose="synchronise",
    )
    add = Transform(
        name=SUMS[compressor],
        mesh=first.mesh,
        reads=everyone,
        writes=results,
        purpose="synchronise",
        constants=(("dtype", builder.values[residuals[0]].dtype), ("ranks", ranks)),
    )
    return [
        builder.transform_step(pack, sources, mine, last_only=last_only),
        builder.message_step(gather, last_only=last_only),
        builder.transform_step(add, everyone, results, last_only=last_only),
    ]


def _pack(builder: ProgramBuilder, source: int, residual: int) -> int:
    sync, count = _sync(builder, source), math.prod(builder.values[source].shape)
    return packed_bytes(sync.compressor, sync.density, count, builder.values[residual].dtype)


def _bytes_value(
    builder: ProgramBuilder, source: int, size: int, axes: tuple[int, ...], placement: int
) -> int:
    """Return a value of so many bytes that stands for a gradient on its way over some axes."""
    entry = builder.values[source]
    layout = tuple([placement if axis in axes else old for axis, old in enumerate(entry.layout)])
    return builder.add_value(
        entry.tensor, entry.mesh, layout, "step", "gradient", dtype="uint8", shape=(size,)
    )


def compressing_bytes(builder: ProgramBuilder, transform: Transform) -> int:
    """Return what a transform needs for a while besides what it reads and writes, one tensor at a time:
    tensors like the gradient, places of its elements (8 bytes), and bytes."""
    if transform.name not in _TEMPORARIES:
        return 0
    tensors, places, flags = _TEMPORARIES[transform.name]
    is_sum = transform.name in SUMS.values()
    whole = transform.writes if is_sum else transform.reads[len(transform.reads) // 2 :]
    dtype = str(dict(transform.constants)["dtype"]) if is_sum else ""
    return max(
        math.prod(builder.values[one].shape)
        * (tensors * DTYPE_BYTES[dtype or builder.values[one].dtype] + 8 * places + flags)
        for one in whole
    )


# Counted in the runtime's functions: what lives at once where most does.
_TEMPORARIES: dict[TransformName, tuple[int, int, int]] = {
    "top-k": (3, 0, 2),
    "int8": (3, 0, 2),
    "1-bit": (2, 1, 2),
    "int8 sum": (1, 0, 0),
    "1-bit sum": (1, 1, 1),
}


def residual_of(builder: ProgramBuilder, gradient: int) -> int:
    """Return the residual of a parameter's gradients of one layout: whatever bucket they travel in."""
    one = builder.values[gradient]
    packs = _sync(builder, gradient).compressor != "none"
    dtype = wide_dtype(one.dtype) if packs else one.dtype
    key = (one.tensor, one.mesh, one.layout, dtype)
    if key not in builder.residuals:
        builder.residuals[key] = builder.add_value(
            *key[:3], "step", "state", dtype=dtype, resident=True
        )
    return builder.residuals[key]
