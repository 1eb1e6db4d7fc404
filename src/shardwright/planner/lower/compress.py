"""Gradients that are compressed on their way: each device packs its own, all packs are gathered, and
everyone adds them up in the same order.

A sum over devices becomes pack, all-gather, sum of packs (``merging`` and ``factors`` have the other ways).
What packing loses stays with the device, as a state, and is added to the parameter's next gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.core.compression import MERGED, is_compressed, packed_by
from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.layout import REPLICATE
from shardwright.core.program import Transform, TransformName
from shardwright.core.strategy import Compressor
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.lower.factors import factored
from shardwright.planner.lower.lot import Lot, Pair, sync_of
from shardwright.planner.lower.merging import merged
from shardwright.planner.space.redistribute import is_sum

SUMS: dict[str, TransformName] = {
    "top-k": "top-k sum", "int8": "int8 sum", "1-bit": "1-bit sum",
}  # fmt: skip
# Others than these select elements.
PACKINGS: dict[str, TransformName] = {"int8": "int8", "1-bit": "1-bit"}


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
    if not is_compressed(sync_of(builder, source), entry.dtype, entry.shape):
        return False
    return is_sum(builder.reshard(source, builder.values[result].layout))


def compressed(
    builder: ProgramBuilder, pairs: Sequence[Pair], last_only: bool
) -> tuple[list[Step], list[Step]]:
    """Return the steps that pack gradients and send them, those of each compressor together, and those
    that wait for packs of others and sum gradients over devices."""
    found: dict[Compressor, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(sync_of(builder, pair[0]).compressor, []).append(pair)
    groups = [_compressed(Lot.of(builder, alike, last_only)) for alike in found.values()]
    # All wait first for what their second step, a message, brings.
    firsts = [step for group in groups for step in group[:2]]
    return firsts, [step for group in groups for step in group[2:]]


def _compressed(lot: Lot) -> list[Step]:
    compressor = lot.sync.compressor
    if compressor == "powersgd":
        return factored(lot)
    mine = lot.packs()
    states = (*lot.residuals, *lot.velocities)
    packing: TransformName = PACKINGS.get(compressor, "top-k")
    pack = lot.transform(packing, lot.sources, mine, states, said=lot.pack_constants())
    if compressor in MERGED:
        return [pack, *merged(lot, mine)]
    sizes = [size * lot.ranks for size in lot.pack_bytes]
    everyone = lot.bytes_values(sizes, REPLICATE)
    gather = lot.message("all_gather", mine, everyone, sum(sizes), dims=(0, -1))
    said = {"dtype": lot.wide, "ranks": lot.ranks}
    add = lot.transform(SUMS[compressor], everyone, lot.results, said=said)
    return [pack, gather, add]


def compressing_bytes(builder: ProgramBuilder, transform: Transform) -> int:
    """Return what a transform needs for a while besides what it reads and writes, one tensor at a time:
    tensors like the gradient, places of its elements (8 bytes), and bytes."""
    if transform.name not in _TEMPORARIES:
        return 0
    tensors, places, flags = _TEMPORARIES[transform.name]
    if transform.name.endswith(" sum"):
        whole = transform.writes[: transform.count("gradients", len(transform.writes))]
        dtype = transform.word("dtype")
    else:
        whole = packed_by(transform)
        last = builder.values[transform.reads[-1]]
        dtype = last.dtype if len(whole) < len(transform.reads) else ""
        tensors += transform.number("momentum", 0) > 0
    return max(
        math.prod(builder.values[one].shape)
        * (tensors * DTYPE_BYTES[dtype or builder.values[one].dtype] + 8 * places + flags)
        for one in whole
    )


# Counted in the runtime's functions: what lives at once where most does.
_TEMPORARIES: dict[TransformName, tuple[int, int, int]] = {
    "top-k": (2, 0, 2),
    "int8": (3, 0, 2),
    "1-bit": (2, 1, 2),
    "int8 sum": (1, 0, 0),
    "1-bit sum": (1, 1, 1),
    "left factor": (1, 0, 1),
    "factor sum": (1, 0, 1),
}
