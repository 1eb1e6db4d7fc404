"""The backward half of a stage, derived from its forward half read in reverse."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from shardwright.core.program import Kind
from shardwright.planner.lower.draft import Draft, Step
from shardwright.planner.lower.parameters import Use
from shardwright.planner.lower.remake import Remake
from shardwright.planner.lower.stage import Entry, Stage

Transfers = dict[tuple[int, int], tuple[Step, Step]]
RUNS = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)


def gather_steps(draft: Draft, uses: Iterable[Use]) -> list[Step]:
    """Return the messages that bring parameters from rest to use, alike ones together."""
    groups: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for use in uses:
        value = use.value if draft.values[use.value].alias < 0 else draft.values[use.value].alias
        key = draft.signature(use.source, draft.values[value].layout)
        pairs = groups.setdefault(key, [])
        if (use.source, value) not in pairs:
            pairs.append((use.source, value))
    return [step for pairs in groups.values() for step in draft.chain(pairs, "parameter")]


def prefetch(draft: Draft, steps: Sequence[tuple[list[Step], Step]]) -> list[Step]:
    """Lay out (gathers, step) pairs so that each gather is issued a block ahead of its use.

    Where the block before is as far on as its own will be then: with short segments one alone hides
    nothing, and no more than about a block's parameters lie gathered.
    """
    runs = [place for place, (_, step) in enumerate(steps) if step.kind in RUNS]
    issued: dict[int, list[Step]] = {}
    before: list[int] = []
    for _, block in itertools.groupby(
        runs, lambda place: draft.segments[steps[place][1].item].block
    ):
        own = list(block)
        for turn, place in enumerate(own):
            ahead = before[turn * len(before) // len(own)] if before else own[0]
            issued.setdefault(ahead, []).extend(steps[place][0])
        before = own
    return [step for place, (_, own) in enumerate(steps) for step in (*issued.get(place, ()), own)]


def forward_steps(draft: Draft, entries: Sequence[Entry]) -> list[Step]:
    """Flatten forward entries, with parameter gathers a block ahead."""
    pairs: list[tuple[list[Step], Step]] = []
    for entry in entries:
        gathers = _gathers(draft, entry, Kind.FORWARD, entry.gathers)
        pairs += [(gathers if number == 0 else [], step) for number, step in enumerate(entry.steps)]
    return prefetch(draft, pairs)


def backward_steps(draft: Draft, stage: Stage, transfers: Transfers) -> list[Step]:
    """Return the steps of one microbatch's backward, without gradient synchronisation."""
    strategy = draft.strategy
    remakes = strategy.recompute or strategy.recompute_operators or strategy.reshard_again
    remake = Remake(draft, stage) if remakes else None
    pairs: list[tuple[list[Step], Step]] = []
    for place in reversed(range(len(stage.forward))):
        entry = stage.forward[place]
        if entry.segment < 0:
            pairs += [([], step) for step in _reverse(draft, entry, transfers)]
        elif draft.segments[entry.segment].has_backward:
            before = remake.before(place) if remake else []
            again = [stage.forward[earlier] for earlier in before]
            pairs += [pair for other in again for pair in _repeat(draft, other)]
            is_kept = not draft.segments[entry.segment].recomputed
            uses = _gathered_again(draft, entry) if is_kept else ()
            gathers = _gathers(draft, entry, Kind.BACKWARD, uses)
            pairs.append((gathers, _backward(draft, entry.segment, stage.index)))
    return prefetch(draft, pairs)


def _gathers(draft: Draft, entry: Entry, kind: Kind, uses: tuple[Use, ...]) -> list[Step]:
    """Return the messages that a segment's forward or backward is preceded by."""
    if not uses:
        return []
    return draft.once((kind, entry.segment, uses), lambda: gather_steps(draft, uses))


def _gathered_again(draft: Draft, entry: Entry) -> tuple[Use, ...]:
    """Return the parameters of a segment which its forward did not keep for its backward."""
    return tuple([use for use in entry.gathers if use.tensor not in draft.kept_for_backward])


def _repeat(draft: Draft, entry: Entry) -> list[tuple[list[Step], Step]]:
    """Run a segment of forward again, this time keeping its graph, or send a message again."""
    if entry.segment < 0:
        return [([], replace(step)) for step in entry.steps]
    step = replace(entry.steps[0], kind=Kind.RECOMPUTE)
    gathers = _gathers(draft, entry, Kind.RECOMPUTE, _gathered_again(draft, entry))
    return [(gathers, step)]


def _backward(draft: Draft, index: int, mesh: int) -> Step:
    segment = draft.segments[index]
    outputs = [v for v in segment.outputs if draft.values[v].gradient >= 0 and v in draft.external]
    incoming = [draft.values[value].gradient for value in outputs]
    made = [draft.values[value].gradient for value in segment.inputs]
    return Step(
        kind=Kind.BACKWARD,
        item=index,
        resource=f"compute:{mesh}",
        reads=(*segment.inputs, *outputs, *dict.fromkeys(incoming)),
        writes=tuple(dict.fromkeys(gradient for gradient in made if gradient >= 0)),
    )


def _reverse(draft: Draft, entry: Entry, transfers: Transfers) -> list[Step]:
    if entry.adapts is not None:
        origin, result = entry.adapts
        source, target = draft.values[result].gradient, draft.values[origin].gradient
        if source == target:
            return []
        return draft.once(("reverse", origin, result), lambda: _turned(draft, source, target))
    crossing = entry.sends or entry.receives
    if crossing is None or draft.values[crossing[0]].gradient < 0:
        return []
    if crossing not in transfers:
        here, there = (draft.values[value].gradient for value in crossing)
        transfers[crossing] = draft.once(
            ("return", crossing), lambda: draft.transfer(there, here, "gradient")
        )
    send, receive = transfers[crossing]
    return [receive] if entry.sends else [send]


def _turned(draft: Draft, source: int, target: int) -> list[Step]:
    """Return the messages that bring a gradient back to the layout of what was read."""
    if draft.values[source].halos != draft.values[target].halos:
        return [draft.exchange_halos(source, target, "gradient")]
    return draft.chain([(source, target)], "gradient")


def insert_syncs(draft: Draft, steps: list[Step], pending: dict[int, int]) -> list[Step]:
    """Add gradient synchronisation right after the backward that completes each bucket.

    Where it takes several messages, the first does; those after it wait for it, and whatever was
    queued behind them on other axes would wait too (activations of the blocks before), so they
    come at the end.
    """
    written = {value: place for place, step in enumerate(steps) for value in step.writes}
    bucket_of = {
        tensor: number
        for number, bucket in enumerate(draft.strategy.gradient_sync.buckets)
        for tensor in bucket
    }
    groups: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for source, target in pending.items():
        if source in written:
            entry = draft.values[source]
            bucket = bucket_of.get(entry.tensor, -1 - entry.tensor)
            key = (bucket, entry.scope, *draft.signature(source, draft.values[target].layout))
            groups.setdefault(key, []).append((source, target))
    after: dict[int, list[Step]] = {}
    late: list[Step] = []
    for pairs in groups.values():
        place = max(written[source] for source, _ in pairs)
        last_only = draft.values[pairs[0][0]].scope == "step"
        syncs = draft.once(
            ("synchronise", last_only, *pairs),
            partial(draft.chain, pairs, "synchronise", last_only=last_only),
        )
        after.setdefault(place, []).extend(syncs[:1])
        late += syncs[1:]
    result = [one for place, step in enumerate(steps) for one in (step, *after.get(place, ()))]
    return result + late
