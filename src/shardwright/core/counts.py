"""Counts as people write them into options and files."""

from __future__ import annotations

GIB = 2**30
MOST_DIGITS = 18


def read_count(text: str, most: int) -> int:
    """Return a whole number from 1 to ``most``, 0 for any other text. Python itself raises at thousands of
    digits."""
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > MOST_DIGITS:
        return 0
    return number if (number := int(digits)) <= most else 0
