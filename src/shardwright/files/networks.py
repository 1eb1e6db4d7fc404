"""Networks as people name them: ``10GbE``, ``100GbIB``, ``10 Gbit/s``, ``10 Gbit/s, 45 us, 2.5 ns``; or measured
seconds of messages by bytes, a table ``bytes,seconds``."""

from __future__ import annotations

import math
import re
from pathlib import Path

from shardwright.errors import InputError
from shardwright.files.limits import check_width, numbered_rows, read_text
from shardwright.files.units import read_quantity

LARGEST_FILE, MOST_POINTS = 2**20, 10_000
# Of the nominal rate that a stream reaches, and a message's latency: modelled, as for hosts of a cluster.
EFFICIENCY = 0.9
LATENCIES = {"e": 30e-6, "ib": 5e-6}
_NAMED = re.compile(r"(\d+(?:\.\d+)?)\s*gb?(e|ib)", re.IGNORECASE)
_ACCEPTED = (
    "write a network such as 10GbE or 100GbIB, a rate with a latency such as '10 Gbit/s, 45 us', or a "
    "CSV file with the columns bytes,seconds"
)
Points = tuple[tuple[float, float], ...]


def read_network(text: str) -> tuple[float, float, float]:
    """Return (latency in s, bandwidth in B/s, seconds that adding up a byte takes). Raises InputError."""
    named = _NAMED.fullmatch(text.strip()[:20])
    if named is not None and 0 < float(named[1]) <= 1e5:
        rate = float(named[1]) * 1e9 / 8 * EFFICIENCY
        return LATENCIES[named[2].lower()], rate, 0.0
    parts = text.split(",")
    if len(parts) > 3:
        raise InputError(f"{text[:60]!r} is no network; {_ACCEPTED}")
    try:
        rate = read_quantity(parts[0], "bandwidth")
        rest = [read_quantity(part, "seconds", zero=True) for part in parts[1:]]
    except InputError as error:
        raise InputError(f"{text[:60]!r} is no network ({error}); {_ACCEPTED}") from error
    latency, reduction = (*rest, *(LATENCIES["e"], 0.0)[len(rest) :])
    return latency, rate, reduction


def read_points(path: str | Path) -> Points:
    """Read measured (bytes, seconds) of messages, ascending in bytes. Raises InputError."""
    text = read_text(path, LARGEST_FILE, "a table of messages", _ACCEPTED)
    (_, header), *rows = numbered_rows(text.splitlines(), path, _ACCEPTED) or [(1, [])]
    if [cell.strip().lower() for cell in header[:2]] != ["bytes", "seconds"]:
        raise InputError(f"{path} must begin with bytes,seconds; {_ACCEPTED}")
    points: dict[float, float] = {}
    for number, row in rows[: MOST_POINTS + 1]:
        check_width(row, header, f"{path}, row {number}")
        size, seconds = _point(row)
        if math.isnan(size) or size in points:
            raise InputError(
                f"{path}, row {number}: bytes and seconds are two numbers, bytes above 0 and each once, "
                f"not {','.join(row)[:60]!r}; correct it"
            )
        points[size] = seconds
    if not 2 <= len(points) <= MOST_POINTS:
        raise InputError(
            f"{path} has {len(points):,} messages, but a line needs 2, and {MOST_POINTS:,} are enough; "
            "measure some sizes"
        )
    return tuple(sorted(points.items()))


def _point(row: list[str]) -> tuple[float, float]:
    """Return bytes and seconds, NaN where they are none."""
    try:
        size, seconds = float(row[0]), float(row[1])
    except (ValueError, IndexError):
        return math.nan, math.nan
    is_one = 0 < size < math.inf and 0 <= seconds < math.inf
    return (size, seconds) if is_one else (math.nan, math.nan)
