"""Parameters that lie on a server: pulled before forward, and their gradients pushed as these are made.

What a block reads travels together, and what a bucket of gradients holds. Every device sends its own
term of a gradient, and the server adds them up: there is no collective between those that send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shardwright.core.program import Purpose
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.lower.compile import Phases
from shardwright.planner.lower.parameters import Parameters, Use
from shardwright.planner.lower.phases import Phase
from shardwright.planner.lower.stage import Entry, Stage
from shardwright.planner.lower.template import Rows
from shardwright.planner.lower.tied import arrived, whole
from shardwright.planner.lower.transfers import transfer_all

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Push:
    """Gradients that leave a mesh together, and what their home does when they arrive."""

    mesh: int
    home: int
    gradients: tuple[int, ...]
    send: Step
    arrival: tuple[Step, ...]


def serve(parameters: Parameters, stages: Sequence[Stage]) -> list[Push]:
    """Let parameters be pulled from servers, in the prologues of ``stages``; return the pushes."""
    builder = parameters.builder
    uses = [use for use in parameters.uses.values() if use.tensor in parameters.served]
    if not uses:
        return []
    builder.make_for("moved parameters")
    _pull(parameters, stages, uses)
    pushes = _pushes(parameters, uses)
    builder.make_for(None)
    return pushes


def _pull(parameters: Parameters, stages: Sequence[Stage], uses: Iterable[Use]) -> None:
    builder = parameters.builder
    groups: dict[tuple[int, int, int], dict[tuple[int, int], list[Step]]] = {}
    for use in uses:
        kept, value = parameters.kept[use.tensor], builder.values[use.value]
        if value.alias < 0:
            leaving, gather = builder.once(
                ("whole", kept.rest, value.layout),
                partial(whole, builder, kept.rest, value.layout),
            )
            block = builder.graph.block_of[builder.graph.consumers[use.tensor][0]]
            pairs = groups.setdefault((block, kept.mesh, use.mesh), {})
            pairs[leaving, use.value] = gather
    for (_, home, mesh), pairs in sorted(groups.items()):
        send, receive = _travel(builder, tuple(pairs), "parameter")
        gathers = {id(step): step for steps in pairs.values() for step in steps}
        stages[home].prologue.append(Entry(-1, [*gathers.values(), send]))
        stages[mesh].prologue.append(Entry(-1, [receive]))


def _pushes(parameters: Parameters, uses: Iterable[Use]) -> list[Push]:
    builder = parameters.builder
    buckets = builder.strategy.gradient_sync.buckets
    bucket_of = {tensor: number for number, bucket in enumerate(buckets) for tensor in bucket}
    groups: dict[tuple[object, ...], dict[tuple[int, int], list[Step]]] = {}
    for use in uses:
        if builder.values[use.value].gradient >= 0:
            kept = parameters.kept[use.tensor]
            leaving = parameters.summed_abroad(use)
            arriving, rest = builder.once(
                ("arrived", leaving, kept.reduced),
                partial(arrived, builder, leaving, kept.reduced, is_served=True),
            )
            number = bucket_of.get(use.tensor, -1 - use.tensor)
            key = (use.mesh, kept.mesh, number, builder.values[leaving].dtype)
            groups.setdefault(key, {})[leaving, arriving] = rest
    found: list[Push] = []
    for pairs in groups.values():
        send, receive = _travel(builder, tuple(pairs), "synchronise")
        leaving, arriving = (builder.values[end] for end in next(iter(pairs)))
        arrival = (receive, *[step for steps in pairs.values() for step in steps])
        sent = tuple([source for source, _ in pairs])
        found.append(Push(leaving.mesh, arriving.mesh, sent, send, arrival))
    return found


def _travel(builder: ProgramBuilder, pairs: Pairs, purpose: Purpose) -> tuple[Step, Step]:
    return builder.once(("serve", pairs), partial(transfer_all, builder, pairs, purpose))


def with_pushes(
    builder: ProgramBuilder, phases: Sequence[Phases], pushes: Sequence[Push]
) -> list[Phases]:
    """Return stages' phases with every push behind the step that makes the last of its gradients, in the
    last backward; homes take in what arrives in the order in which it is sent."""
    lasts = [list(own[Phase.LAST]) for own in phases]
    arrivals: dict[int, list[Step]] = {}
    for mesh in reversed(range(len(phases))):
        own = [push for push in pushes if push.mesh == mesh]
        if own:
            lasts[mesh], sent = _inserted(builder, lasts[mesh], own)
            for push in sent:
                arrivals.setdefault(push.home, []).extend(push.arrival)
    for home, steps in arrivals.items():
        lasts[home].append(Rows.of(builder, steps))
    return [
        [*own[: Phase.LAST], last, *own[Phase.LAST + 1 :]]
        for own, last in zip(phases, lasts, strict=True)
    ]


def _inserted(
    builder: ProgramBuilder, parts: Sequence[Rows], pushes: Sequence[Push]
) -> tuple[list[Rows], list[Push]]:
    """Return a mesh's steps with its pushes, and these in the order in which they come."""
    steps = Rows.joined(parts)
    values, writers = steps.writes
    last = np.full(len(builder.values), -1, dtype=np.int64)
    np.maximum.at(last, values, writers)
    places = [int(last[list(push.gradients)].max()) for push in pushes]
    order = sorted(range(len(pushes)), key=places.__getitem__)
    sends = [(places[number] + 1, Rows.of(builder, [pushes[number].send])) for number in order]
    return steps.woven(sends), [pushes[number] for number in order]
