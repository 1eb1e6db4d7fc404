"""What 8-bit products cost besides themselves: their operands are scaled and rounded by plain kernels.

Of each operand 2-byte elements are read for the largest one, read and written for the division, read
for the rounding, and 1-byte elements written twice and read once for rounding and layout; the product
then reads 1 byte instead of 2.
"""

from __future__ import annotations

# Kernels of one operand: norm, scale (3), division, rounding, layout.
LAUNCHES = 7
# Bytes that pass, for each byte of an operand.
PASSES = 5.0


def rounding(
    inputs: tuple[int, ...], outputs: tuple[int, ...], needs: tuple[bool, ...], phase: str
) -> tuple[float, int]:
    """Return the bytes and kernels of a phase, from the bytes of a linear map's tensors and which of
    its operands want a gradient."""
    x, weight = inputs[:2]
    if phase == "forward":
        return PASSES * (x + weight), LAUNCHES * 2
    # The gradient is multiplied with the weight, and with the input.
    operands = sum(
        sum(outputs) + other for other, needed in zip((weight, x), needs[:2], strict=True) if needed
    )
    return PASSES * operands, LAUNCHES * 2 * sum(needs[:2])
