"""Ranks and the loaders of a host on the same cores."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field, replace

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.program import Kind
from shardwright.operators.splitting import find_samples
from shardwright.planner.cost import price
from shardwright.planner.cost.feed import input_costs, input_words
from shardwright.planner.lower import lower
from shardwright.planner.simulate import on_shared_cores, simulate, with_input
from shardwright.planner.simulate.cores import Sharers
from shardwright.planner.space.seeds import Seed, seed_strategy
from tests.planner.search.models import cluster, mlp


def stepped(
    cores: float,
    ranks: int,
    computing: float,
    working: float,
    waiting: float = 0.0,
    idle: float = 0.0,
) -> float:
    """Return the step of ranks with a loader of one worker each, which waits and works; ranks wait idly, too."""
    given = max(waiting + working, ranks * working / cores)  # cores bind loaders, too
    sharers = Sharers(
        cores=cores,
        ranks=ranks,
        computing=computing * max(1.0, ranks / cores),
        loaders=ranks,
        busy=working / given,
    )
    return sharers.step(sharers.computing + idle, given)[0]


def test_where_all_are_always_busy_a_step_is_their_work_over_the_cores() -> None:
    """Of c cores, r ranks that compute C seconds and w workers that prepare B: (r C + w B) / c."""
    for cores, ranks, computing, working in (
        (1, 1, 10.0, 40.0), (1, 1, 40.0, 10.0), (2, 2, 40.0, 20.0), (2, 2, 20.0, 40.0), (4, 4, 5.0, 5.0), (2, 4, 30.0, 10.0),
    ):  # fmt: skip
        expected = (ranks * computing + ranks * working) / cores
        assert stepped(cores, ranks, computing, working) == pytest.approx(expected)


def test_where_everybody_has_a_core_nobody_is_slowed_down() -> None:
    for ranks, computing, working, waiting in itertools.product(
        (1, 3), (5.0, 20.0), (10.0,), (0.0, 7.0)
    ):
        found = stepped(2 * ranks, ranks, computing, working, waiting, 1.0)
        assert found == pytest.approx(max(computing + 1.0, working + waiting))


@dataclass
class Player:
    """Somebody who does (seconds, whether on a core) in turns, one round after another."""

    turns: list[tuple[float, bool]]
    round: int = 2
    at: int = 0
    left: float = 0.0
    turn: int = -1
    rounds: int = 0
    ends: list[float] = field(default_factory=list)


def played(
    cores: float, ranks: int, computing: float, working: float, waiting: float, idle: float
) -> float:
    """Play the same moment by moment: ranks go into a step together, each with a batch of its loader, of 8 samples that are
    waited for and prepared one by one, and loaders are two batches ahead at most."""
    drawn = random.Random(0)
    loaders = [
        Player(
            [
                (drawn.uniform(0.5, 1.5) * seconds / 8, on_core)
                for _ in range(320)
                for seconds, on_core in ((waiting, False), (working, True))
            ],
            16,
        )
        for _ in range(ranks)
    ]
    trainers = [Player([(computing, True), (idle, False)]) for _ in range(ranks)]
    now = 0.0
    while min(one.rounds for one in trainers) < 40:
        ready = min(one.rounds for one in loaders)
        began = min(one.rounds for one in trainers)
        for one in (*loaders, *trainers):
            if one.turn < 0:
                may = one.rounds <= began + 2 if one in loaders else one.rounds == began < ready
                one.turn, one.left = (one.at, one.turns[one.at][0]) if may else (-1, math.inf)
        busy = sum(one.turn >= 0 and one.turns[one.turn][1] for one in (*loaders, *trainers))
        rate = min(1.0, cores / max(busy, 1))
        paces = {
            id(one): rate if one.turn >= 0 and one.turns[one.turn][1] else 1.0
            for one in (*loaders, *trainers)
        }
        passed = min(one.left / paces[id(one)] for one in (*loaders, *trainers))
        now += passed
        for one in (*loaders, *trainers):
            one.left -= passed * paces[id(one)]
            while one.turn >= 0 and one.left <= 1e-9:
                one.turn += 1
                one.turn %= len(one.turns)
                one.left = one.turns[one.turn][0]
                if one.turn % one.round == 0:
                    one.at, one.turn, one.rounds = one.turn, -1, one.rounds + 1
                    one.ends.append(now)
    ends = trainers[0].ends
    return (ends[35] - ends[9]) / 26


def test_a_step_is_what_playing_every_moment_of_it_gives() -> None:
    for case in (
        (2, 2, 5.0, 2.5, 8.0, 2.0), (2, 2, 12.0, 4.0, 4.0, 2.0), (2, 2, 12.0, 10.0, 3.0, 1.0),
        (1, 1, 6.0, 3.0, 5.0, 1.0), (1, 1, 3.0, 3.0, 9.0, 1.0), (3, 2, 10.0, 8.0, 2.0, 1.0),
        (2, 1, 10.0, 8.0, 0.0, 3.0), (4, 4, 9.0, 3.0, 5.0, 0.0), (1, 2, 4.0, 2.0, 8.0, 1.0),
    ):  # fmt: skip
        found = stepped(*case)
        assert found == pytest.approx(played(*case), rel=0.055), case


def test_ranks_that_compute_where_loaders_prepare_wait_for_both() -> None:
    """Two ranks who take S for a step, and loaders, always at work, 1.1 S for a batch: together 2.1 S on two cores."""
    graph = mlp()
    program = lower(graph, seed_strategy(graph, Seed(data=2)))
    seconds = price(program, graph, cluster(1, 2), CostTable()).seconds
    seconds[program.kind == Kind.MESSAGE] = 0.0
    alone = simulate(program, seconds)
    size = graph.tensors[graph.inputs[0]].shape[0]
    rate = size / (1.1 * alone.step_seconds)  # of both ranks together, who read half each
    for cores, taken in ((2.0, 2.1), (4.0, 1.1), (0.0, 1.1)):
        rates = {"rank_input_rate": rate / 2, "host_input_rate": rate * (cores or 2.0) / 2}
        where = replace(cluster(1, 2), host_cores=cores, **rates)
        feeding = input_costs(program, graph, find_samples(graph), where)
        timeline, feeding = on_shared_cores(program, alone, feeding, where)
        step = with_input(program, timeline, feeding).step_seconds
        assert step == pytest.approx(taken * alone.step_seconds)
        assert f"takes {step:.3g} s for a step" in input_words(where, feeding, step, (0, 1))


def test_handing_batches_over_takes_cores_where_they_are_counted() -> None:
    graph = mlp()
    program = lower(graph, seed_strategy(graph, Seed(data=2)))
    where = replace(cluster(1, 2), rank_input_rate=1.0, rank_batch_seconds=0.5)
    for cores, expected in ((0.0, []), (4.0, [2 * 0.5 / 4.0])):
        found = input_costs(program, graph, find_samples(graph), replace(where, host_cores=cores))
        assert [one.seconds for one in found if one.kind == Kind.PREPARE] == expected
