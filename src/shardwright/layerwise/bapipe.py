"""BaPipe's planner: balanced stages without replicas, and the schedule that then is fastest.

The order of work is that of Zhao et al., 2020, as far as public text shows: balance, then check
communication (coarser cuts where a link is too slow), then memory (shift layers to later stages,
which hold fewer microbatches), then explore schedules, and fall back on data parallelism where no
pipeline is faster. Its split of a single layer between neighbours is for FPGAs and left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardwright.core.profile import PipelinePlan
from shardwright.core.schedules import ScheduleKind
from shardwright.errors import NoPlan
from shardwright.layerwise.problem import (
    Crew,
    PipelineProblem,
    Placed,
    busy_seconds,
    measure,
    memory_bytes,
)


def plan_bapipe(problem: PipelineProblem, schedules: Sequence[ScheduleKind] = ()) -> PipelinePlan:
    """Plan as BaPipe does and judge by the problem's model; of ``schedules`` the fastest that fits.

    Workers keep the order given. Raises NoPlan when neither a pipeline nor data parallelism fits.
    """
    best: PipelinePlan | None = None
    for schedule in schedules or (problem.schedule,):
        each = dataclasses.replace(problem, schedule=schedule)
        for stages in _candidates(each):
            plan = measure(each, stages, "bapipe")
            if plan.fits and (best is None or plan.seconds < best.seconds):
                best = plan
    if best is None:
        raise NoPlan(
            f"BaPipe finds no balanced pipeline of {problem.num_workers} workers that fits their "
            "memory, nor does data parallelism; give more memory"
        )
    return best


def balance(problem: PipelineProblem, chain: Sequence[int], num_stages: int) -> list[int]:
    """Return where the stages end: near the ideal shares of the work, then moved one cut at a time
    as long as the slowest stage gets faster."""
    cuts = problem.cuts
    work = [float(cuts.forward[c] + cuts.backward[c]) for c in chain]
    speeds = [speed for speed, _ in _order(problem)[:num_stages]]
    ends: list[int] = []
    share = 0.0
    for stage in range(num_stages - 1):
        share += speeds[stage]
        ideal = work[-1] * share / sum(speeds)
        first = ends[-1] + 1 if ends else 1
        last = len(chain) - (num_stages - stage)
        ends.append(min(range(first, last + 1), key=lambda i: abs(work[i] - ideal)))
    ends.append(len(chain) - 1)
    while _move(ends, work, speeds):
        pass
    return [chain[end] for end in ends]


def _move(ends: list[int], work: list[float], speeds: list[float]) -> bool:
    """Shrink the slowest stage by one cut if that lowers the bottleneck; say whether it did."""

    def times() -> list[float]:
        starts = [0, *ends[:-1]]
        return [(work[e] - work[s]) / v for s, e, v in zip(starts, ends, speeds, strict=True)]

    before = times()
    slowest = before.index(max(before))
    for boundary, step in ((slowest - 1, 1), (slowest, -1)):
        if not 0 <= boundary < len(ends) - 1:
            continue
        low = ends[boundary - 1] if boundary else 0
        if not low < ends[boundary] + step < ends[boundary + 1]:
            continue
        ends[boundary] += step
        if max(times()) < max(before):
            return True
        ends[boundary] -= step
    return False


def _candidates(problem: PipelineProblem) -> list[list[Placed]]:
    """The balanced pipeline, made to fit links and memory, and data parallelism."""
    chain = _chain(problem)
    num_stages = min(problem.num_workers, len(chain) - 1)
    found = [[(chain[-1], Crew(tuple(kind.count for kind in problem.workers)))]]
    ends = balance(problem, chain, num_stages)
    stages = _placed(problem, ends)
    if _is_link_bound(problem, stages):
        stage_seconds = problem.cuts.work / sum(speed for speed, _ in _order(problem)[:num_stages])
        most = problem.bandwidth * stage_seconds / 2  # there and back
        chain = [c for c in chain[:-1] if problem.cuts.crossing[c] <= most] + [chain[-1]]
        num_stages = min(num_stages, len(chain) - 1)
        stages = _placed(problem, balance(problem, chain, num_stages))
    shifted = _shift(problem, chain, stages)
    return found if shifted is None else [shifted, *found]


def _order(problem: PipelineProblem) -> list[tuple[float, Crew]]:
    """Speed and one-worker crew of each worker, in the order given."""
    kinds = problem.workers
    return [
        (kind.speed, Crew(tuple(int(k == i) for i in range(len(kinds)))))
        for k, kind in enumerate(kinds)
        for _ in range(kind.count)
    ]


def _placed(problem: PipelineProblem, ends: Sequence[int]) -> list[Placed]:
    return [(end, one) for end, (_, one) in zip(ends, _order(problem), strict=False)]


def _chain(problem: PipelineProblem) -> list[int]:
    """One layer at a time from the empty cut to the full one (BaPipe knows chains only)."""
    cuts = problem.cuts
    chain = [0]
    while chain[-1] != cuts.num_cuts - 1:
        larger = cuts.larger[cuts.offset[chain[-1]] : cuts.offset[chain[-1] + 1]]
        chain.append(min(map(int, larger), key=lambda c: (cuts.masks[c].bit_count(), c)))
    return chain


def _is_link_bound(problem: PipelineProblem, stages: Sequence[Placed]) -> bool:
    """Whether some stage waits for its links rather than for its compute."""
    cuts = problem.cuts
    start = 0
    for stop, crew in stages:
        send = 2 * max(float(cuts.crossing[start]), float(cuts.crossing[stop])) / problem.bandwidth
        alone = dataclasses.replace(problem, schedule="pipedream", microbatches=0)
        compute = busy_seconds(alone, start, stop, crew)
        if send > 0 and send >= compute:
            return True
        start = stop
    return False


def _shift(
    problem: PipelineProblem, chain: Sequence[int], stages: list[Placed]
) -> list[Placed] | None:
    """Move layers from stages that do not fit to the next; None when the last does not."""
    ends = [chain.index(stop) for stop, _ in stages]
    order = [kind.memory_bytes for kind in problem.workers for _ in range(kind.count)]
    one = Crew((1,))  # any single worker: memory does not depend on its kind
    for stage in range(len(ends)):
        start = ends[stage - 1] if stage else 0
        while (
            memory_bytes(problem, chain[start], chain[ends[stage]], one, len(ends) - stage)
            > order[stage]
        ):
            if stage == len(ends) - 1 or ends[stage] - 1 <= start:
                return None
            ends[stage] -= 1
    return _placed(problem, [chain[end] for end in ends])
