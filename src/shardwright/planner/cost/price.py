"""Seconds for every instruction of a Program.

Each segment and each message is priced once, whatever the microbatches. A transfer's time lies on its SEND,
which occupies the link; the RECEIVE waits for it and costs only the message overhead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.costs import Cost, CostTable
from shardwright.core.graph import OperatorGraph, tensor_bytes
from shardwright.core.layout import Layout, local_bytes
from shardwright.core.program import LOCAL, Call, Kind, Message, Program, Segment
from shardwright.core.strategy import Mesh, master_dtype
from shardwright.operators.counting.work import Shapes, has_backward
from shardwright.planner.cost.beneath import exposed, num_products, products_beside
from shardwright.planner.cost.burden import (
    NUM_COLUMNS,
    Burden,
    charge,
    charge_entries,
    charge_telling,
    is_measured,
    largest_burden,
)
from shardwright.planner.cost.collective import collective_seconds, halo_seconds
from shardwright.planner.cost.roofline import Rates, memory_seconds
from shardwright.planner.cost.shards import Groups, ShardPrices
from shardwright.planner.cost.totals import SOURCES, halves, started, total
from shardwright.planner.cost.transfers import halo_bytes, paired_seconds, transfer_cost
from shardwright.planner.cost.transforms import transform_cost
from shardwright.planner.cost.update import added_seconds, update_all, updates_by_mesh

MOST_KNOWN, FIRST_ROWS = 100_000, 512  # beyond so many prices, they are forgotten
WEIGHTS = ("parameter", "version")
Row = tuple[float, ...]  # seconds, half-width, source, and the columns of a ``Burden``
# See ``InstructionCosts._reads``.
Reads = tuple[Segment, tuple[tuple[int, int], ...], tuple[int, ...], int]


@dataclass(frozen=True, eq=False)
class Prices:
    """Per instruction: seconds, half-width, the ``SOURCES`` index of most, and what of them ``burden.charge`` moved."""

    seconds: NDArray[np.float64]
    spread: NDArray[np.float64]
    source: NDArray[np.int8]
    moved: NDArray[np.float64] | None = None

    def by_source(self) -> tuple[tuple[str, float], ...]:
        """Return how many of all seconds rest on each sort of number."""
        totals = np.bincount(self.source, weights=self.seconds, minlength=len(SOURCES))
        return tuple((name, float(totals[i])) for i, name in enumerate(SOURCES) if totals[i] > 0)


def price(program: Program, graph: OperatorGraph, cluster: Cluster, table: CostTable) -> Prices:
    """Return the cost of every instruction, alone on its resource."""
    return InstructionCosts(graph, ShardPrices(cluster, table)).price(program)


def _prices(costs: InstructionCosts, program: Program) -> Prices:
    fixed, meshes = _fixed(costs, program), len(program.meshes)
    (forward, backward), messages, halves = costs.segments(), costs.messages(), costs.halves()
    known = [costs.rows[part] for part in (forward, backward, messages)]
    table = np.concatenate([*known, fixed, *halves])
    ahead = 2 * len(forward) + len(messages)  # of ``fixed``
    begin = np.zeros(len(Kind), dtype=np.int64)
    begin[Kind.BACKWARD] = len(forward)
    begin[[Kind.MESSAGE, Kind.SEND]] = 2 * len(forward)
    begin[Kind.INPUT_GRADIENT] = ahead + len(fixed)
    begin[Kind.WEIGHT_GRADIENT] = begin[Kind.INPUT_GRADIENT] + len(forward)
    begin[Kind.UPDATE], begin[Kind.CLIP] = ahead + 1, ahead + 1 + meshes
    begin[Kind.TRANSFORM] = begin[Kind.CLIP] + meshes
    by_group = (program.kind == Kind.UPDATE) | (program.kind == Kind.CLIP)
    row = begin[program.kind] + np.where(by_group, program.group, program.item)
    some = (program.kind == Kind.UPDATE) & (program.item >= 0)
    row[some] = ahead + len(fixed) - len(program.updates) + program.item[some]
    row[program.kind == Kind.RECEIVE] = ahead
    columns = np.ascontiguousarray(table[row].T)
    # Gradients kept over the step are first written, then added to.
    backward = np.flatnonzero(np.isin(program.kind, (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)))
    later = backward[program.microbatch[backward] != program.microbatch[backward[:1]]]
    if len(later):
        sums = np.array([costs.accumulated(item) for item in program.segments])
        columns[0, later] += sums[program.item[later]]
    seconds, spread, source = columns[:3]
    if costs.entry:
        charge_entries(program, seconds, costs.overheads)
    moved = None
    if costs.is_burdened:
        moved = charge(program, seconds, spread, costs.rows[messages, 3:].T)
        charge_telling(program, seconds, spread, (costs.cluster, costs.table))
    return Prices(seconds, spread, source.astype(np.int8), moved)


def _fixed(costs: InstructionCosts, program: Program) -> NDArray[np.float64]:
    meshes = range(len(program.meshes))
    updates = [_row(costs.update(mesh)) for mesh in meshes]
    clips = [_row(costs.clip(mesh)) for mesh in meshes] if program.strategy.clips else updates
    known = program.values, costs.table, [[one.kind for one in own] for own in costs.rates]
    works = [_row(transform_cost(one, *known)) for one in program.transforms]
    works += [_row(costs.update(mesh, masters)) for mesh, masters in updates_by_mesh(program)]
    rows = np.array([_row(costs.received()), *updates, *clips, *works], dtype=np.float64)
    return np.pad(rows, ((0, 0), (0, NUM_COLUMNS))) if costs.is_burdened else rows


def _row(cost: Cost) -> Row:
    return cost.seconds, cost.spread, SOURCES.index(cost.source)


class InstructionCosts:
    """Prices of segments and messages, remembered by what decides them.

    It may price one Program after another: segments and messages that are the same objects on the
    same meshes are priced once (``lower.incremental`` hands on what did not change).
    """

    def __init__(self, graph: OperatorGraph, shards: ShardPrices) -> None:
        self.graph = graph
        self.shards = shards
        self.cluster, self.table = shards.cluster, shards.table
        self.overheads = self.table.overhead_map
        self.entry = self.overheads.get("segment_seconds", 0.0)
        self.sort_of: dict[int, int] = {}
        self.sizes: dict[tuple[object, ...], int] = {}
        self.trained = tuple(
            (position, tensor)
            for position, tensor in enumerate(graph.parameters)
            if graph.tensors[tensor].needs_gradient and graph.consumers[tensor]
        )
        self.known: dict[object, int] = {}  # by id, segments with what they add: a row
        self.is_burdened = is_measured(self.table)
        self.width = 3 + NUM_COLUMNS * self.is_burdened
        self.rows, self.items = np.empty((FIRST_ROWS, self.width)), list[Segment | Message]()
        self.reads: dict[int, Reads] = {}
        self._homes: dict[int, list[tuple[int, int]]] = {}
        self._frame: object = None

    def price(self, program: Program, masters: Mapping[int, int] | None = None) -> Prices:
        """Return the cost of every instruction of one Program.

        ``masters``: per mesh, bytes that the optimizer keeps, where the Program does not tell.
        """
        frame = (program.meshes, program.strategy.precision)
        if frame != self._frame or len(self.known) > MOST_KNOWN:
            self._frame = frame
            self._meet(program.meshes, program.strategy.precision)
        self.program = program
        self._homes.clear()
        self.masters = masters or {}
        return _prices(self, program)

    def _meet(self, meshes: tuple[Mesh, ...], precision: str) -> None:
        """Look at meshes: one device of each kind per mesh, since a group waits for its slowest."""
        self.known.clear()
        self.items.clear()
        self.reads.clear()
        self.rates = [self.shards.rates_of(mesh, precision) for mesh in meshes]
        # By mesh and axes: the number of a mesh is found faster than thousands of devices.
        self._groups: dict[tuple[int, tuple[int, ...]], Groups] = {}

    def segments(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which of ``rows`` price every segment's forward and backward."""
        known, segments = self.known, self.program.segments
        keys = list(zip(map(id, segments), self._added(), strict=True))
        if not all(map(known.__contains__, keys)):
            for item, key in zip(segments, keys, strict=True):
                if key not in known:
                    known[key] = self._priced(item, key[1])
        numbers = np.array([known[key] for key in keys], dtype=np.int64)
        return numbers, numbers + 1

    def _priced(self, segment: Segment, added: int) -> int:
        """Return the row that prices a segment's forward; that of its backward comes next. Those of equal
        operators are priced once."""
        own = self.reads[id(segment)][-1] + added
        like = (segment.mesh, segment.has_backward, own, *map(self._shard, segment.calls))
        if like not in self.known:
            rows = [_row(self._segment(segment, one, added)) for one in ("forward", "backward")]
            self.known[like], _ = (self._keep(segment, row) for row in rows)
        return self.known[like]

    def halves(self) -> list[NDArray[np.float64]]:
        """Return the rows that price I and W of every segment, where backward is split."""
        if not self.program.strategy.pipeline.splits_backward:
            return []
        ends = list(zip(self.program.segments, self._added(), strict=True))
        prices = {
            phase: [_row(self._segment(segment, phase, added)) for segment, added in ends]
            for phase in ("input", "weight")
        }
        blank = (0.0,) * (self.width - 3)
        return [np.array([row + blank for row in rows]) for rows in prices.values()]

    def messages(self) -> NDArray[np.int64]:
        """Return which of ``rows`` price every message."""
        known, items = self.known, self.program.messages
        keys: list[object] = list(map(id, items))
        self.beside = self._beside()
        for number, seconds in self.beside.items():
            keys[number] = (id(items[number]), seconds)
        if not all(map(known.__contains__, keys)):
            for number, key in enumerate(keys):
                if key not in known:
                    row = _row(self._message(number))
                    if self.is_burdened:
                        row += self._burden(items[number])
                    known[key] = self._keep(items[number], row)
        return np.array([known[key] for key in keys], dtype=np.int64)

    def _keep(self, item: Segment | Message, row: Row) -> int:
        """Remember a price, and what it is of: no other may have its id."""
        number = len(self.items)
        if number == len(self.rows):
            self.rows = np.concatenate([self.rows, np.empty((number + FIRST_ROWS, self.width))])
        self.items.append(item)
        self.rows[number] = row + (0.0,) * (self.width - len(row))
        return number

    def _segment(self, segment: Segment, phase: str, added: int) -> Cost:
        if phase != "forward" and not segment.has_backward:
            return Cost(seconds=0.0)
        fixed = Cost(seconds=self.entry, source="measured")
        options: list[Cost] = []
        for rates in self.rates[segment.mesh]:
            if phase in ("input", "weight"):
                whole = [self._call(call, "backward", rates) for call in segment.calls]
                costs = halves(self.graph, self.program, segment, whole, phase)
            else:
                costs = [self._call(call, phase, rates) for call in segment.calls]
            if phase in ("backward", "input"):
                size = 3 * (self.reads[id(segment)][-1] + added)
                costs.append(Cost(seconds=memory_seconds(size, rates.kind)))
            busy = total([fixed, *costs])
            if rates.is_gpu:
                busy = started(busy, costs, phase, rates)
            options.append(busy)
        return max(options, key=lambda cost: cost.seconds)

    def _call(self, call: Call, phase: str, rates: Rates) -> Cost:
        sort, operands, results = self._shard(call)
        return self.shards.cost(self.graph, call.operator, sort, (operands, results), phase, rates)

    def _shard(self, call: Call) -> tuple[int, Shapes, Shapes]:
        """Return all that decides what an operator costs on one sort of device."""
        shapes = tuple([self.program.values[value].shape for value in call.operands])
        if call.operator not in self.sort_of:
            self.sort_of[call.operator] = self.shards.sort(self.graph, call.operator)
        return self.sort_of[call.operator], shapes, call.result_shapes

    def _reads(self, segment: Segment) -> Reads:
        """Return of a segment's own inputs and outputs: gradients, bytes, and parameters that others read too;
        and what its own operators add to each other's gradients."""
        if not segment.has_backward:
            return segment, (), (), 0
        values, operators = self.program.values, self.graph.operators
        calls = [one for one in segment.calls if has_backward(self.graph, operators[one.operator])]
        uses = Counter(chain.from_iterable([call.operands for call in calls]))
        own = (*segment.inputs, *segment.outputs)
        read = list(filter(uses.__contains__, own))
        parameters = tuple(v for v in read if values[v].role in WEIGHTS)
        others = [v for v in read if values[v].role not in WEIGHTS]
        return segment, self._summed(others), parameters, self._twice(uses)

    def _twice(self, uses: Mapping[int, int]) -> int:
        """Return the bytes of gradients that are summed because a value is read so often."""
        read = [(self.program.values[value], count - 1) for value, count in uses.items()]
        trained = [one for one in read if self.graph.tensors[one[0].tensor].needs_gradient]
        return sum(again * value.bytes for value, again in trained)

    def _summed(self, read: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return those gradients of values, with their bytes, that are summed in one microbatch;
        ``accumulated`` counts sums of a step."""
        values = self.program.values
        pairs = [(values[v].gradient, values[v].bytes) for v in read]
        return tuple(pair for pair in pairs if pair[0] >= 0 and values[pair[0]].scope != "step")

    def _added(self) -> list[int]:
        """Return by segment the bytes of gradients that it adds to those of segments behind it.

        Backward runs the last reader of a value first; so its gradient is written once, then added
        to, however the readers are spread over segments.
        """
        segments, written = self.program.segments, set[int]()
        how = self.program.strategy
        is_often = any("microbatch" in (one.sync, how.updates) for one in how.parameters)
        reads, found = self.reads, list[int]()
        for segment in segments:
            if id(segment) not in reads:
                reads[id(segment)] = self._reads(segment)
        for segment in reversed(segments):
            _, pairs, parameters, _ = reads[id(segment)]
            if is_often:
                pairs += self._summed(parameters)
            total = 0
            for gradient, size in pairs:
                if gradient in written:
                    total += size
                else:
                    written.add(gradient)
            found.append(total)
        return found[::-1]

    def accumulated(self, segment: Segment) -> float:
        """Return the seconds of adding a later microbatch's gradients to those kept."""
        values = self.program.values
        kept = [(values[v], values[values[v].gradient]) for v in segment.inputs
                if values[v].gradient >= 0]  # fmt: skip
        sizes = [
            value.bytes + 2 * tensor_bytes(value.shape, total.dtype)
            for value, total in kept
            if total.scope == "step"
        ]
        return max(
            0.0
            if rates.is_gpu and rates.software.adds_in_products
            else added_seconds(sizes, rates.kind, self.table)
            for rates in self.rates[segment.mesh]
        )

    def received(self) -> Cost:
        seconds = self.overheads.get("message_seconds", 0.0)
        return Cost(seconds=seconds, source="measured" if seconds else "modelled")

    def _message(self, item: int) -> Cost:
        """Return the slowest group's time; merged items are also copied in and out."""
        message = self.program.messages[item]
        if message.destination >= 0:
            wire = transfer_cost(self.program, item, self.cluster, self.table, self.shards.wires)
            return total([wire, self.received()])
        groups = self._groups_of(message)
        costs = [self._within(message, devices, concurrent) for devices, concurrent in groups]
        parts = [max(costs, key=lambda cost: cost.seconds)]
        if item in self.beside and self._is_in_host(groups):
            parts = [exposed(parts[0], self.beside[item], len(groups[0][0]))]
        if message.primitive not in LOCAL:
            parts.append(self.received())
        if not (self.is_burdened and self._burden(message).held):
            parts.append(self._copied(message))
        return total(parts)

    def _groups_of(self, message: Message) -> Groups:
        key = (message.mesh, message.axes)
        if key not in self._groups:
            self._groups[key] = self.shards.groups(self.program.meshes[message.mesh], message.axes)
        return self._groups[key]

    def _is_in_host(self, groups: Groups) -> bool:
        return all(len({self.cluster.devices[one].host for one in own}) == 1 for own, _ in groups)

    def _beside(self) -> dict[int, float]:
        """Return the seconds of the product that each message runs beneath, where software does so."""
        rates = [each[0] for each in self.rates]
        if not any(one.is_gpu and one.software.overlaps_products for one in rates):
            return {}
        return {
            number: sum(
                self._call(call, phase, rates[mesh]).seconds / num_products(phase)
                for mesh, call, phase in products
            )
            for number, products in products_beside(self.program, self.graph).items()
        }

    def _copied(self, message: Message) -> Cost:
        """Price copying merged items into and out of their buffer."""
        device = self.program.meshes[message.mesh].devices[:1]
        count = self.rates[message.mesh][0].software.num_messages(message)
        size = 2 * message.bytes if len(message.sources) > count else 0
        return collective_seconds("copy", size, device, self.cluster, self.table)

    def _burden(self, message: Message) -> Burden:
        """Return what a message costs ranks that compute."""
        ends = (message.mesh, message.destination)
        groups = [tuple(self.program.meshes[mesh].devices[0] for mesh in ends)]
        if message.destination < 0:
            groups = [group for group, _ in self._groups_of(message)]
        return largest_burden(message, groups, (self.cluster, self.table))

    def _within(self, message: Message, devices: tuple[int, ...], concurrent: int) -> Cost:
        """Price a message in one group of devices; many are alike."""
        wires = self.shards.wires
        if message.pairs:
            route = self.program.meshes[message.mesh], message.axes, message.pairs, message.bytes
            if route not in wires:
                wires[route] = paired_seconds(*route, (self.cluster, self.table))
            return wires[route]
        size = halo_bytes(self.program, message)
        count = self.rates[message.mesh][0].software.num_messages(message)
        key = (message.primitive, message.bytes, size, devices, concurrent, count)
        if key not in wires:
            args = (devices, self.cluster, self.table, concurrent)
            if size:
                wires[key] = halo_seconds(message.bytes, size, *args)
            else:
                each = collective_seconds(message.primitive, message.bytes / count, *args)
                wires[key] = total([each] * count) if count > 1 else each
        return wires[key]

    def update(self, mesh: int, masters: Sequence[int] | None = None) -> Cost:
        """Price the update of this mesh's optimizer shards, or of some of them."""
        kind = min((rates.kind for rates in self.rates[mesh]), key=lambda k: k.memory_bandwidth)
        sizes, states = self._master_sizes(mesh, masters), self.program.strategy.optimizer_states
        return update_all(sizes, states, kind, self.table)

    def clip(self, mesh: int) -> Cost:
        """Read every gradient once, one small all-reduce, scale them."""
        kind = min((rates.kind for rates in self.rates[mesh]), key=lambda k: k.memory_bandwidth)
        mine = self.program.strategy
        everyone = mine.devices if mine.pipeline.is_flushed else mine.meshes[mesh].devices
        norm = collective_seconds("all_reduce", 8, everyone, self.cluster, self.table)
        return total([Cost(seconds=memory_seconds(3 * sum(self._master_sizes(mesh)), kind)), norm])

    def _master_sizes(self, mesh: int, chosen: Sequence[int] | None = None) -> list[int]:
        """Return the local bytes of the optimizer's shards on one mesh, where their first use is."""
        kept, sizes = self.program.strategy.parameters, self.program.meshes[mesh].sizes
        if chosen is not None:
            shards = [self.program.values[master] for master in chosen]
            return [self._shard_bytes(one.tensor, one.layout, sizes) for one in shards]
        masters = self._masters(mesh)
        if mesh in self.masters:
            each, rest = divmod(self.masters[mesh], max(len(masters), 1))
            return [each + rest, *[each] * (len(masters) - 1)]
        return [self._shard_bytes(one, kept[at].optimizer, sizes) for at, one in masters]

    def _masters(self, mesh: int) -> list[tuple[int, int]]:
        """Return the trained parameters, by position and tensor, whose first use is on a mesh."""
        if len(self.program.meshes) == 1:
            return list(self.trained)
        if not self._homes:
            strategy, consumers = self.program.strategy, self.graph.consumers
            for position, tensor in self.trained:
                home = strategy.home(strategy.parameters[position], consumers[tensor])
                self._homes.setdefault(home, []).append((position, tensor))
        return self._homes.get(mesh, [])

    def _shard_bytes(self, tensor: int, layout: Layout, sizes: tuple[int, ...]) -> int:
        spec = self.graph.tensors[tensor]
        dtype = master_dtype(self.program.strategy.precision, spec.dtype)
        key = (tensor, layout, sizes, dtype)
        if key not in self.sizes:
            self.sizes[key] = local_bytes(spec.shape, dtype, layout, sizes)
        return self.sizes[key]
