"""The critical path by operator and by link: what the step waits for, and where.

The instructions of a critical chain follow each other without a gap, so the rows add up to the step
time. A segment's seconds are shared among its operators as their prices are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.core.cluster import Cluster
from shardwright.core.costs import link_label
from shardwright.core.deferral import weight_shares
from shardwright.core.graph import OperatorGraph
from shardwright.core.program import BACKWARD_KINDS, LOCAL, Kind, Message, Program, Segment
from shardwright.report.story import PlanStory, kind_text

PHASES = {
    Kind.FORWARD: "forward", Kind.RECOMPUTE: "recompute", Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient", Kind.WEIGHT_GRADIENT: "weight gradient",
}  # fmt: skip
# Where what leaves a mesh goes to, by why it is sent.
TO = {
    "activation": "to the next stage", "gradient": "to the stage before",
    "parameter": "from the devices that keep the parameters",
    "synchronise": "to the devices that keep the parameters",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalRow:
    """Seconds of the critical chain that one sort of work takes in one place.

    ``where`` is the phase of an operator, or the link and mesh axes of a message.
    """

    what: str
    where: str
    seconds: float


def critical_rows(
    story: PlanStory, graph: OperatorGraph, cluster: Cluster
) -> tuple[CriticalRow, ...]:
    """Return the critical chain's seconds by operator and link, longest first."""
    program, timeline = story.program, story.predicted
    prices = _prices(story)
    found: dict[tuple[str, str], float] = {}
    for index in timeline.critical:
        seconds = float(timeline.end[index] - timeline.start[index]) / timeline.laps
        for what, where, share in _parts(program, graph, cluster, prices, index):
            found[what, where] = found.get((what, where), 0.0) + share * seconds
    rows = (
        CriticalRow(what=what, where=where, seconds=seconds)
        for (what, where), seconds in found.items()
        if seconds > 0
    )
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.what, row.where)))


def _prices(story: PlanStory) -> dict[object, list[tuple[float, float]]]:
    """Return the forward and backward seconds of every operator of every segment.

    Their rows come in the order of the distinct segments.
    """
    rows = iter(story.operators)
    found: dict[object, list[tuple[float, float]]] = {}
    for segment in dict.fromkeys(story.program.segments):
        found[segment] = [
            (row.forward_seconds, row.backward_seconds)
            for _, row in zip(segment.calls, rows, strict=False)
        ]
    return found


def _parts(
    program: Program,
    graph: OperatorGraph,
    cluster: Cluster,
    prices: dict[object, list[tuple[float, float]]],
    index: int,
) -> Iterator[tuple[str, str, float]]:
    """Yield what an instruction's time is spent on, where, and which share of it."""
    kind, item = Kind(int(program.kind[index])), int(program.item[index])
    if kind in PHASES:
        segment = program.segments[item]
        seconds = _seconds(program, graph, segment, kind, prices[segment])
        total = sum(seconds)
        for call, own in zip(segment.calls, seconds, strict=True):
            operator = graph.operators[call.operator]
            name = re.sub(r"\d+", "*", operator.module or operator.name)
            share = own / total if total else 1 / len(seconds)
            yield f"{name} ({kind_text(operator.kind)})", PHASES[kind], share
    elif kind in (Kind.MESSAGE, Kind.SEND, Kind.RECEIVE):
        message = program.messages[item]
        yield f"{message.primitive} ({message.purpose})", _link(program, cluster, message), 1.0
    elif kind == Kind.TRANSFORM:
        one = program.transforms[item]
        yield f"{one.name} ({one.purpose})", f"stage {int(program.group[index])}", 1.0
    else:
        yield kind.name.lower(), f"stage {int(program.group[index])}", 1.0


def _seconds(
    program: Program,
    graph: OperatorGraph,
    segment: Segment,
    kind: Kind,
    pairs: list[tuple[float, float]],
) -> list[float]:
    """Return what each of a segment's operators takes of a phase; I and W share its backward."""
    if kind not in BACKWARD_KINDS:
        return [forward for forward, _ in pairs]
    whole = [backward for _, backward in pairs]
    if kind == Kind.BACKWARD:
        return whole
    later = weight_shares(graph, program, segment)
    shares = later if kind == Kind.WEIGHT_GRADIENT else [1.0 - one for one in later]
    return [own * share for own, share in zip(whole, shares, strict=True)]


def _link(program: Program, cluster: Cluster, message: Message) -> str:
    """Say over which links a message goes, and along which axes of the mesh."""
    mesh = program.meshes[message.mesh]
    if message.destination >= 0:
        other = program.meshes[message.destination]
        devices = mesh.devices[0], other.devices[0]
        axes = TO.get(message.purpose, "to another stage")
    elif not message.axes or message.primitive in LOCAL:
        return "on the device"
    else:
        devices = mesh.peers(mesh.devices[0], message.axes)
        axes = "over " + " x ".join(mesh.axes[axis] for axis in message.axes)
    hosts = {cluster.devices[device].host for device in devices}
    place = "within a host" if len(hosts) == 1 else "between hosts"
    return f"{place}, {link_label(cluster, devices)}, {axes}"
