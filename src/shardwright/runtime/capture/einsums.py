"""Einsums of several operands as those of two that torch makes of them: what lies between two is as large as anything, is kept
for backward, and splits by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.operators.equation import sides


def in_pairs(
    equation: str, count: int, path: Sequence[int] | None = None
) -> list[tuple[int, int, str]] | None:
    """Return which two of the operands left are contracted by which equation, one pair after another; None for dims without
    letters. What comes of a pair is the first operand left; along a path that somebody chose, the last.

    Dims between lie as the product of matrices makes them: those of both, of the left, of the right, each in the order of
    the result.
    """
    if count < 3 or "." in equation:
        return None
    left, made = sides(equation)
    order = (made + "".join(sorted(set("".join(left)) - set(made)))).index
    pairs: list[tuple[int, int, str]] = []
    while len(left) > 1:
        done = 2 * len(pairs)
        one, two = sorted(path[done : done + 2]) if path else (0, 1)
        second, first = left.pop(two), left.pop(one)
        inside = made if not left else _between(first, second, set(made).union(*left), order)
        pairs.append((one, two, f"{first},{second}->{inside}"))
        left.insert(len(left) if path else 0, inside)
    return pairs


def _between(first: str, second: str, wanted: set[str], order: Callable[[str], int]) -> str:
    """Return the dims of a pair's product of which something is still wanted."""
    stays = sorted((set(first) | set(second)) & wanted, key=order)
    if len(stays) < len(set(first) | set(second)):
        stays.sort(key=lambda one: (one not in first, (one in first) != (one in second)))
    return "".join(stays)
