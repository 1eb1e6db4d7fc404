"""Quantities as people read them. Values are SI; the unit is chosen to leave two to four digits."""

from __future__ import annotations

import math


def seconds_text(seconds: float) -> str:
    """Write a duration: ``812 us``, ``41.3 ms``, ``2.08 s``, ``3 min 20 s``."""
    if not math.isfinite(seconds):
        return "-"
    if abs(seconds) >= 120:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e6:.2g} us" if seconds else "0 s"


def bytes_text(count: float) -> str:
    """Write a size in binary units: ``512 B``, ``3.4 MiB``, ``17.2 GiB``."""
    if not math.isfinite(count):
        return "-"
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(count) >= 0.9995 * 1024**power:
            return f"{_three_digits(count / 1024**power)} {unit}"
    return f"{count:.0f} B"


def dollars_text(dollars: float) -> str:
    """Write a price per step; an unpriced cluster gives a dash."""
    if not dollars:
        return "-"
    return f"${dollars:.2f}" if dollars >= 1 else f"${dollars:.2g}"


def count_text(count: float) -> str:
    """Write a large number: ``950``, ``3.28 M``, ``8.03 G``."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= 0.9995 * scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f}"


def percent_text(ratio: float) -> str:
    """Write a signed difference: ``+3.1 %``."""
    return f"{ratio * 100:+.1f} %" if math.isfinite(ratio) else "-"


def overhead_text(name: str, value: float) -> str:
    """Write a scalar that was measured on a machine (``CostTable.overheads``): most are seconds."""
    what = name.partition("|")[0]
    if what.endswith("bytes"):
        return bytes_text(value)
    if what == "skew":  # of computation
        return f"{value:.1%}"
    if what == "overlap_slowdown":
        return f"{value:.2f}x"
    return count_text(value) if what == "cores" else seconds_text(value)


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
