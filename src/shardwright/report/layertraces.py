"""Iterations of synchronous SGD as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.core.compression import SPARSE
from shardwright.core.layertrace import Exchange, Iteration
from shardwright.report.units import seconds_text

COLUMNS = (
    "workers",
    "exchange",
    "messages",
    "iteration",
    "network",
    "exposed",
    "speed-up",
    "efficiency",
    "binds",
)
WORDS: dict[Exchange, str] = {
    "naive": "after backward",
    "wait-free": "layer by layer (WFBP)",
    "merged": "merged (optimal)",
    "mg-wfbp": "merged (MG-WFBP's rule)",
    "top-k": "top-k by layer",
    "gtop-k": "gTop-k by layer",
}


def iteration_rows(found: Sequence[Iteration]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each iteration; the fastest dense one of so many workers is marked."""
    dense = [one for one in found if one.exchange not in SPARSE]
    best = {
        workers: min(one.seconds for one in dense if one.workers == workers)
        for workers in {one.workers for one in found}
    }
    for one in found:
        is_best = one.exchange not in SPARSE and one.seconds <= best[one.workers]
        yield (
            str(one.workers),
            WORDS[one.exchange],
            str(len(one.messages)),
            seconds_text(one.seconds) + (" ▸" if is_best else ""),
            seconds_text(one.network_seconds),
            seconds_text(one.exposed_seconds),
            f"{one.speedup:.2f}x",
            f"{one.efficiency:.0%}",
            one.binding,
        )
