"""Strategies of deep graphs, made for a short one and spread over all equal blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import OperatorConfig, Strategy
from shardwright.operators.splitting.samples import Samples
from shardwright.planner.lower.fold import Folder, Short
from shardwright.planner.lower.outline import REACH
from shardwright.planner.space.seeds import (
    TooFewBlocks,
    balanced_stages,
    block_buckets,
    repeated_blocks,
)

# So many blocks of each stretch are left to look at: those within reach of its ends, and three in between, which must
# come out alike.
SHOWN = REACH + 3 + REACH

Make = Callable[[OperatorGraph, Samples], Strategy]


class Spreader:
    """Makes strategies that treat equal blocks alike, but for the stages that they belong to."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.graph = folder.graph

    def spread(self, make: Make) -> Strategy:
        """Return what ``make`` makes of the whole graph, from what it makes of the short one where
        equal blocks come out alike there. It may look at flops only to balance stages.

        Raises what ``make`` raises.
        """
        whole, samples = self.graph, self.folder.outline.samples
        if not self.folder.is_long:
            return make(whole, samples)
        try:
            made = make(self.short.graph, self.short.samples)
        except TooFewBlocks:  # the whole graph may have enough
            return make(whole, samples)
        flat = replace(made, configs=_on_stages(made.configs, [0] * len(made.configs)))
        if not self._is_even(flat):
            return make(whole, samples)
        configs = [flat.configs[index] for index in self._operators]
        stages = balanced_stages(whole, len(made.meshes))
        sync = made.gradient_sync
        return replace(
            made,
            configs=tuple(configs) if len(made.meshes) == 1 else _on_stages(configs, stages),
            parameters=tuple([made.parameters[position] for position in self._parameters]),
            gradient_sync=replace(sync, buckets=sync.buckets and self.buckets),
            recompute=self._repeated if made.recompute else (),
        )

    @cached_property
    def short(self) -> Short:
        """The graph to look at."""
        stretches = self.folder.outline.stretches
        return self.folder.short(tuple([min(SHOWN, one.stop - one.first) for one in stretches]))

    def _is_even(self, made: Strategy) -> bool:
        """Whether blocks between the edges of a stretch were treated alike."""
        looked = self._looking
        even = [
            any(
                first <= one.first + REACH and stop >= one.stop - REACH
                for first, stop in looked.runs(made, one)
            )
            for one in looked.outline.stretches
            if one.stop - one.first == SHOWN
        ]
        deep = [one for one in self.folder.outline.stretches if one.stop - one.first >= SHOWN]
        return all(even) and len(even) == len(deep)

    @cached_property
    def _looking(self) -> Folder:
        return Folder(self.short.graph, self.short.samples)

    @cached_property
    def _repeated(self) -> tuple[int, ...]:
        return repeated_blocks(self.graph)

    @cached_property
    def buckets(self) -> tuple[tuple[int, ...], ...]:
        """The gradients of each block, to travel together."""
        return block_buckets(self.graph)

    @cached_property
    def _shown(self) -> list[int]:
        """Per block of the whole graph, the one of the short graph that it is treated like."""
        found: list[int] = []
        ahead = 0  # how many blocks are shown before
        done = 0
        for one in self.folder.outline.stretches:
            found += range(ahead, ahead + one.first - done)
            ahead, done = ahead + one.first - done, one.stop
            length = one.stop - one.first
            shown = min(SHOWN, length)
            for offset in range(length):
                middle = min(offset, shown // 2)
                found.append(ahead + max(middle, shown - (length - offset)))
            ahead += shown
        return [*found, *range(ahead, ahead + len(self.graph.blocks) - done)]

    @cached_property
    def _operators(self) -> list[int]:
        """Per operator of the whole graph, that of the short one."""
        short, blocks = self.short.graph.blocks, self.graph.blocks
        return [
            short[shown].start + index - block.start
            for block, shown in zip(blocks, self._shown, strict=True)
            for index in range(block.start, block.stop)
        ]

    @cached_property
    def _parameters(self) -> list[int]:
        """Per parameter of the whole graph, the number of that of the short one."""
        short, outline = self.short, self.folder.outline
        number = {tensor: position for position, tensor in enumerate(short.graph.parameters)}
        ends = zip(short.home.tolist(), short.place.tolist(), short.outer.tolist(), strict=True)
        where = {
            (home, outer if home < 0 else place): t for t, (home, place, outer) in enumerate(ends)
        }
        found: list[int] = []
        for tensor in self.graph.parameters:
            home = outline.home[tensor]
            key = (-1, tensor) if home < 0 else (self._shown[home], outline.place[tensor])
            found.append(number[where[key]])
        return found


def _on_stages(
    configs: Sequence[OperatorConfig], stages: Sequence[int]
) -> tuple[OperatorConfig, ...]:
    known: dict[tuple[int, tuple[str, ...]], OperatorConfig] = {}
    found: list[OperatorConfig] = []
    for config, stage in zip(configs, stages, strict=True):
        key = (stage, config.dims)
        if key not in known:
            known[key] = OperatorConfig(mesh=stage, dims=config.dims)
        found.append(known[key])
    return tuple(found)
