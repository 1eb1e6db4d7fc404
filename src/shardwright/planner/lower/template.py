"""Steps as columns: what each reads, holds and writes, for NumPy to look at all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Kind, Message
from shardwright.planner.lower.builder import (
    ACTIVATION,
    BY_MICROBATCH,
    GATHERED,
    GRADIENT,
    WIDE,
    ProgramBuilder,
    Step,
)

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
NUM_COLUMNS = 11
FORWARDS, BACKWARD = (Kind.FORWARD, Kind.RECOMPUTE), Kind.BACKWARD


def _table(*kinds: Kind) -> Flags:
    return np.array([kind in kinds for kind in Kind], dtype=np.bool_)


# By kind: what computes, what runs a segment, what runs a message, what sends one off, what takes all
# of its mesh's parameters.
COMPUTES = _table(
    Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.CLIP, Kind.UPDATE, Kind.TRANSFORM
)
RUNS_SEGMENT = _table(Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
MOVES = _table(Kind.MESSAGE, Kind.SEND, Kind.RECEIVE)
SENDS = _table(Kind.MESSAGE, Kind.SEND)
TAKES_ALL = _table(Kind.CLIP, Kind.UPDATE)


@dataclass(frozen=True, eq=False)
class Facts:
    """Of every value of a builder: what one device allocates for it, and what it is (``marks``).

    ``root`` is the value whose data it has under another name, ``storage`` the one in whose memory
    it lies (``ProgramBuilder.storage``); itself where it has its own.
    """

    bytes: Ints
    root: Ints
    storage: Ints
    mesh: Ints
    marks: Ints

    @classmethod
    def of(cls, builder: ProgramBuilder) -> Facts:
        """Read them off a builder whose values are all there."""
        sizes, roots = np.array(builder.sizes), np.array(builder.roots)
        lying = np.arange(len(sizes))
        views = list(builder.views)
        lying[views] = [builder.storage(value) for value in views]
        sizes[views] = 0
        return cls(
            bytes=sizes,
            root=roots,
            storage=lying[roots],
            mesh=np.array(builder.meshes),
            marks=np.array(builder.marks),
        )

    @cached_property
    def by_microbatch(self) -> Flags:
        """Those that are made anew for every microbatch."""
        return (self.marks & BY_MICROBATCH) > 0

    @cached_property
    def is_gradient(self) -> Flags:
        """Those that add up."""
        return (self.marks & GRADIENT) > 0

    @cached_property
    def is_wide(self) -> Flags:
        """Gradients in twice the bytes of what is added to them."""
        return (self.marks & WIDE) > 0

    @cached_property
    def is_activation(self) -> Flags:
        """Those that are activations."""
        return (self.marks & ACTIVATION) > 0

    @cached_property
    def is_gathered(self) -> Flags:
        """Parameters that are filled by a message."""
        return (self.marks & GATHERED) > 0

    def none(self) -> Flags:
        """Return the empty set of values."""
        return np.zeros(len(self.bytes), dtype=np.bool_)

    def set_of(self, values: Ints | Sequence[int]) -> Flags:
        """Return a set of values."""
        chosen = self.none()
        chosen[np.asarray(values, dtype=np.int64)] = True
        return chosen


class Rows(NamedTuple):
    """Steps as numbers: one row of ``NUM_COLUMNS`` per step, what they hold and then write, step by
    step, and what they read."""

    rows: Ints
    value: Ints
    read: Ints

    @classmethod
    def of(cls, builder: ProgramBuilder, steps: Sequence[Step]) -> Rows:
        """Look at steps of a builder whose segments are finished."""
        segments = builder.segments
        held = [_held(builder, step) if step.kind is BACKWARD else step.reads for step in steps]
        written = [
            segments[step.item].outputs if step.kind in FORWARDS else step.writes for step in steps
        ]
        rows = [
            (
                step.kind, step.item, builder.resource(step.resource), step.last_only,
                _synchronises(builder, step),
                *_own_bytes(builder, step), len(one), len(other), len(step.reads),
            )
            for step, one, other in zip(steps, held, written, strict=True)
        ]  # fmt: skip
        both = list(chain.from_iterable(chain.from_iterable(zip(held, written, strict=True))))
        read = list(chain.from_iterable([step.reads for step in steps]))
        return cls(
            np.array(rows, dtype=np.int64).reshape(-1, NUM_COLUMNS),
            np.array(both, dtype=np.int64),
            np.array(read, dtype=np.int64),
        )

    def followed_by(self, other: Rows) -> Rows:
        """Return these steps and then others."""
        return Rows(*[np.concatenate(pair) for pair in zip(self, other, strict=True)])

    def chosen(self, steps: Flags) -> Rows:
        """Return some of the steps."""
        touched = self.rows[:, 8] + self.rows[:, 9]
        return Rows(
            self.rows[steps],
            self.value[np.repeat(steps, touched)],
            self.read[np.repeat(steps, self.rows[:, 10])],
        )

    def split(self, at: int) -> tuple[Rows, Rows]:
        """Return the steps before a place, and those from there on."""
        touched = int(self.rows[:at, 8:10].sum())
        read = int(self.rows[:at, 10].sum())
        return (
            Rows(self.rows[:at], self.value[:touched], self.read[:read]),
            Rows(self.rows[at:], self.value[touched:], self.read[read:]),
        )


class Template:
    """A list of steps as columns.

    ``place``, ``value`` and ``writes`` list, step by step, what it holds (needs alive) and then
    what it writes. A segment writes its outputs; of these its backward holds only what was saved.
    ``allocated``, ``freed`` and ``temporary`` are a step's bytes besides values. ``syncs`` are messages
    and transforms that synchronise gradients.
    """

    def __init__(self, parts: Sequence[Rows]) -> None:
        """Take the steps of several parts, one behind the other."""
        rows, self.value, self.read = parts[0]
        if len(parts) > 1:
            rows = np.concatenate([part.rows for part in parts])
            self.value = np.concatenate([part.value for part in parts])
            self.read = np.concatenate([part.read for part in parts])
        columns = np.ascontiguousarray(rows.T)
        self.kind = columns[0].astype(np.int8)
        self.item, self.resource = columns[1], columns[2]
        self.last_only, self.syncs = columns[3] > 0, columns[4] > 0
        self.allocated, self.freed, self.temporary = columns[5], columns[6], columns[7]
        turn = np.repeat(np.arange(2 * len(rows)), rows[:, 8:10].reshape(-1))
        self.place, self.writes = turn >> 1, (turn & 1) == 1
        self.written = self.value[self.writes]
        self.written_at = self.place[self.writes]
        self.read_at = np.repeat(np.arange(len(rows)), columns[10])

    def __len__(self) -> int:
        return len(self.kind)

    def chosen(self, flags: Flags) -> tuple[Ints, Ints]:
        """Return what the steps so flagged read: columns (place, value)."""
        mine = flags[self.read_at]
        return self.read_at[mine], self.read[mine]


def _held(builder: ProgramBuilder, step: Step) -> tuple[int, ...]:
    segment = builder.segments[step.item]
    dropped = set(segment.outputs).difference(builder.saved[step.item])
    dropped.update(segment.unused_in_backward)
    if not dropped:
        return step.reads
    return tuple([value for value in step.reads if value not in dropped])


def _synchronises(builder: ProgramBuilder, step: Step) -> bool:
    """Whether a step within a mesh brings gradients to where the optimizer reads them."""
    if step.kind is Kind.TRANSFORM:
        return builder.transforms[step.item].purpose == "synchronise"
    return step.kind is Kind.MESSAGE and builder.messages[step.item].purpose == "synchronise"


def _own_bytes(builder: ProgramBuilder, step: Step) -> tuple[int, int, int]:
    """Return the bytes that a step allocates, frees and needs for a while besides values."""
    kind = step.kind
    if kind in (Kind.MESSAGE, Kind.SEND, Kind.RECEIVE):
        return 0, 0, _buffers(builder, builder.messages[step.item])
    if kind is Kind.UPDATE:
        # For-loop optimizers make a few temporaries of the size of one parameter at a time.
        sizes = [builder.value_bytes(value) for value in step.writes]
        return 0, 0, 2 * max(sizes, default=0)
    if kind in (Kind.CLIP, Kind.TRANSFORM):
        return 0, 0, 0
    segment = builder.segments[step.item]
    forward, backward = segment.temporary_bytes
    if kind is BACKWARD:
        return 0, segment.saved_bytes, backward
    if kind is Kind.FORWARD and segment.recomputed:
        return 0, 0, segment.bare_bytes
    return segment.saved_bytes, 0, forward


def _buffers(builder: ProgramBuilder, message: Message) -> int:
    """Return what a message needs besides its sources and results until it is complete.

    What is split is packed rank by rank first, unless it lies so, in the dtype that it travels in. All other buffers become the
    results, or stand where results will: see ``Message.is_unpacked`` for what is copied out at the
    end. Packed pieces to gather are left out: they are copied into the output at once. What is added
    to a wider sum is taken for half of it (``lifetimes``); what travelled as wide as the sum is more.
    """
    source, result = (builder.values[ends[0]] for ends in (message.sources, message.results))
    is_cast = message.scatters_gradients and source.dtype != (message.dtype or result.dtype)
    wide, several = 0, builder.strategy.pipeline.num_microbatches > 1
    if several and source.scope == "microbatch" and source.dtype == result.dtype:
        sums = [value for value in message.results if builder.marks[value] & WIDE]
        wide = sum(builder.value_bytes(value) for value in sums) // 2
    return wide + (message.bytes if message.is_packed or is_cast else 0)
