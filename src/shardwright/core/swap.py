"""All-reduces of two ranks on hosts' own cores: each sends the other all it has, and both add.

A ring would send as many bytes in twice as many steps or more, and every step wakes threads. What
arrives needs memory of its own, which large messages, where steps do not matter, are spared.
"""

from __future__ import annotations

SWAPPED_BYTES = 2 * 2**20


def is_swapped(ranks: int, size: int) -> bool:
    """Whether so many ranks swap an all-reduce of so many bytes."""
    return ranks == 2 and size <= SWAPPED_BYTES
