"""How many bytes are left of a gradient that is compressed for the wire."""

from __future__ import annotations

from typing import Literal

from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.strategy import REAL, Compressor, GradientSync

# Smaller gradients (norms, biases) travel whole: starting to select costs more than sending them does.
WHOLE_BELOW = 1024
INDEX_BYTES = 4
Packing = Literal["top-k", "int8", "1-bit"]
# What a planner that may compress tries: compressors and densities.
MENU: tuple[tuple[Compressor, float], ...] = (
    ("int8", 1.0), ("1-bit", 1.0), ("top-k", 0.25), ("top-k", 0.1), ("top-k", 0.04), ("top-k", 0.01),
    ("top-k", 0.004), ("top-k", 0.001),
)  # fmt: skip
WHOLE: tuple[Compressor, float] = ("none", 1.0)
LEAST_SENT = 0.001  # where nobody says


def kept_elements(density: float, elements: int) -> int:
    """Return how many elements top-k keeps."""
    return max(1, round(density * elements))


def packed_bytes(compressor: Compressor, density: float, elements: int, dtype: str) -> int:
    """Return the bytes that a device sends of so many elements: values of a dtype with 32-bit indices; a
    byte each and the size of a level; or a bit each and two means."""
    width = DTYPE_BYTES[dtype]
    if compressor == "top-k":
        return kept_elements(density, elements) * (width + INDEX_BYTES)
    if compressor == "int8":
        return elements + width
    return -(-elements // 8) + 2 * width


def sent_share(compressor: Compressor, density: float, dtype: str) -> float:
    """Return the share of a gradient's bits that travel, places of elements and sizes of levels aside."""
    if compressor == "none":
        return 1.0
    bits = {"top-k": density, "int8": 8.0, "1-bit": 1.0}[compressor]
    return bits if compressor == "top-k" else bits / (8 * DTYPE_BYTES[dtype])


def wide_dtype(dtype: str) -> str:
    """Return the dtype in which gradients of a dtype are compressed and what that loses is kept."""
    return "float32" if DTYPE_BYTES[dtype] < DTYPE_BYTES["float32"] else dtype


def allowed_ways(least_sent: float, dtype: str) -> list[tuple[Compressor, float]]:
    """Return what of the menu sends at least a share of the bits of a dtype, densest first."""
    found = [(sent_share(*way, dtype), way) for way in MENU]
    return [way for share, way in sorted(found, reverse=True) if share >= least_sent]


def is_worth_packing(dtype: str, elements: int) -> bool:
    """Whether a device's gradient of a dtype and so many elements is compressed where anything is."""
    return dtype in REAL and elements >= WHOLE_BELOW


def is_compressed(sync: GradientSync, dtype: str, elements: int) -> bool:
    """Whether a device's gradient of a dtype and so many elements is compressed before it is summed."""
    return sync.compressor != "none" and is_worth_packing(dtype, elements)
