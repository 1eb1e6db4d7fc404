"""Small random wide problems, and two oracles: trying everything, and HiGHS."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import highspy
import numpy as np

from shardwright.planner.solve.wide.problem import WideProblem


def random_problem(
    seed: int,
    num_nodes: int = 5,
    num_edges: int = 7,
    most: int = 3,
    num_times: int = 6,
    forbidden: float = 0.15,
) -> WideProblem:
    """Return a problem with parallel and turned edges, forbidden pairs, and empty intervals."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most + 1, num_nodes)
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    cost = rng.integers(0, 30, first[-1]).astype(float)
    usage = rng.integers(0, 10, first[-1]).astype(float)
    begin = rng.integers(0, num_times, num_nodes)
    end = np.minimum(begin + rng.integers(0, num_times, num_nodes), num_times)
    ends = [rng.choice(num_nodes, 2, replace=False) for _ in range(num_edges)]
    tables = [rng.integers(0, 40, sizes[a] * sizes[b]).astype(float) for a, b in ends]
    for table in tables:
        table[rng.random(len(table)) < forbidden] = np.inf
    starts = np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int64)
    shell = WideProblem(
        first=first, cost=cost, usage=usage, begin=begin, end=end,
        ends=np.array(ends, dtype=np.int64).reshape(-1, 2), table=starts[:-1],
        cells=np.concatenate([np.zeros(0), *tables]), limit=np.inf, base=np.zeros(num_times),
    )  # fmt: skip
    frugal = [int(usage[a:b].argmin()) for a, b in itertools.pairwise(first)]
    return with_limit(shell, float(math.ceil(peak(shell, np.array(frugal)) * 1.15)))


def with_limit(problem: WideProblem, limit: float) -> WideProblem:
    """Return the problem under another limit."""
    return replace(problem, limit=limit)


def cost(problem: WideProblem, choice: np.ndarray) -> float:
    """Return the cost, spelled out."""
    sizes = [int(b - a) for a, b in zip(problem.first[:-1], problem.first[1:], strict=True)]
    total = sum(problem.cost[problem.first[i] + s] for i, s in enumerate(choice))
    for (a, b), start in zip(problem.ends, problem.table, strict=True):
        total += problem.cells[start + choice[a] * sizes[b] + choice[b]]
    return float(total)


def peak(problem: WideProblem, choice: np.ndarray) -> float:
    """Return the largest usage at any time, spelled out."""
    used = problem.base.copy()
    for i, s in enumerate(choice):
        for time in range(problem.begin[i], problem.end[i]):
            used[time] += problem.usage[problem.first[i] + s]
    return float(used.max(initial=0.0))


def optimum(problem: WideProblem) -> float:
    """Return the least cost within the limit by trying everything; infinite where nothing is."""
    sizes = np.diff(problem.first)
    best = math.inf
    for choice in itertools.product(*(range(size) for size in sizes)):
        value = cost(problem, np.array(choice))
        if value < best and peak(problem, np.array(choice)) <= problem.limit:
            best = value
    return best


def highs_optimum(problem: WideProblem) -> float:
    """Return the least cost as HiGHS finds it, by the local marginal polytope with integers."""
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    sizes = np.diff(problem.first)
    picks = [
        [model.addBinary(obj=float(problem.cost[problem.first[i] + s])) for s in range(sizes[i])]
        for i in range(problem.num_nodes)
    ]
    for row in picks:
        model.addConstr(sum(row) == 1)
    for (a, b), start in zip(problem.ends, problem.table, strict=True):
        table = problem.cells[start : start + sizes[a] * sizes[b]].reshape(sizes[a], sizes[b])
        both = [
            [
                model.addVariable(0, 1, obj=value)
                if np.isfinite(value)
                else model.addVariable(0, 0)
                for value in row.tolist()
            ]
            for row in table
        ]
        for s in range(sizes[a]):
            model.addConstr(sum(both[s]) == picks[a][s])
        for t in range(sizes[b]):
            model.addConstr(sum(row[t] for row in both) == picks[b][t])
    for time in range(len(problem.base)):
        alive = [i for i in range(problem.num_nodes) if problem.begin[i] <= time < problem.end[i]]
        terms = [
            float(problem.usage[problem.first[i] + s]) * picks[i][s]
            for i in alive
            for s in range(sizes[i])
        ]
        if terms:
            model.addConstr(sum(terms) <= problem.limit)
    model.minimize()
    assert model.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(model.getInfo().objective_function_value)
