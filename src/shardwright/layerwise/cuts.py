"""Where a graph of layers may be cut: sets of layers closed under "what it reads".

A pipeline is a growing chain of such sets, each stage the difference of two (PipeDream's antichain
states are the same sets, named by their last layers). A chain of n layers has n + 1 of them, a
graph with branches may have exponentially many; then a part of them is kept, and said so.

Layers without time and weights (views, sums that were not timed) make most of those many: cuts
that agree in all other layers differ only in what crosses them and is kept. Of such a family the
one that least crosses is enough where memory is not limited: what crosses is a submodular function
of closed sets, so the smallest minimisers of nested families are nested, and put in place of the
cuts of any pipeline they make one in which every stage computes the same and sends no more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.core.profile import LayerGraph

MOST_CUTS = 1000
# So many are looked through for those that matter, where there are too many to try: 0.3 s.
MOST_LOOKED_AT = 50_000
Floats = NDArray[np.float64]
Masks = set[int]


@dataclass(frozen=True, eq=False, kw_only=True)
class Cuts:
    """The cuts by ascending work; the first is empty, the last has every layer.

    Columns are sums over a cut's layers, ``crossing`` the bytes of outputs that layers outside
    read, ``gathered`` those that its layers with weights read. Cut ``i`` is inside the cuts
    ``larger[offset[i] : offset[i + 1]]``, ascending. ``most_gathered`` and ``most_parameter`` are
    those of one layer. ``is_complete``: every cut of the graph is here; ``has_least_crossing``: of
    those that agree in layers with time or weights, at least the one that fewest bytes cross.
    """

    masks: tuple[int, ...]
    forward: Floats
    backward: Floats
    activation: Floats
    parameter: Floats
    crossing: Floats
    gathered: Floats
    offset: NDArray[np.int64]
    larger: NDArray[np.int64]
    most_gathered: float
    most_parameter: float
    is_complete: bool
    has_least_crossing: bool

    @property
    def num_cuts(self) -> int:
        """How many cuts there are, the empty and the full one included."""
        return len(self.masks)

    @property
    def work(self) -> float:
        """Compute seconds of one (micro)batch through all layers."""
        return float(self.forward[-1] + self.backward[-1])

    def layers(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the layers between two cuts."""
        return tuple(_members(self.masks[stop] & ~self.masks[start]))


def find_cuts(graph: LayerGraph, most: int = MOST_CUTS) -> Cuts:
    """Enumerate the cuts, all of them where there are at most ``most``.

    Else those of the graph with free layers merged into a neighbour, or with the runs of layers
    inside branches merged too, whichever first has few enough; those of two topological orders; and
    of every family the one that is least crossed, where these can be found. O(cuts * layers) plus O(cuts^2 * layers) multiply-adds for what is inside what.
    """
    everything = tuple(1 << i for i in range(len(graph.layers)))
    masks = _closed_sets(graph, everything, most)
    is_complete = has_least = masks is not None
    if masks is None:
        least = _least_crossed(graph, most)
        has_least = least is not None
        groups = _merge(graph, everything, _free(graph))
        masks = _closed_sets(graph, groups, most)
        if masks is None:
            groups = _merge(graph, groups, _beside_others(graph))
            masks = _closed_sets(graph, groups, most) or set()
        masks |= _prefixes(graph.order()) | _prefixes(_breadth_first(graph)) | (least or set())
    return replace(_tabulate(graph, masks), is_complete=is_complete, has_least_crossing=has_least)


def _least_crossed(graph: LayerGraph, most: int) -> Masks | None:
    """Return, of every family of cuts that agree in layers with time or weights, the smallest that
    fewest bytes cross; None where there are too many families, or cuts to look through."""
    found = _closed_sets(graph, tuple(1 << i for i in range(len(graph.layers))), MOST_LOOKED_AT)
    if found is None:
        return None
    everything = (1 << len(graph.layers)) - 1
    busy = everything & ~sum(1 << layer for layer in _free(graph))
    if len({mask & busy for mask in found}) > most:
        return None
    masks = list(found)
    crossing = _crossing(graph, _members_of(masks, len(graph.layers)))
    best: dict[int, tuple[float, int, int]] = {}
    for mask, size in zip(masks, crossing.tolist(), strict=True):
        one = (size, mask.bit_count(), mask)
        best[mask & busy] = min(best.get(mask & busy, one), one)
    return {mask for _, _, mask in best.values()} | {0, everything}


def _members_of(masks: list[int], count: int) -> NDArray[np.uint8]:
    """Return a matrix that says which of ``count`` layers each cut has."""
    width = (count + 7) // 8
    packed = np.frombuffer(b"".join(m.to_bytes(width, "little") for m in masks), dtype=np.uint8)
    return np.unpackbits(packed.reshape(len(masks), width), axis=1, bitorder="little")[:, :count]


def _crossing(graph: LayerGraph, has: NDArray[np.uint8]) -> Floats:
    """Return the bytes of outputs that layers outside each cut read."""
    crossing = np.zeros(len(has))
    for layer, consumers in enumerate(graph.consumers()):
        if consumers:
            waits = (has[:, layer] > 0) & (has[:, list(consumers)].min(axis=1) == 0)
            crossing += waits * graph.layers[layer].activation_bytes
    return crossing


def _prefixes(order: tuple[int, ...]) -> Masks:
    found, mask = {0}, 0
    for layer in order:
        mask |= 1 << layer
        found.add(mask)
    return found


def _breadth_first(graph: LayerGraph) -> tuple[int, ...]:
    """Order the layers by the longest path that leads to them."""
    depth = [0] * len(graph.layers)
    consumers = graph.consumers()
    for layer in graph.order():
        for target in consumers[layer]:
            depth[target] = max(depth[target], depth[layer] + 1)
    return tuple(sorted(range(len(depth)), key=depth.__getitem__))


class _Groups:
    """Groups of layers (masks), which others each reads, and which read it."""

    def __init__(self, graph: LayerGraph, masks: tuple[int, ...]) -> None:
        home = {layer: g for g, mask in enumerate(masks) for layer in _members(mask)}
        self.masks = list(masks)
        self.producers: list[set[int]] = [set() for _ in masks]
        self.consumers: list[set[int]] = [set() for _ in masks]
        for a, b in graph.edges:
            if home[a] != home[b]:
                self.producers[home[b]].add(home[a])
                self.consumers[home[a]].add(home[b])

    def ready(self, done: int, before: tuple[int, ...], group: int) -> tuple[int, ...]:
        """Return the groups that can follow what is ``done``, with this one the last of the many that
        could ``before``."""
        others = [g for g in before if g != group]
        return (*others, *(g for g in self.consumers[group] if not self.needs[g] & ~done))

    @cached_property
    def needs(self) -> list[int]:
        """What each reads, as a mask."""
        return [sum(self.masks[one] for one in own) for own in self.producers]

    def join(self, group: int, into: int) -> None:
        """Make one of two groups."""
        self.masks[into] |= self.masks[group]
        self.masks[group] = 0
        for ends, back in self.ways:
            for other in ends[group]:
                back[other].discard(group)
                if other != into:
                    back[other].add(into)
                    ends[into].add(other)
            ends[into].discard(group)
            ends[group] = set()

    @property
    def ways(self) -> tuple[tuple[list[set[int]], list[set[int]]], ...]:
        """Both directions: what is at the end of each group's edges, and the edges back."""
        return (self.producers, self.consumers), (self.consumers, self.producers)


def _closed_sets(graph: LayerGraph, masks: tuple[int, ...], most: int) -> Masks | None:
    """Enumerate the closed sets made of whole groups (masks of layers), or None beyond ``most``."""
    groups = _Groups(graph, masks)
    found = {0: tuple(g for g, needs in enumerate(groups.needs) if not needs)}
    level = [0]
    while level:
        following: list[int] = []
        for mask in level:
            for group in found[mask]:
                larger = mask | masks[group]
                if larger not in found:
                    found[larger] = groups.ready(larger, found[mask], group)
                    following.append(larger)
            if len(found) > most:
                return None
        level = following
    return set(found)


def _members(mask: int) -> list[int]:
    found: list[int] = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _free(graph: LayerGraph) -> set[int]:
    """Layers without time and weights: concatenations, items of tuples, views."""
    return {
        i
        for i, layer in enumerate(graph.layers)
        if not (layer.forward_seconds or layer.backward_seconds or layer.parameter_bytes)
    }


def _beside_others(graph: LayerGraph) -> set[int]:
    """Layers inside a branch: neither before nor after some other layer."""
    before = [0] * len(graph.layers)
    consumers = graph.consumers()
    for layer in graph.order():
        for target in consumers[layer]:
            before[target] |= before[layer] | 1 << layer
    related = list(before)
    for layer, mask in enumerate(before):
        for other in _members(mask):
            related[other] |= 1 << layer
    full = (1 << len(before)) - 1
    return {i for i, mask in enumerate(related) if mask | 1 << i != full}


def _merge(graph: LayerGraph, masks: tuple[int, ...], which: set[int]) -> tuple[int, ...]:
    """Merge a group into the one that it alone reads, or that alone reads it, both or one in
    ``which``: no other path joins the two, so no cycle can arise."""
    groups = _Groups(graph, masks)
    mergeable = [which.issuperset(_members(mask)) for mask in masks]
    free = _free(graph)
    for group, mask in enumerate(masks):
        if not mergeable[group]:
            continue
        is_free = free.issuperset(_members(mask))
        for mine, theirs in groups.ways:
            if len(mine[group]) != 1:
                continue
            (into,) = mine[group]
            if is_free or (len(theirs[into]) == 1 and mergeable[into]):
                groups.join(group, into)
                break
    return tuple(filter(None, groups.masks))


def _tabulate(graph: LayerGraph, masks: Masks) -> Cuts:
    count = len(graph.layers)
    read = [0.0] * count
    for producer, consumer in set(graph.edges):
        if graph.layers[consumer].parameter_bytes:
            read[consumer] += graph.layers[producer].activation_bytes
    columns = np.array(
        [
            (v.forward_seconds, v.backward_seconds, v.activation_bytes, v.parameter_bytes, z)
            for v, z in zip(graph.layers, read, strict=True)
        ]
    )
    raw = list(masks)
    has = _members_of(raw, count)
    # The sort key must be a linear extension, so work that rounding reorders is told apart by size.
    seconds = columns[:, 0] + columns[:, 1]
    work = has @ np.round(seconds / (seconds.sum() or 1.0) * 2.0**53).astype(np.int64)
    order = sorted(range(len(raw)), key=lambda i: (int(work[i]), raw[i].bit_count(), raw[i]))
    ordered = has[order]
    has = ordered.astype(np.float32)
    inside = (has @ (1 - has).T) == 0
    np.fill_diagonal(inside, val=False)
    sums = has.astype(np.float64) @ columns
    offset = np.zeros(len(raw) + 1, dtype=np.int64)
    np.cumsum(inside.sum(axis=1), out=offset[1:])
    return Cuts(
        masks=tuple(raw[i] for i in order),
        forward=sums[:, 0].copy(),
        backward=sums[:, 1].copy(),
        activation=sums[:, 2].copy(),
        parameter=sums[:, 3].copy(),
        crossing=_crossing(graph, ordered),
        gathered=sums[:, 4].copy(),
        offset=offset,
        larger=np.nonzero(inside)[1].astype(np.int64),
        most_gathered=float(columns[:, 4].max()),
        most_parameter=float(columns[:, 3].max()),
        is_complete=False,
        has_least_crossing=False,
    )
