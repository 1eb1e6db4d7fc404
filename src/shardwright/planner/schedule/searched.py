"""A searched order: W fills what would be idle, within a limit of memory (ZB-1p, ZB-2p).

The best of many plays (``play``) and of ZB-H1 and ZB-H2; of few actions every order is tried. Times
and limit are those of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024; so is what is
minimised, the longest time from first start to last end on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from shardwright.planner.schedule.clock import StageTimes, replay
from shardwright.planner.schedule.exhaustive import best_order
from shardwright.planner.schedule.generators import alternated, pipeline_order, with_weights
from shardwright.planner.schedule.pipeline import Crews, Line, merges, most_bytes
from shardwright.planner.schedule.play import ROUNDING, Policy, Room, list_schedule

# W is begun where it makes what comes next wait for this share of it at most, and devices that have idled least
# wait longer or not: the most promising first. More shares found nothing better in the twelve settings of the paper.
HOLDS = (
    (0.4, True), (1.0, False), (0.0, True), (0.7, True), (0.4, False), (0.7, False), (1.0, True), (0.0, False),
)  # fmt: skip
# So many actions are played at most: a second of a slow core. All policies are tried up to 1,000 actions,
# such as 8 stages of 40 microbatches; of more, as many as there is time for, the most promising first.
MOST_PLAYED = 100_000
# So few actions, three stages of three microbatches, take some 20 ms to try in every order; a
# microbatch more can take seconds.
FEW = 27


def search_order(
    stages: Sequence[StageTimes], num_microbatches: int, room: Room
) -> tuple[Line, ...] | None:
    """Return an order of F, I and W, each stage on a device of its own, whose ``Replay.span`` is short;
    None where the first forward does not fit already.

    With at most ``FEW`` actions no order within the limits is shorter. O(plays * actions log stages), at most ``MOST_PLAYED`` actions.
    """
    count = len(stages)
    found: list[tuple[float, tuple[Line, ...]]] = []
    for name in ("zb-h1", "zb-h2"):
        lines = pipeline_order(name, count, num_microbatches)
        if room.has(lines):
            found.append((replay(lines, stages).span, lines))
    least = least_span(stages, num_microbatches, room)
    for policy in _policies(stages, num_microbatches, room)[: _plays(count * num_microbatches)]:
        played = list_schedule(stages, num_microbatches, room, policy)
        found += [(played[1], played[0])] if played else []
        if played and played[1] <= least * (1 + ROUNDING):
            return played[0]
    if not found:
        return None
    span, lines = min(found, key=lambda each: each[0])
    if 3 * count * num_microbatches <= FEW:
        return best_order(stages, num_microbatches, room, span) or lines
    return lines


def timed_order(
    lines: tuple[Line, ...],
    stages: Sequence[StageTimes],
    num_microbatches: int,
    crews: Crews,
    sizes: tuple[Sequence[float], Sequence[float]],
) -> tuple[Line, ...]:
    """Return an order of F, I and W whose span is no longer, and which keeps no more than that does on its fullest device.

    Named orders are laid out for actions that take equally long. Tried are their F and I with W where it fills what would be
    idle in fact, or as late as ZB-H1 and torch have it, also with less of a warm-up, and orders in which devices decide it all. ``sizes``: what a mesh keeps of a microbatch from F to I, and of that to
    W. The first of equals, the named order before all.
    """
    kept, left = sizes
    limit = max(most_bytes(lines, kept, left))
    room = Room(limits=[limit] * len(lines), kept=kept, left=left)
    best, span = lines, replay(lines, stages, has_own_links=False).span
    ways = [
        (given, Policy(share=share, balances=balances, hurries=hurries))
        for share, balances in HOLDS
        for given, hurries in ((lines, False), ((), False), ((), True))
    ]
    others = [_late(one) for one in (lines, _less_warm(lines)) if merges(one, len(stages))]
    for given, policy in ways[: _plays(len(stages) * num_microbatches)]:
        played = list_schedule(stages, num_microbatches, room, policy, crews=crews, given=given)
        others += [played[0]] if played else []
    for other in filter(room.has, others):
        found = replay(other, stages, has_own_links=False).span
        if found < span * (1 - ROUNDING):
            best, span = other, found
    return best


def _less_warm(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return F and I of an order in which every device runs one forward more ahead than the one behind it."""
    found: list[Line] = []
    least = [one.phase for one in lines[-1]].index("I") - 1
    for behind, line in enumerate(reversed(lines)):
        forwards, inputs = ([one for one in line if one.phase == phase] for phase in "FI")
        found.append(alternated(forwards, inputs, min(least + behind, len(forwards))))
    return tuple(reversed(found))


def _late(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return an order with W where more of them are pending than there are devices ahead."""
    others = [tuple([one for one in line if one.phase != "W"]) for line in lines]
    return tuple(with_weights(line, place) for place, line in enumerate(others))


def _plays(forwards: int) -> int:
    """Return how many ways to decide may be played."""
    return max(1, MOST_PLAYED // (3 * forwards))


def least_span(stages: Sequence[StageTimes], num_microbatches: int, room: Room) -> float:
    """Return what no order's longest span is below: a stage's own work, and what the forwards that it
    has memory for leave idle until its first gradient can have come back."""
    spans: list[float] = []
    behind = 0.0  # from the end of a stage's first F to the start of its first I
    for k in range(len(stages) - 1, -1, -1):
        stage, most = stages[k], _most_forwards(room, num_microbatches)[k]
        idle = max(0.0, stage.forward + behind - most * stage.forward)
        spans.append(num_microbatches * sum(map(stage.seconds, "FIW")) + idle)
        behind += stage.forward + stage.backward + 2 * stage.receive
    return max(spans)


def _most_forwards(room: Room, count: int) -> list[int]:
    """Return how many microbatches each stage has memory for."""
    return [
        min(count, int(limit * (1 + ROUNDING) / kept)) if kept else count
        for limit, kept in zip(room.limits, room.kept, strict=True)
    ]


def _policies(stages: Sequence[StageTimes], count: int, room: Room) -> list[Policy]:
    """Return ways to decide, first those of which the fewest come near what all find: in 49 cases of 4 to 16 stages, equal or
    not, with transfers or without, within either memory, the first 4 were .2 % longer than the best on average, 8 .07 %."""
    fits, last = _most_forwards(room, count), len(stages) - 1
    twice, once = (tuple(each * (last - k) + 1 for k in range(len(stages))) for each in (2, 1))
    waiting, ready = (tuple(_warmup(stages, fits, waits)) for waits in (True, False))
    paces = ((True, True), (True, False), (False, False))
    found = [
        Policy(share=share, balances=balances, paced=paced, hurries=hurries, warmup=warmup)
        for warmups in ((twice, waiting), (once, ready))
        for (paced, hurries), (share, balances), warmup in product(paces, HOLDS, warmups)
    ]
    found += [Policy(share=share, balances=balances) for share, balances in HOLDS]
    return list(dict.fromkeys(found))


def _warmup(stages: Sequence[StageTimes], most: Sequence[int], waits: bool) -> list[int]:
    """Return how many forwards each stage runs before the first gradient arrives; ``waits``: not one
    that would keep it waiting."""
    ends: list[float] = []
    for stage in stages:
        ends.append((ends[-1] + stage.receive if ends else 0.0) + stage.forward)
    counts = [1] * len(stages)
    back = ends[-1] + stages[-1].backward
    for k in range(len(stages) - 2, -1, -1):
        arrives, free = back + stages[k + 1].receive, ends[k]
        while counts[k] < most[k]:
            if (free + stages[k].forward if waits else free) > arrives - (0 if waits else ROUNDING):
                break
            free, counts[k] = free + stages[k].forward, counts[k] + 1
        back = max(free, arrives) + stages[k].backward
    for k in range(1, len(counts)):
        counts[k] = max(1, min(counts[k], counts[k - 1] - 1))
    return counts
