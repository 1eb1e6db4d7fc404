"""A builder that outlives one lowering: what is made alike has the same number, and is made once.

Values are numbered by what they are, not in order: a value made alike by the same maker has the
same number, so that a change in one place does not renumber all others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.core.program import Message, Segment, Value
from shardwright.core.strategy import Strategy
from shardwright.planner.lower.builder import Extra, Like, Made, ProgramBuilder, Said
from shardwright.planner.lower.ground import Ground
from shardwright.planner.remember import KEPT

# Beyond so many remembered things, or ``KEPT`` times the values of the first strategy, everything is
# forgotten and begins anew.
MOST_REMEMBERED = 60_000


@dataclass(slots=True)
class _Alike:
    """The numbers of equal values of one maker, and how many of them are taken this ``turn``."""

    numbers: list[int] = field(default_factory=list[int])
    turn: int = 0
    drawn: int = 0

    def draw(self, turn: int) -> int:
        """Return the next number in a turn, -1 where there is none yet."""
        if self.turn != turn:
            self.turn, self.drawn = turn, 0
        self.drawn += 1
        return self.numbers[self.drawn - 1] if self.drawn <= len(self.numbers) else -1

    def add(self, number: int) -> int:
        """Note the number of the value drawn last, which is new."""
        self.numbers.append(number)
        return number


class LastingBuilder(ProgramBuilder):
    """A builder that outlives one lowering: equal values get equal numbers, equal things are made
    once."""

    def __init__(self, ground: Ground, strategy: Strategy) -> None:
        self.remembered: dict[Hashable, Any] = {}
        self.maker: Hashable = None  # whose values are being numbered; None: nobody's, all are new
        # Of every maker, the values that it made, by all that they are; and how often one began.
        self._numbers: dict[Hashable, dict[Hashable, _Alike]] = {}
        self._known: dict[Hashable, _Alike] = {}
        # The same by what they are like.
        self._likes_of: dict[Hashable, dict[Like, _Alike]] = {}
        self._likes: dict[Like, _Alike] = {}
        self._turn = 0
        self.first_size = 0  # values of the first strategy
        # By what they read and make.
        self._segments: dict[object, list[tuple[Segment, int]]] = {}
        self._message_numbers: dict[Message, int] = {}
        self._untold: dict[int, Value] = {}
        self._told: dict[tuple[int, int], Value] = {}
        self._base: dict[tuple[int, int, int], int] = {}
        self.values: list[Value] = []
        super().__init__(ground, strategy)

    def begin(self, strategy: Strategy) -> None:
        """Take up the next strategy, on the same meshes."""
        for number, value in self._untold.items():
            self.values[number] = value
        self._untold.clear()
        self.make_for(None)
        super().begin(strategy)

    def make_for(self, maker: Hashable) -> None:
        """Number values from here on as ``maker`` did before, as far as they are alike."""
        super().make_for(maker)
        self.maker = maker
        self._known = self._numbers.setdefault(maker, {})
        self._likes = self._likes_of.setdefault(maker, {})
        self._turn += 1

    def _number(self, said: Said, extra: Extra) -> int:
        """Return the number of a value; of equal ones the maker's first gets the first number."""
        if self.maker is None:
            return super()._number(said, extra)
        known = self._alike(said, extra)
        number = known.draw(self._turn)
        return number if number >= 0 else known.add(super()._number(said, extra))

    def _alike(self, said: Said, extra: Extra) -> _Alike:
        key = (said, self.cut_dim.get(said[0]), *extra.items())
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Alike()
        return known

    def ask_like(
        self, like: Like, asked: Callable[[int, int, int, int], tuple[Said, Extra]]
    ) -> int:
        """Return the number of a value that is like another; what it is is told once."""
        known = self._likes.get(like)
        if known is None:
            known = self._likes[like] = self._alike(*asked(*like))
        number = known.draw(self._turn)
        if number < 0:
            number = known.add(super()._number(*asked(*like)))
        self.made.append(number)
        return number

    def add_segment(self, segment: Segment) -> int:
        """Return the index of a segment; an equal one has the same."""
        key = (segment.block, segment.inputs, segment.outputs)
        known = self._segments.setdefault(key, [])
        for other, index in known:
            if other == segment:
                self.segments[index] = segment
                self.begun.append((index, segment))
                return index
        known.append((segment, super().add_segment(segment)))
        return known[-1][1]

    def add_message(self, message: Message) -> int:
        """Return the index of a message; an equal one that some maker asks for again has the same."""
        if self.maker is None:
            return super().add_message(message)
        index = self._message_numbers.get(message, -1)
        if index < 0:
            index = self._message_numbers[message] = super().add_message(message)
        return index

    def turn(self, told: Sequence[tuple[int, int]]) -> None:
        """Tell parameters at rest their gradients as they were told before."""
        values, untold = self.values, self._untold
        for key in told:
            if key not in self._told:
                self._told[key] = replace(values[key[0]], gradient=key[1])
            untold.setdefault(key[0], values[key[0]])
            values[key[0]] = self._told[key]
        self.turned += told

    def base_of(self, value: int) -> int:
        """Return one device's bytes of a value that lasts, counted once."""
        key = (value, self.values[value].gradient, self.strategy.optimizer_states)
        if key not in self._base:
            self._base[key] = super().base_of(value)
        return self._base[key]

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what ``make`` made when it was first asked for."""
        if key not in self.remembered:
            maker, made, self.maker, self.made = self.maker, self.made, None, []
            try:
                self.remembered[key] = make()
            finally:
                self.maker, self.made = maker, made
        return self.remembered[key]

    @property
    def is_full(self) -> bool:
        """Whether it is time to forget."""
        grown = len(self.values) > KEPT * self.first_size
        return grown or max(len(self.messages), len(self.remembered)) > MOST_REMEMBERED
