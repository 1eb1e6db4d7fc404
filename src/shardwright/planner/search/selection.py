"""Which shapes are worth solving, and which candidates of the additive model a simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from shardwright.core.cluster import Cluster
from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.model.arrangements import Arrangement, Shape
from shardwright.planner.search.candidates import Candidate, least_work

# Candidates so near in seconds and bytes are taken for the same plan on another mesh.
ALIKE, WIDE = 0.01, 0.1


def cheaper(
    plans: list[Shape], candidates: list[Candidate], cluster: Cluster, limit: float
) -> list[Shape]:
    """Keep of too few devices only what may save money: the best shape, on fewer hosts."""
    fits = [c for c in candidates if c.bytes <= limit]
    if not fits or not plans:
        return []
    best = min(fits, key=lambda c: (c.seconds, c.bytes)).arrangement
    count = plans[0].stages * plans[0].data * plans[0].tensor
    rate = cluster.dollars_per_second
    if rate(tuple(range(2 * count))) <= rate(tuple(range(count))):
        return []
    return [
        replace(plan, microbatches=plan.microbatches[-2:])
        for plan in plans
        if (plan.stages, plan.tensor) == (best.stages, best.tensor)
    ]


def least_flat(candidates: list[Candidate], count: int, even: float) -> float:
    """Return the seconds of the operators alone in the best arrangement of so many devices without
    stages, ``even`` where there is none."""
    flat = (c for c in candidates if c.arrangement.stages == 1)
    works = (
        least_work(c.problem, c.arrangement) for c in flat if c.arrangement.num_devices == count
    )
    return min(works, default=even)


def shortlist(candidates: list[Candidate], count: int, limit: float) -> list[Candidate]:
    """Choose the fastest candidates that fit, one per arrangement and per number of devices first.

    Of those which differ in nothing but how wide tensors are split, and hardly in costs, one does.
    """
    fitting: list[Candidate] = []
    for candidate in sorted(
        (c for c in candidates if c.bytes <= limit),
        key=lambda c: (float(f"{c.seconds:.9g}"), c.arrangement.num_devices, c.bytes),
    ):
        if not any(_is_alike(candidate, known) for known in fitting[-count:]):
            fitting.append(candidate)
    chosen: dict[tuple[object, ...], Candidate] = {}
    arrangements: dict[Arrangement, Candidate] = {}
    widths: dict[int, Candidate] = {}
    for candidate in fitting:
        arrangements.setdefault(candidate.arrangement, candidate)
        widths.setdefault(candidate.arrangement.num_devices, candidate)
    for group, upto in ((arrangements, (count + 1) // 2), (widths, count)):
        for candidate in group.values():
            if len(chosen) < upto:
                chosen.setdefault(candidate.identity, candidate)
    for candidate in fitting[:count]:
        if len(chosen) < count:
            chosen.setdefault(candidate.identity, candidate)
    return list(chosen.values())


def _is_alike(one: Candidate, other: Candidate) -> bool:
    here, there = one.arrangement, other.arrangement
    return (
        here != there
        and (here.stages, here.microbatches) == (there.stages, there.microbatches)
        and abs(one.seconds - other.seconds) <= ALIKE * other.seconds
        and abs(one.bytes - other.bytes) <= WIDE * other.bytes
    )


def pareto_front(candidates: list[Candidate], count: int) -> list[Candidate]:
    """Choose so many along the frontier of time and memory, evenly."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.seconds, c.bytes)):
        if not kept or candidate.bytes < kept[-1].bytes:
            kept.append(candidate)
    steps = np.linspace(0, len(kept) - 1, min(count, len(kept))) if kept else np.zeros(0)
    return [kept[round(float(step))] for step in steps]


def log_bucket(seconds: float) -> int:
    """Take seconds within a tenth of each other as alike."""
    return round(math.log(seconds) / math.log(1.1)) if seconds > 0 else 0


def unlike(evaluations: list[Evaluation]) -> list[Evaluation]:
    """Keep, of plans that are the same on another mesh, the first."""
    found: dict[tuple[str, str], Evaluation] = {}
    for one in evaluations:
        found.setdefault((f"{one.seconds:.4g}", f"{one.least_seconds:.3g}"), one)
    return list(found.values())


def bound_of(evaluation: Evaluation) -> tuple[float, float]:
    """Order evaluations by what they could take at best, where that is known."""
    least = evaluation.least_seconds
    return (evaluation.seconds if math.isnan(least) else least), evaluation.seconds
