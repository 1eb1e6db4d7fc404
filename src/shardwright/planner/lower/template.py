"""Steps as columns: what each reads, holds and writes, for NumPy to look at all of them at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.crossing import adds_up
from shardwright.core.layout import PARTIAL
from shardwright.core.program import BACKWARD_KINDS, SEGMENT_KINDS, Kind, Message
from shardwright.planner.lower.builder import WIDE, ProgramBuilder, Step
from shardwright.planner.lower.compress import compressing_bytes

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
# Columns of ``Rows.rows``: what a step is, runs and takes; whether it runs with the last microbatch only, and
# brings gradients to the optimizer; its bytes besides values; how many values it holds, writes and reads.
KIND, ITEM, RESOURCE, LAST_ONLY, SYNCS, ALLOCATED, FREED, TEMPORARY, HELD, WRITTEN, READ = range(11)
FORWARDS = (Kind.FORWARD, Kind.RECOMPUTE)


def _table(*kinds: Kind) -> Flags:
    return np.array([kind in kinds for kind in Kind], dtype=np.bool_)


# By kind: what computes, what runs a segment, what does so backward, what runs a message, what sends one off.
COMPUTES = _table(*SEGMENT_KINDS, Kind.CLIP, Kind.UPDATE, Kind.TRANSFORM)
RUNS_SEGMENT, BACKWARDS = _table(*SEGMENT_KINDS), _table(*BACKWARD_KINDS)
MOVES = _table(Kind.MESSAGE, Kind.SEND, Kind.RECEIVE)
SENDS = _table(Kind.MESSAGE, Kind.SEND)


class Facts(NamedTuple):
    """Of every value of a builder: what one device allocates for it, and what it is (``marks``).

    ``root`` is the value whose data it has under another name, ``storage`` the one in whose memory
    it lies (``ProgramBuilder.storage``); itself where it has its own. ``reported`` live until the end of
    the step, because somebody may ask for them.
    """

    bytes: Ints
    root: Ints
    storage: Ints
    mesh: Ints
    marks: Ints
    reported: Flags

    @classmethod
    def of(cls, builder: ProgramBuilder) -> Facts:
        """Read them off a builder whose values are all there."""
        sizes, roots = np.array(builder.sizes), np.array(builder.roots)
        lying = np.arange(len(sizes))
        views = list(builder.views)
        lying[views] = [builder.storage(value) for value in views]
        sizes[list(builder.stored)] = list(builder.stored.values())
        sizes[views] = 0
        reported = np.zeros(len(sizes), dtype=np.bool_)
        reported[[builder.storage(output.value) for output in builder.outputs]] = True
        return cls(
            bytes=sizes,
            root=roots,
            storage=lying[roots],
            mesh=np.array(builder.meshes),
            marks=np.array(builder.marks),
            reported=reported,
        )


class Rows(NamedTuple):
    """Steps as numbers: one row per step, what they hold and then write, step by
    step, and what they read."""

    rows: Ints
    value: Ints
    read: Ints

    @classmethod
    def of(cls, builder: ProgramBuilder, steps: Sequence[Step]) -> Rows:
        """Look at steps of a builder whose segments are finished."""
        if not steps:
            return _no_rows
        segments = builder.segments
        held = [
            _held(builder, step) if step.kind in BACKWARD_KINDS else step.reads for step in steps
        ]
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
            np.array(rows, dtype=np.int64),
            np.array(both, dtype=np.int64),
            np.array(read, dtype=np.int64),
        )

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Return the steps of several parts, one behind the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(*[np.concatenate(columns) for columns in zip(*parts, strict=True)])

    def chosen(self, steps: Flags) -> Rows:
        """Return some of the steps."""
        touched = self.rows[:, HELD] + self.rows[:, WRITTEN]
        return Rows(
            self.rows[steps],
            self.value[np.repeat(steps, touched)],
            self.read[np.repeat(steps, self.rows[:, READ])],
        )

    def split(self, at: int) -> tuple[Rows, Rows]:
        """Return the steps before a place, and those from there on."""
        touched = int(self.rows[:at, HELD : WRITTEN + 1].sum())
        read = int(self.rows[:at, READ].sum())
        return (
            Rows(self.rows[:at], self.value[:touched], self.read[:read]),
            Rows(self.rows[at:], self.value[touched:], self.read[read:]),
        )

    def woven(self, others: Iterable[tuple[int, Rows]]) -> list[Rows]:
        """Return the steps with others, each before a place; these ascend."""
        parts, rest, done = list[Rows](), self, 0
        for place, rows in others:
            if place > done:
                first, rest = rest.split(place - done)
                parts.append(first)
                done = place
            parts.append(rows)
        return [*parts, rest]

    @property
    def writes(self) -> tuple[Ints, Ints]:
        """The values that are written, one write after another, and at which places."""
        rows = self.rows
        ends = np.tile([False, True], len(rows))
        is_written = np.repeat(ends, rows[:, HELD : WRITTEN + 1].reshape(-1))
        return self.value[is_written], np.repeat(np.arange(len(rows)), rows[:, WRITTEN])


_no_rows = Rows(*(np.zeros(shape, dtype=np.int64) for shape in ((0, READ + 1), 0, 0)))


def _held(builder: ProgramBuilder, step: Step) -> tuple[int, ...]:
    segment = builder.segments[step.item]
    if step.kind is Kind.WEIGHT_GRADIENT:
        return segment.deferred_values
    dropped = set(segment.outputs).difference(builder.saved[step.item])
    dropped.update(segment.unused_in_backward)
    if not dropped:
        return step.reads
    return tuple([value for value in step.reads if value not in dropped])


def _synchronises(builder: ProgramBuilder, step: Step) -> bool:
    """Whether a step within a mesh brings gradients to where the optimizer reads them, or there consumes
    them."""
    if step.kind is Kind.UPDATE:
        return step.item >= 0
    if step.kind is Kind.TRANSFORM:
        return builder.transforms[step.item].purpose == "synchronise"
    return step.kind is Kind.MESSAGE and builder.messages[step.item].purpose == "synchronise"


def _own_bytes(builder: ProgramBuilder, step: Step) -> tuple[int, int, int]:
    """Return the bytes that a step allocates, frees and needs for a while besides values."""
    kind = step.kind
    if kind not in SEGMENT_KINDS:
        return 0, 0, _needed_bytes(builder, step)
    segment = builder.segments[step.item]
    forward, backward = segment.temporary_bytes
    inputs, weights = segment.split_temporary_bytes
    if kind is Kind.BACKWARD:
        return 0, segment.saved_bytes, backward
    if kind is Kind.INPUT_GRADIENT:
        return segment.deferred_bytes, segment.saved_bytes, inputs
    if kind is Kind.WEIGHT_GRADIENT:
        return 0, segment.deferred_bytes, weights
    if kind is Kind.FORWARD and segment.recomputed:
        return 0, 0, segment.bare_bytes
    return segment.saved_bytes, 0, forward


def _needed_bytes(builder: ProgramBuilder, step: Step) -> int:
    """Return the bytes that what computes no segment needs for a while."""
    if step.kind in (Kind.CLIP, Kind.UPDATE):  # updates are one kernel, in place
        return 0
    if step.kind is not Kind.TRANSFORM:
        message = builder.messages[step.item]
        terms = _terms_bytes(builder, message) if step.kind is Kind.RECEIVE else 0
        return _buffers(builder, message) + terms
    if builder.transforms[step.item].name == "feedback":
        # What was rounded is widened again, one tensor at a time, to be taken off its residual.
        return max(builder.values[value].bytes for value in step.reads)
    return compressing_bytes(builder, builder.transforms[step.item])


def _buffers(builder: ProgramBuilder, message: Message) -> int:
    """Return what a message needs besides its sources and results until it is complete.

    What is split is packed rank by rank first, unless it lies so, in the dtype that it travels in. All other buffers become the
    results, or stand where results will: see ``Message.is_unpacked`` for what is copied out at the
    end. Packed pieces to gather are left out: they are copied into the output at once. What is added
    to a wider sum is taken for half of it (``kernels``); what travelled as wide as the sum is more.
    """
    source, result = (builder.values[ends[0]] for ends in (message.sources, message.results))
    is_cast = message.scatters_gradients and source.dtype != (message.dtype or result.dtype)
    packed = message.bytes if message.is_packed or is_cast else 0
    several = builder.strategy.pipeline.num_microbatches > 1
    if several and source.scope == "microbatch" and source.dtype == result.dtype:
        packed += _wide_bytes(builder, message.results) // 2
    return packed


def _terms_bytes(builder: ProgramBuilder, message: Message) -> int:
    """Return the bytes of the terms of sums that arrive from another mesh, each beside the others."""
    total, sizes = 0, builder.mesh(message.mesh).sizes
    for ends in zip(message.sources, message.results, strict=True):
        source, result = (builder.values[end] for end in ends)
        if adds_up(source.layout, result.layout):
            pairs = zip(source.layout, sizes, strict=True)
            total += result.bytes * math.prod(size for one, size in pairs if one == PARTIAL)
    return total


def _wide_bytes(builder: ProgramBuilder, values: Sequence[int]) -> int:
    """Return the bytes of those values that are added to wider sums."""
    return sum(builder.values[value].bytes for value in values if builder.marks[value] & WIDE)
