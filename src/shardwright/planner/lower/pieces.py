"""What a lowered block becomes, kept as columns: its pieces of the phases, and how pieces are joined.

A phase is the pieces of its blocks one behind the other, but for three things that cross from one
to the next. Parameters that a piece needs are gathered while the piece before runs; a gradient that
several blocks add to is synchronised where the last of them is done; and further messages of a
synchronisation come behind all pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.planner.lower.backward import SEGMENTS, Gathers, issued_before
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.lower.template import Rows


class Piece:
    """Steps of one block, what is gathered for them while those before run, and what comes at last.

    See ``backward.Synced`` for what is carried on to the next piece, and where what comes from the
    one before ``meets`` these steps.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        ahead: Sequence[tuple[int, Gathers]],
        steps: list[Step],
        late: Sequence[Step] = (),
        carried: Sequence[Step] = (),
        meets: int = -1,
    ) -> None:
        self.whole = Rows.of(builder, steps)
        self.late = Rows.of(builder, late) if late else None
        self.carried = Rows.of(builder, carried) if carried else None
        self.meets = meets
        self.ahead = ahead
        self.segments = [place for place, step in enumerate(steps) if step.kind in SEGMENTS]

    def woven(self, issued: Sequence[tuple[int, Rows]], brought: Rows | None) -> list[Rows]:
        """Return the steps with rows issued before some of the segments, which ascend, and with what
        is brought from the piece before."""
        between = [] if brought is None else [(self.meets, brought)]
        between += [(self.segments[segment], rows) for segment, rows in issued]
        return self.whole.woven(sorted(between, key=lambda one: one[0]))


def joined(pieces: Sequence[Piece]) -> list[list[Rows]]:
    """Return what pieces make one behind the other: the steps of each with what is woven in from those
    beside it, in parts, and then what comes behind all."""
    issued, parts, carried = _issued(pieces), list[list[Rows]](), None
    for number, piece in enumerate(pieces):
        if number not in issued and piece.meets < 0:
            parts.append([piece.whole])
            continue
        meets = piece.meets >= 0
        parts.append(piece.woven(issued.get(number, ()), carried if meets else None))
        carried = piece.carried if meets else carried
    return [*parts, [] if carried is None else [carried]]


def _issued(pieces: Sequence[Piece]) -> dict[int, list[tuple[int, Rows]]]:
    """Return by piece what is gathered while it runs, each before which of its segments: what the next
    piece with segments needs, and the first one its own."""
    issued: dict[int, list[tuple[int, Rows]]] = {}
    before = -1  # the last piece with segments
    for number, piece in enumerate(pieces):
        if not piece.segments:
            continue
        own = len(piece.segments)
        for turn, gathers in piece.ahead:
            where = number if before < 0 else before
            segment = 0 if before < 0 else issued_before(turn, own, len(pieces[before].segments))
            issued.setdefault(where, []).append((segment, gathers.rows))
        before = number
    return issued


@dataclass(frozen=True, slots=True)
class Share:
    """What one block adds to the templates of one stage."""

    prologue: Piece
    forward: Piece
    inputs: Piece
    last: Piece
