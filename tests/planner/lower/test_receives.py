"""Transfers overlap computation: Programs run by devices whose links meet before anything flows."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from shardwright.core.completion import asked_ahead
from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Kind, Program
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space import Seed, seed_strategy
from tests import zoo
from tests.planner.simulate.plain import simulate_plain

pytestmark = pytest.mark.torch


@cache
def graph(depth: int) -> OperatorGraph:
    from shardwright.runtime.capture import capture

    module, batch = zoo.mlp(depth=depth, batch=24)
    return capture(module, batch).graph


def program_of(seed: Seed) -> Program:
    one = graph(seed.stages * seed.chunks - 1)
    return lower(one, seed_strategy(one, seed))


def seconds_of(program: Program, forward: float, backward: float, transfer: float):
    """Give every microbatch's forward, backward and transfer on a mesh a time, all else none."""
    found, seen = np.zeros(program.num_instructions), set[tuple[int, int, int]]()
    times = {Kind.FORWARD: forward, Kind.BACKWARD: backward,
             Kind.INPUT_GRADIENT: backward / 2, Kind.WEIGHT_GRADIENT: backward / 2}  # fmt: skip
    for index in range(program.num_instructions):
        kind, microbatch = Kind(int(program.kind[index])), int(program.microbatch[index])
        key = (kind, int(program.group[index]), microbatch)
        if kind in times and microbatch >= 0 and key not in seen:
            seen.add(key)
            found[index] = times[kind]
        if kind == Kind.SEND and microbatch >= 0:
            message = program.messages[int(program.item[index])]
            here, there = (program.meshes[m].devices for m in (message.mesh, message.destination))
            found[index] = transfer if here != there else 0.0
    return found


def met(program: Program, seconds) -> float:
    """Return when the last device ends, where a transfer starts once both ends have asked for it.

    An oracle of its own: each device runs its list, sending and posting in passing; it waits for
    what it posted where something reads it. It asks ahead where ranks on CPUs do. Each pair of meshes has a link that
    takes one at a time.
    """
    names = {i: (int(program.item[i]), int(program.microbatch[i])) for i in
             np.flatnonzero(np.isin(program.kind, (Kind.SEND, Kind.RECEIVE))).tolist()}  # fmt: skip
    cost = {names[i]: float(seconds[i]) for i in names if program.kind[i] == Kind.SEND}
    lists = {
        device: [i for i in range(program.num_instructions)
                 if device in program.meshes[program.group[i]].devices]
        for device in program.strategy.devices
    }  # fmt: skip
    ahead = dict[int, list[int]]()
    for place, coming in zip(*asked_ahead(program), strict=True):
        ahead.setdefault(int(place), []).append(int(coming))
    clock, at = dict.fromkeys(lists, 0.0), dict.fromkeys(lists, 0)
    sent, posted, arrived, free = {}, {}, {}, {}

    def arrives(name: tuple[int, int]) -> float | None:
        if name not in sent:
            return None
        if name not in arrived:
            message = program.messages[name[0]]
            link = (message.mesh, message.destination)
            start = max(sent[name], posted[name], free.get(link, 0.0))
            arrived[name] = free[link] = start + cost[name]
        return arrived[name]

    def received(index: int) -> list[tuple[int, int]]:
        needed = program.predecessor[program.offset[index] : program.offset[index + 1]].tolist()
        return [names[i] for i in needed if program.kind[i] == Kind.RECEIVE]

    def ready(index: int) -> float | None:
        times = [arrives(name) for name in received(index)]
        known = [time for time in times if time is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    moved = True
    while moved:
        moved = False
        for device, mine in lists.items():
            while at[device] < len(mine):
                index = mine[at[device]]
                kind = program.kind[index]
                for other in ahead.get(index, ()):
                    posted.setdefault(names[other], clock[device])
                if kind == Kind.SEND:
                    sent[names[index]] = clock[device]
                elif kind == Kind.RECEIVE:
                    posted.setdefault(names[index], clock[device])
                elif (time := ready(index)) is not None:
                    clock[device] = max(clock[device], time) + float(seconds[index])
                else:
                    break
                at[device] += 1
                moved = True
    assert all(at[device] == len(mine) for device, mine in lists.items())
    return max(clock.values())


# Stages, microbatches, seconds of a forward, a backward and a transfer; 2 transfers <= F + B.
CASES = [(2, 4, 1.0, 2.0, 0.5), (4, 8, 1.0, 2.0, 0.5), (4, 8, 1.0, 2.0, 1.0), (3, 8, 1.0, 1.0, 1.0),
         (4, 12, 2.0, 3.0, 1.0)]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "1f1b-so"])
def test_predictions_and_devices_that_meet_take_the_time_of_the_closed_form(schedule, case):
    stages, pieces, forward, backward, transfer = case
    # BaPipe (arXiv 2012.12544): transfers exposed in nearly every round, or in fill and drain only.
    rounds = stages - 1
    if schedule == "1f1b":
        rounds = pieces + stages - 2 - math.ceil((pieces - 1) / stages)
    wanted = (pieces + stages - 1) * (forward + backward) + rounds * 2 * transfer
    program = program_of(Seed(stages=stages, num_microbatches=pieces, schedule=schedule))
    seconds = seconds_of(program, forward, backward, transfer)
    assert simulate(program, seconds).step_seconds == pytest.approx(wanted)
    assert met(program, seconds) == pytest.approx(wanted)


@pytest.mark.parametrize("stages", [2, 4])
def test_what_a_device_asks_for_never_comes_later_than_predicted_where_backward_is_split(stages):
    # Receives that the order posts stand behind their sends, which may be a whole action too late.
    program = program_of(Seed(stages=stages, num_microbatches=8, schedule="zb-h1"))
    seconds = seconds_of(program, 1.0, 2.0, 0.5)
    assert met(program, seconds) == pytest.approx(simulate(program, seconds).step_seconds)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1"])
def test_what_comes_next_is_asked_for_before_what_came_is_used(schedule):
    # Whoever sends it may compute for a whole action by then; message by message it was asked for where it was used.
    chunks = 2 if schedule == "interleaved" else 1
    seed = Seed(stages=2, chunks=chunks, num_microbatches=4, schedule=schedule)
    program = program_of(seed)
    asked = dict(zip(*(column.tolist() for column in reversed(asked_ahead(program))), strict=True))
    device = [program.meshes[mesh].devices[0] for mesh in program.group.tolist()]
    seen = set[int]()
    for here in (0, 1):
        used = 0  # where what came before is used
        for index in (i for i in range(program.num_instructions) if device[i] == here):
            needed = program.predecessor[program.offset[index] : program.offset[index + 1]]
            for one in needed[program.kind[needed] == Kind.RECEIVE].tolist():
                message = program.messages[int(program.item[one])]
                crosses = program.meshes[message.mesh].devices[0] != here
                if crosses and program.microbatch[one] >= 0 and one not in seen:
                    assert asked.get(one, one) <= max(used, device.index(here))
                    used = index
                    seen.add(one)
    assert len(seen) == 8 * (2 * chunks - 1)


@pytest.mark.parametrize(("pieces", "chunks"), [(4, 2), (8, 2), (8, 3), (6, 2)])
def test_chunks_shorten_the_bubble_by_their_number(pieces, chunks):
    stages = 2
    seed = Seed(stages=stages, chunks=chunks, num_microbatches=pieces, schedule="interleaved")
    program = program_of(seed)
    seconds = seconds_of(program, 1.0 / chunks, 2.0 / chunks, 0.0)
    wanted = pieces * 3.0 + (stages - 1) * 3.0 / chunks  # Narayanan et al., section 2.2
    assert simulate(program, seconds).step_seconds == pytest.approx(wanted)
    assert met(program, seconds) == pytest.approx(wanted)


def test_chunks_of_one_device_share_its_links_and_its_overlap():
    program = program_of(Seed(stages=2, chunks=2, num_microbatches=4, schedule="interleaved"))
    names = [name for name in program.resource_names if name.startswith("send:")]
    assert sorted(names) == ["send:0-1", "send:1-0"]
    # A device that computes for one chunk while it sends for another is slowed down, as for one.
    seconds = seconds_of(program, 1.0, 2.0, 1.5)
    slow = simulate(program, seconds, overlap_slowdown=2.0)
    assert (
        slow.end.tobytes() == simulate_plain(program, seconds, overlap_slowdown=2.0)[0][1].tobytes()
    )
    both = [
        (i, j)
        for i in np.flatnonzero(program.kind == Kind.SEND).tolist()
        for j in np.flatnonzero(np.isin(program.kind, (Kind.FORWARD, Kind.BACKWARD))).tolist()
        if program.group[i] != program.group[j] and program.group[i] % 2 == program.group[j] % 2
        and slow.start[i] < slow.end[j] and slow.start[j] < slow.end[i] and seconds[i] and seconds[j]
    ]  # fmt: skip
    assert both
    assert all(slow.end[i] - slow.start[i] > seconds[i] for i, _ in both)
