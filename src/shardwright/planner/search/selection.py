"""Which candidates of the additive model are worth a simulation."""

from __future__ import annotations

import math

import numpy as np

from shardwright.planner.search.arrangements import Arrangement
from shardwright.planner.search.candidates import Candidate
from shardwright.planner.search.judge import Judged

# Candidates so near in seconds and bytes are taken for the same plan on another mesh.
ALIKE, WIDE = 0.01, 0.1


def leads(candidates: list[Candidate], count: int, limit: float) -> list[Candidate]:
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


def edge(candidates: list[Candidate], count: int) -> list[Candidate]:
    """Choose so many along the frontier of time and memory, evenly."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.seconds, c.bytes)):
        if not kept or candidate.bytes < kept[-1].bytes:
            kept.append(candidate)
    steps = np.linspace(0, len(kept) - 1, min(count, len(kept))) if kept else np.zeros(0)
    return [kept[round(float(step))] for step in steps]


def decade(seconds: float) -> int:
    """Take seconds within a tenth of each other as alike."""
    return round(math.log(seconds) / math.log(1.1)) if seconds > 0 else 0


def unlike(verdicts: list[Judged]) -> list[Judged]:
    """Keep, of plans that are the same on another mesh, the first."""
    found: dict[tuple[str, str], Judged] = {}
    for one in verdicts:
        found.setdefault((f"{one.seconds:.4g}", f"{one.least_seconds:.3g}"), one)
    return list(found.values())


def promise(verdict: Judged) -> tuple[float, float]:
    """Order verdicts by what they could take at best, where that is known."""
    least = verdict.least_seconds
    return (verdict.seconds if math.isnan(least) else least), verdict.seconds
