"""What is dropped after forward and made again before backward: results and re-laid-out copies.

A value is *rematerialised* where the instruction that made it may run again: a segment of recomputed
operators, or a message of a recomputed block or of an activation in ``Strategy.reshard_again``. It is
made again as late as possible, before the first backward that needs it, together with whatever it
is made from and is itself rematerialised. What one block hands to another is kept, so that making one
block's values again never reaches into another; copies of what lies otherwise are not so bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwright.operators.keeping.memory import SegmentMemory
from shardwright.planner.lower.builder import ProgramBuilder
from shardwright.planner.lower.stage import Entry

ELSEWHERE = -2  # some other block


class Remake:
    """Says, going backward through one stage, which forward entries must run again, and when.

    ``entries`` are those of a stage, or of one block where nothing reaches from one into another;
    then others read the values ``handed`` to them.
    """

    def __init__(
        self, builder: ProgramBuilder, entries: Sequence[Entry], handed: Iterable[int] = ()
    ) -> None:
        self.builder = builder
        self.entries = entries
        self._handed = handed
        self._makers = self._find_makers()
        self._done: set[int] = set()
        for entry in self.entries:
            if entry.segment >= 0:
                self._release_inputs(entry.segment)

    def before(self, place: int) -> list[int]:
        """Return the positions of entries to run again before the backward of one, ascending."""
        segment = self.builder.segments[self.entries[place].segment]
        wanted: set[int] = set()
        queue = [place] if segment.recomputed else self._made_by(segment.rematerialised)
        while queue:
            at = queue.pop()
            if at not in self._done and at not in wanted:
                wanted.add(at)
                queue += self._made_by(self._reads(at))
        self._done |= wanted
        return sorted(wanted)

    def _made_by(self, values: tuple[int, ...]) -> list[int]:
        roots = [self.builder.roots[value] for value in values]
        return [self._makers[root] for root in roots if root in self._makers]

    def _reads(self, place: int) -> tuple[int, ...]:
        entry = self.entries[place]
        if entry.segment >= 0:
            return self.builder.segments[entry.segment].inputs
        return tuple(value for step in entry.steps for value in step.reads)

    def _find_makers(self) -> dict[int, int]:
        """Map every value that is dropped after forward to the entry that makes it again."""
        builder, graph, read_in = self.builder, self.builder.graph, self._find_readers()
        blocks, apart = set(builder.strategy.recompute), set(builder.strategy.reshard_again)
        makers: dict[int, int] = {}
        for place, entry in enumerate(self.entries):
            made = self._makes(entry)
            stays = {value for value in made if read_in.get(value, set()) <= {entry.block}}
            if entry.segment >= 0:
                makers |= dict.fromkeys(
                    stays if builder.segments[entry.segment].recomputed else (), place
                )
            elif any(builder.values[value].tensor in apart for value in made):
                makers |= dict.fromkeys(made, place)
            elif 0 <= entry.block < len(graph.blocks) and entry.block in blocks:
                makers |= dict.fromkeys(stays, place)
        return makers

    def _find_readers(self) -> dict[int, set[int]]:
        """Map every value to the blocks that read it, but for sending it."""
        read_in = {value: {ELSEWHERE} for value in self._handed}
        for place, entry in enumerate(self.entries):
            if entry.sends is None:
                for value in self._reads(place):
                    read_in.setdefault(self.builder.roots[value], set()).add(entry.block)
        return read_in

    def _makes(self, entry: Entry) -> tuple[int, ...]:
        if entry.sends is not None or entry.receives is not None:
            return ()
        if entry.segment >= 0:
            return self.builder.segments[entry.segment].outputs
        return tuple(value for step in entry.steps for value in step.writes)

    def _release_inputs(self, number: int) -> None:
        """Tell a segment with a graph kept from forward which inputs it may not hold on to."""
        builder = self.builder
        segment = builder.segments[number]
        dropped = [value for value in segment.inputs if builder.roots[value] in self._makers]
        if segment.recomputed or not segment.has_backward or not dropped:
            return
        memory = SegmentMemory(builder.graph, segment.calls, builder.values, segment.inputs)
        needed = memory.kept(segment.inputs)
        builder.segments[number] = replace(
            segment,
            rematerialised=tuple(value for value in dropped if value in needed),
            unused_in_backward=tuple(value for value in dropped if value not in needed),
        )
