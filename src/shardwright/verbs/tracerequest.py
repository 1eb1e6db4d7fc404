"""What a caller asks of a trace of layers, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.counts import read_count
from shardwright.errors import InputError
from shardwright.verbs.options import check_options, option

MOST_TRACED = 2**17  # workers
# Of choosing the largest of n numbers, by n log2 n: a V100's (Shi et al., INFOCOM 2020, their code).
SELECT_RATE = 5e-10


def _algorithms() -> tuple[str, ...]:
    from shardwright.layerwise.allreduce import ALL_REDUCE, AUTO

    return (AUTO, *ALL_REDUCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """On how many ``workers`` (``16``, or several: ``2,4,8``), connected how (``link``: ``10GbE``, a rate with
    latency and seconds of adding up a byte, or a CSV file of measured messages between so many).
    ``density`` is the share of numbers that sparse exchanges send, ``select`` what choosing them takes."""

    workers: str = option("", "With --trace: 16, or several: 2,4,8,16.")
    link: str = option(
        "", "With --trace: 10GbE, 100GbIB, '10 Gbit/s, 45 us', or a CSV of bytes,seconds."
    )
    algorithm: str = option(
        "auto",
        "With --trace: auto, ring, tree, recursive-doubling, halving-doubling, double-tree.",
        one_of=_algorithms,
    )
    density: float = option(
        0.001, "With --trace: share of the numbers that top-k sends.", least=1e-9, most=1.0
    )
    select: float = option(
        SELECT_RATE, "With --trace: seconds of choosing the largest of n, by n log2 n.", least=0.0,
        most=1.0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        if not self.workers or not self.link:
            raise InputError(
                "a trace of layers needs --workers and --link; add for example --workers 16 --link 10GbE"
            )

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of workers, ascending."""
        found = {read_count(part, MOST_TRACED) for part in self.workers.split(",")}
        if 0 in found:
            raise InputError(
                f"workers are numbers from 1 to {MOST_TRACED:,}, not {self.workers[:60]!r}; write 16, or "
                "several: 2,4,8,16"
            )
        return tuple(sorted(found))
