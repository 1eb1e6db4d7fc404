"""A method's answers are remembered per object and by its arguments."""

from __future__ import annotations

from shardwright.planner.remember import remembered


class Squares:
    def __init__(self) -> None:
        self.asked: list[int] = []

    @remembered
    def of(self, number: int) -> int:
        """Return a square."""
        self.asked.append(number)
        return number * number


def test_equal_questions_are_answered_once_by_each_object() -> None:
    one, other = Squares(), Squares()
    assert [one.of(3), one.of(3), one.of(4), other.of(3)] == [9, 9, 16, 9]
    assert (one.asked, other.asked) == ([3, 4], [3])
    assert Squares.of.__doc__ == "Return a square."
