"""Other orders of the pipelines that promise most."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool


def schedules(pool: Pool) -> Proposals:
    """Propose the fastest pipeline in GPipe order too, which hides slow transfers better."""
    pipelines = [
        (evaluation.seconds, candidate.bytes, number)
        for number, (candidate, evaluation) in enumerate(pool.tried.values())
        if evaluation is not None and candidate.arrangement.stages > 1
    ]
    if pipelines:
        candidate = list(pool.tried.values())[min(pipelines)[2]][0]
        other = replace(candidate, arrangement=replace(candidate.arrangement, schedule="gpipe"))
        yield Proposal(candidate.least_seconds, partial(pool.try_candidate, other))
