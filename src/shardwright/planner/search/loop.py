"""The loop of every search: proposers say what to try and how fast it could be at best; the most
promising is tried first.

A proposer is a generator. It yields proposals, is sent what became of each, and reads the pool.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from typing import NamedTuple

from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.search.pool import Pool

# Returns the evaluation, which the pool keeps; None where nothing legal was to be simulated.
Trial = Callable[[], Evaluation | None]


class Proposal(NamedTuple):
    """Something to try, the seconds that what it gives takes at least, and how it is tried."""

    bound: float
    trial: Trial


Proposals = Generator[Proposal, Evaluation | None]
Proposer = Callable[[Pool], Proposals]
Waiting = list[tuple[float, int, Trial, Proposals]]


def run(pool: Pool, *proposers: Proposer) -> None:
    """Try what is proposed, the least bound first, until nothing is or the caller stops.

    What cannot be faster than the fastest plan that fits is passed over; its proposer is sent None. Of
    equal bounds the proposer named first goes first, so the order is deterministic. One proposal of
    each proposer waits in the queue: O(log proposers) per trial. Once the caller stops nobody is asked for more,
    which may take as long as a trial, unless nothing was looked at yet.
    """
    waiting: Waiting = []
    left = deque(enumerate(proposers))
    while (waiting or left) and not _is_over(pool):
        while left and not (waiting and pool.stopped()):
            number, proposer = left.popleft()
            _ask(waiting, number, proposer(pool), None)
        if waiting:
            bound, number, trial, stream = heapq.heappop(waiting)
            found = trial() if bound < pool.fastest else None
            if not _is_over(pool):
                _ask(waiting, number, stream, found)


def _ask(waiting: Waiting, number: int, stream: Proposals, found: Evaluation | None) -> None:
    """Tell a proposer what became of its proposal, and ask for the next."""
    try:
        bound, trial = stream.send(found)
    except StopIteration:
        return
    heapq.heappush(waiting, (bound, number, trial, stream))


def _is_over(pool: Pool) -> bool:
    return pool.stopped() and bool(pool.evaluations)
