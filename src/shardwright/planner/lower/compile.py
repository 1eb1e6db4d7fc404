"""Templates with what their steps wait for and when values live: once per stage, whatever it repeats.

By NumPy, or where a builder outlives one lowering by a kernel that looks over a whole stage at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Kind
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.lower.lifetimes import (
    Lifetimes,
    backward_lifetimes,
    find_reported,
    forward_lifetimes,
    free_at_update,
    once_lifetimes,
)
from shardwright.planner.lower.template import Facts, Ints, Rows, Template
from shardwright.planner.lower.waits import NAMES, Needed, Waits

PREVIOUS_COMPUTE = "previous compute"
# By number of a template that is waited for: what its instance is called.
INSTANCES = (*(name.removesuffix(" backward") for name in NAMES), PREVIOUS_COMPUTE)
_NOTHING = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class Steps:
    """The five lists of steps of one stage."""

    prologue: list[Step]
    forward: list[Step]
    backward: list[Step]
    exchange: list[Step]
    epilogue: list[Step]


@dataclass(frozen=True, slots=True)
class Templates:
    """The templates of one stage, each in parts. ``middle`` is the backward of all microbatches but
    the last, empty where there is one; ``sends`` and ``receives`` follow the last."""

    prologue: Sequence[Rows]
    forward: Sequence[Rows]
    middle: Sequence[Rows]
    last: Sequence[Rows]
    sends: Sequence[Rows]
    receives: Sequence[Rows]
    epilogue: Sequence[Rows]

    @classmethod
    def of(cls, builder: ProgramBuilder, steps: Steps) -> Templates:
        """Look at the steps of a builder whose segments are finished."""
        several = builder.strategy.pipeline.num_microbatches > 1
        last = [Rows.of(builder, steps.backward)]
        middle = [step for step in steps.backward if not step.last_only]
        is_same = len(middle) == len(steps.backward)
        often = last if is_same else [Rows.of(builder, middle)]
        return cls(
            prologue=[Rows.of(builder, steps.prologue)],
            forward=[Rows.of(builder, steps.forward)],
            middle=often if several else (),
            last=last,
            sends=[Rows.of(builder, [s for s in steps.exchange if s.kind is Kind.SEND])],
            receives=[Rows.of(builder, [s for s in steps.exchange if s.kind is not Kind.SEND])],
            epilogue=[Rows.of(builder, steps.epilogue)],
        )

    def in_order(self) -> tuple[Sequence[Rows], ...]:
        """Return them in the order of ``waits.NAMES``."""
        return (
            self.prologue, self.forward, self.middle, self.last, self.sends, self.receives,
            self.epilogue,
        )  # fmt: skip


@dataclass(slots=True)
class Compiled:
    """A template as arrays. What it ``needed`` lies in instances of templates which ``references``
    say: (number of the writer, name, stage)."""

    stage: int
    kind: NDArray[np.int8]
    item: NDArray[np.int32]
    resource: NDArray[np.int32]
    lifetimes: Lifetimes
    needed: Needed
    references: list[tuple[int, str, int]]


class Compiler:
    """Compiles the templates of one stage after another; ``resources`` numbers what they run on in
    the order in which they meet it. ``facts`` of the values, where these are not all in the builder."""

    def __init__(
        self, builder: ProgramBuilder, resources: dict[str, int], facts: Facts | None = None
    ) -> None:
        self.builder = builder
        self.facts = facts or Facts.of(builder)
        self.reported = find_reported(builder, self.facts)
        self.resources = resources
        self.names = list(builder.resources)
        self.act = self._by_kernel if builder.compiled or facts else self._by_numpy

    def stages(self, templates: Sequence[Templates]) -> list[dict[str, Compiled]]:
        """Compile all templates of all stages."""
        found = [self.act(stage, own) for stage, own in enumerate(templates)]
        if len(found) > 1:
            _await_senders(found)
        return found

    def _by_numpy(self, stage: int, templates: Templates) -> dict[str, Compiled]:
        builder, facts = self.builder, self.facts
        prologue, forward, last, sends, receives, epilogue = [
            Template(parts)
            for parts in (
                templates.prologue, templates.forward, templates.last, templates.sends,
                templates.receives, templates.epilogue,
            )
        ]  # fmt: skip
        waits, result = Waits(facts), dict[str, Compiled]()

        def add(name: str, template: Template, lifetimes: Lifetimes, known: Waits) -> None:
            if len(template):
                needed = known.of(name, template)
            else:
                needed = Needed(_NOTHING, _NOTHING, _NOTHING, -1)
            writers = np.flatnonzero(np.bincount(needed.writer)).tolist()
            result[name] = Compiled(
                stage=stage,
                kind=template.kind,
                item=template.item.astype(np.int32),
                resource=self._resources(template.resource),
                lifetimes=lifetimes,
                needed=needed,
                references=_references(name, stage, writers),
            )

        add("prologue", prologue, once_lifetimes(facts, prologue, _NOTHING, ends_step=False), waits)
        lifetimes, alive = forward_lifetimes(facts, forward, last, self.reported)
        add("forward", forward, lifetimes, waits)
        ends = alive, self.reported
        if templates.middle:
            middle = last if templates.middle is templates.last else Template(templates.middle)
            add("backward", middle, backward_lifetimes(facts, middle, *ends), waits.copy())
        add("last backward", last, backward_lifetimes(facts, last, *ends), waits)
        for name, template in (("send", sends), ("receive", receives)):
            lifetimes = once_lifetimes(facts, template, last.written, ends_step=True)
            add(name, template, lifetimes, waits)
        before = np.concatenate([last.written, receives.written])
        lifetimes = once_lifetimes(facts, epilogue, before, ends_step=True)
        frame = stage, builder.strategy.pipeline.num_microbatches
        others = (prologue, last, (sends, receives, epilogue))
        free_at_update(facts, frame, lifetimes, others, self.reported)
        add("epilogue", epilogue, lifetimes, waits)
        return result

    def _by_kernel(self, stage: int, templates: Templates) -> dict[str, Compiled]:
        from shardwright.planner.lower import kernels

        facts, every = self.facts, templates.in_order()
        parts = list(chain.from_iterable(every))
        rows = np.concatenate([part.rows for part in parts])
        value = np.concatenate([part.value for part in parts])
        read = np.concatenate([part.read for part in parts])
        stops = list(accumulate(sum(len(part.rows) for part in own) for own in every))
        values = kernels.Values(
            facts.bytes, facts.root, facts.storage, facts.mesh, facts.marks, self.reported
        )
        many = self.builder.strategy.pipeline.num_microbatches
        found = kernels.look_over(rows, (value, read), np.array(stops), values, stage, many)
        kind, item = rows[:, 0].astype(np.int8), rows[:, 1].astype(np.int32)
        resource = self._resources(rows[:, 2])
        result: dict[str, Compiled] = {}
        begin = begin_frees = begin_needed = 0
        ends: list[list[int]] = found.ends.tolist()
        for name, stop, end in zip(NAMES, stops, ends, strict=True):
            frees, needed, last_compute, writers = end
            sizes, freed = found.sizes[:, begin:stop], found.frees[:, begin_frees:frees]
            waits = found.needed[:, begin_needed:needed]
            adds = sizes[3:] if name in ("backward", "last backward") else ()
            result[name] = Compiled(
                stage=stage,
                kind=kind[begin:stop],
                item=item[begin:stop],
                resource=resource[begin:stop],
                lifetimes=Lifetimes(sizes[0], sizes[1], sizes[2], freed[0], freed[1], *adds),
                needed=Needed(waits[0], waits[1], waits[2], last_compute),
                references=_references(
                    name, stage, [one for one in range(len(INSTANCES)) if writers >> one & 1]
                ),
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


def _references(name: str, stage: int, writers: Sequence[int]) -> list[tuple[int, str, int]]:
    own = NAMES.index(name)
    return [(one, "self" if one == own else INSTANCES[one], stage) for one in writers]


def _await_senders(stages: Sequence[dict[str, Compiled]]) -> None:
    """Let what is received wait until it is sent.

    Every schedule runs backward by ascending microbatch, so stages agree on the last.
    """
    senders: dict[tuple[str, int], tuple[str, int, int]] = {}
    for stage, templates in enumerate(stages):
        for name, compiled in templates.items():
            instance = "exchange" if name == "send" else name.removeprefix("last ")
            for place in np.flatnonzero(compiled.kind == Kind.SEND).tolist():
                senders[name, int(compiled.item[place])] = (instance, stage, place)
    for name, compiled in chain.from_iterable(templates.items() for templates in stages):
        arrivals = np.flatnonzero(compiled.kind == Kind.RECEIVE)
        if len(arrivals):
            source = "send" if name == "receive" else name
            sent = [senders[source, item] for item in compiled.item[arrivals].tolist()]
            numbers = len(INSTANCES) + np.arange(len(sent))
            compiled.references += [
                (number, instance, other)
                for number, (instance, other, _) in zip(numbers.tolist(), sent, strict=True)
            ]
            places = np.array([place for _, _, place in sent], dtype=np.int64)
            known = compiled.needed
            compiled.needed = Needed(
                np.concatenate([known.place, arrivals]),
                np.concatenate([known.writer, numbers]),
                np.concatenate([known.target, places]),
                known.last_compute,
            )
