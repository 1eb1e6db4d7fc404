"""What is measured before advice is asked for, as people write it on a command line: ``1:10s,2:5.4s``."""

from __future__ import annotations

from shardwright.core.counts import read_count
from shardwright.errors import InputError
from shardwright.files.units import read_quantity

MOST_DEVICES, MOST_SAMPLES, MOST_POINTS = 2**20, 2**31, 1000


def read_step_times(text: str) -> tuple[tuple[int, float], ...]:
    """Read (devices, seconds of a step) by ascending devices, at least two. Raises InputError."""
    points: dict[int, float] = {}
    example = "write for example --measured 1:10s,2:5.4s"
    for part in _parts(text, example):
        devices, colon, time = part.partition(":")
        count = read_count(devices, MOST_DEVICES)
        if not colon or not count or count in points:
            raise InputError(
                f"a measured step is a number of devices, once each, and its time, not {part[:40]!r}; {example}"
            )
        points[count] = _seconds(time, part, example)
    if len(points) < 2:
        raise InputError(
            f"what devices share shows between two numbers of them, but {text[:40]!r} has {len(points)}; "
            f"{example}"
        )
    return tuple(sorted(points.items()))


def read_batch_times(text: str) -> tuple[tuple[int, int, float], ...]:
    """Read (global batch, devices, seconds of a step), ascending. Raises InputError."""
    points: dict[tuple[int, int], float] = {}
    example = "write for example --measured 32:0.10s,64@2:0.11s (batch@devices:seconds)"
    for part in _parts(text, example):
        where, colon, time = part.partition(":")
        batch, at, devices = where.partition("@")
        key = read_count(batch, MOST_SAMPLES), read_count(devices, MOST_DEVICES) if at else 1
        if not colon or not all(key) or key in points:
            raise InputError(
                f"a measured step is a batch, devices and its time, each pair once, not {part[:40]!r}; {example}"
            )
        points[key] = _seconds(time, part, example)
    return tuple((*key, seconds) for key, seconds in sorted(points.items()))


def _parts(text: str, example: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not 0 < len(parts) <= MOST_POINTS:
        raise InputError(
            f"1 to {MOST_POINTS:,} measured steps are needed, not {len(parts)}; {example}"
        )
    return parts


def _seconds(text: str, part: str, example: str) -> float:
    try:
        return read_quantity(text, "seconds")
    except InputError as error:
        raise InputError(f"the time in {part[:40]!r} {error}; {example}") from error
