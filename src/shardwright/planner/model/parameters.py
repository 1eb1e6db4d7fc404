"""Terms of parameters: memory at rest, gathers before use, gradient synchronisation, the update.

A parameter's *level* says how much is sharded beyond its use over the axes that would keep copies:
0 nothing, 1 the optimizer's share (ZeRO-1), 2 gradients too, reduced in every microbatch (ZeRO-2),
3 the parameter at rest as well (ZeRO-3, FSDP), 4 the same, but kept from forward to backward (FSDP's
SHARD_GRAD_OP). The last is for one microbatch: with more, what stays whole is gathered less often;
and not for what the last block reads, which is kept at level 3 as well, its backward being next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.compression import (
    MERGED,
    allowed_in_rounds,
    allowed_ways,
    factor_shapes,
    is_compressed,
    is_worth_packing,
    kept_elements,
    merge_rounds,
    packed_bytes,
    wide_dtype,
)
from shardwright.core.graph import DTYPE_BYTES, TensorSpec, tensor_bytes
from shardwright.core.layout import PARTIAL, Layout, local_bytes, local_shape
from shardwright.core.strategy import GradientSync, ParameterConfig, wire_dtype
from shardwright.planner.model.decisions import Decisions, Statement
from shardwright.planner.model.prices import Prices
from shardwright.planner.model.terms import (
    EACH,
    GATHER,
    KEPT,
    NUM_COLUMNS,
    ONCE,
    SYNC,
    TRANSIENT,
    Term,
    term,
)
from shardwright.planner.space.configs import Pair
from shardwright.planner.space.redistribute import is_sum, reshard_steps
from shardwright.planner.space.rest import shard_further

WHOLE, ZERO_1, ZERO_2, ZERO_3, KEEPS = range(5)


def parameter_config(
    shape: tuple[int, ...], use: Layout, axis_sizes: tuple[int, ...], level: int
) -> ParameterConfig:
    """Return how a parameter with this layout in use is kept at a level."""
    fine = shard_further(shape, use, axis_sizes)
    return ParameterConfig(
        rest=fine if level >= ZERO_3 else use,
        optimizer=fine if level >= ZERO_1 else use,
        sync="microbatch" if level >= ZERO_2 else "step",
        keeps=level == KEEPS and fine != use,
    )


def num_levels(decisions: Decisions, tensor: int) -> int:
    """Return among how many levels a trained parameter may choose."""
    is_last = tensor in decisions.context.facts.read_last
    return KEEPS + 1 if decisions.num_microbatches == 1 and not is_last else KEEPS


def state_parameters(decisions: Decisions, statement: Statement) -> None:
    """State what every parameter costs, and the variables of their levels."""
    graph, ties = decisions.context.graph, decisions.context.facts.ties
    for tensor in graph.parameters:
        readers = graph.consumers[tensor]
        if not readers or ties.root[readers[0]] != readers[0]:
            continue
        statement.terms.append(_home_term(decisions, statement, tensor))
        seen = {readers[0]}
        for reader in readers[1:]:
            root = ties.root[reader]
            if root not in seen:
                seen.add(root)
                statement.terms.append(_away_term(decisions, statement, tensor, root))


def _pairs(decisions: Decisions, tensor: int, reader: int) -> list[Pair]:
    """Return the parameter's layouts under each config of a reader (a root)."""
    context = decisions.context
    graph, ties = context.graph, context.facts.ties
    # A root of another block reads its own parameter in this one's place.
    alike = next(r for r in graph.consumers[tensor] if ties.root[r] == reader)
    position = graph.operators[alike].inputs.index(tensor)
    hands_on, mesh = context.facts.hands_on[reader], decisions.mesh
    pairs: list[Pair] = []
    for dims in decisions.domains[reader]:
        pair = context.facts.placements(reader, dims).inputs[position]
        gradient = tuple(
            PARTIAL if hands_on and name == "" and axis == "data" and size > 1 else placed
            for name, axis, size, placed in zip(
                dims, mesh.axes, mesh.sizes, pair.gradient, strict=True
            )
        )
        pairs.append(Pair(pair.value, gradient))
    return pairs


def _home_term(decisions: Decisions, statement: Statement, tensor: int) -> Term:
    """Build the term of a parameter with its first reader: over (config, level)."""
    context = decisions.context
    reader = context.graph.consumers[tensor][0]
    trained = context.graph.tensors[tensor].needs_gradient
    can_shard = trained and math.prod(decisions.mesh.sizes) > 1
    pairs = _pairs(decisions, tensor, reader)
    levels = num_levels(decisions, tensor) if can_shard else 1
    columns = np.zeros((NUM_COLUMNS, len(pairs), levels))
    for choice, pair in enumerate(pairs):
        if not trained:
            spec, sizes = context.graph.tensors[tensor], decisions.mesh.sizes
            columns[KEPT, choice] = local_bytes(spec.shape, spec.dtype, pair.value, sizes)
        for level in range(levels if trained else 0):
            columns[:, choice, level] = _trained(decisions, tensor, pair, level)
    blocks = context.facts.ties.classes[context.facts.ties.block[reader]]
    if can_shard:
        statement.level_of[tensor] = statement.add(levels)
    variable = statement.level_of.get(tensor)
    return term((decisions.config_of[reader], variable), columns, blocks)


def _trained(decisions: Decisions, tensor: int, pair: Pair, level: int) -> NDArray[np.float64]:
    """Return the columns of one parameter at one level; of equal ones only how often their gradients are added up
    goes by the number of microbatches, the rest is worked out once a mesh."""
    spec, count = decisions.context.graph.tensors[tensor], decisions.num_microbatches
    is_last = tensor in decisions.context.facts.read_last
    key = (spec.shape, spec.dtype, pair, level, count > 1, is_last)
    known = decisions.wires.parameters
    if key not in known:
        gathers = 1 if is_last or level == KEEPS else 2
        known[key] = _columns(decisions, spec, pair, level, gathers=gathers)
    column, added = known[key]
    if count > 1 and added > 0:
        column = column.copy()
        column[EACH] += (1 - 1 / count) * added
    return column


def _columns(
    decisions: Decisions, spec: TensorSpec, pair: Pair, level: int, *, gathers: int
) -> tuple[NDArray[np.float64], float]:
    """Follow what lowering does with a parameter that is gathered so often per microbatch; what every microbatch but
    the first takes to add its gradient to the kept one, where one is kept, comes apart."""
    case = _Case(decisions, spec, pair, level)
    column = np.zeros(NUM_COLUMNS)
    wires, kept = decisions.wires, case.kept
    sync = _sync_seconds(decisions, spec, pair.gradient, kept)
    gather = wires.reshard(spec.shape, spec.dtype, kept.rest, pair.value)
    back = wires.reshard(spec.shape, spec.dtype, kept.optimizer, kept.rest)
    if math.inf in (sync, gather, back):
        column[EACH] = math.inf
        return column, 0.0
    _add_synchronisation(column, case, sync)
    column[GATHER] += gathers * gather
    column[EACH] += gathers * wires.lost(spec.shape, spec.dtype, kept.rest, pair.value)
    _add_casts(column, case)
    prices = decisions.context.prices
    update = prices.update_seconds(case.size(kept.optimizer, case.master))
    column[ONCE] += back + update
    _add_memory(column, case)
    if level >= ZERO_2:
        return column, 0.0
    touched = case.size(pair.value, spec.dtype) + 2 * case.size(pair.value, case.total)
    return column, prices.added_seconds(touched)


class _Case:
    """A parameter, its layout in use, and how it is kept at a level. Dtypes: in which microbatches add up
    (``total``), of the optimizer's copy (``master``), and of messages (``wire``)."""

    def __init__(self, decisions: Decisions, spec: TensorSpec, pair: Pair, level: int) -> None:
        context = decisions.context
        self.decisions, self.spec, self.pair, self.level = decisions, spec, pair, level
        self.kept = parameter_config(spec.shape, pair.value, decisions.mesh.sizes, level)
        self.total = _sum_dtype(decisions, spec, level)
        self.master = context.prices.master_dtype(spec.dtype)
        self.wire = wire_dtype(context.training.gradient_dtype, spec.dtype)

    @property
    def places(self) -> tuple[int, int]:
        """The columns of seconds and bytes of what each microbatch does, or else the step."""
        return (EACH, TRANSIENT) if self.level >= ZERO_2 else (ONCE, KEPT)

    def size(self, layout: Layout, dtype: str) -> int:
        """Return a device's bytes."""
        return local_bytes(self.spec.shape, dtype, layout, self.decisions.mesh.sizes)


def _add_synchronisation(column: NDArray[np.float64], case: _Case, sync: float) -> None:
    """Add the messages of the gradient, which take ``sync`` where nothing is compressed."""
    decisions, way = case.decisions, case.decisions.context.training.sync
    summed = _summed(case)
    if summed is not None and is_compressed(way, summed.dtype, summed.shape):
        sync = summed.message_seconds(decisions, way)
        column[ONCE] += summed.work_seconds(decisions.context.prices, way)
        column[KEPT] += summed.kept_elements(way) * DTYPE_BYTES[summed.dtype]
    else:
        least = math.inf if summed is None else summed.least_seconds(decisions)
        sync = min(sync, least)
        if least == math.inf:
            moved = (case.pair.gradient, case.kept.optimizer)
            column[case.places[0]] += decisions.wires.lost(case.spec.shape, case.wire, *moved)
    column[GATHER if case.level >= ZERO_2 else SYNC] += sync


def _add_casts(column: NDArray[np.float64], case: _Case) -> None:
    """Add what casting a gradient for its message takes, and keeping what that rounds off."""
    training, wire, total = case.decisions.context.training, case.wire, case.total
    feeds_back = training.error_feedback
    if PARTIAL not in case.pair.gradient or not (wire != case.spec.dtype or feeds_back):
        return
    casts = ((case.pair.value, total, wire), (case.kept.optimizer, wire, case.master))
    touched = sum(case.size(at, one) + case.size(at, two) for at, one, two in casts if one != two)
    source = case.size(case.pair.value, total)
    if feeds_back and DTYPE_BYTES[wire] < DTYPE_BYTES[total]:
        touched += 5 * source + case.size(case.pair.value, wire)
        column[KEPT] += source
    column[case.places[0]] += case.decisions.context.prices.touch_seconds(touched)


def _add_memory(column: NDArray[np.float64], case: _Case) -> None:
    """Add the bytes of the parameter, its gradient and the optimizer's states."""
    kept, pair, dtype, master = case.kept, case.pair, case.spec.dtype, case.master
    # The reduced gradient and the optimizer's own.
    state = 1 + case.decisions.context.training.optimizer_states
    column[KEPT] += case.size(kept.rest, dtype) + state * case.size(kept.optimizer, master)
    if kept.rest != kept.optimizer or master != dtype:
        column[KEPT] += case.size(kept.optimizer, master)
    if pair.gradient != kept.optimizer or master != case.total:
        column[case.places[1]] += case.size(pair.value, case.total)
    if case.level >= ZERO_3:
        column[KEPT if kept.keeps else TRANSIENT] += case.size(pair.value, dtype)


def _sum_dtype(decisions: Decisions, spec: TensorSpec, level: int) -> str:
    """Return the dtype in which microbatches' gradients are added up at a level, if they are."""
    if level >= ZERO_2:
        return spec.dtype
    return decisions.context.prices.sum_dtype(spec.dtype, decisions.num_microbatches)


def _sync_seconds(
    decisions: Decisions, spec: TensorSpec, gradient: Layout, kept: ParameterConfig
) -> float:
    """Price a gradient's synchronisation; one message may carry many of one step's."""
    wire = wire_dtype(decisions.context.training.gradient_dtype, spec.dtype)
    way = (spec.shape, wire, gradient, kept.optimizer)
    if kept.sync == "step" or decisions.num_microbatches == 1:
        return decisions.wires.merged(*way)
    return decisions.wires.reshard(*way)


@dataclass(frozen=True, slots=True)
class _Summed:
    """A gradient that may be compressed: the axes over which it is summed, of so many ranks, each one's
    shape, and the dtype in which it is packed."""

    axes: tuple[int, ...]
    ranks: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def message_seconds(self, decisions: Decisions, sync: GradientSync) -> float:
        """Return its share of the messages that bring what is packed to all."""
        wires, axes = decisions.wires, self.axes
        if sync.compressor == "powersgd":
            forms = factor_shapes(self.shape, sync.feedback.rank)
            return sum(
                wires.share("all_reduce", axes, tensor_bytes(form, self.dtype)) for form in forms
            )
        size = packed_bytes(sync.compressor, sync.density, self.elements, self.dtype)
        if sync.compressor in MERGED:
            rounds = merge_rounds(sync.compressor, self.ranks)
            return sum(wires.paired_share(axes, one.pairs, size) for one in rounds)
        return wires.share("all_gather", axes, self.ranks * size)

    def least_seconds(self, decisions: Decisions) -> float:
        """Return the least of that where plans may compress as they like: what it takes besides is not
        counted, so that bounds are true for any choice. Infinite where they may not."""
        training = decisions.context.training
        least, sync, dtype = training.least_sent, training.sync, self.dtype
        if least == 1:
            return math.inf
        ways = [
            replace(sync, compressor=how, density=density)
            for how, density in allowed_ways(least, dtype)
        ]
        ways += [way for _, way in allowed_in_rounds(sync, least, dtype, [self.shape])]
        return min([self.message_seconds(decisions, way) for way in ways], default=math.inf)

    def work_seconds(self, prices: Prices, sync: GradientSync) -> float:
        """Return its computation; of what comes before packing as little as may be."""
        elements, compressor = self.elements, sync.compressor

        def seconds(name: str, count: int = elements) -> float:
            return prices.pack_seconds(name, count, self.dtype, sync.density)

        if compressor == "powersgd":
            ranked = seconds("rank", elements * factor_shapes(self.shape, sync.feedback.rank)[0][1])
            return sum(map(seconds, ("left factor", "right factor", "factor sum"))) + 3 * ranked
        if compressor in MERGED:
            merging = [one for one in merge_rounds(compressor, self.ranks) if not one.replaces]
            merge = seconds("merge", kept_elements(sync.density, elements))
            added = seconds("zeros") + seconds("top-k sum")
            return seconds("top-k") + len(merging) * merge + added
        added = seconds("zeros") + self.ranks * seconds(f"{compressor} sum")
        return seconds(compressor) + added

    def kept_elements(self, sync: GradientSync) -> int:
        """Return the elements that stay from step to step."""
        copies = (sync.feedback.residual != "none") + bool(sync.feedback.momentum)
        is_factored = sync.compressor == "powersgd"
        right = factor_shapes(self.shape, sync.feedback.rank)[1] if is_factored else (0,)
        return copies * self.elements + math.prod(right)


def _summed(case: _Case) -> _Summed | None:
    """Return a gradient that is summed over devices once a step and then whole, and large enough to be
    compressed, where somebody asked for that or allows it; None where it is not (``lower.compress``)."""
    decisions, spec, pair = case.decisions, case.spec, case.pair
    training, sizes = decisions.context.training, decisions.mesh.sizes
    is_whole = training.compressor == "none" and training.least_sent == 1
    often = case.kept.sync == "microbatch" and decisions.num_microbatches > 1
    if is_whole or often or PARTIAL not in pair.gradient:
        return None
    steps = reshard_steps(spec.shape, spec.dtype, pair.gradient, case.kept.optimizer, sizes)
    shape = local_shape(spec.shape, pair.value, sizes)
    if not is_sum(steps) or not is_worth_packing(case.total, math.prod(shape)):
        return None
    ranks = math.prod(sizes[axis] for axis in steps[0].axes)
    return _Summed(steps[0].axes, ranks, shape, wide_dtype(case.total))


def _away_term(decisions: Decisions, statement: Statement, tensor: int, root: int) -> Term:
    """Return the term of a shared parameter's further reader: over both configs and the level."""
    context = decisions.context
    home = context.graph.consumers[tensor][0]
    first, second = _pairs(decisions, tensor, home), _pairs(decisions, tensor, root)
    level_variable = statement.level_of.get(tensor)
    levels = num_levels(decisions, tensor) if level_variable is not None else 1
    columns = np.zeros((NUM_COLUMNS, len(first), len(second), levels))
    for i, pair in enumerate(first):
        for j, other in enumerate(second):
            for level in range(levels):
                columns[:, i, j, level] = _away(decisions, tensor, pair, other, level)
    places = (decisions.config_of[home], decisions.config_of[root], level_variable)
    return term(places, columns, (context.facts.ties.block[root],))


def _away(
    decisions: Decisions, tensor: int, pair: Pair, other: Pair, level: int
) -> NDArray[np.float64]:
    """Return what a further reader under ``other`` adds to a parameter that the first has as ``pair``."""
    spec, sizes = decisions.context.graph.tensors[tensor], decisions.mesh.sizes
    kept = parameter_config(spec.shape, pair.value, sizes, level)
    column = np.zeros(NUM_COLUMNS)
    if spec.needs_gradient and other != pair:
        sync = _sync_seconds(decisions, spec, other.gradient, kept)
        column[GATHER if level >= ZERO_2 else SYNC] += sync
        more = local_bytes(spec.shape, _sum_dtype(decisions, spec, level), other.value, sizes)
        column[TRANSIENT if level >= ZERO_2 else KEPT] += more
    if other.value != pair.value:
        gather = decisions.wires.reshard(spec.shape, spec.dtype, kept.rest, other.value)
        column[GATHER] += (1 if kept.keeps else 2) * gather
        if kept.keeps and other.value != kept.rest:
            column[KEPT] += local_bytes(spec.shape, spec.dtype, other.value, sizes)
    if not np.isfinite(column).all():
        column[:] = 0.0
        column[EACH] = math.inf
    return column
