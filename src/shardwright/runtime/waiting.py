"""Where in a rank's list of actions the messages under way are completed, and received ones asked for."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence

from shardwright.core.completion import asked_ahead, completions, scatter_turns
from shardwright.core.program import Kind, Program
from shardwright.runtime.cores import give_way
from shardwright.runtime.messages import Exchange
from shardwright.runtime.transfers import Send

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
        self._gives_way, self._sending = on_host, set[int]()
        self._writer: dict[int, int] = {}
        self._due = due(program, indices, on_host=on_host) if sends else {}
        # What is asked for ahead, by the instruction before which, and then by the place of an action.
        self._asked: dict[int, list[int]] = {}
        self._ahead: dict[int, list[int]] = {}
        if sends and on_host:
            places, receives = asked_ahead(program)
            for place, coming in zip(places.tolist(), receives.tolist(), strict=True):
                self._asked.setdefault(place, []).append(coming)

    def issue(self, index: int, exchange: Exchange, slots: Iterable[int]) -> None:
        """Start a message which writes slots."""
        self.exchanges[index] = exchange
        self.actions.append((index, exchange.issue))
        self._under_way[index] = None
        if isinstance(exchange, Send) and self._gives_way:
            self._sending.add(index)
        self._writer |= dict.fromkeys(slots, index)

    def come_to(self, index: int) -> None:
        """Complete what is due before an instruction although nothing there needs it."""
        for other in self._due.get(index, ()):
            self._complete(other)
        if index in self._asked:
            self._ahead.setdefault(len(self.actions), []).extend(self._asked[index])

    def give_way(self, index: int) -> None:
        """Give way before an instruction that computes while something sent is under way: where it is asked
        for only now, the thread that hears so would wait for the core until the scheduler's next tick."""
        if self._sending:
            self.actions.append((index, give_way))

    def need(self, slot: int) -> None:
        """Complete the message under way that writes a slot, if there is one."""
        index = self._writer.get(slot, -1)
        if index >= 0:
            self._complete(index)

    def finish(self) -> None:
        """Complete all that is left, and ask ahead."""
        for index in tuple(self._under_way):
            self._complete(index)
        early = {one for asked in self._ahead.values() for one in asked if one in self.exchanges}
        found: list[tuple[int, Action]] = []
        for place, (index, action) in enumerate(self.actions):
            asked = self._ahead.get(place, ())
            found += [(one, self.exchanges[one].issue) for one in asked if one in early]
            if index not in early or action != self.exchanges[index].issue:
                found.append((index, action))
        self.actions[:] = found

    def _complete(self, index: int) -> None:
        if index in self._under_way:
            del self._under_way[index]
            self._sending.discard(index)
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
