"""Equations of ``einsum``: which dims of its operands and of its result are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Names = tuple[str, ...]


def sides(equation: str) -> tuple[list[str], str]:
    """Return what an equation says of each operand and of the result; where it says nothing of the result, that has
    what stands for several dims and those named once."""
    read, arrow, made = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = Counter(read.replace(",", "").replace(".", ""))
        once = "".join(one for one in sorted(letters) if letters[one] == 1)
        made = "..." * ("..." in read) + once
    return read.split(","), made


def dims(equation: str, ranks: Sequence[int]) -> tuple[list[Names], Names] | None:
    """Name every dim of operands of these ranks, and of the result; None for as many as the equation does not have.

    What ``...`` stands for is called ``e0, e1, ...`` and ends with the same dim in all.
    """
    terms, made = sides(equation)
    if not equation or len(terms) != len(ranks):
        return None
    hidden = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    if any(
        count < 0 or (count and "..." not in term)
        for term, count in zip(terms, hidden, strict=True)
    ):
        return None
    spread = tuple(f"e{place}" for place in range(max(hidden, default=0)))
    named = [
        _spelled(term, spread[len(spread) - width :])
        for term, width in zip(terms, hidden, strict=True)
    ]
    return named, _spelled(made, spread)


def _spelled(term: str, hidden: Names) -> Names:
    before, dots, after = term.partition("...")
    return (*before, *(hidden if dots else ()), *after)
