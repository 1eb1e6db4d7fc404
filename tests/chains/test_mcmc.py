"""Markov chains over strategies: what FlexFlow's paper says of them, and ours beyond it."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from shardwright.chains.mcmc import Chain, Chains, sample, walk
from shardwright.chains.places import Place, fine_mesh, move, refine
from shardwright.chains.proposals import Drawing
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import OperatorConfig, Strategy
from shardwright.errors import InputError, NoPlan
from shardwright.planner.judge.evaluate import Evaluation, evaluate
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.search import Limits, Training
from shardwright.planner.search.local.moves import Space, resplit
from shardwright.planner.search.loop import run
from shardwright.planner.search.named import as_strategy, named_strategies
from shardwright.planner.search.pool import Pool
from shardwright.planner.space import Seed
from shardwright.proofs import check
from tests.planner.search.models import cluster, mlp, residual

pytestmark = pytest.mark.slow
SLOW = {"flops": 1e10, "near": 1e9, "far": 1e8}


def of(proposals: int):
    return lambda done: done / proposals


def context(graph: OperatorGraph, hosts: int = 1, devices: int = 4) -> Context:
    return Context.of(graph, cluster(hosts, devices, **SLOW), CostTable(), Training())


def walked(where: Context, proposals: int, judge=None, **chain: object):
    pool = Pool(where, math.inf)
    if judge is not None:
        pool.evaluator = SimpleNamespace(evaluate=judge)
    chains = Chains(pool, Chain(**chain), of(proposals))
    run(pool, lambda _: chains.propose())
    return pool, chains


@pytest.mark.parametrize("start", ["data", "expert", "random"])
def test_no_chain_ends_worse_than_it_began(start: str) -> None:
    pool, chains = walked(context(residual(width=64)), 25, starts=(start,), seed=3)
    assert len(chains.begun) == 1
    assert pool.fastest <= chains.begun[0].seconds


def test_the_first_start_is_data_parallelism_and_the_expert_is_the_best_known_plan() -> None:
    where = context(residual(width=64))
    _, chains = walked(where, 3)
    data, expert, splits = chains.begun
    assert data.seconds == pytest.approx(evaluate(where, as_strategy(where, Seed(data=4))).seconds)
    known = [evaluate(where, s).seconds for pair in named_strategies(where) for s in pair]
    assert expert.seconds == pytest.approx(min(known))
    assert splits.strategy.label == "random splits"


def test_equal_seeds_give_equal_plans_and_others_other_walks() -> None:
    graph, where = residual(width=64), cluster(1, 4, **SLOW)

    def plans(seed: int):
        return sample(graph, where, CostTable(), Chain(seed=seed), of(24))

    assert plans(5) == plans(5)
    assert plans(5).best.reason != plans(6).best.reason


def test_every_plan_says_how_it_was_found_and_its_program_is_sound() -> None:
    graph, where = residual(width=64), cluster(2, 2, **SLOW)
    frontier = sample(graph, where, CostTable(), Chain(), of(60))
    for plan in frontier.plans:
        assert plan.method.startswith("MCMC")
        assert plan.bound is None
        check(lower(graph, plan.strategy))
    assert "nothing is proved" in frontier.best.reason
    assert re.search(r" \d+ proposals ", frontier.best.reason)


def test_chains_reach_the_best_of_all_splits_of_a_tiny_model() -> None:
    """Brute force over every split of every operator, parameters as used (so do the chains)."""
    where = context(mlp(batch=4, width=64, depth=1, classes=4), devices=2)
    begin = refine(where, as_strategy(where, Seed(data=2)))
    space = Space(where)
    every = [space.splits(i, (2,), 1) for i in range(len(where.graph.operators))]
    assert math.prod(map(len, every)) < 20_000
    least = math.inf
    for choice in itertools.product(*every):
        made = replace(begin, configs=tuple(OperatorConfig(mesh=0, dims=dims) for dims in choice))
        if space.dangling(made, range(len(choice))):
            continue
        strategy = resplit(space, begin, dict(enumerate(choice)))
        least = min(least, evaluate(where, strategy).seconds)
    known: dict[Strategy, Evaluation] = {}

    def remembered(strategy: Strategy) -> Evaluation:
        key = replace(strategy, label="")
        if key not in known:
            known[key] = evaluate(where, key)
        return replace(known[key], strategy=strategy)

    pool, _ = walked(where, 1500, remembered, starts=("data", "random"))
    assert pool.fastest <= least * (1 + 1e-9)


def test_slower_proposals_are_accepted_as_often_as_metropolis_says() -> None:
    where = context(mlp(), devices=1)
    chains = Chains(Pool(where, math.inf), Chain(temperature=0.1), of(1))
    count = sum(chains.takes(1.0, 1.05) for _ in range(4000))
    assert count / 4000 == pytest.approx(1.05 ** (-1 / 0.1), abs=0.03)
    assert all(chains.takes(1.0, 0.9) for _ in range(10))


def test_what_is_accepted_does_not_depend_on_the_unit_of_time() -> None:
    where = context(mlp(), devices=1)
    draws = [
        [
            Chains(Pool(where, math.inf), Chain(seed=seed), of(1)).takes(unit, 1.001 * unit)
            for seed in range(50)
        ]
        for unit in (1e-3, 1.0, 1e3)
    ]
    assert draws[0] == draws[1] == draws[2]
    assert len(set(draws[0])) == 2


def test_half_a_share_without_gain_ends_a_chain() -> None:
    where = context(mlp())
    begun = evaluate(where, as_strategy(where, Seed(data=4)))

    def stuck(strategy: Strategy) -> Evaluation:
        return replace(begun, strategy=strategy)  # nothing is ever better

    _, chains = walked(where, 100, stuck, starts=("data",))
    assert chains.proposed == 50


def test_illegal_proposals_are_counted_and_never_kept() -> None:
    where = context(mlp())

    def strict(strategy: Strategy) -> Evaluation:
        if len({config.dims for config in strategy.configs}) > 3:
            raise ValueError("too many sorts of split")
        return evaluate(where, strategy)

    pool, chains = walked(where, 60, strict, starts=("data",))
    assert chains.illegal > 0
    assert chains.accepted + chains.illegal <= chains.proposed
    assert all(len({c.dims for c in j.strategy.configs}) <= 3 for j in pool.evaluations)


def test_stopping_at_once_returns_a_complete_plan_that_says_so() -> None:
    graph, where = residual(width=64), cluster(1, 4, **SLOW)
    best = sample(graph, where, CostTable(), Chain(), of(1000), stop=lambda: True).best
    assert any("did not end" in note for note in best.notes)
    check(lower(graph, best.strategy))


def test_progress_shows_the_best_so_far_and_never_goes_back() -> None:
    heard = []
    graph, where = residual(width=64), cluster(1, 4, **SLOW)
    sample(graph, where, CostTable(), Chain(), of(40), progress=heard.append)
    assert [p.fraction for p in heard] == sorted(p.fraction for p in heard)
    assert [p.best_seconds for p in heard] == sorted((p.best_seconds for p in heard), reverse=True)


def test_a_memory_limit_is_kept_although_data_parallelism_breaks_it() -> None:
    graph, where = residual(batch=4, width=256, depth=3), cluster(1, 4, **SLOW)
    here = Context.of(graph, where, CostTable(), Training())
    limit = 0.8 * evaluate(here, as_strategy(here, Seed(data=4))).bytes
    frontier = sample(graph, where, CostTable(), Chain(), of(60), limits=Limits(memory_bytes=limit))
    assert all(plan.predicted.peak_bytes <= limit for plan in frontier.plans)


def test_nothing_that_fits_says_how_much_is_missing() -> None:
    with pytest.raises(NoPlan, match="too much"):
        walk(Pool(context(mlp()), 1000.0), Chain(), of(5))


def test_a_batch_that_nothing_divides_is_one_message_with_what_to_do() -> None:
    says = (
        r"global batch of 7 over 6; choose a batch that 6 devices divide, or leave out the method"
    )
    with pytest.raises(InputError, match=says):
        walk(Pool(context(mlp(batch=7), hosts=3, devices=2), math.inf), Chain(), of(5))


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"starts": ()}, {"starts": ("best",)}])
def test_chains_that_cannot_walk_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Chain(**wrong)


def test_finer_meshes_change_no_message_of_data_parallelism() -> None:
    where = context(residual(), hosts=2, devices=4)
    plain = as_strategy(where, Seed(data=8))
    fine = refine(where, plain)
    assert fine.meshes[0].sizes == (2, 2, 2)
    assert evaluate(where, fine).objective == evaluate(where, plain).objective


def test_finer_meshes_of_operators_placed_apart_change_no_message_either() -> None:
    where = context(residual(batch=16), hosts=2, devices=4)
    half = fine_mesh((0, 1, 2, 3), where.cluster)
    begin = as_strategy(where, Seed(data=8))
    index = next(i for i, o in enumerate(where.graph.operators) if "linear" in o.kind)
    plain = move(Space(where), begin, {index: Place(half, ("",) * len(half.sizes))})
    assert {len(mesh.axes) for mesh in plain.meshes} == {1, 2}
    fine = refine(where, plain)
    assert {mesh.sizes for mesh in fine.meshes} == {(2, 2), (2, 2, 2)}
    assert evaluate(where, fine).objective == evaluate(where, plain).objective


def test_operators_placed_apart_get_meshes_in_the_order_of_the_data() -> None:
    where = context(residual(), devices=4)
    begin = as_strategy(where, Seed(data=4))
    half = fine_mesh((0, 1), where.cluster)
    index = next(i for i, o in enumerate(where.graph.operators) if "gelu" in o.kind)
    dims = ("",) * len(half.sizes)
    moved = move(Space(where), begin, {index: Place(half, dims)})
    assert [mesh.devices for mesh in moved.meshes] == [(0, 1, 2, 3), (0, 1), (0, 1, 2, 3)]
    check(lower(where.graph, moved))
    back = move(Space(where), moved, {index: Place(begin.meshes[0], begin.configs[index].dims)})
    assert back == begin


def test_proposals_reach_every_part_of_a_strategy() -> None:
    where = context(residual(batch=16), devices=4)
    begin = refine(where, as_strategy(where, Seed(data=4)))
    drawing = Drawing(Space(where), Random(0))
    made_again = {"recompute", "recompute_operators"}
    parts = {"meshes", "configs", "parameters", "segment_starts"} | made_again
    seen = set()
    for _ in range(200):
        try:
            changed = drawing.draw(begin)
        except ValueError:
            continue
        seen |= {name for name in parts if getattr(changed, name) != getattr(begin, name)}
    assert seen == parts


def test_most_proposals_can_be_lowered() -> None:
    where = context(residual(batch=16), hosts=2, devices=4)
    here = refine(where, as_strategy(where, Seed(data=8)))
    drawing, legal = Drawing(Space(where), Random(1)), 0
    for _ in range(40):
        try:
            changed = drawing.draw(here)
            check(lower(where.graph, changed, where.facts.samples))
            legal, here = legal + 1, changed
        except ValueError:
            continue
    assert legal > 24
