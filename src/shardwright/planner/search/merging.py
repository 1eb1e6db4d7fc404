"""When gradients travel, and which together, in the plans that promise most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.planner.judge.evaluate import merge
from shardwright.planner.model.context import Context
from shardwright.planner.search.exploration import Exploration
from shardwright.planner.search.local.refinement import is_gain
from shardwright.planner.search.selection import bound_of, unlike

# So many of the fastest plans get buckets of their own, of small graphs more, if this close to the
# fastest.
MERGED, MERGED_SMALL, CLOSE = 3, 12, 1.1
# So many are tried with shorter segments, of small graphs more; where memory is short, in the first
# blocks alone.
EARLIER, EARLIER_SMALL, FIRST = 1, 6, 3


def merge_fastest(exploration: Exploration) -> None:
    """Choose gradient buckets for the plans that promise most; their order may change."""
    close = [
        one for one in unlike(exploration.fitting) if one.seconds <= CLOSE * exploration.fastest
    ]
    most = MERGED_SMALL if exploration.is_small else MERGED
    for evaluation in sorted(close, key=bound_of)[:most]:
        if exploration.stopped():
            return
        if evaluation.least_seconds >= exploration.fastest:
            continue
        merged = merge(exploration.context, evaluation, exploration.evaluator.run)
        exploration.evaluations = [
            merged if known is evaluation else known for known in exploration.evaluations
        ]
        exploration.tell(1.0, "merging gradients")


def send_earlier(exploration: Exploration) -> None:
    """Let segments begin wherever parameters are read, in all blocks or in the first few: backward
    is cut there, and gradients leave earlier. The bound holds for either way to cut.
    """
    close = [
        one for one in unlike(exploration.fitting) if one.seconds <= CLOSE * exploration.fastest
    ]
    places = tuple(_segment_starts(exploration.context))
    for evaluation in close[: EARLIER_SMALL if exploration.is_small else EARLIER]:
        for starts in places:
            if exploration.stopped():
                return
            label = f"{evaluation.strategy.label}, gradients sent earlier"
            shorter = replace(evaluation.strategy, segment_starts=starts, label=label)
            found = exploration.try_out(shorter, evaluation.least_seconds)
            if found is not None:
                if found.seconds <= evaluation.seconds:
                    found = merge(exploration.context, found, exploration.evaluator.run)
                exploration.evaluations[-1:] = [found] if is_gain(found, evaluation) else []
            exploration.tell(1.0, "sending gradients earlier")
            if found is None or found.bytes <= exploration.limit:
                break


def _segment_starts(context: Context) -> Iterator[tuple[int, ...]]:
    """Yield where segments could begin: at readers of trained parameters that do not begin a block,
    in all blocks, then only in the first few, whose gradients come last."""
    graph = context.graph
    readers = {
        reader
        for tensor in graph.parameters
        if graph.tensors[tensor].needs_gradient
        for reader in graph.consumers[tensor]
    }
    inside = sorted(readers - {block.start for block in graph.blocks})
    trained = [
        block for block in graph.blocks if not readers.isdisjoint(range(block.start, block.stop))
    ]
    if inside:
        yield tuple(inside)
    stop = trained[min(FIRST, len(trained)) - 1].stop if trained else 0
    few = [reader for reader in inside if reader < stop]
    if few and len(few) < len(inside):
        yield tuple(few)
