"""A trace for Perfetto (or chrome://tracing): what every rank does when, predicted and measured.

Chrome's JSON event format. Ranks are processes, the compute stream and links their threads,
messages are flow arrows and memory a counter. Predicted and measured ranks form two groups of
processes. Large clusters show the first device of each stage, since the devices of a stage do the
same.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from shardwright.core.program import Kind, Program, ResourceClass
from shardwright.core.timeline import Timeline
from shardwright.report.story import WORK, PlanStory, lane_text, work_of

MAX_RANKS = 16
MEASURED_OFFSET = 1_000_000
INPUT_OFFSET = 2_000_000


def trace_bytes(story: PlanStory, *, compressed: bool = False) -> bytes:
    """Return the trace file's content, gzip-compressed where asked for (Perfetto opens both)."""
    body = json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events(story))}).encode()
    return gzip.compress(body, mtime=0) if compressed else body


def events(story: PlanStory) -> Iterator[dict[str, Any]]:
    """Yield all trace events, predicted ranks first."""
    yield from _timeline_events(story.program, story.predicted, "predicted", 0)
    yield from _input_events(story)
    if story.measured is not None:
        yield from _timeline_events(story.program, story.measured, "measured", MEASURED_OFFSET)


def _timeline_events(
    program: Program, timeline: Timeline, group: str, offset: int
) -> Iterator[dict[str, Any]]:
    ranks = _shown_ranks(program)
    work = work_of(program)
    for mesh, devices in enumerate(ranks):
        mine = np.flatnonzero((program.group == mesh) & ~np.isnan(timeline.start))
        threads = _threads(program, mesh)
        for device in devices:
            pid = offset + device + 1
            yield from _names(pid, f"{group} rank {device} (stage {mesh})", offset + device)
            for resource, thread in threads.items():
                yield _meta("thread_name", pid, thread, lane_text(program.resource_names[resource]))
            for index in mine:
                thread = threads[int(program.resource[index])]
                yield _slice(program, timeline, int(index), (pid, thread), WORK[work[index]])
                yield from _waiting(timeline, int(index), (pid, _compute(program, threads)))
            for seconds, size in timeline.memory[mesh] if mesh < len(timeline.memory) else ():
                yield {
                    "ph": "C",
                    "name": "memory",
                    "pid": pid,
                    "tid": 0,
                    "ts": float(seconds) * 1e6,
                    "args": {"bytes": float(size)},
                }
    yield from _arrows(program, timeline, ranks, offset)


def _input_events(story: PlanStory) -> Iterator[dict[str, Any]]:
    """Yield what brings the input of later steps meanwhile, a thread for each resource of a host; of hosts that read
    alike one."""
    for thread, (resource, what, seconds) in enumerate(story.feeding):
        kind, host = resource.split(":")
        pid = INPUT_OFFSET + int(host)
        yield from _names(pid, f"predicted input of host {host}", pid)
        yield _meta("thread_name", pid, thread, kind)
        yield {
            "ph": "X", "name": f"{what}, for a later step", "cat": "input", "pid": pid, "tid": thread, "ts": 0.0,
            "dur": seconds * 1e6, "args": {},
        }  # fmt: skip


def _shown_ranks(program: Program) -> list[tuple[int, ...]]:
    total = sum(len(mesh.devices) for mesh in program.meshes)
    return [mesh.devices if total <= MAX_RANKS else mesh.devices[:1] for mesh in program.meshes]


def _threads(program: Program, mesh: int) -> dict[int, int]:
    """Number the resources which a mesh uses."""
    used = np.unique(program.resource[program.group == mesh])
    return {int(resource): index for index, resource in enumerate(used)}


def _compute(program: Program, threads: dict[int, int]) -> int:
    """Return the thread on which a mesh computes, the first where none does."""
    classes = program.resource_class
    return next((t for r, t in threads.items() if classes[r] == ResourceClass.COMPUTE), 0)


def _names(pid: int, name: str, order: int) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", pid, 0, name)
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": pid,
        "tid": 0,
        "args": {"sort_index": order},
    }


def _meta(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(
    program: Program, timeline: Timeline, index: int, lane: tuple[int, int], work: str
) -> dict[str, Any]:
    start, end = float(timeline.working_from[index]), float(timeline.end[index])
    return {
        "ph": "X",
        "name": program.describe(index),
        "cat": work,
        "pid": lane[0],
        "tid": lane[1],
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": {"instruction": index, "microbatch": int(program.microbatch[index])},
    }


def _waiting(timeline: Timeline, index: int, lane: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield how long the device stood still before the last rank that takes part had come."""
    waited = 0.0 if timeline.waited is None else float(timeline.waited[index])
    if waited > 0:
        yield {
            "ph": "X",
            "name": "stands still for another rank",
            "cat": "waiting",
            "pid": lane[0],
            "tid": lane[1],
            "ts": (float(timeline.working_from[index]) - waited) * 1e6,
            "dur": waited * 1e6,
            "args": {"instruction": index},
        }


def _arrows(
    program: Program, timeline: Timeline, ranks: list[tuple[int, ...]], offset: int
) -> Iterator[dict[str, Any]]:
    """Join each send to its receive, device by device at equal places of the two meshes."""
    kinds = program.kind
    sends = {
        (int(program.item[i]), int(program.microbatch[i])): int(i)
        for i in np.flatnonzero(kinds == Kind.SEND)
    }
    for receive in map(int, np.flatnonzero(kinds == Kind.RECEIVE)):
        send = sends.get((int(program.item[receive]), int(program.microbatch[receive])))
        if send is None or np.isnan(timeline.start[send]) or np.isnan(timeline.start[receive]):
            continue
        from_ranks, to_ranks = ranks[int(program.group[send])], ranks[int(program.group[receive])]
        for source, target in zip(from_ranks, to_ranks, strict=False):
            name = {"name": "message", "cat": "message", "id": f"{offset}-{receive}-{source}"}
            begin, end = float(timeline.working_from[send]), float(timeline.end[receive])
            for phase, index, rank, when in (
                ("s", send, source, begin),
                ("f", receive, target, end),
            ):
                thread = _threads(program, int(program.group[index]))[int(program.resource[index])]
                event = {
                    **name,
                    "ph": phase,
                    "pid": offset + rank + 1,
                    "tid": thread,
                    "ts": when * 1e6,
                }
                yield event | ({"bp": "e"} if phase == "f" else {})
