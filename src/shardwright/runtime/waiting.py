"""Where in a rank's list of actions the messages under way are completed."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence

from shardwright.core.completion import completions, scatter_turns
from shardwright.core.program import Kind, Program
from shardwright.runtime.messages import Exchange

Action = Callable[[], None]


class Waiting:
    """The exchanges of a rank, and who still waits for which; appends completions to ``actions``.

    Without ``sends`` somebody else sees to these.
    """

    def __init__(
        self, program: Program, indices: Sequence[int], *, on_host: bool, sends: bool = True
    ) -> None:
        self.actions: list[tuple[int, Action]] = []
        self.exchanges: dict[int, Exchange] = {}
        self._under_way: dict[int, None] = {}
        self._writer: dict[int, int] = {}
        self._due = due(program, indices, on_host=on_host) if sends else {}

    def issue(self, index: int, exchange: Exchange, slots: Iterable[int]) -> None:
        """Start a message which writes slots."""
        self.exchanges[index] = exchange
        self.actions.append((index, exchange.issue))
        self._under_way[index] = None
        self._writer |= dict.fromkeys(slots, index)

    def come_to(self, index: int) -> None:
        """Complete what is due before an instruction although nothing there needs it."""
        for other in self._due.get(index, ()):
            self._complete(other)

    def need(self, slot: int) -> None:
        """Complete the message under way that writes a slot, if there is one."""
        index = self._writer.get(slot, -1)
        if index >= 0:
            self._complete(index)

    def finish(self) -> None:
        """Complete all that is left."""
        for index in tuple(self._under_way):
            self._complete(index)

    def _complete(self, index: int) -> None:
        if index in self._under_way:
            del self._under_way[index]
            self.actions.append((index, self.exchanges[index].complete))


def due(program: Program, indices: Sequence[int], *, on_host: bool) -> dict[int, list[int]]:
    """Return, by instruction of a rank, what is completed before it without being needed there.

    These are sends, and reduce-scatters that would keep whole gradients alive. Evaluation runs only
    some instructions, and waits at the next one of them.
    """
    until = completions(program, on_host=on_host)
    turns = scatter_turns(program, on_host=on_host)
    bounded = {int(index) for earlier, _ in turns for index in earlier}
    result: dict[int, list[int]] = {}
    for index in indices:
        if int(program.kind[index]) == Kind.SEND or index in bounded:
            place = bisect.bisect_left(indices, int(until[index]))
            if place < len(indices):
                result.setdefault(indices[place], []).append(index)
    return result
