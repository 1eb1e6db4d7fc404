"""Activations that pass from block to block, and what sending them to the next stage costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.layout import PARTIAL, REPLICATE, local_bytes
from shardwright.planner.cost import collective_seconds
from shardwright.planner.model.decisions import Decisions


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Crossing:
    """An activation made in block ``first`` and last read in block ``last``.

    ``seconds`` of sending it on and its gradient back, by the choice of its maker's ``variable``.
    """

    first: int
    last: int
    variable: int
    seconds: NDArray[np.float64]


def find_crossings(decisions: Decisions) -> tuple[Crossing, ...]:
    """List every trained activation that is read in a later block."""
    context = decisions.context
    graph, ties = context.graph, context.facts.ties
    known: dict[int, float] = {}
    rows: dict[tuple[int, int], NDArray[np.float64]] = {}  # equal for equal blocks
    found: list[Crossing] = []
    for tensor, spec in enumerate(graph.tensors):
        readers = graph.consumers[tensor]
        if spec.producer < 0 or not spec.needs_gradient or not readers:
            continue
        first, last = ties.block[spec.producer], max([ties.block[reader] for reader in readers])
        if first == last:
            continue
        root = ties.root[spec.producer]
        position = graph.operators[spec.producer].outputs.index(tensor)
        if (root, position) not in rows:
            shape = decisions.shape(tensor, spec.producer)
            seconds: list[float] = []
            for dims in decisions.domains[root]:
                placed = context.facts.placements(root, dims).outputs[position].value
                clean = tuple(REPLICATE if p == PARTIAL else p for p in placed)
                size = local_bytes(shape, spec.dtype, clean, decisions.mesh.sizes)
                if size not in known:
                    known[size] = 2 * _transfer(decisions, size)
                seconds.append(known[size])
            rows[root, position] = np.array(seconds)
        variable = decisions.config_of[root]
        found.append(
            Crossing(first=first, last=last, variable=variable, seconds=rows[root, position])
        )
    return tuple(found)


def _transfer(decisions: Decisions, num_bytes: int) -> float:
    """Price sending from the first stage's devices to the second's, as ``price`` does."""
    context, width = decisions.context, len(decisions.mesh.devices)
    hosts = [device.host for device in context.cluster.devices]
    pairs = [(d, d + width) for d in decisions.mesh.devices if d + width < len(hosts)]
    leaving = [pair for pair in pairs if hosts[pair[0]] != hosts[pair[1]]]
    pair = (leaving or pairs)[0]
    share = sum(hosts[a] == hosts[pair[0]] for a, _ in leaving)
    cost = collective_seconds(
        "transfer", num_bytes, pair, context.cluster, context.table, max(share, 1)
    )
    return cost.seconds + context.prices.message_seconds
