"""The additive cost of one strategy, straight from the definition on the untied graph.

Prices of single operators and messages come from the same tables as the search's; which of them
occur, and how often, is worked out here again: no ties, no factors, no copy variables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType

from shardwright.core.graph import tensor_bytes
from shardwright.core.halo import extended_shape
from shardwright.core.layout import PARTIAL, REPLICATE, local_bytes, local_shape
from shardwright.core.strategy import Mesh
from shardwright.operators.derivatives import base_kind, is_view, storages
from shardwright.operators.keeping.kept import saved_tensors
from shardwright.planner.model.context import Context
from shardwright.planner.model.messages import MessageCosts
from shardwright.planner.model.modes import KEEP, Mode
from shardwright.planner.model.terms import EACH, FLIGHT, GATHER, KEPT, ONCE, SYNC
from shardwright.planner.space.rest import shard_further

NO_MODES: Mapping[int, Mode] = MappingProxyType({})


def num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * {"float32": 4, "int64": 8}[dtype]


class Additive:
    def __init__(self, context: Context, mesh: Mesh, microbatches: int) -> None:
        self.context, self.mesh, self.microbatches = context, mesh, microbatches
        self.wires = MessageCosts(
            context.cluster, context.table, context.prices.message_seconds, mesh
        )
        self.totals = [0.0] * 6

    def cost(
        self,
        dims: tuple[tuple[str, ...], ...],
        levels: dict[int, int],
        modes: Mapping[int, Mode] = NO_MODES,
    ) -> list[float]:
        """Return the first six columns."""
        self.totals = [0.0] * 6
        self.dims, self.levels = dims, levels
        self.modes = [
            modes.get(block, KEEP) for block in range(len(self.context.facts.ties.ranges))
        ]
        for index in range(len(dims)):
            self._operator(index)
        for tensor, spec in enumerate(self.context.graph.tensors):
            if spec.producer >= 0 and self.context.graph.consumers[tensor]:
                self._activation(tensor)
        for tensor in self.context.graph.parameters:
            self._parameter(tensor)
        return self.totals

    def _shape(self, tensor: int, reader: int) -> tuple[int, ...]:
        return self.context.facts.shape(
            tensor, 1 if self.context.facts.is_once(reader) else self.microbatches
        )

    def _operator(self, index: int) -> None:
        context, saves = self.context, self.context.facts.saves
        graph = context.graph
        operator, placed = graph.operators[index], context.facts.placements(index, self.dims[index])
        sizes = self.mesh.sizes
        inputs = tuple(
            extended_shape(local_shape(self._shape(t, index), pair.value, sizes), pair.halos)
            for t, pair in zip(operator.inputs, placed.inputs, strict=True)
        )
        outputs = tuple(
            local_shape(self._shape(t, index), pair.value, sizes)
            for t, pair in zip(operator.outputs, placed.outputs, strict=True)
        )
        mode = self.modes[context.facts.ties.block[index]]
        again = self._runs_again(index, mode)
        price = context.prices.seconds(index, inputs, outputs)
        times = 2 if again and not context.facts.is_once(index) else 1
        column = ONCE if context.facts.is_once(index) else EACH
        self.totals[column] += times * price.forward + price.backward
        inner = sum(
            tensor_bytes(inputs[p], graph.tensors[operator.inputs[p]].dtype)
            for p in saves.inputs[index]
            if not mode.whole and self._maker(operator.inputs[p]) not in mode.operators
        )
        if again:
            self.totals[FLIGHT] += inner
            inner = 0
        inner += sum(
            tensor_bytes(outputs[p], graph.tensors[operator.outputs[p]].dtype)
            for p in saves.outputs[index]
        )
        inner += saves.extra[index](inputs, outputs)
        across = sum(
            tensor_bytes(outputs[p], graph.tensors[operator.outputs[p]].dtype)
            for p in saves.crossing[index]
        )
        self.totals[FLIGHT] += across + (0 if again else inner)

    def _cut(self, tensor: int, lies: tuple[int, ...]) -> None:
        """What is made once lies whole along the samples of whoever reads it microbatch by microbatch."""
        graph, facts = self.context.graph, self.context.facts
        spec, whole = graph.tensors[tensor], list(lies)
        readers = [i for i in graph.consumers[tensor] if not facts.is_once(i)]
        if not facts.is_once(spec.producer):
            return
        for reader in readers:
            names = facts.iteration(reader).inputs[graph.operators[reader].inputs.index(tensor)]
            sample = facts.samples.operator_dim[reader]
            if sample in names:
                split = names.index(sample)
                whole = [REPLICATE if p in (split, PARTIAL) else p for p in whole]
        self.totals[ONCE] += self.wires.reshard(spec.shape, spec.dtype, lies, tuple(whole))

    def _runs_again(self, index: int, mode: Mode) -> bool:
        """Whether an operator comes before the last of its block that a backward there needs."""
        graph, block = self.context.graph, self.context.facts.ties.block
        inside = [i for i, other in enumerate(block) if other == block[index]]
        root = storages(graph)
        saved: set[int] = set()
        needed: list[int] = []
        for other in inside:
            operator = graph.operators[other]
            read, made, extra = saved_tensors(graph, operator)
            saved |= {root[operator.inputs[p]] for p in read}
            saved |= {root[operator.outputs[p]] for p in made}
            shapes = [
                tuple(graph.tensors[t].shape for t in ends)
                for ends in (operator.inputs, operator.outputs)
            ]
            needed += [other] if extra(*shapes) else []
        needed += [i for i in inside if saved & {root[t] for t in graph.operators[i].outputs}]
        asked = [i for i in inside if mode.whole or i in mode.operators]
        return index in asked and index <= max((i for i in needed if i in asked), default=-1)

    def _maker(self, tensor: int) -> int:
        """Return who made the data of a tensor, looking through views."""
        graph = self.context.graph
        maker = graph.tensors[tensor].producer
        while maker >= 0 and is_view(base_kind(graph.operators[maker].kind)):
            maker = graph.tensors[graph.operators[maker].inputs[0]].producer
        return maker

    def _activation(self, tensor: int) -> None:
        context = self.context
        graph = context.graph
        spec = graph.tensors[tensor]
        maker = spec.producer
        out = context.facts.placements(maker, self.dims[maker]).outputs[
            graph.operators[maker].outputs.index(tensor)
        ]
        wanted = set()
        for reader in graph.consumers[tensor]:
            for position, read in enumerate(graph.operators[reader].inputs):
                if read == tensor:
                    pair = context.facts.placements(reader, self.dims[reader]).inputs[position]
                    gradient = pair.gradient if spec.needs_gradient else None
                    wanted.add((pair.value, gradient, pair.halos))
        self._sums(tensor)
        self._cut(tensor, out.value)
        wanted.discard((out.value, out.gradient if spec.needs_gradient else None, ()))
        blocks = {context.facts.ties.block[reader] for reader in graph.consumers[tensor]}
        mode = self.modes[min(blocks)] if len(blocks) == 1 else KEEP
        kept = context.facts.saves.kept_below[tensor]
        once = context.facts.is_once(maker)
        shape = self._shape(tensor, maker)
        for value, gradient, halos in wanted:
            forward = self.wires.reshard(shape, spec.dtype, out.value, value)
            backward = 0.0
            if gradient is not None:
                home = list(out.gradient)
                if context.facts.hands_on[maker]:
                    for axis, name in enumerate(self.dims[maker]):
                        if (
                            name == ""
                            and gradient[axis] == PARTIAL
                            and self.mesh.axes[axis] == "data"
                        ):
                            home[axis] = PARTIAL
                backward = self.wires.reshard(shape, spec.dtype, gradient, tuple(home))
            if halos:
                local = local_shape(shape, value, self.mesh.sizes)
                forward += self.wires.halos(local, spec.dtype, halos)
                if gradient is not None:
                    backward += self.wires.halos(local, spec.dtype, halos)
            self.totals[ONCE if once else EACH] += forward + backward
            moves = value != out.value or bool(halos)
            read_again = all(self._runs_again(i, mode) for i in graph.consumers[tensor])
            again = (mode.whole and read_again) or (mode.copies and kept and moves)
            self.totals[EACH] += forward if again and not once else 0.0
            if moves and kept and not once and not mode.copies:
                local = extended_shape(local_shape(shape, value, self.mesh.sizes), halos)
                size = tensor_bytes(local, spec.dtype)
                self.totals[FLIGHT] += size

    def _sums(self, tensor: int) -> None:
        """Gradients that neighbouring readers in equal layouts add up."""
        context = self.context
        graph, ties, spec = context.graph, context.facts.ties, context.graph.tensors[tensor]
        if not spec.needs_gradient or context.facts.is_once(spec.producer):
            return
        ends = {}
        for reader in graph.consumers[tensor]:
            outputs = graph.operators[reader].outputs
            if not any(graph.tensors[output].needs_gradient for output in outputs):
                continue  # it hands no gradient back
            for position, read in enumerate(graph.operators[reader].inputs):
                if read == tensor:
                    pair = context.facts.placements(reader, self.dims[reader]).inputs[position]
                    ends[ties.root[reader], position] = (pair, ties.block[reader])
        ordered = [ends[key] for key in sorted(ends)]
        for one, other in itertools.pairwise(ordered):
            if one == other:
                pair, _ = one
                shape = local_shape(self._shape(tensor, spec.producer), pair.value, self.mesh.sizes)
                size = tensor_bytes(extended_shape(shape, pair.halos), spec.dtype)
                self.totals[EACH] += context.prices.touch_seconds(3 * size)

    def _parameter(self, tensor: int) -> None:
        context, graph, sizes = self.context, self.context.graph, self.mesh.sizes
        spec = graph.tensors[tensor]
        (reader,) = graph.consumers[tensor]
        pair = context.facts.placements(reader, self.dims[reader]).inputs[
            graph.operators[reader].inputs.index(tensor)
        ]
        # ZeRO's stages: its optimizer state is sharded, its gradients as they come, itself; and at
        # level 4 itself, but gathered once a step.
        level = self.levels.get(tensor, 0)
        fine = shard_further(spec.shape, pair.value, sizes)
        rest, optimizer = (fine if level >= least else pair.value for least in (3, 1))
        keeps = level == 4 and fine != pair.value
        merges = level < 2 or self.microbatches == 1
        price = self.wires.merged if merges else self.wires.reshard
        sync = price(spec.shape, spec.dtype, pair.gradient, optimizer)
        self.totals[GATHER if level >= 2 else SYNC] += sync
        gathers = 1 if self._is_last(tensor) or keeps else 2
        gather = self.wires.reshard(spec.shape, spec.dtype, rest, pair.value)
        self.totals[GATHER] += gathers * gather
        if level < 2:
            used = local_bytes(spec.shape, spec.dtype, pair.value, sizes)
            share = 1 - 1 / self.microbatches
            self.totals[EACH] += share * context.prices.touch_seconds(3 * used)
        self.totals[ONCE] += self.wires.reshard(spec.shape, spec.dtype, optimizer, rest)
        own = local_bytes(spec.shape, spec.dtype, optimizer, sizes)
        self.totals[ONCE] += context.prices.update_seconds(own)
        self.totals[KEPT] += local_bytes(spec.shape, spec.dtype, rest, sizes) + 3 * own
        self.totals[KEPT] += own if rest != optimizer else 0
        if keeps:
            self.totals[KEPT] += local_bytes(spec.shape, spec.dtype, pair.value, sizes)
        if pair.gradient != optimizer and level < 2:
            self.totals[KEPT] += local_bytes(spec.shape, spec.dtype, pair.value, sizes)

    def _is_last(self, tensor: int) -> bool:
        """Whether only the last block that has parameters, which no other is alike, reads it."""
        graph, ties = self.context.graph, self.context.facts.ties
        readers = {t: {ties.block[r] for r in graph.consumers[t]} for t in graph.parameters}
        last = max(block for blocks in readers.values() for block in blocks)
        alone = not any(last in blocks and len(blocks) > 1 for blocks in ties.classes.values())
        return readers[tensor] == {last} and alone
