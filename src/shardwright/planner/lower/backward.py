"""The backward half of a stage, derived from its forward half read in reverse."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from shardwright.core.program import Kind
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.lower.parameters import Use
from shardwright.planner.lower.remake import Remake
from shardwright.planner.lower.stage import Entry
from shardwright.planner.lower.template import Rows
from shardwright.planner.lower.transfers import transfer
from shardwright.planner.lower.wire import synchronise, unanswered

Transfers = dict[tuple[int, int], tuple[Step, Step]]
Group = tuple[tuple[int, int], ...]  # gradients that are synchronised together, and where they go
# What parameters are gathered for.
SEGMENTS = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT_GRADIENT)


class Gathers(NamedTuple):
    """Messages that bring parameters to a segment, and what they are as columns."""

    steps: list[Step]
    rows: Rows


StepPair = tuple[Gathers | None, Step]  # what is gathered ahead, and the step that needs it


def gather(builder: ProgramBuilder, uses: Iterable[Use]) -> Gathers:
    """Return the messages that bring parameters from rest to use, alike ones together."""
    groups: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for use in uses:
        value = builder.roots[use.value]
        key = builder.signature(use.source, builder.values[value].layout)
        pairs = groups.setdefault(key, [])
        if (use.source, value) not in pairs:
            pairs.append((use.source, value))
    steps = [step for pairs in groups.values() for step in builder.chain(pairs, "parameter")]
    return Gathers(steps, Rows.of(builder, steps))


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Steps of a block, and what is gathered for its segments while the block before runs: for which
    of them, counted from 0."""

    ahead: list[tuple[int, Gathers]]
    steps: list[Step]


def prefetch(pairs: Sequence[StepPair]) -> Prefetched:
    """Part the steps of one block from what is gathered for them."""
    needed = [gathers for gathers, step in pairs if step.kind in SEGMENTS]
    return Prefetched(
        [(turn, gathers) for turn, gathers in enumerate(needed) if gathers],
        [step for _, step in pairs],
    )


def issued_before(turn: int, own: int, before: int) -> int:
    """Return before which segment of the block before, which has so many, a gather is issued.

    It is for segment ``turn`` of ``own``. So every gather has about a block's time: with short
    segments one alone hides nothing, and no more than about a block's parameters lie gathered.
    """
    return turn * before // own


def forward_pairs(builder: ProgramBuilder, entries: Sequence[Entry]) -> list[StepPair]:
    """Flatten forward entries to (gathers, step) pairs."""
    pairs: list[StepPair] = []
    for entry in entries:
        gathers = _gathers(builder, entry, Kind.FORWARD, entry.gathers)
        pairs += [
            (gathers if number == 0 else None, step) for number, step in enumerate(entry.steps)
        ]
    return pairs


def backward_pairs(
    builder: ProgramBuilder,
    entries: Sequence[Entry],
    places: range,
    mesh: int,
    transfers: Transfers,
    remake: Remake | None,
) -> list[StepPair]:
    """Read some of the forward entries of one stage in reverse: (gathers, step) pairs of backward, or
    of its first half where it is split (``weight_steps``)."""
    pairs: list[StepPair] = []
    for place in reversed(places):
        entry = entries[place]
        if entry.segment < 0:
            pairs += [(None, step) for step in _reverse(builder, entry, transfers)]
        elif builder.segments[entry.segment].has_backward:
            before = remake.before(place) if remake else []
            again = [entries[earlier] for earlier in before]
            pairs += [pair for other in again for pair in _repeat(builder, other)]
            is_kept = not builder.segments[entry.segment].recomputed
            uses = _gathered_again(builder, entry) if is_kept else ()
            gathers = _gathers(builder, entry, Kind.BACKWARD, uses)
            pairs.append((gathers, _backward(builder, entry.segment, mesh)))
    return pairs


def _gathers(
    builder: ProgramBuilder, entry: Entry, kind: Kind, uses: tuple[Use, ...]
) -> Gathers | None:
    """Return the messages that a segment's forward or backward is preceded by."""
    if not uses:
        return None
    return builder.once((kind, entry.segment, uses), partial(gather, builder, uses))


def _gathered_again(builder: ProgramBuilder, entry: Entry) -> tuple[Use, ...]:
    """Return the parameters of a segment which its forward did not keep for its backward."""
    return tuple([use for use in entry.gathers if use.tensor not in builder.kept_for_backward])


def _repeat(builder: ProgramBuilder, entry: Entry) -> list[StepPair]:
    """Run a segment of forward again, this time keeping its graph, or send a message again."""
    if entry.segment < 0:
        return [(None, replace(step)) for step in entry.steps]
    step = replace(entry.steps[0], kind=Kind.RECOMPUTE)
    gathers = _gathers(builder, entry, Kind.RECOMPUTE, _gathered_again(builder, entry))
    return [(gathers, step)]


def _backward(builder: ProgramBuilder, index: int, mesh: int) -> Step:
    segment, values = builder.segments[index], builder.values
    outputs = [v for v in segment.outputs if values[v].gradient >= 0 and v in builder.external]
    incoming = [values[value].gradient for value in outputs]
    made = segment.inputs
    if builder.splits_backward:
        made = tuple([value for value in made if values[value].role != "parameter"])
    return Step(
        kind=Kind.INPUT_GRADIENT if builder.splits_backward else Kind.BACKWARD,
        item=index,
        resource=f"compute:{mesh}",
        reads=(*segment.inputs, *outputs, *dict.fromkeys(incoming)),
        writes=_gradients(builder, made),
    )


def weight_steps(builder: ProgramBuilder, steps: Iterable[Step]) -> list[Step]:
    """Return the other half of a split backward: the gradients of parameters, in the order of ``steps``."""
    found: list[Step] = []
    for step in steps:
        if step.kind is Kind.INPUT_GRADIENT:
            inputs = builder.segments[step.item].inputs
            parameters = [v for v in inputs if builder.values[v].role == "parameter"]
            if writes := _gradients(builder, parameters):
                reads = tuple([value for value in step.reads if value not in parameters])
                found.append(replace(step, kind=Kind.WEIGHT_GRADIENT, reads=reads, writes=writes))
    return found


def _gradients(builder: ProgramBuilder, values: Iterable[int]) -> tuple[int, ...]:
    made = [builder.values[value].gradient for value in values]
    return tuple(dict.fromkeys([gradient for gradient in made if gradient >= 0]))


def _reverse(builder: ProgramBuilder, entry: Entry, transfers: Transfers) -> list[Step]:
    if entry.adapts is not None:
        origin, result = entry.adapts
        source, target = builder.values[result].gradient, builder.values[origin].gradient
        if source == target:
            return []
        return builder.once(("reverse", origin, result), lambda: _turned(builder, source, target))
    crossing = entry.sends or entry.receives
    if crossing is None or builder.values[crossing[0]].gradient < 0:
        return []
    if crossing not in transfers:
        here, there = (builder.values[value].gradient for value in crossing)
        transfers[crossing] = builder.once(
            ("return", crossing), lambda: transfer(builder, there, here, "gradient")
        )
    send, receive = transfers[crossing]
    return [receive] if entry.sends else [send]


def _turned(builder: ProgramBuilder, source: int, target: int) -> list[Step]:
    """Return the messages that bring a gradient back to the layout of what was read."""
    if builder.values[source].halos != builder.values[target].halos:
        return [builder.exchange_halos(source, target, "gradient")]
    return builder.chain([(source, target)], "gradient")


@dataclass(frozen=True, slots=True)
class Links:
    """The resources on which others may wait behind synchronisation: those of all other steps of
    ``backward``, after which a gradient of the whole step is synchronised, or of ``either`` half.
    ``are_shared`` with another mesh: then there is always somebody.
    """

    backward: frozenset[str] = frozenset()
    either: frozenset[str] = frozenset()
    are_shared: bool = False

    @classmethod
    def of(
        cls, builder: ProgramBuilder, forward: Iterable[Entry], backward: Iterable[Step]
    ) -> Links:
        """Read them off both halves of a stage, or of a block."""
        behind = frozenset([step.resource for step in backward])
        ahead = frozenset([step.resource for entry in forward for step in entry.steps])
        return cls(behind, behind | ahead, len(set(builder.links)) < len(builder.links))

    def and_those(self, other: Links) -> Links:
        """Return both."""
        shared = self.are_shared or other.are_shared
        return Links(self.backward | other.backward, self.either | other.either, shared)

    def are_free_for(self, step: Step) -> bool:
        """Whether a message keeps neither computation nor other messages waiting."""
        if self.are_shared or step.resource.startswith("compute:"):
            return False
        return step.resource not in (self.backward if step.last_only else self.either)


@dataclass(frozen=True, slots=True)
class Synced:
    """Steps with their synchronisation. ``carried`` are messages to come with the first of those
    that follow; what is so carried here comes before step ``meets`` (-1: nothing is synchronised).
    ``late`` ones come after all steps."""

    steps: list[Step]
    meets: int
    carried: list[Step]
    late: list[Step]


def add_syncs(
    steps: Sequence[Step],
    written: Mapping[int, int],
    groups: Iterable[tuple[Group, list[Step]]],
    links: Links,
) -> Synced:
    """Add what synchronises each group of gradients right behind the step that completes it.

    Where it takes several messages, those that wait for none come there. Behind the others on
    their ``links`` activations of the blocks before would wait too, so they come at the end; where
    nothing else uses a link, with the next group's first, by when theirs has had time to arrive.
    """
    after: dict[int, list[Step]] = {}
    soon: dict[int, list[Step]] = {}
    late: list[tuple[int, list[Step]]] = []
    for pairs, syncs in groups:
        place = max(written[source] for source, _ in pairs if source in written)
        first = unanswered(syncs)
        early = list(itertools.takewhile(links.are_free_for, syncs[first:]))
        after.setdefault(place, []).extend(syncs[:first])
        soon.setdefault(place, []).extend(early)
        late.append((place, syncs[first + len(early) :]))
    result: list[Step] = []
    meets, carried = -1, list[Step]()
    for place, step in enumerate(steps):
        result.append(step)
        if place in after:
            result += after[place]
            meets = len(result) if meets < 0 else meets
            result += carried
            carried = soon[place]
    late.sort(key=lambda group: group[0])
    return Synced(result, meets, carried, [step for _, group in late for step in group])


def synchronised(builder: ProgramBuilder, group: Group) -> list[Step]:
    """Return the steps that synchronise a group of gradients, (source, result)."""
    last_only = builder.values[group[0][0]].scope == "step"
    return builder.once(
        ("synchronise", last_only, *group),
        partial(synchronise, builder, group, last_only=last_only),
    )
