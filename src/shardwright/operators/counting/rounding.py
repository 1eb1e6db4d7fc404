"""What 8-bit products cost besides themselves: their operands are scaled and rounded before them.

Three ways, by who does it; bytes are those that pass for each 2-byte element. That the product then
reads 1 byte instead of 2 is no gain: large products wait for their matrix units.

``plain``: kernels one by one. 2 are read for the largest element, 2 read and 2 written for the
division, 2 read for the rounding, and 1-byte elements written twice and read once for rounding and
layout; each operand of each product anew. This is what this project's runtime does.

``fused``: a compiler makes of division, rounding and layout one kernel (torchao beneath
``torch.compile``): 2 are read for the largest element, 2 read and 1 written for a layout. Backward
rounds the gradient once, in the layouts of both its products; weight and input, which were kept in 16
bits, again.

``transposing``: scales come from earlier steps, so one kernel reads 2 and writes both layouts, 1 each
(Transformer Engine, delayed scaling). What forward rounded is kept for backward, and weights are
rounded in the first microbatch of a step only, which is left out.
"""

from __future__ import annotations

from typing import Literal

Rounding = Literal["plain", "fused", "transposing"]
PLAIN, FUSED, TRANSPOSING = 2 + 4 + 2 + 3, 2 + 2, 2 + 2
# Kernels of one operand: norm, scale (3), division, rounding, layout; largest element and the rest.
LAUNCHES = {"plain": 7, "fused": 2, "transposing": 1}


def rounding(
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    needs: tuple[bool, ...],
    phase: str,
    how: Rounding,
) -> tuple[float, int]:
    """Return the bytes and kernels of a phase, from the bytes of a linear map's tensors and which of
    its operands want a gradient."""
    x, weight = (size // 2 for size in inputs[:2])
    made = sum(outputs) // 2
    # The gradient is multiplied with the weight, and with the input.
    others = [one for one, needed in zip((weight, x), needs[:2], strict=True) if needed]
    if how == "plain":
        operands = [x, weight] if phase == "forward" else [*others, *[made] * len(others)]
        return float(PLAIN * sum(operands)), LAUNCHES[how] * len(operands)
    if phase == "forward":
        operands = [x] if how == "transposing" else [x, weight]
        layouts = (TRANSPOSING if how == "transposing" else FUSED + 1) * sum(operands)
        return float(layouts), LAUNCHES[how] * len(operands)
    if how == "transposing":
        return float(TRANSPOSING * made * bool(others)), LAUNCHES[how] * bool(others)
    gradient = (FUSED + len(others)) * made * bool(others)
    return float(gradient + (FUSED + 1) * sum(others)), LAUNCHES[how] * (len(others) + bool(others))
