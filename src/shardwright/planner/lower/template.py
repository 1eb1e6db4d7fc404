"""Steps as columns: what each reads, holds and writes, for NumPy to look at all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Kind
from shardwright.planner.lower.draft import (
    ACTIVATION,
    BY_MICROBATCH,
    GATHERED,
    GRADIENT,
    Draft,
    Step,
)

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
FORWARDS, BACKWARD = (Kind.FORWARD, Kind.RECOMPUTE), Kind.BACKWARD


def _table(*kinds: Kind) -> Flags:
    return np.array([kind in kinds for kind in Kind], dtype=np.bool_)


# By kind: what computes, what runs a segment, what runs a message, what sends one off.
COMPUTES = _table(Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.CLIP, Kind.UPDATE)
RUNS_SEGMENT = _table(Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
MOVES = _table(Kind.MESSAGE, Kind.SEND, Kind.RECEIVE)
SENDS = _table(Kind.MESSAGE, Kind.SEND)


@dataclass(frozen=True, eq=False, slots=True)
class Facts:
    """Of every value of a draft: what one device allocates for it, and what it is.

    ``root`` is the value whose data it has under another name, ``storage`` the one in whose memory
    it lies (``Draft.storage``); itself where it has its own.
    """

    bytes: Ints
    root: Ints
    storage: Ints
    mesh: Ints
    by_microbatch: Flags
    is_gradient: Flags
    is_activation: Flags
    is_gathered: Flags  # a parameter that is filled by a message
    compiled: bool = False  # whether steps are played by ``kernels``

    @classmethod
    def of(cls, draft: Draft) -> Facts:
        """Read them off a draft whose values are all there."""
        marks, sizes = np.array(draft.marks), np.array(draft.sizes)
        roots, lying = np.array(draft.roots), np.arange(len(sizes))
        views = list(draft.views)
        lying[views] = [draft.storage(value) for value in views]
        sizes[views] = 0
        return cls(
            bytes=sizes,
            root=roots,
            storage=lying[roots],
            mesh=np.array(draft.meshes),
            by_microbatch=(marks & BY_MICROBATCH) > 0,
            is_gradient=(marks & GRADIENT) > 0,
            is_activation=(marks & ACTIVATION) > 0,
            is_gathered=(marks & GATHERED) > 0,
            compiled=draft.compiled,
        )

    def none(self) -> Flags:
        """Return the empty set of values."""
        return np.zeros(len(self.bytes), dtype=np.bool_)

    def set_of(self, values: Ints | Sequence[int]) -> Flags:
        """Return a set of values."""
        chosen = self.none()
        chosen[np.asarray(values, dtype=np.int64)] = True
        return chosen


class Template:
    """A list of steps, and columns of (place of a step, value).

    ``place``, ``value`` and ``writes`` list, step by step, what it holds (needs alive) and then
    what it writes. A segment writes its outputs; of these its backward holds only what was saved.
    """

    def __init__(self, draft: Draft, steps: Sequence[Step]) -> None:
        self.draft = draft
        self.steps = steps
        self.kind = np.array([step.kind for step in steps], dtype=np.int8)
        segments = draft.segments
        held = [self._held(step) if step.kind is BACKWARD else step.reads for step in steps]
        written = [
            segments[step.item].outputs if step.kind in FORWARDS else step.writes for step in steps
        ]
        num_held, num_written = list(map(len, held)), list(map(len, written))
        both = chain.from_iterable(chain.from_iterable(zip(held, written, strict=True)))
        self.value = np.fromiter(both, np.int64, sum(num_held) + sum(num_written))
        counts = np.array([num_held, num_written], dtype=np.int64).T.reshape(-1)
        turn = np.repeat(np.arange(2 * len(steps)), counts)
        self.place, self.writes = turn >> 1, (turn & 1) == 1
        self.written = self.value[self.writes]
        self.written_at = self.place[self.writes]

    def _held(self, step: Step) -> tuple[int, ...]:
        segment = self.draft.segments[step.item]
        dropped = set(segment.outputs).difference(self.draft.saved[step.item])
        dropped.update(segment.spared)
        if not dropped:
            return step.reads
        return tuple([value for value in step.reads if value not in dropped])

    @cached_property
    def reads(self) -> tuple[Ints, Ints]:
        """Columns (place, value) of all that steps read."""
        counts = [len(step.reads) for step in self.steps]
        values = chain.from_iterable([step.reads for step in self.steps])
        places = np.repeat(np.arange(len(counts)), counts)
        return places, np.fromiter(values, np.int64, len(places))

    def chosen(self, flags: Sequence[bool]) -> tuple[Ints, Ints]:
        """Return what the steps so flagged read: columns (place, value)."""
        places, values = self.reads
        mine = np.array(flags, dtype=np.bool_)[places] if len(flags) else np.zeros(0, np.bool_)
        return places[mine], values[mine]
