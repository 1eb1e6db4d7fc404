"""Named schedules as orders: who runs what after what.

Where the backward is split (I and W), W has no reader, so that it fills what would be idle. Sources:
Huang et al., 2019 (GPipe); Fan et al., 2021 (1F1B); Zhao et al., 2020 (1F1B-SO); Narayanan et al.,
2021 (interleaved); Lamy-Poirier, 2023 (looped, breadth first); Qi et al., 2024 (ZB-H1, ZB-H2); Qi et
al., 2024b (ZB-V, V-Half, V-Min).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from shardwright.core.schedules import SCHEDULES, Schedule
from shardwright.planner.schedule.folded import folded_order
from shardwright.planner.schedule.pipeline import Action, Crews, Line, Phase, alone, halved, merges
from shardwright.planner.schedule.play import with_weights_late

# All that need no times and run one action of a device at a time.
GENERATED = tuple(
    name
    for name, schedule in SCHEDULES.items()
    if schedule.flushes and schedule.at_end == 1 and not schedule.searched and name != "custom"
)


def pipeline_order(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    crews: Crews | None = None,
    *,
    replicas: Sequence[int] = (),
) -> tuple[Line, ...]:
    """Return the actions of every crew in the order they run; without ``crews`` each stage is one.

    Of stages in ``replicas`` each has a line, and microbatch i goes to replica i mod r. ``gpipe``:
    every forward, then every backward, both by ascending microbatch. ``1f1b`` (DAPPLE,
    PipeDream-Flush): stage k of p runs p-1-k forwards ahead, then one forward and one backward in
    turn, then the remaining backwards; it keeps at most p-k microbatches alive. ``1f1b-so`` (BaPipe)
    runs twice as many ahead, so that a transfer has an action to hide behind. These take every stage
    as a crew, as do ``zb-h1`` and ``zb-h2`` (``_deferred``). ``interleaved`` (Megatron-LM) and
    ``looped-bfs``: see ``_interleaved`` and ``_breadth_first``; ``zb-interleaved`` is the former with
    W where it would idle. ``zb-v``, ``v-half`` and ``v-min``: see
    ``folded``.

    Raises ValueError for another name, and for an odd number of stages of a V.
    """
    _check_asked(schedule, num_stages, num_microbatches)
    entry = SCHEDULES[schedule]
    if entry.folds:
        return folded_order(schedule, num_stages, num_microbatches)
    if entry.chunks:
        return _by_chunks(entry, crews or alone(num_stages), num_stages, num_microbatches)
    if entry.splits:
        return _deferred(num_stages, num_microbatches, entry.per_stage or 0)
    return _by_stages(entry.per_stage, replicas or (1,) * num_stages, num_microbatches)


def _check_asked(schedule: str, num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"a pipeline needs at least one stage and one microbatch, not {num_stages} and "
            f"{num_microbatches}; raise both to 1 or more"
        )
    if schedule not in GENERATED:
        known = ", ".join(map(repr, GENERATED))
        raise ValueError(f"schedule {schedule!r} is unknown; choose {known}")


def _by_stages(
    per_stage: int | None, replicas: Sequence[int], num_microbatches: int
) -> tuple[Line, ...]:
    """Return a line for every replica of every stage, which runs so many forwards ahead for each line
    behind it (None: all of them), then one and one backward in turn."""
    lines: list[Line] = []
    for stage, count in enumerate(replicas):
        behind = (sum(replicas[stage:]) - 1) // count
        for replica in range(count):
            mine = range(replica, num_microbatches, count)
            forwards = [Action(stage, "F", m) for m in mine]
            backwards = [Action(stage, "B", m) for m in mine]
            ahead = len(mine) if per_stage is None else per_stage * behind
            lines.append(alternated(forwards, backwards, min(ahead, len(mine))))
    return tuple(lines)


def _by_chunks(
    entry: Schedule, crews: Crews, num_stages: int, num_microbatches: int
) -> tuple[Line, ...]:
    """Return the lines of crews with several stages each."""
    if entry.per_stage is None:
        return tuple(_breadth_first(own, num_microbatches) for own in crews)
    whole = _interleaved(crews, num_stages, num_microbatches)
    if not entry.splits:
        return whole
    return with_weights_late([halved(line) for line in whole], num_stages, num_microbatches, crews)


def alternated(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> Line:
    """Run so many forwards ahead, then forward and backward in turn, then what is left."""
    order = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(forwards) - ahead :])


def _in_groups(phase: Phase, own: Sequence[int], groups: Sequence[range]) -> list[Action]:
    """Return a phase of groups of microbatches, each chunk by chunk, backwards from the last."""
    chunks = sorted(own, reverse=phase == "B")
    return [Action(chunk, phase, m) for group in groups for chunk in chunks for m in group]


def _interleaved(crews: Crews, num_stages: int, num_microbatches: int) -> tuple[Line, ...]:
    """Return the order of Narayanan et al. (SC 2021): chunk by chunk, a group of microbatches each.

    A group has as many microbatches as there are crews, or more where these do not divide: groups are as
    even as they can be, since a device idles in every one that is shorter. Crew k of p, with v
    chunks, runs 2 (p-1-k) + (v-1) g forwards ahead, g the size of the first group; with one chunk
    each, p-1-k as ``1f1b`` does. Where crews differ that may be too few for any
    order at all: then every crew runs one more ahead, until there is one.
    """
    most = max(map(len, crews))
    count = max(1, num_microbatches // len(crews))
    ends = [-(-num_microbatches * number // count) for number in range(count + 1)]
    groups = [range(first, end) for first, end in pairwise(ends)]
    size = len(groups[0])
    for more in range(num_stages * num_microbatches + 1):
        lines: list[Line] = []
        for place, own in enumerate(crews):
            behind = len(crews) - 1 - place
            ahead = more + (2 * behind + (len(own) - 1) * size if most > 1 else behind)
            forwards, backwards = _in_groups("F", own, groups), _in_groups("B", own, groups)
            lines.append(alternated(forwards, backwards, min(ahead, len(forwards))))
        if merges(lines, num_stages):
            return tuple(lines)
    raise AssertionError("all forwards before all backwards is always an order")


def _deferred(num_stages: int, num_microbatches: int, share: int) -> tuple[Line, ...]:
    """Return ZB-H1 (share 1) or ZB-H2 (2): stage k of p runs share (p-1-k) forwards ahead, then F and
    I in turn with a W once more than share k are pending, then I and W in turn, then the W left."""
    lines: list[Line] = []
    for stage in range(num_stages):
        ahead = min(share * (num_stages - 1 - stage), num_microbatches)
        forwards = [Action(stage, "F", m) for m in range(num_microbatches)]
        inputs = [one._replace(phase="I") for one in forwards]
        line = alternated(forwards, inputs, ahead)
        lines.append(with_weights(line, share * stage, num_microbatches - ahead))
    return tuple(lines)


def with_weights(line: Line, most: int, eager: float = math.inf) -> Line:
    """Return a line of F and I with a W behind an I once more than so many are pending, and behind each
    from the microbatch ``eager`` on; what is left comes last."""
    found, pending = list[Action](), list[Action]()
    for one in line:
        found.append(one)
        if one.phase == "I":
            pending.append(one._replace(phase="W"))
            if len(pending) > most or one.microbatch >= eager:
                found.append(pending.pop(0))
    return (*found, *pending)


def _breadth_first(own: Sequence[int], num_microbatches: int) -> Line:
    """Run all microbatches of a chunk before any of the next, so that its weights are gathered once."""
    every = [range(num_microbatches)]
    return (*_in_groups("F", own, every), *_in_groups("B", own, every))
