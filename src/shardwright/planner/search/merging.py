"""Gradient buckets for the plans that promise most."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.planner.search.judge import merge
from shardwright.planner.search.selection import promise, unlike

if TYPE_CHECKING:
    from shardwright.planner.search.hunt import Hunt

# So many of the fastest plans get buckets of their own, of small graphs more, if this close to the
# fastest.
MERGED, MERGED_SMALL, CLOSE = 3, 12, 1.1


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
    """Let the fastest plan make again what costs little, if it makes nothing again and its graph is
    small: then segments of backward are shorter, and gradients leave earlier.
    """
    if not hunt.is_small:
        return
    best = next(iter(hunt.fitting), None)
    again = tuple(sorted(hunt.context.recomputed("selective")))
    if best is None or hunt.context.training.recompute != "auto" or not again or hunt.stopped():
        return
    strategy = best.strategy
    if not strategy.recompute and not strategy.recompute_operators:
        label = f"{strategy.label}, recompute (selective)"
        shorter = replace(strategy, recompute_operators=again, label=label)
        verdict = hunt.verdict(shorter, best.least_seconds)
        if verdict is not None:
            hunt.judged[-1] = merge(hunt.context, verdict, hunt.judging.run)
