"""Which candidates of the additive model are worth a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.judge.ties import NEAR
from shardwright.planner.model.arrangements import SMALL_GRAPH, Arrangement
from shardwright.planner.search.candidates import Candidate, explore
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.proposers.smallest import until_one_fits
from shardwright.planner.search.steering import CLOSE, FEW, SAME
from shardwright.planner.solve.frontier import falling


def shortlist(pool: Pool) -> Proposals:
    """Propose the fastest candidates that fit, and a few along the frontier of time and memory; then
    the fastest of what the simulator's memory leaves, and while nothing fits the smallest."""
    count = pool.count * (FEW if len(pool.context.graph.operators) <= SMALL_GRAPH else 1)
    promising = _fastest_unlike(pool, count)
    fits = [c for c in pool.candidates if c.bytes <= pool.room]
    most = max(2, count if pool.is_small else count // 2)
    lean = pareto_front(fits or pool.candidates, most)[1:]
    for number, candidate in enumerate([*promising, *lean]):
        bound = candidate.least_seconds if number < len(promising) else 0.0
        yield Proposal(bound, partial(pool.try_candidate, candidate))
        part = (number + 1) / (len(promising) + len(lean))
        pool.tell(0.7 + 0.2 * part, "simulating")
    yield from _corrected(pool)
    yield from until_one_fits(pool, pool.candidates)


def _fastest_unlike(pool: Pool, count: int) -> list[Candidate]:
    """Choose the fastest candidates that fit, one per arrangement and per number of devices first.

    Of those which differ in nothing but how wide tensors are split, and hardly in costs, one does.
    """
    fitting = _unlike([one for one in pool.candidates if one.bytes <= pool.room], count)
    chosen: dict[tuple[object, ...], Candidate] = {}
    arrangements: dict[Arrangement, Candidate] = {}
    widths: dict[int, Candidate] = {}
    for candidate in fitting:
        arrangements.setdefault(candidate.arrangement, candidate)
        widths.setdefault(candidate.arrangement.num_devices, candidate)
    half = (count + 1) // 2
    for group, upto in ((arrangements.values(), half), (widths.values(), count), (fitting, count)):
        for candidate in group:
            if len(chosen) < upto:
                chosen.setdefault(candidate.identity, candidate)
    return list(chosen.values())


def _unlike(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return candidates, the fastest first, without those like one of so many before them."""
    found: list[Candidate] = []
    for candidate in sorted(
        candidates,
        key=lambda one: (float(f"{one.seconds:.9g}"), one.arrangement.num_devices, one.bytes),
    ):
        if not any(_is_alike(candidate, known) for known in found[-count:]):
            found.append(candidate)
    return found


def _is_alike(one: Candidate, other: Candidate) -> bool:
    here, there = one.arrangement, other.arrangement
    return (
        here != there
        and (here.stages, here.microbatches) == (there.stages, there.microbatches)
        and abs(one.seconds - other.seconds) <= SAME * other.seconds
        and other.bytes <= CLOSE * one.bytes <= CLOSE**2 * other.bytes
    )


def pareto_front(candidates: list[Candidate], count: int) -> list[Candidate]:
    """Choose so many along the frontier of time and memory, evenly."""
    kept = falling(sorted(candidates, key=lambda c: (c.seconds, c.bytes)))
    steps = np.linspace(0, len(kept) - 1, min(count, len(kept))) if kept else np.zeros(0)
    return [kept[round(float(step))] for step in steps]


def _corrected(pool: Pool) -> Proposals:
    """Solve the most promising arrangements again, with the memory the simulator found missing or
    left over.

    The additive model does not know when tensors are alive, so plans made to just fit may not.
    """
    fixed = pool.limit - pool.room
    missing = {
        arrangement: max(found.bytes - fixed - candidate.bytes for candidate, found in tried)
        for arrangement, tried in pool.errors().items()
    }
    fastest: dict[Arrangement, float] = {}
    for candidate in pool.candidates:
        if candidate.arrangement in missing and candidate.bytes <= pool.room:
            known = fastest.get(candidate.arrangement, math.inf)
            fastest[candidate.arrangement] = min(known, candidate.seconds)
    for arrangement in sorted(fastest, key=lambda a: (fastest[a], a))[: max(2, pool.further)]:
        if not -NEAR * pool.room < missing[arrangement] <= 0:
            room = pool.room - missing[arrangement]
            yield Proposal(0.0, partial(_solved_again, pool, arrangement, room))
            pool.tell(0.95, "correcting memory")


def _solved_again(pool: Pool, arrangement: Arrangement, room: float) -> Evaluation | None:
    """Try what is best in so much room, unless it is slower than the fastest if it promises as much too little,
    or too much, as what was tried of its arrangement did."""
    again = explore(pool.context, arrangement, room, enough=(0.0, 0.0)).candidates
    best = min(again, key=lambda c: (c.bytes > room, c.seconds, c.bytes), default=None)
    if best is None or best.bytes > room or best.least_seconds >= pool.fastest:
        return None
    off = min(found.seconds / one.seconds for one, found in pool.errors()[arrangement])
    return pool.try_candidate(best) if off * best.seconds < pool.fastest else None
