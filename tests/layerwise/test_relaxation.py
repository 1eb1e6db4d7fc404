"""What helps where no pipeline fits: it really does, and less of it does not."""

from __future__ import annotations

import dataclasses
import math
import random

from shardwright.layerwise import PipelineProblem, relaxations
from tests.layerwise.oracle import best_price, random_problem


def test_the_least_memory_and_the_fewest_workers_are_those_of_brute_force() -> None:
    memories = workers = 0
    for seed in range(300):
        graph, problem = random_problem(random.Random(seed), most_layers=5, most_workers=2)
        finite = all(kind.memory_bytes < math.inf for kind in problem.workers)
        if not finite or best_price(graph, problem) < math.inf:
            continue
        for one in relaxations(problem, (problem.schedule,)):
            if "times the memory" in one.what:
                times = float(one.what.split(" ")[0])
                assert best_price(graph, richer(problem, times * 1.001)) < math.inf
                assert best_price(graph, richer(problem, times / 1.01)) == math.inf
                memories += 1
            elif "workers instead of" in one.what:
                total = int(one.what.split(" ")[0])
                extra = total - problem.num_workers
                assert best_price(graph, more(problem, extra)) < math.inf
                assert best_price(graph, more(problem, extra - 1)) == math.inf
                workers += 1
    assert memories >= 10
    assert workers >= 1


def richer(problem: PipelineProblem, times: float) -> PipelineProblem:
    kinds = tuple(
        dataclasses.replace(kind, memory_bytes=kind.memory_bytes * times)
        for kind in problem.workers
    )
    return dataclasses.replace(problem, workers=kinds)


def more(problem: PipelineProblem, extra: int) -> PipelineProblem:
    *others, last = problem.workers
    last = dataclasses.replace(last, count=last.count + extra)
    return dataclasses.replace(problem, workers=(*others, last))
