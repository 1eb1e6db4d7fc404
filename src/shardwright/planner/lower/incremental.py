"""Lowering one strategy after another: a block is lowered again only where something touches it.

What a block becomes depends on the configs of its operators, on its parameters, and on what it
finds of the tensors that come from outside. Where all of that is as it was in some earlier
lowering, what that did is done again without looking at operators; and all that later steps make
of unchanged values (messages back, bytes saved, gathers) is remembered too (``memo``), as are its
pieces.

The Program is the one that ``lower`` makes, but for the numbers of values, segments and messages;
``values`` also holds some of earlier strategies, so it is for simulating, not for running.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Program
from shardwright.core.strategy import OperatorConfig, Strategy
from shardwright.operators.splitting.samples import Samples
from shardwright.planner.lower.alike import Surroundings
from shardwright.planner.lower.flushless import flushless
from shardwright.planner.lower.gradients import hands_on, let_through
from shardwright.planner.lower.ground import Ground
from shardwright.planner.lower.lower import Lowering
from shardwright.planner.lower.memo import LastingBuilder
from shardwright.planner.lower.records import Record
from shardwright.planner.remember import KEPT
from shardwright.planner.space.configs import Placements, placements
from shardwright.planner.space.legal import check_pipeline

Known = list[list[Record]]  # by block, the last used first


class IncrementalLowering:
    """Lowers strategies of one graph, each quickly where it resembles one of the last."""

    def __init__(
        self, graph: OperatorGraph, samples: Samples, ground: Ground | None = None
    ) -> None:
        self.graph = graph
        self.samples = samples
        self._ground = ground or Ground(graph, samples)
        # Operators that may let partial gradients through, last first, and all that decides whether.
        self._free = [
            (i, {i, *(reader for t in graph.operators[i].outputs for reader in graph.consumers[t])})
            for i in reversed(range(len(graph.operators)))
            if hands_on(graph, samples, i)
        ]
        self._deciding = frozenset[int]().union(*(readers for _, readers in self._free))
        self._forget()

    def anew(self) -> IncrementalLowering:
        """Return one for the same graph that has lowered nothing."""
        other = copy(self)
        other._forget()
        return other

    def _forget(self) -> None:
        graph = self.graph
        self._known: Known = [[] for _ in graph.blocks]
        self._configs: list[OperatorConfig | None] = [None] * len(graph.operators)
        self._alone: list[Placements] = [Placements((), ())] * len(graph.operators)
        self._placed, self._changed = list(self._alone), set[int]()
        self._frame: object = None
        self._builder: LastingBuilder | None = None

    def lower(self, strategy: Strategy) -> Program:
        """Return the Program of a strategy; see ``lower`` for what is refused."""
        check_pipeline(strategy, self.samples)
        types = (
            strategy.precision,
            strategy.accumulation,
            replace(strategy.gradient_sync, method="", buckets=()),
            strategy.updates,
        )
        frame = (strategy.meshes, strategy.pipeline, types, strategy.batch_norm)
        placed = self._place(strategy)
        builder = self._builder
        if builder is None or builder.is_full or frame != self._frame:
            self._frame = frame
            self._known = [[] for _ in self.graph.blocks]
            builder = LastingBuilder(self._ground, strategy)
            self._builder = builder
        else:
            builder.begin(strategy)
        program = _Replay(builder, placed, self._known).run()
        builder.first_size = builder.first_size or len(builder.values)
        return flushless(program)

    def _place(self, strategy: Strategy) -> list[Placements]:
        """Return the placements of every operator's tensors, as ``gradients.place`` does."""
        changed = self._changed  # also by a strategy that was refused half way
        before = zip(strategy.configs, self._configs, strict=True)
        for index in [i for i, (one, other) in enumerate(before) if one is not other]:
            config = strategy.configs[index]
            self._configs[index] = config
            self._alone[index] = placements(self._ground.iterations[index], config.dims)
            changed.add(index)
        placed = self._placed
        for index in changed:
            placed[index] = self._alone[index]
        # What is let through depends on the readers, which come later.
        for index, readers in () if changed.isdisjoint(self._deciding) else self._free:
            if changed.isdisjoint(readers):
                continue
            before, placed[index] = placed[index], self._alone[index]
            if "" in strategy.configs[index].dims:
                placed[index] = let_through(self.graph, strategy, placed, index)
            if placed[index] == before:
                placed[index] = before
            else:
                changed.add(index)
        changed.clear()
        return list(placed)


class _Replay(Lowering):
    """One lowering, block by block: as recorded, or really."""

    builder: LastingBuilder

    def __init__(self, builder: LastingBuilder, placed: list[Placements], known: Known) -> None:
        super().__init__(builder, placed)
        self.known = known

    def lower_block(self, number: int) -> None:
        """Do what a record says where it rests on what is there, else lower and record; that record
        comes first."""
        known, around = self.known[number], self.builder.ground.blocks[number]
        rests_on = self._rests_on(around)
        place = next((n for n, one in enumerate(known) if one.rests_on == rests_on), -1)
        if place >= 0:
            known.insert(0, known.pop(place))
            self.repeat(known[0])
        else:
            known.insert(0, self.lowered(number, rests_on))
            del known[KEPT:]  # those of the strategies accepted and proposed last
        self.blocks.append(known[0])

    def _rests_on(self, around: Surroundings) -> tuple[object, ...]:
        builder, parameters, stages = self.builder, self.parameters, self.stages
        strategy, start, stop = builder.strategy, around.start, around.stop
        found: list[object] = [
            strategy.configs[start:stop],
            self.placed[start:stop],
            self.where[start:stop],
            [stage.block for stage in stages],  # what is sent from there belongs to it
            *[
                sorted(chosen.intersection(range(start, stop))) if chosen else []
                for chosen in (builder.recomputed, builder.segment_starts)
            ],
            *map(parameters.kept.get, around.parameters),
        ]
        if len(stages) > 1:
            found += [strategy.configs[producer].mesh for producer in around.producers]
        found += map(builder.cut_dim.get, around.finds)
        found += [stage.state(tensor) for tensor in around.finds for stage in stages]
        if parameters.often:
            found += [parameters.is_often(parameters.kept[t]) for t in around.parameters]
        return *found, *map(self._shared, around.shared)

    def _shared(self, tensor: int) -> object:
        kept, builder = self.parameters.kept[tensor], self.builder
        uses = [pair for pair in self.parameters.uses.items() if pair[0][1] == tensor]
        return uses, kept.rest in self.parameters.taken, builder.values[kept.rest]
