"""Counts as people write them, and as they slip."""

from __future__ import annotations

import pytest

from shardwright.caching.server import split_address
from shardwright.core.counts import read_count
from shardwright.errors import InputError
from shardwright.files.workers import read_workers
from shardwright.planner.search.asked import read_sizes
from shardwright.verbs.tracerequest import TraceRequest

# More digits than Python makes a number of, a digit that is no decimal, and zeros before too large a number.
LONG, SQUARE, PADDED = "9" * 5000, "\u00b2", "0" * 12 + "1000000000"


def test_a_count_is_read_as_it_is_written_or_nothing() -> None:
    for text, most, number in (
        ("1", 1, 1), (" 16 ", 16, 16), ("016", 16, 16), ("17", 16, 0), ("0", 16, 0), ("-1", 16, 0),
        ("", 16, 0), ("1_0", 16, 0), (LONG, 16, 0), (SQUARE, 16, 0), (PADDED, 16, 0),
    ):  # fmt: skip
        assert read_count(text, most) == number, (text, most)


def test_counts_that_are_none_are_refused_wherever_they_are_written() -> None:
    for text in (LONG, SQUARE, PADDED):
        for read, wrong in (
            (read_workers, text),
            (lambda wrong: read_sizes("summa", wrong), f"{text}x2"),
            (lambda wrong: TraceRequest(workers=wrong, link="10GbE").counts, f"2,{text}"),
            (split_address, f"host:{text}"),
        ):
            with pytest.raises(InputError, match=";"):
                read(wrong)
