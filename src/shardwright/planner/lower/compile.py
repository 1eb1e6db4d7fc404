"""The phases of a stage with what their steps wait for and when values live: once per stage, whatever
it repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Kind
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.lower.phases import PREVIOUS, Phase
from shardwright.planner.lower.template import ITEM, KIND, LAST_ONLY, RESOURCE, Facts, Ints, Rows

# The steps of a stage, phase by phase, each in parts.
Phases = Sequence[Sequence[Rows]]


def phases_of(
    builder: ProgramBuilder,
    exchange: Sequence[Step],
    once: tuple[Sequence[Rows], Sequence[Rows]],
    forward: Sequence[Rows],
    inputs: Sequence[Rows],
    last: Sequence[Rows],
) -> Phases:
    """Return a stage in phases, prologue and epilogue ``once``; the backward of all microbatches but the last is
    the last one's but for what runs with that only."""
    prologue, epilogue = once
    middle = list[Rows]()
    if last and builder.strategy.pipeline.num_microbatches > 1:
        whole = Rows.joined(last)
        middle.append(whole.chosen(whole.rows[:, LAST_ONLY] == 0))
    sends = Rows.of(builder, [step for step in exchange if step.kind is Kind.SEND])
    others = Rows.of(builder, [step for step in exchange if step.kind is not Kind.SEND])
    return prologue, forward, inputs, middle, last, [sends], [others], epilogue


class Needed(NamedTuple):
    """What the steps at ``place`` wait for: the number of a phase, or of a reference, and the place
    there. Also the place of the last compute (-1)."""

    place: Ints
    writer: Ints
    target: Ints
    last_compute: int


@dataclass(slots=True)
class Compiled:
    """A phase as arrays; ``sizes`` and ``frees`` as ``kernels.Found`` has them. What it ``needed`` lies in
    instances of phases which ``references`` say: (number of the writer, phase, stage)."""

    stage: int
    phase: Phase
    kind: NDArray[np.int8]
    item: NDArray[np.int32]
    resource: NDArray[np.int32]
    sizes: Ints
    frees: Ints
    needed: Needed
    references: list[tuple[int, int, int]]


class Compiler:
    """Compiles the phases of one stage after another; ``resources`` numbers what they run on in the
    order in which they meet it. ``facts`` of the values, where these are not all in the builder."""

    def __init__(
        self, builder: ProgramBuilder, resources: dict[str, int], facts: Facts | None = None
    ) -> None:
        self.facts = facts or Facts.of(builder)
        self.many = builder.strategy.pipeline.num_microbatches
        self.resources = resources
        self.names = list(builder.resources)

    def stages(self, stages: Sequence[Phases]) -> list[list[Compiled]]:
        """Compile all phases of all stages."""
        found = [self._stage(stage, own) for stage, own in enumerate(stages)]
        if len(found) > 1:
            _await_senders(found)
        return found

    def _stage(self, stage: int, phases: Phases) -> list[Compiled]:
        from shardwright.planner.lower.kernels import look_over

        rows, value, read = Rows.joined(list(chain.from_iterable(phases)))
        stops = list(accumulate(sum(len(part.rows) for part in own) for own in phases))
        found = look_over(rows, (value, read), np.array(stops), self.facts, stage, self.many)
        kind, item = rows[:, KIND].astype(np.int8), rows[:, ITEM].astype(np.int32)
        resource = self._resources(rows[:, RESOURCE])
        result: list[Compiled] = []
        begin = begin_frees = begin_needed = 0
        ends: list[list[int]] = found.ends.tolist()
        for phase, stop, (frees, needed, last, writers) in zip(Phase, stops, ends, strict=True):
            waits = found.needed[:, begin_needed:needed]
            result.append(
                Compiled(
                    stage=stage,
                    phase=phase,
                    kind=kind[begin:stop],
                    item=item[begin:stop],
                    resource=resource[begin:stop],
                    sizes=found.sizes[:, begin:stop],
                    frees=found.frees[:, begin_frees:frees],
                    needed=Needed(waits[0], waits[1], waits[2], last),
                    references=[
                        (one, one, stage) for one in range(PREVIOUS + 1) if writers >> one & 1
                    ],
                )
            )
            begin, begin_frees, begin_needed = stop, frees, needed
        return result

    def _resources(self, met: Ints) -> NDArray[np.int32]:
        """Number resources in the order in which the Program meets them."""
        table = np.zeros(len(self.names), dtype=np.int32)
        every: list[int] = met.tolist()
        for known in dict.fromkeys(every):
            table[known] = self.resources.setdefault(self.names[known], len(self.resources))
        return table[met]


def _await_senders(stages: Sequence[list[Compiled]]) -> None:
    """Let what is received wait until it is sent.

    Meshes send in one order of microbatches, so they agree on the last.
    """
    every = list(chain.from_iterable(stages))
    senders: dict[tuple[Phase, int], tuple[int, int]] = {}
    for compiled in every:
        for place in np.flatnonzero(compiled.kind == Kind.SEND).tolist():
            senders[compiled.phase, int(compiled.item[place])] = compiled.stage, place
    for compiled in every:
        arrivals = np.flatnonzero(compiled.kind == Kind.RECEIVE)
        if len(arrivals):
            source = compiled.phase.sender
            sent = [senders[source, item] for item in compiled.item[arrivals].tolist()]
            numbers = PREVIOUS + 1 + np.arange(len(sent))
            compiled.references += [
                (number, source.instance, other)
                for number, (other, _) in zip(numbers.tolist(), sent, strict=True)
            ]
            places = np.array([place for _, place in sent], dtype=np.int64)
            known = compiled.needed
            compiled.needed = Needed(
                np.concatenate([known.place, arrivals]),
                np.concatenate([known.writer, numbers]),
                np.concatenate([known.target, places]),
                known.last_compute,
            )
