"""Quantities as people read them."""

from __future__ import annotations

import pytest

from shardwright.report.units import overhead_text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("segment_seconds", 3e-5, "30.0 us"),
        ("hiding|1x2|loopback", 0.00589, "5.89 ms"),
        ("process_bytes", 402 * 2**20, "402 MiB"),
        ("cores", 2.0, "2"),
        ("skew|2x2|1Gbit/s", 0.0323, "3.2%"),
        ("overlap_slowdown", 1.0, "1.00x"),
    ],
)
def test_what_was_measured_of_a_machine_has_its_own_unit(
    name: str, value: float, text: str
) -> None:
    assert overhead_text(name, value) == text
