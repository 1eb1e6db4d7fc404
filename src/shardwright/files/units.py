"""Quantities with units, as people write them: ``25 Gbit/s``, ``80 GiB``, ``3.2 USD/h``.

Units are mandatory and case matters: GB and GiB differ, and so do Gbit and GByte. Inside everything
is SI; this module and the report's printing are the only places that know other units.
"""

from __future__ import annotations

import difflib
import re
from typing import Literal

from shardwright.errors import InputError

Quantity = Literal["bytes", "bandwidth", "seconds", "flops", "price"]

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}

_BYTES = {f"{p}B": f for p, f in (_PREFIXES | _BINARY).items()}
_BITS = {f"{p}{bit}": f / 8 for p, f in (_PREFIXES | _BINARY).items() for bit in ("bit", "b")}

UNITS: dict[Quantity, dict[str, float]] = {
    "bytes": _BYTES,
    "bandwidth": {f"{unit}/s": f for unit, f in (_BYTES | _BITS).items()}
    | {f"{p}bps": f / 8 for p, f in _PREFIXES.items()},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "flops": {f"{p}FLOP/s": f for p, f in _PREFIXES.items() if p != "k"}
    | {f"{p}FLOPS": f for p, f in _PREFIXES.items() if p != "k"},
    "price": {"USD/h": 1 / 3600, "USD/hour": 1 / 3600,
              "USD/s": 1.0, "USD/min": 1 / 60, "$/h": 1 / 3600},
}  # fmt: skip

EXAMPLES: dict[Quantity, str] = {
    "bytes": "80 GiB or 80 GB",
    "bandwidth": "25 Gbit/s or 450 GB/s",
    "seconds": "5 us",
    "flops": "312 TFLOP/s",
    "price": "3.2 USD/h",
}

_PATTERN = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?)\s*(\S*)\s*")
LARGEST = 1e30
SMALLEST = 1e-30  # but for 0: what is divided by it stays finite


def read_quantity(text: object, quantity: Quantity, *, zero: bool = False) -> float:
    """Return the SI value of a quantity. ``zero`` allows 0.

    Raises InputError which says what is accepted; whoever knows the place adds it in front.
    """
    example = EXAMPLES[quantity]
    if not isinstance(text, str):
        raise InputError(
            f"needs a number with its unit in quotes, not {text!r:.80}; write for example {example!r}"
        )
    match = _PATTERN.fullmatch(text[:100])
    if match is None:
        raise InputError(
            f"needs a number and a unit, not {text[:80]!r}; write for example {example!r}"
        )
    number, unit = match.groups()
    units = UNITS[quantity]
    if not unit:
        raise InputError(f"{text[:80]!r} has no unit; write for example {example!r}")
    if unit not in units:
        near = difflib.get_close_matches(unit, units, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]!r}?" if near else f"; write for example {example!r}"
        raise InputError(
            f"{text[:80]!r} has the unknown unit {unit[:80]!r}, such as {example!r} is accepted{meant}"
        )
    value = float(number) * units[unit]
    if not is_in_range(value, zero=zero):
        raise InputError(
            f"{text[:80]!r} must be {range_text(zero=zero)} in SI units; write for example {example!r}"
        )
    return value


def is_in_range(value: float, *, zero: bool = False) -> bool:
    """Whether a number in SI units is one that can be calculated with; ``zero`` allows 0."""
    return SMALLEST <= value <= LARGEST or (zero and value == 0)


def range_text(*, zero: bool = False) -> str:
    """Say what ``is_in_range`` accepts."""
    bound = (
        f"0 or more (but 0, at least {SMALLEST:g})"
        if zero
        else f"more than 0 (at least {SMALLEST:g})"
    )
    return f"{bound} and at most {LARGEST:g}"


def write_quantity(value: float, quantity: Quantity) -> str:
    """Write a quantity so that ``read_quantity`` returns it exactly, shortly where possible."""
    for unit in _PREFERRED[quantity]:
        text = f"{value / UNITS[quantity][unit]:.12g} {unit}"
        if read_quantity(text, quantity, zero=True) == value:
            return text
    return f"{value!r} {_PREFERRED[quantity][-1]}"


# Largest first; the last is the SI unit, in which a float always comes back unchanged.
_PREFERRED: dict[Quantity, tuple[str, ...]] = {
    "bytes": ("GiB", "GB", "MiB", "B"),
    "bandwidth": ("GB/s", "Gbit/s", "Mbit/s", "B/s"),
    "seconds": ("us", "ms", "s"),
    "flops": ("TFLOP/s", "GFLOP/s", "FLOP/s"),
    "price": ("USD/h", "USD/s"),
}
