"""Why not ...: the best plan that does what a user has in mind.

What the user leaves open is searched; what is named is kept, however bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

from shardwright.core.arguments import check_fields
from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.legality import MOST_DEVICES, MOST_MICROBATCHES
from shardwright.core.plan import Plan
from shardwright.errors import InputError
from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.model.arrangements import Shape, global_batch, microbatch_counts, shape_of
from shardwright.planner.search.answer import fitting, make_plan
from shardwright.planner.search.asked import uses
from shardwright.planner.search.loop import Proposal, Proposals, run
from shardwright.planner.search.named import as_strategy
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.proposers.additive import of_shape
from shardwright.planner.search.proposers.gradients import merged
from shardwright.planner.search.proposers.known import asked
from shardwright.planner.search.proposers.shortlist import shortlist
from shardwright.planner.search.search import How, begun
from shardwright.planner.space import Seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Degrees that a user names; None leaves one open. ``seed_plan`` names a whole strategy.

    A tensor degree splits anything but samples, which are for the data degree.
    The degrees multiply to the number of devices; an open data degree is what is left over, open
    others are 1. With ``zero`` or ``recompute`` every operator is split as the named strategies do,
    else the best split and parameter layouts for these degrees are searched.
    """

    data: int | None = None
    tensor: int | None = None
    stages: int | None = None
    microbatches: int | None = None
    zero: int | None = None
    recompute: bool | None = None
    seed_plan: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        degrees = (self.data, self.tensor, self.stages, self.microbatches)
        for name, given in zip(("dp", "tp", "pp"), degrees, strict=False):
            _check_count(name, given, MOST_DEVICES)
        _check_count("microbatches", self.microbatches, MOST_MICROBATCHES)
        if self.zero is not None and not 0 <= self.zero <= 3:
            raise InputError(f"ZeRO has the stages 0 to 3, not {self.zero}; choose one of these")
        others = any(one is not None for one in (*degrees, self.zero, self.recompute))
        if self.seed_plan and others:
            raise InputError(
                "an alternative is a seed plan or degrees, but both were named; leave one out"
            )
        if not self.seed_plan and not others:
            raise InputError(
                "nothing was named to compare with; name an alternative, such as --tp 8 or --seed-plan cube"
            )


def _check_count(name: str, given: int | None, most: int) -> None:
    if given is not None and not 1 <= given <= most:
        raise InputError(
            f"{name} must be between 1 and {most:,}, not {given}; choose it within these"
        )


def why_not(
    graph: OperatorGraph, cluster: Cluster, table: CostTable, wish: Wish, **how: Unpack[How]
) -> Plan:
    """Return the fastest plan of a wish that fits into memory, or the smallest where none does.

    Raises InputError where there is no such plan.
    """
    pool = begun(graph, cluster, table, **how)
    if wish.seed_plan:
        run(pool, partial(asked, wish.seed_plan))
    else:
        _judge_degrees(pool, wish)
    run(pool, merged)
    if not pool.evaluations:
        why = "; ".join(pool.refused[:3]) or "the global batch does not divide so"
        raise InputError(
            f"this alternative is impossible here: {why}; data-parallel copies times microbatches must divide the "
            f"global batch of {global_batch(pool.context)}, tensor-parallel devices layers, and stages have a block each: "
            "name other degrees, or plan for another batch"
        )
    meant = _meant(pool.evaluations, wish)
    smallest = min(meant, key=lambda one: one.bytes)
    chosen: Evaluation = next(iter(fitting(meant, pool.limit)), smallest)
    return make_plan(pool.findings(), chosen, 0)


def _meant(tried: Sequence[Evaluation], wish: Wish) -> list[Evaluation]:
    """Return what splits something over every axis that a wish names. Raises InputError for nothing."""
    named = (("data", wish.data), ("tensor", wish.tensor))
    wanted = {axis: size for axis, size in named if size and not wish.seed_plan}
    meant = [one for one in tried if all(uses(one.strategy, axis) for axis in wanted)]
    if not meant:
        raise InputError(_unused(wanted, tried))
    return meant


def _unused(wanted: dict[str, int], tried: Sequence[Evaluation]) -> str:
    if "tensor" in wanted and not any(uses(one.strategy, "tensor") for one in tried):
        return (
            f"tp {wanted['tensor']} splits operators over so many devices, but of this model none can be "
            "split so, except by samples; choose a smaller tp, or dp"
        )
    return (
        f"dp {wanted.get('data', 1)} splits samples over so many devices, but of this model no operator can "
        "be split so (`shardwright capture` says why); choose tp or pp"
    )


def _judge_shape(pool: Pool, stages: int, shape: Shape) -> None:
    blocks = len(pool.context.facts.ties.ranges)
    if stages > blocks:
        raise InputError(f"pp {stages} needs as many blocks, but the model has {blocks}")
    run(pool, partial(of_shape, shape))
    run(pool, shortlist)


def _judge_degrees(pool: Pool, wish: Wish) -> None:
    context = pool.context = replace(pool.context, is_strict=True)
    stages, tensor = wish.stages or 1, wish.tensor or 1
    data = wish.data or max(1, context.num_devices // (stages * tensor))
    needed = data * tensor * stages
    if needed > context.num_devices:
        raise InputError(
            f"dp {data} x tp {tensor} x pp {stages} takes {needed} devices, but the cluster has "
            f"{context.num_devices}; choose smaller degrees"
        )
    counts = microbatch_counts(context, data, stages)
    if wish.microbatches is not None:
        counts = (wish.microbatches,)
    if wish.zero is None and wish.recompute is None:
        _judge_shape(pool, stages, shape_of(stages, data, tensor, counts))
    seeds = [
        Seed(
            data=data, tensor=tensor, stages=stages, zero=wish.zero or 0,
            num_microbatches=count, recompute=bool(wish.recompute),
        )
        for count in counts
    ]  # fmt: skip
    run(pool, partial(_seeded, seeds))


def _seeded(seeds: list[Seed], pool: Pool) -> Proposals:
    """Propose named strategies until one fits, whatever they promise."""
    for seed in seeds:
        made = partial(as_strategy, pool.context, seed)
        found = yield Proposal(0.0, partial(pool.try_made, seed.label, made))
        if found is not None and found.bytes <= pool.limit:
            return
