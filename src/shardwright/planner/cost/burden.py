"""What messages cost the ranks that compute, besides their own time on the wire.

Where a cluster's ranks were measured while they compute (``runtime/profile/beneath.py``), starting
and finishing a message holds the computing thread, the backend's threads take cores from it, and
whoever waits for a message at once waits for the slowest rank as well. All of it is charged to what
computes: to the instruction that runs beneath the message, and to the one that waits for it.
Nothing is charged where nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.completion import first_needs
from shardwright.core.costs import (
    CostTable,
    beneath_key,
    collective_key,
    link_label,
    meeting_name,
)
from shardwright.core.joining import joined
from shardwright.core.program import LOCAL, SEGMENT_KINDS, Kind, Message, Program
from shardwright.planner.cost.collective import MODEL_SPREAD, collective_seconds, interpolate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Burden(NamedTuple):
    """Seconds: ``held`` of the computing thread, ``stolen`` from it by the backend's threads while
    it computes, ``meeting`` where it waits at once; ``skew``, a share of what was computed since the
    ranks last met; ``hiding``, the computation that it takes to hide the message."""

    held: float = 0.0
    stolen: float = 0.0
    meeting: float = 0.0
    skew: float = 0.0
    hiding: float = 0.0


NOTHING = Burden()
BENEATH = ("held", "stolen", "waited")
OF_RANKS = ("skew", "hiding")
NUM_COLUMNS = len(NOTHING)
TOLD_BYTES = 16  # the loss, and whether to stop


def is_measured(table: CostTable) -> bool:
    """Whether anything is known of what messages cost ranks that compute."""
    return any(name.startswith("held|") for name, _ in table.collectives)


def _measured_as(
    primitive: str, devices: tuple[int, ...], cluster: Cluster
) -> tuple[str, tuple[int, int, str]]:
    """Return as what a message of a group is measured: what goes from one to another as one of two."""
    hosts = len({cluster.devices[device].host for device in devices})
    label = link_label(cluster, devices)
    if primitive in {"transfer", "halo", "halo_sum", "send_receive"}:
        return "transfer", (min(hosts, 2), 2, label)
    return primitive, (hosts, len(devices), label)


def crowding_seconds(
    primitive: str, devices: tuple[int, ...], cluster: Cluster, table: CostTable
) -> float:
    """Return by how much a message of a group takes longer while more ranks compute than there are cores; 0 where that
    was not measured."""
    _, ends = _measured_as(primitive, devices, cluster)
    return table.overhead_map.get(meeting_name("crowding", *ends), 0.0)


def message_burden(
    primitive: str, num_bytes: float, devices: tuple[int, ...], cluster: Cluster, table: CostTable
) -> Burden:
    """Return what one message costs each rank of a group; nothing where that was not measured."""
    if num_bytes <= 0 or len(devices) < 2:
        return NOTHING
    name, ends = _measured_as(primitive, devices, cluster)
    known = table.collective_map
    held_at, stolen_at, waited_at = (known.get(beneath_key(what, name, *ends)) for what in BENEATH)
    alone = known.get(collective_key(name, *ends))
    if not alone or not held_at or not stolen_at or not waited_at:
        return NOTHING
    # Ranks come no later to what is larger than all that was waited for.
    seen = min(num_bytes, waited_at[-1][0])
    late = interpolate(waited_at, seen).seconds - interpolate(alone, seen).seconds
    skew, hiding = (table.overhead_map.get(meeting_name(what, *ends), 0.0) for what in OF_RANKS)
    # By the clock on the wall while this group computed; where it shares cores, simulated time is as long.
    crowd = max(1.0, ends[1] / table.overhead_map.get("cores", math.inf))
    return Burden(
        held=interpolate(held_at, num_bytes).seconds,
        stolen=interpolate(stolen_at, num_bytes).seconds,
        meeting=max(late, 0.0) / crowd,
        skew=skew,
        hiding=hiding / crowd,
    )


def copied_bytes(message: Message) -> int:
    """Return what the executor copies into buffers, since what is summed in place must be a copy, and out of them."""
    goes_in = message.is_packed or message.primitive == "all_reduce"
    return message.bytes * (goes_in + message.is_unpacked)


def largest_burden(
    message: Message,
    groups: Sequence[tuple[int, ...]],
    facts: tuple[Cluster, CostTable],
) -> Burden:
    """Return what a message costs the ranks of the group that it costs most. Their computing threads also lay what
    travels together side by side, and copy; what that takes of a few bytes is among what every message does
    (``message_seconds``)."""
    args = (message.primitive, message.bytes)
    burdens = [message_burden(*args, group, *facts) for group in groups]
    found = max(burdens)
    if not found.held:
        return found
    all_bytes, few = (
        collective_seconds("copy", size, groups[0][:1], *facts).seconds
        for size in (copied_bytes(message), 1)
    )
    parts = (len(message.sources) - 1) * facts[1].overhead_map.get("part_seconds", 0.0)
    return found._replace(held=found.held + parts + max(all_bytes - few, 0.0))


def charge(program: Program, seconds: Floats, spread: Floats, messages: Floats) -> Floats:
    """Add to every instruction's seconds what messages cost it; half-widths grow in proportion. Return by how much more
    of the seconds are a message's own, and fewer that of what computes: what is held for it and waited.

    ``messages`` has the columns of ``Burden``, one entry per message. A message that is on the wire no longer than
    its rank computes, and stands still for it, steals all it can, and one that is under way while it computes for
    ``hiding`` seconds is not waited for; one that is waited for at once steals nothing. In between both go in
    proportion. Ranks that have met just
    before stand ready for each other, and what serves them is still in their caches: the cost of meeting, too, grows
    up to ``hiding``, with the root of what was computed since (of .25, 1 and 4 ms: .25, .54 and 1 of it), by who receives
    or by who sends: who only waited meanwhile slept. A slow rank stays slow for longer than a step, so that what it comes later by is waited
    for sooner or later, however well messages are hidden.
    """
    ends = (program.kind == Kind.SEND) | (program.kind == Kind.RECEIVE)
    sent = np.flatnonzero(ends | (program.kind == Kind.MESSAGE))
    sent = sent[messages[0, program.item[sent]] > 0]
    moved = np.zeros_like(seconds)
    if not len(sent):
        return moved
    held, stolen, meeting, skew, hiding = messages[:, program.item[sent]]
    # Each end of a transfer has half of an exchange.
    half = np.where(ends[sent], 0.5, 1.0)
    limit = program.num_instructions + 1
    computing = np.flatnonzero(program.computes)
    mesh = program.group.astype(np.int64) * limit
    # What computes, mesh by mesh in index order, and how much every mesh has computed before it.
    order = computing[np.argsort(mesh[computing], kind="stable")]
    places = mesh[order] + order
    clock = np.concatenate([[0.0], np.cumsum(seconds[order])])
    begin = np.searchsorted(places, mesh[sent])
    end = np.searchsorted(places, mesh[sent] + limit)
    after = np.searchsorted(places, mesh[sent] + sent)
    needed = np.searchsorted(places, mesh[sent] + first_needs(program)[sent])
    sends = program.kind[sent] == Kind.SEND
    by_mesh = np.argsort(mesh[sent], kind="stable")
    met = np.maximum.accumulate(np.where(sends, begin, after)[by_mesh])
    last = begin.copy()
    last[by_mesh[1:]] = np.maximum(last[by_mesh[1:]], met[:-1])
    beneath, since = clock[needed] - clock[after], clock[after] - clock[last]
    scale = np.where(hiding > 0, hiding, np.inf)
    longest = np.maximum(since, _of_senders(program, sent, since))
    hidden, apart = np.minimum(beneath / scale, 1.0), np.sqrt(np.minimum(longest / scale, 1.0))
    # Threads that serve a message have work for as long as it is on the wire, what they steal included: where that is
    # all of it, nothing is gained by hiding it.
    work = half * stolen
    alone = np.maximum(seconds[sent] - work, 1e-9)
    load = half * held + work * np.minimum(beneath / alone, 1.0)
    wait = np.where(sends, 0.0, meeting * apart * (1.0 - hidden) + skew * since)
    for place, extra, own in ((after, load, half * held), (needed, wait, wait)):
        # Behind the last computation of a mesh nothing but the message itself can take longer.
        inside = place < end
        target = np.where(inside, order[np.minimum(place, len(order) - 1)], sent)
        np.add.at(seconds, target, extra)
        np.add.at(spread, target, MODEL_SPREAD * extra)
        moved[sent] += own
        np.subtract.at(moved, target, own)
    return moved


def _of_senders(program: Program, sent: Ints, since: Floats) -> Floats:
    """Return of every receive what its sender computed since that last met another; nothing of other messages."""
    limit = program.num_instructions + 1
    keys = program.item[sent].astype(np.int64) * limit + program.microbatch[sent]
    sends = np.flatnonzero(program.kind[sent] == Kind.SEND)
    receives = np.flatnonzero(program.kind[sent] == Kind.RECEIVE)
    order = sends[np.argsort(keys[sends], kind="stable")]
    found = np.zeros_like(since)
    found[receives] = since[order[np.searchsorted(keys[order], keys[receives])]]
    return found


def charge_entries(program: Program, seconds: Floats, overheads: Mapping[str, float]) -> None:
    """Take off what entering autograd takes those that run as one with the backward before, and add what a segment
    takes longer that runs behind something of another kind, or a message waited for at once: caches hold the code and
    data of that."""
    seconds[joined(program)] -= overheads["segment_seconds"]
    computing = np.flatnonzero(program.computes)
    order = computing[np.argsort(program.group[computing], kind="stable")]
    before = np.full(program.num_instructions, -1, dtype=np.int64)
    follows = np.flatnonzero(np.diff(program.group[order]) == 0)
    before[order[follows + 1]] = order[follows]
    begun = (before < 0) | (program.kind[before] != program.kind)
    waits = np.repeat(np.arange(program.num_instructions), np.diff(program.offset))
    local = np.array([one.primitive in LOCAL for one in program.messages], dtype=np.bool_)
    awaited = program.predecessor
    at_once = (program.kind[awaited] == Kind.MESSAGE) & (awaited > before[waits])
    waits, awaited = waits[at_once], awaited[at_once]
    begun[waits[~local[program.item[awaited]]]] = True
    begun &= np.isin(program.kind, SEGMENT_KINDS)
    seconds[begun] += overheads.get("begin_seconds", 0.0)


def charge_telling(
    program: Program, seconds: Floats, spread: Floats, facts: tuple[Cluster, CostTable]
) -> None:
    """Add to the updates of a pipeline that is never flushed what its ranks hold to tell each other the loss: in
    every period, where others do so once a step."""
    if program.under_way > 1:
        held = message_burden("all_reduce", TOLD_BYTES, program.strategy.devices, *facts).held
        updates = program.kind == Kind.UPDATE
        seconds[updates] += held
        spread[updates] += MODEL_SPREAD * held
