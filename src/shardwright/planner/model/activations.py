"""Terms of activations: what it costs to bring them from their maker's layout to their readers', and to the next
stage.

Lowering makes one copy of a tensor per distinct (value, gradient) pair of layouts, always from the
original. With one reader that is a table over two configs. With several readers a copy that more
than one may want becomes a yes/no decision: the maker pays for it, readers that want it require it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.graph import tensor_bytes
from shardwright.core.halo import Halos, extended_shape
from shardwright.core.layout import PARTIAL, REPLICATE, Layout, local_bytes, local_shape
from shardwright.operators.counting.work import has_backward
from shardwright.planner.cost import collective_seconds
from shardwright.planner.model.context import Context
from shardwright.planner.model.decisions import Decisions, Dims, Statement
from shardwright.planner.model.modes import KEEP
from shardwright.planner.model.terms import (
    EACH,
    FLIGHT,
    NUM_COLUMNS,
    ONCE,
    TRANSIENT,
    Columns,
    Term,
    term,
)
from shardwright.planner.model.ties import Flow
from shardwright.planner.space.configs import Pair

Key = tuple[Layout, Layout | None, Halos]
Axes = tuple[bool, ...]


def state_activations(decisions: Decisions, statement: Statement) -> None:
    """State what every activation costs, and the variables of shared copies."""
    for flow in decisions.context.facts.flows:
        statement.terms += _Copies(decisions, statement, flow).terms()


class _Copies:
    """Builds the terms of one tensor."""

    def __init__(self, decisions: Decisions, statement: Statement, flow: Flow) -> None:
        self.decisions, self.statement, self.flow = decisions, statement, flow
        context = decisions.context
        graph = context.graph
        self.spec = graph.tensors[flow.tensor]
        self.shape = decisions.shape(flow.tensor, flow.maker)
        self.once = context.facts.is_once(flow.maker)
        self.kept = context.facts.saves.kept_below[flow.tensor] and not self.once
        placed, domains = context.facts.placements, decisions.domains
        self.sources = [
            self._key(placed(flow.maker, dims).outputs[flow.position])
            for dims in domains[flow.maker]
        ]
        self.open_axes = list(map(self._open, domains[flow.maker]))
        self.wanted = [
            [self._key(placed(reader, dims).inputs[position]) for dims in domains[reader]]
            for reader, position in flow.readers
        ]
        first = graph.consumers[flow.tensor][0]
        lead = context.facts.ties.class_of(context.facts.ties.block[first])
        inside = {context.facts.ties.block[r] for r in graph.consumers[flow.tensor]}
        self.switch = decisions.mode_of.get(lead) if len(inside) == 1 else None
        self.modes = decisions.modes if self.switch is not None else (KEEP,)
        kind = (self.shape, self.spec.dtype, self.spec.needs_gradient, self.kept, self.once)
        self._tables = statement.tables.setdefault(kind, {})

    def _key(self, pair: Pair) -> Key:
        return (pair.value, pair.gradient if self.spec.needs_gradient else None, pair.halos)

    def _open(self, dims: Dims) -> Axes:
        """Return on which axes a gradient may stay a partial sum."""
        is_lenient = self.decisions.context.facts.hands_on[self.flow.maker]
        axes = zip(dims, self.decisions.mesh.axes, strict=True)
        return tuple(is_lenient and name == "" and axis == "data" for name, axis in axes)

    def terms(self) -> list[Term]:
        shared = self._shared()
        maker = self.decisions.config_of[self.flow.maker]
        terms: list[Term] = []
        for (reader, _), wanted in zip(self.flow.readers, self.wanted, strict=True):
            alone = self._table(wanted, [reader], skip=frozenset(shared))
            if alone.any():
                terms.append(self._term((maker, self.decisions.config_of[reader]), alone))
        terms += [*self._sums(), *self._cut()]
        for key in shared:
            copy = self.statement.add(2)
            readers = [reader for reader, _ in self.flow.readers]
            made = self._table([key], readers, skip=frozenset())[:, :, 0]
            columns = np.stack([np.zeros_like(made), made], axis=2)
            terms.append(self._term((maker, copy), columns))
            terms += self._requirements(copy, key)
        return terms

    def _sums(self) -> list[Term]:
        """Charge readers of one copy for adding their gradients up, neighbour to neighbour.

        Of k readers in the same layouts k - 1 add to what is there. Counting neighbours only never
        counts more, and just as much where those that agree stand together.
        """
        if not self.spec.needs_gradient or self.once:
            return []
        terms: list[Term] = []
        graph = self.decisions.context.graph
        ends = [
            (reader, home, wanted)
            for (reader, _), home, wanted in zip(
                self.flow.readers, self.flow.homes, self.wanted, strict=True
            )
            if has_backward(graph, graph.operators[reader])
        ]
        for (left, home, here), (right, other, there) in itertools.pairwise(ends):
            if home != other:
                continue  # a stage may begin between them
            table = np.zeros((NUM_COLUMNS, len(here), len(there)))
            for key in set(here) & set(there):
                rows = np.flatnonzero([k == key for k in here])
                columns = np.flatnonzero([k == key for k in there])
                table[EACH, rows[:, None], columns[None, :]] = self._sum_seconds(key)
            configs = self.decisions.config_of
            terms.append(term((configs[left], configs[right]), table, self.flow.blocks))
        return terms

    def _cut(self) -> list[Term]:
        """Charge the maker, which runs once a step, for all samples coming together before microbatches are
        cut from them: what is split along them is gathered (``lower.stage``)."""
        facts, dims = self.decisions.context.facts, set[int]()
        for reader, position in self.flow.readers if self.once else ():
            sample = facts.samples.operator_dim[reader]
            names = facts.iteration(reader).inputs[position]
            if sample and sample in names and not facts.is_once(reader):
                dims.add(names.index(sample))
        if not dims:
            return []
        way, columns = (self.shape, self.spec.dtype), np.zeros((NUM_COLUMNS, len(self.sources)))
        for place, (value, _, _) in enumerate(self.sources):
            whole = tuple(REPLICATE if lies in (*dims, PARTIAL) else lies for lies in value)
            columns[ONCE, place] = self.decisions.wires.moving(*way, value, whole)
        return [term((self.decisions.config_of[self.flow.maker],), columns, self.flow.blocks)]

    def _sum_seconds(self, key: Key) -> float:
        local = local_shape(self.shape, key[0], self.decisions.mesh.sizes)
        size = tensor_bytes(extended_shape(local, key[2]), self.spec.dtype)
        return self.decisions.context.prices.touch_seconds(3 * size)

    def _shared(self) -> tuple[Key, ...]:
        """Return the pairs which two or more readers may want and some maker does not offer, in the
        order in which they are wanted: that of a set would differ from run to run."""
        if len(self.flow.readers) < 2:
            return ()
        count: dict[Key, int] = {}
        for wanted in self.wanted:
            for key in dict.fromkeys(wanted):
                count[key] = count.get(key, 0) + 1
        offered = set(self.sources)
        only = next(iter(offered)) if len(offered) == 1 else None
        return tuple([key for key, times in count.items() if times > 1 and key != only])

    def _table(self, wanted: list[Key], readers: list[int], skip: frozenset[Key]) -> Columns:
        """Return columns over (maker config, reader config, mode); equal ones are worked out once a problem.

        Of the ``readers`` (roots) that may read the copy, one that runs again needs it again. Which of them
        will read it is not known: charged is what is certain.
        """
        made = list(zip(self.sources, self.open_axes, strict=True))
        whole = tuple([mode.whole and all(map(mode.repeats, readers)) for mode in self.modes])
        key = (tuple(made), tuple(wanted), skip, whole, self.switch is None)
        if key not in self._tables:
            self._tables[key] = self._worked_out(made, wanted, skip, whole)
        return self._tables[key]

    def _worked_out(
        self, made: list[tuple[Key, Axes]], wanted: list[Key], skip: frozenset[Key],
        whole: tuple[bool, ...],
    ) -> Columns:  # fmt: skip
        """Return the columns, repeats shared."""
        places = {entry: i for i, entry in enumerate(dict.fromkeys(made))}
        columns = {key: j for j, key in enumerate(dict.fromkeys(wanted))}
        crossings = np.zeros((3, len(places), len(columns)))
        for (source, axes), i in places.items():
            for target, j in columns.items():
                if source != target and target not in skip:
                    crossings[:, i, j] = self._crossing(source, axes, target)
        table = self._by_mode(crossings, whole)
        row = [places[entry] for entry in made]
        column = [columns[key] for key in wanted]
        return table[:, np.array(row)[:, None], np.array(column)[None, :]]

    def _by_mode(self, crossings: Columns, whole: tuple[bool, ...]) -> Columns:
        """Return columns over modes as well; those that are ``whole`` need the copy once more."""
        forward, backward, size = crossings[..., None]
        copies = np.array([mode.copies for mode in self.modes])
        is_needed = np.array(whole) | (copies & (size > 0))
        both = forward + backward
        table = np.zeros((NUM_COLUMNS, *both.shape[:2], len(self.modes)))
        again = 0.0 if self.once else np.where(is_needed, forward, 0.0)
        table[ONCE if self.once else EACH] = both + again
        table[TRANSIENT], table[FLIGHT] = size * copies, size * ~copies
        never = np.isinf(both[..., 0])
        if never.any():
            table[:, never] = 0.0
            table[EACH, never] = math.inf
        return table

    def _crossing(self, source: Key, axes: Axes, target: Key) -> tuple[float, float, int]:
        """Return the seconds of one copy, forward and backward, and the bytes that it adds until backward."""
        wires, way = self.decisions.wires, (self.shape, self.spec.dtype)
        forward, backward = wires.moving(*way, source[0], target[0]), 0.0
        if forward == math.inf:
            return forward, backward, 0
        if source[1] is not None and target[1] is not None:
            backward = wires.moving(*way, target[1], _passed_on(source[1], target[1], axes))
        if source[0] == target[0] and not target[2]:
            return forward, backward, 0
        local = local_shape(self.shape, target[0], self.decisions.mesh.sizes)
        halos = wires.halos(local, self.spec.dtype, target[2])
        # One by one, as they are charged.
        for seconds in (halos, self.decisions.context.prices.segment_seconds):
            forward += seconds
            backward += seconds if self.spec.needs_gradient else 0.0
        size = tensor_bytes(extended_shape(local, target[2]), self.spec.dtype)
        return forward, backward, size if self.kept else 0

    def _term(self, variables: tuple[int, int], table: Columns) -> Term:
        """Return the term of a table over two variables and the mode, where there is one."""
        return term((*variables, self.switch), table, self.flow.blocks)

    def _requirements(self, copy: int, key: Key) -> list[Term]:
        terms: list[Term] = []
        for (reader, _), wanted in zip(self.flow.readers, self.wanted, strict=True):
            if key not in wanted:
                continue
            columns = np.zeros((NUM_COLUMNS, len(wanted), 2))
            columns[EACH, [k == key for k in wanted], 0] = np.inf
            terms.append(Term((self.decisions.config_of[reader], copy), columns, self.flow.blocks))
        return terms


def _passed_on(home: Layout, there: Layout, axes: Axes) -> Layout:
    """Return the layout in which a gradient comes back from where it is ``there``: a sum over samples that
    no one needs yet, over an open axis, passes on as a partial one."""
    return tuple(
        PARTIAL if is_open and wanted == PARTIAL else placement
        for placement, wanted, is_open in zip(home, there, axes, strict=True)
    )


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
    for tensor, first, last in _passing(context):
        spec = graph.tensors[tensor]
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


def _passing(context: Context) -> Iterator[tuple[int, int, int]]:
    """Yield the trained activations that are read in a later block, the block that makes each, and the last that
    reads it."""
    graph, block = context.graph, context.facts.ties.block
    for tensor, spec in enumerate(graph.tensors):
        if spec.producer >= 0 and spec.needs_gradient and graph.consumers[tensor]:
            first, last = block[spec.producer], max(block[one] for one in graph.consumers[tensor])
            if first != last:
                yield tensor, first, last


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
