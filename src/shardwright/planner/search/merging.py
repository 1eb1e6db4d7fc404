"""When gradients travel, and which together, in the plans that promise most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.planner.judge.evaluate import merge
from shardwright.planner.model.context import Context
from shardwright.planner.search.hunt import Hunt
from shardwright.planner.search.local.refinement import is_gain
from shardwright.planner.search.selection import promise, unlike

# So many of the fastest plans get buckets of their own, of small graphs more, if this close to the
# fastest.
MERGED, MERGED_SMALL, CLOSE = 3, 12, 1.1
# So many are tried with shorter segments, of small graphs more; where memory is short, in the first
# blocks alone.
EARLIER, EARLIER_SMALL, FIRST = 1, 6, 3


def merge_fastest(hunt: Hunt) -> None:
    """Choose gradient buckets for the plans that promise most; their order may change."""
    close = [one for one in unlike(hunt.fitting) if one.seconds <= CLOSE * hunt.fastest]
    most = MERGED_SMALL if hunt.is_small else MERGED
    for verdict in sorted(close, key=promise)[:most]:
        if hunt.stopped():
            return
        if verdict.least_seconds >= hunt.fastest:
            continue
        merged = merge(hunt.context, verdict, hunt.judging.run)
        hunt.judged = [merged if known is verdict else known for known in hunt.judged]
        hunt.tell(1.0, "merging gradients")


def send_earlier(hunt: Hunt) -> None:
    """Let segments begin wherever parameters are read, in all blocks or in the first few: backward
    is cut there, and gradients leave earlier. The bound holds for either way to cut.
    """
    close = [one for one in unlike(hunt.fitting) if one.seconds <= CLOSE * hunt.fastest]
    places = tuple(_segment_starts(hunt.context))
    for verdict in close[: EARLIER_SMALL if hunt.is_small else EARLIER]:
        for starts in places:
            if hunt.stopped():
                return
            label = f"{verdict.strategy.label}, gradients sent earlier"
            shorter = replace(verdict.strategy, segment_starts=starts, label=label)
            found = hunt.verdict(shorter, verdict.least_seconds)
            if found is not None:
                if found.seconds <= verdict.seconds:
                    found = merge(hunt.context, found, hunt.judging.run)
                hunt.judged[-1:] = [found] if is_gain(found, verdict) else []
            hunt.tell(1.0, "sending gradients earlier")
            if found is None or found.bytes <= hunt.limit:
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
