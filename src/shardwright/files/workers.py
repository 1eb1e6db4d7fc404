"""Workers and bandwidths as people write them: ``16``, ``2x8``, ``8,8@0.5@16GiB``; ``1e9``, ``10 GB/s``."""

from __future__ import annotations

import math
import re

from shardwright.core.counts import read_count
from shardwright.core.profile import WorkerKind
from shardwright.errors import InputError
from shardwright.files.units import read_quantity

MOST_WORKERS = 256


def read_workers(text: str, memory_bytes: float = math.inf) -> tuple[WorkerKind, ...]:
    """Read kinds of workers: ``count[@speed[@memory]]`` separated by commas.

    ``speed`` is relative to the profiled device, 1 where not given. Raises InputError.
    """
    kinds: list[WorkerKind] = []
    for part in text.split(","):
        count, *rest = (word.strip() for word in part.split("@"))
        number = read_count(count, MOST_WORKERS)
        if not number or len(rest) > 2:
            raise InputError(
                f"workers are a number up to {MOST_WORKERS}, not {text[:60]!r}; write 16, hosts x "
                "workers such as 2x8, or kinds with their speed such as '8,8@0.5'"
            )
        try:
            speed = float(rest[0]) if rest else 1.0
        except ValueError:
            raise InputError(
                f"a worker's speed is a number, not {rest[0][:40]!r}; write for example 8@0.5"
            ) from None
        memory = read_quantity(rest[1], "bytes") if len(rest) == 2 else memory_bytes
        kinds.append(WorkerKind(count=number, speed=speed, memory_bytes=memory))
    if sum(kind.count for kind in kinds) > MOST_WORKERS:
        raise InputError(f"{text[:60]!r} are more than {MOST_WORKERS} workers; plan for fewer")
    return tuple(kinds)


def read_levels(text: str) -> tuple[int, ...]:
    """Read ``hosts x workers``, outermost first: ``2x8`` is (2, 8), ``16`` is (16,), else ()."""
    if not re.fullmatch(r"\s*\d{1,3}(\s*x\s*\d{1,3})*\s*", text):
        return ()
    return tuple(int(part) for part in text.split("x"))


def read_bandwidths(text: str) -> tuple[float, ...]:
    """Read bandwidths, outermost first, separated by commas; bare numbers are bytes per second."""
    found: list[float] = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            try:
                value = read_quantity(part, "bandwidth")
            except InputError as error:
                raise InputError(f"the bandwidth {error}") from error
        if not (value > 0 and math.isfinite(value)):
            raise InputError(
                f"a bandwidth is positive and finite, not {part[:40]!r}; write bytes per second such as "
                "1e9, or '10 GB/s'"
            )
        found.append(value)
    return tuple(found)
