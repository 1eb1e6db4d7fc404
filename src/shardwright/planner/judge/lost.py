"""How much of its gradients a step loses to compression: bits that do not travel."""

from __future__ import annotations

import math

import numpy as np

from shardwright.core.compression import PACKS, packed_by, sent_density, sent_share, wide_dtype
from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import shard_dim
from shardwright.core.program import Kind, Program, Transform


def lost_share(program: Program, graph: OperatorGraph) -> float:
    """Return the share of the bits of all trained parameters' gradients that are not sent. What is kept for
    the next step counts as lost."""
    packs = [place for place, one in enumerate(program.transforms) if one.name in PACKS]
    if not packs:
        return 0.0
    lost = {place: _lost(program, program.transforms[place]) for place in packs}
    packing = (program.kind == Kind.TRANSFORM) & np.isin(program.item, packs)
    trained = sum(
        graph.tensors[one].numel for one in graph.parameters if graph.tensors[one].needs_gradient
    )
    # Of a parameter with several gradients each is packed.
    return min(1.0, sum(lost[int(item)] for item in program.item[packing]) / trained)


def _lost(program: Program, transform: Transform) -> float:
    """Return elements times the share of their bits that is not sent, over all shards."""
    sizes, total = program.meshes[transform.mesh].sizes, 0.0
    for source in packed_by(transform):
        value = program.values[source]
        sync = program.strategy.gradient_sync.of(value.tensor)
        elements = math.prod(value.shape)
        shards = math.prod(
            size for size, one in zip(sizes, value.layout, strict=True) if shard_dim(one) >= 0
        )
        sent = sent_share(sync.compressor, sent_density(sync, value.shape), wide_dtype(value.dtype))
        total += elements * shards * (1 - sent)
    return total
