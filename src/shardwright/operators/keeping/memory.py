"""Bytes of a segment: what autograd keeps until backward, and the transient peaks.

Liveness over *storages*, not tensors: views share the storage of what they view. Counted are only
storages made inside the segment; its inputs, outputs and parameters are values of the Program and
counted there. Workspaces of kernels: see ``workspaces``. Optimistic where an allocator fragments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.core.deferral import deferred_operands
from shardwright.core.graph import Operator, OperatorGraph
from shardwright.core.program import Call, Segment, Value, data_of
from shardwright.core.vocabulary import LOG_SUMS, is_whole
from shardwright.operators.derivatives import (
    KEEPS_ORDER,
    MAY_COPY,
    base_kind,
    is_identity,
    is_view,
    shares_storage,
)
from shardwright.operators.keeping.backward import backward_peak, split_peak
from shardwright.operators.keeping.kept import saved_tensors
from shardwright.operators.keeping.workspaces import forward_workspace

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Storages:
    """Which storage each value lives in, and what happens to the storages of one segment.

    ``made``/``last`` are call positions of birth and last forward use, ``kept`` the storages that
    autograd holds with the call that first keeps them, ``extra`` the nameless bytes per call,
    ``workspace`` those only while it runs forward.
    """

    root: dict[int, int] = field(default_factory=dict[int, int])
    size: dict[int, int] = field(default_factory=dict[int, int])
    made: dict[int, int] = field(default_factory=dict[int, int])
    last: dict[int, int] = field(default_factory=dict[int, int])
    kept: dict[int, int] = field(default_factory=dict[int, int])
    released: dict[int, int] = field(default_factory=dict[int, int])
    extra: list[int] = field(default_factory=list[int])
    workspace: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class Deferred:
    """What a split backward's I leaves to W: ``calls`` by place, ``values`` of the Program, ``bytes`` of
    what forward saved and of gradients beyond those; and the ``temporary_bytes`` of I and of W."""

    calls: tuple[int, ...]
    values: tuple[int, ...]
    bytes: int
    temporary_bytes: tuple[int, int]


class SegmentMemory:
    """The storages of one segment's values, looked at once."""

    def __init__(
        self,
        graph: OperatorGraph,
        calls: Sequence[Call],
        values: Sequence[Value],
        inputs: tuple[int, ...],
    ) -> None:
        self.graph, self.calls, self.values, self.inputs = graph, calls, values, inputs
        self.storages = _trace(graph, calls, values, inputs)

    def bytes(self, outputs: tuple[int, ...], has_backward: bool) -> tuple[int, tuple[int, int]]:
        """Return (saved bytes, (temporary bytes of forward, of backward)).

        Temporary bytes come on top of the saved bytes and of the outputs. The backward's come on top
        of the gradients of the segment's inputs as well, which are values of the Program; they are
        negative where saved bytes go faster than those gradients come.
        """
        storages = self.storages
        kept_out = {storages.root[v] for v in outputs if v in storages.root}
        kept = {root for root in storages.kept if root in storages.made and root not in kept_out}
        if not has_backward:
            return 0, (_forward_peak(storages, set(), kept_out, keeps_extra=False), 0)
        saved = sum(storages.size[root] for root in kept) + sum(storages.extra)
        forward = _forward_peak(storages, kept, kept_out, keeps_extra=True)
        return saved, (forward, self._backward(outputs))

    def lying(self, outputs: tuple[int, ...]) -> tuple[dict[int, int], dict[int, int]]:
        """Return in which other output's storage outputs lie, and the bytes of storages that outputs alone hold, where
        these see a part of it only (one third of a fused product) or the same numbers several times."""
        storages, owner = self.storages, dict[int, int]()
        for value in sorted(outputs, key=storages.made.__contains__, reverse=True):
            root = storages.root.get(value, value)
            if root in storages.made:
                owner.setdefault(root, value)
        roots = {value: storages.root.get(value, value) for value in outputs}
        views = {v: owner[root] for v, root in roots.items() if owner.get(root, v) != v}
        sizes = {owner[root]: storages.size[root] for root in owner}
        return views, {v: size for v, size in sizes.items() if size != self.values[v].bytes}

    def joined(self, outputs: tuple[int, ...], sums: Mapping[int, bool]) -> int:
        """Return the temporary bytes of a backward that is joined to the one before (``core.joining``); see
        ``backward_peak``."""
        return self._backward(outputs, sums)

    def _backward(self, outputs: tuple[int, ...], sums: Mapping[int, bool] | None = None) -> int:
        storages = self.storages
        released = list(storages.extra)
        for root, step in storages.released.items():
            # Outputs too: by then only autograd holds them.
            released[step] += storages.size[root] if root in storages.made else 0
        ends = (self.inputs, outputs)
        return backward_peak(self.graph, self.calls, self.values, ends, released, sums=sums)

    def split(self, outputs: tuple[int, ...], precision: str) -> Deferred:
        """Return what the two halves of a split backward leave and need."""
        storages, calls = self.storages, self.calls
        places = ((place, self._later(call, precision)) for place, call in enumerate(calls))
        later = {place: positions for place, positions in places if positions}
        kept_out = {storages.root[v] for v in outputs if v in storages.root}
        own = storages.made.keys() - kept_out
        read = self._read_later(later)
        stays = read & own
        released = [0 if place in later else size for place, size in enumerate(storages.extra)]
        for root in own.intersection(storages.released) - stays:
            released[storages.released[root]] += storages.size[root]
        ends, work = (self.inputs, outputs), (released, later)
        inner = split_peak(self.graph, calls, self.values, ends, work)
        inside = sum(map(storages.size.__getitem__, stays))
        inside += sum(map(storages.extra.__getitem__, later))
        shared = [v for v in (*self.inputs, *outputs) if storages.root.get(v) in read - stays]
        gradients = [self.values[value].gradient for value in inner.outputs]
        return Deferred(
            calls=tuple(later),
            values=tuple(dict.fromkeys([*shared, *gradients])),
            bytes=inside + inner.kept,
            temporary_bytes=(inner.peak - inner.kept - inside, self._weight_peak(later)),
        )

    def _read_later(self, later: Mapping[int, tuple[int, ...]]) -> set[int]:
        """Return the storages that W's calls read of what forward saved."""
        read: set[int] = set()
        for place, positions in later.items():
            call = self.calls[place]
            kept_in, _, _ = saved_tensors(self.graph, self.graph.operators[call.operator])
            wanted = (call.operands[p] for p in kept_in if p not in positions)
            read.update(self.storages.root[value] for value in wanted)
        return read

    def _later(self, call: Call, precision: str) -> tuple[int, ...]:
        shapes = tuple(self.values[value].shape for value in call.operands)
        return deferred_operands(self.graph, self.graph.operators[call.operator], shapes, precision)

    def _weight_peak(self, later: Mapping[int, tuple[int, ...]]) -> int:
        """Return the most bytes of W above what it began with and all gradients of parameters: they come
        one call after another, the last call's first."""
        trained = [v for v in self.inputs if self.values[v].role == "parameter"]
        level = -sum(self.values[v].bytes for v in trained if self.values[v].gradient >= 0)
        peak = level
        for place in sorted(later, reverse=True):
            operands = self.calls[place].operands
            level += sum(self.values[operands[position]].bytes for position in later[place])
            peak = max(peak, level)
        return peak

    def kept(self, values: tuple[int, ...]) -> frozenset[int]:
        """Return those of its outputs or inputs that its own backward needs, so that they live until
        then."""
        storages = self.storages
        return frozenset(v for v in values if storages.root.get(v) in storages.kept)

    def idle_inputs(self) -> tuple[int, ...]:
        """Return the activations among its inputs that its own backward does not need: terms of sums, such as the
        products that tensor parallelism adds up, and what is written to."""
        kept, values = self.kept(self.inputs), self.values
        return tuple(
            value
            for value in self.inputs
            if values[value].role == "activation" and value not in kept
        )


def viewed_inputs(
    graph: OperatorGraph, segment: Segment, values: Sequence[Value]
) -> dict[int, int]:
    """Map outputs of a segment to the activations among its inputs that they are mere views of.

    Left out is what may have been copied on the way: reshaped when no longer in order of memory.
    """
    roots = ((value, data_of(values, value)) for value in segment.inputs)
    source = {value: root for value, root in roots if values[root].role == "activation"}
    ordered = {value for value, root in source.items() if _is_ordered(graph, values[root])}
    for call in segment.calls:
        operand = call.operands[0] if call.operands and call.scale == 1.0 else -1
        if operand in source:
            views, keeps = _how_viewed(graph, graph.operators[call.operator], operand in ordered)
            made = set(call.results if views else ()) - {-1}
            source |= dict.fromkeys(made, source[operand])
            ordered |= made if keeps else set()
    return {value: source[value] for value in segment.outputs if value in source}


def _is_ordered(graph: OperatorGraph, activation: Value) -> bool:
    """Whether an activation lies in memory in the order of its dims, whoever made it."""
    bare = base_kind(graph.operators[graph.tensors[activation.tensor].producer].kind)
    return not is_view(bare) or bare in KEEPS_ORDER


def _how_viewed(graph: OperatorGraph, operator: Operator, is_ordered: bool) -> tuple[bool, bool]:
    """Whether results are views of an operand that lies in order or does not, and lie in order too."""
    bare, same = base_kind(operator.kind), is_identity(graph, operator)
    views = same or (is_view(bare) and (is_ordered or bare not in MAY_COPY))
    return views, is_ordered and (same or bare in KEEPS_ORDER)


def _trace(
    graph: OperatorGraph, calls: Sequence[Call], values: Sequence[Value], inputs: tuple[int, ...]
) -> Storages:
    storages = Storages()
    for value in inputs:
        storages.root[value] = data_of(values, value)
    for step, call in enumerate(calls):
        operator = graph.operators[call.operator]
        shares = shares_storage(graph, operator)
        for value in call.operands:
            root = storages.root.setdefault(value, data_of(values, value))
            storages.last[root] = step
        for value in call.results:
            if value < 0:
                continue
            source = call.operands[0] if shares else value
            root = storages.root.get(source, value)
            storages.root[value] = root
            if root == value:
                storages.made[root] = step
                storages.size[root] = _bytes_made(graph, call, values, value)
            storages.last[root] = step
        _keep(graph, call, values, storages, step)
    return storages


def _bytes_made(graph: OperatorGraph, call: Call, values: Sequence[Value], result: int) -> int:
    """Return the bytes of a result; those of log sums that the loss does not read are not made."""
    operator = graph.operators[call.operator]
    if operator.kind == LOG_SUMS and is_whole(graph, operator, values[call.operands[0]].shape):
        return 0
    return values[result].bytes


def _keep(
    graph: OperatorGraph, call: Call, values: Sequence[Value], storages: Storages, step: int
) -> None:
    kept_in, kept_out, extra = saved_tensors(graph, graph.operators[call.operator])
    named = [call.operands[p] for p in kept_in] + [call.results[p] for p in kept_out]
    for value in named:
        if value >= 0:
            root = storages.root[value]
            storages.kept.setdefault(root, step)
            # Backward runs calls in reverse: the earliest call that keeps it releases it last.
            storages.released[root] = min(storages.released.get(root, step), step)
    shapes: Shapes = tuple(values[v].shape for v in call.operands)
    results: Shapes = tuple(
        shape if v < 0 else values[v].shape
        for v, shape in zip(call.results, call.result_shapes, strict=True)
    )
    storages.extra.append(extra(shapes, results))
    storages.workspace.append(forward_workspace(graph, call, values))


def _forward_peak(
    storages: Storages, kept: set[int], kept_out: set[int], *, keeps_extra: bool
) -> int:
    """Return the most bytes alive in forward above what remains alive at its end.

    Without a backward an operator's nameless bytes last only while it runs.
    """
    lasting = kept | {root for root in kept_out if root in storages.made}
    extra = storages.extra
    change = [*extra, 0]
    if not keeps_extra:
        for step, size in enumerate(extra):
            change[step + 1] -= size
    for root, made in storages.made.items():
        change[made] += storages.size[root]
        change[-1 if root in lasting else storages.last[root] + 1] -= storages.size[root]
    peak = level = 0
    for step in range(len(extra)):
        level += change[step]
        peak = max(peak, level + storages.workspace[step])
    end = sum(storages.size[root] for root in lasting) + (sum(extra) if keeps_extra else 0)
    return max(0, peak - end)
