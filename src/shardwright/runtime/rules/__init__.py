"""Operators in pieces: run one whole, run it split over imagined devices, and compare.

Knows nothing of how rules are written, only of the layouts that they lead to. It slices and sums as
a program's messages would, and calls the kernels that the executor calls.
"""

from shardwright.runtime.rules.cases import Case, Refused, draw, example_of, find_operator
from shardwright.runtime.rules.isolated import Answer, Crashed, Differ, is_crash, run_isolated
from shardwright.runtime.rules.pieces import Axis, Split, difference

__all__ = [
    "Answer",
    "Axis",
    "Case",
    "Crashed",
    "Differ",
    "Refused",
    "Split",
    "difference",
    "draw",
    "example_of",
    "find_operator",
    "is_crash",
    "run_isolated",
]
