"""What a report shows: plans with their programs and timelines, and what is read off them.

The verbs gather a ``Story`` (``shardwright.api``); text, page and trace only show one. Everything
here is arithmetic on the nouns: sums per kind of instruction, memory by part, operators grouped
where layers repeat.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.compression import PACKS, SPARSE, packed_by
from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import layout_text
from shardwright.core.plan import Plan
from shardwright.core.program import Kind, Program
from shardwright.core.timeline import Timeline
from shardwright.report.why import Why

WORK = (
    "forward",
    "recompute",
    "backward",
    "activation message",
    "gradient message",
    "parameter message",
    "gradient synchronisation",
    "clip",
    "update",
    "transfer",
)
MESSAGES = WORK[3:7]
PURPOSE_WORK = {"activation": 3, "gradient": 4, "parameter": 5, "synchronise": 6, "loss": 3}
KIND_WORK = {
    Kind.FORWARD: 0,
    Kind.RECOMPUTE: 1,
    Kind.BACKWARD: 2,
    Kind.INPUT_GRADIENT: 2,
    Kind.WEIGHT_GRADIENT: 2,
    Kind.CLIP: 7,
    Kind.UPDATE: 8,
    Kind.SEND: 9,
    Kind.RECEIVE: 9,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """One operator, or ``count`` equal ones of repeated layers: its split and its cost each.

    ``split`` names mesh axes and the dims they split; seconds are per microbatch on one device.
    """

    name: str
    kind: str
    stage: int
    split: str
    shape: str
    forward_seconds: float
    backward_seconds: float
    source: str
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class PlanStory:
    """One plan with its program, how it is predicted to run, and how it ran if it did.

    The memory of both timelines includes ``process_bytes``, what a rank occupies before the model.
    ``beside`` is what the driver of a GPU sees besides that on the fullest stage: parts and their bytes.
    ``usual_seconds``: the steps before those that were ``measured`` instruction by instruction, 0 if unknown.
    ``axes``: what each axis of each mesh splits, in words. ``why`` is what speaks for the plan, where
    that was looked for. ``feeding``: what brings a step's input beneath others, as (resource such as ``disk:0``, what
    it does, seconds); none where input is never waited for.
    """

    plan: Plan
    program: Program
    predicted: Timeline
    measured: Timeline | None = None
    usual_seconds: float = 0.0
    spread_seconds: float = 0.0
    feeding: tuple[tuple[str, str, float], ...] = ()
    process_bytes: float = 0.0
    beside: tuple[tuple[str, float], ...] = ()
    operators: tuple[OperatorRow, ...] = ()
    axes: tuple[tuple[str, ...], ...] = ()
    why: Why | None = None

    @property
    def input_seconds(self) -> float:
        """The seconds from one batch to the next, if nobody else is waited for."""
        return max((seconds for _, _, seconds in self.feeding), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Story:
    """All that one report shows.

    ``losses`` are named curves, one value per step. ``provenance`` are (what, where from) pairs.
    """

    graph: OperatorGraph
    cluster: Cluster
    plans: tuple[PlanStory, ...]
    chosen: int = 0
    losses: tuple[tuple[str, tuple[float, ...]], ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()


def work_of(program: Program) -> np.ndarray:
    """Return for every instruction its index into ``WORK``."""
    found = np.zeros(program.num_instructions, dtype=np.int64)
    for index in range(program.num_instructions):
        kind = Kind(int(program.kind[index]))
        if kind in KIND_WORK:
            found[index] = KIND_WORK[kind]
        else:
            item = int(program.item[index])
            named = program.transforms if kind == Kind.TRANSFORM else program.messages
            found[index] = PURPOSE_WORK[named[item].purpose]
    return found


def wire_text(program: Program) -> str:
    """Say in what gradients travel, "" where that is in their parameters' own dtype."""
    sync = program.strategy.gradient_sync
    feedback = ", with error feedback" if sync.feeds_back else ""
    if sync.compressors:
        packs = [len(packed_by(one)) for one in program.transforms if one.name in PACKS]
        ways = dict.fromkeys((how, share) for _, how, share in sync.apart)
        if sync.compressor != "none":
            ways[sync.compressor, sync.density] = None
        said = "; ".join(_how(*way) for way in ways)
        feedback += f", {sync.feedback.words}" if sync.feedback.words else ""
        return (
            f"gradients of {sum(packs)} of {len(program.strategy.parameters)} parameters compressed "
            f"where they are summed ({said}{feedback}); what is small, sharded or not summed is not"
        )
    return "" if sync.dtype == "parameter" else f"gradients in {sync.dtype} on the wire{feedback}"


def _how(compressor: str, density: float) -> str:
    return f"{compressor}, {density:.3g} of the elements," if compressor in SPARSE else compressor


def busiest_mesh(program: Program, timeline: Timeline) -> int:
    """Return the mesh whose devices work longest."""
    spent = np.nan_to_num(timeline.worked_seconds)
    return int(
        np.argmax([spent[program.group == mesh].sum() for mesh in range(len(program.meshes))])
    )


def seconds_by_work(
    program: Program, timeline: Timeline, mesh: int | None = None
) -> tuple[tuple[str, float], ...]:
    """Sum durations per kind of work on a mesh (the busiest one), leaving out what does not
    occur. Waiting for another rank is not work."""
    return seconds_of_work(
        program, timeline.worked_seconds, busiest_mesh(program, timeline) if mesh is None else mesh
    )


def seconds_of_work(
    program: Program, seconds: NDArray[np.float64], mesh: int
) -> tuple[tuple[str, float], ...]:
    """Sum seconds of instructions per kind of work on a mesh, leaving out what does not occur."""
    work, spent = work_of(program), np.nan_to_num(seconds)
    mine = program.group == mesh
    sums = ((name, float(spent[mine & (work == i)].sum())) for i, name in enumerate(WORK))
    return tuple((name, total) for name, total in sums if total > 0)


def memory_by_part(story: PlanStory, mesh: int) -> tuple[tuple[str, float], ...]:
    """Split the predicted peak of one mesh's devices into parts that add up to it.

    Parameters, optimizer state and buffers are sizes of resident values; what the peak has beyond
    the base is activations, gradients and messages.
    """
    program, peak = story.program, story.predicted.peak_bytes[mesh]
    parts = {"parameters": 0.0, "optimizer state": 0.0, "buffers": 0.0}
    masters: dict[int, float] = {}
    for value in program.values:
        if value.mesh != mesh or value.alias >= 0 or value.scope != "step":
            continue
        size = float(value.bytes)
        match value.role:
            case "parameter" if value.resident:
                parts["parameters"] += size
                masters.setdefault(value.tensor, size)
            case "master":
                parts["optimizer state"] += size
                masters[value.tensor] = size
            case "buffer":
                parts["buffers"] += size
            case _:
                pass
    parts["optimizer state"] += program.strategy.optimizer_states * sum(masters.values())
    known = sum(parts.values())
    parts["other state"] = max(0.0, program.base_bytes[mesh] - known)
    base = max(float(program.base_bytes[mesh]), known)
    parts["activations and gradients"] = max(0.0, peak - story.process_bytes - base)
    parts["process"] = story.process_bytes
    return tuple((name, size) for name, size in parts.items() if size > 0)


def kind_text(kind: str) -> str:
    """Write an operator kind without the library's name and the usual overload."""
    return kind.removeprefix("aten.").removesuffix(".default")


def lane_text(name: str) -> str:
    """Write a resource's name as people read it: ``compute``, ``link``, ``send 0-1``."""
    family, _, rest = name.partition(":")
    _, _, detail = rest.partition(":")
    if family in ("send", "receive"):
        return f"{family} {rest}"
    return f"{family} {detail}".strip()


def split_text(axes: Sequence[str], sizes: Sequence[int], dims: Sequence[str]) -> str:
    """Write a config as people read it: ``b over data (2), n over tensor (4)``, or ``whole``."""
    pieces = [
        f"{dim if dim != '+' else 'partial sums'} over {axis} ({size})"
        for axis, size, dim in zip(axes, sizes, dims, strict=True)
        if dim and size > 1
    ]
    return ", ".join(pieces) or "whole"


def group_rows(rows: Sequence[OperatorRow]) -> tuple[OperatorRow, ...]:
    """Merge operators which differ only in the number of their layer, costliest first."""
    merged: dict[tuple[object, ...], OperatorRow] = {}
    for row in rows:
        name = re.sub(r"\d+", "*", row.name)
        key = (name, row.kind, row.stage, row.split, row.shape, row.source)
        if key in merged:
            old = merged[key]
            total = old.count + row.count
            merged[key] = replace(
                old,
                name=name,
                count=total,
                forward_seconds=_mean(old.forward_seconds, row.forward_seconds, old.count, total),
                backward_seconds=_mean(
                    old.backward_seconds, row.backward_seconds, old.count, total
                ),
            )
        else:
            merged[key] = row
    cost = sorted(
        merged.values(), key=lambda r: (-r.count * (r.forward_seconds + r.backward_seconds), r.name)
    )
    return tuple(cost)


def parameter_lines(plan: Plan) -> tuple[tuple[str, str, str, int], ...]:
    """How parameters are kept, grouped: (at rest, optimizer state, reduced every, how many)."""
    counts: dict[tuple[str, str, str], int] = {}
    for config in plan.strategy.parameters:
        rest = layout_text(config.rest) + (", kept for backward" if config.keeps else "")
        key = (rest, layout_text(config.optimizer), config.sync)
        counts[key] = counts.get(key, 0) + 1
    return tuple((*key, count) for key, count in counts.items())


def _mean(old: float, new: float, count: int, total: int) -> float:
    return (old * count + new * (total - count)) / total
