"""Random planning problems of at most a million plans, and every objective by trying all of them.

A problem is a few ways to arrange unequal, priced devices; each has a table of decisions with costs in
seconds and bytes. The brute force adds up the whole product space at once and sorts it; it shares nothing
with the solvers but the tables.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Mesh
from shardwright.errors import NoPlan
from shardwright.layerwise import plan_exact
from shardwright.planner.model.context import Context
from shardwright.planner.model.problem import Problem
from shardwright.planner.model.terms import Weights
from shardwright.planner.model.training import Training
from shardwright.planner.solve.frontier import hull
from shardwright.reasons.factors import Factor, FactorGraph, factor_graph
from tests.layerwise.oracle import best_price, random_problem
from tests.planner.search.models import cluster, mlp
from tests.planner.solve.pareto import Front, front, union
from tests.planner.solve.whole import fastest_within, whole_frontier

MOST_PLANS = 10**6
CLOSE = 1e-9
Costs = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Instance:
    """Arrangements: a table of decisions and the dollars per second of its devices each."""

    arrangements: tuple[tuple[FactorGraph, float], ...]

    @property
    def num_plans(self) -> int:
        return sum(math.prod(graph.sizes) for graph, _ in self.arrangements)


def random_tables(rng: random.Random) -> Instance:
    """Random decisions on devices of random speeds and prices: a group waits for its slowest."""
    devices = [(rng.choice([0.5, 1.0, 1.0, 3.0]), rng.choice([1.0, 2.0])) for _ in range(8)]
    arrangements: list[tuple[FactorGraph, float]] = []
    most = rng.choice([10**3, 10**4, 3 * 10**5])
    for count in rng.sample([1, 2, 4, 8], rng.randint(1, 3)):
        group = rng.sample(devices, count)
        scale = 1 / (count * min(speed for speed, _ in group))
        graph = _random_graph(rng, most, scale, 1e9 / count)
        arrangements.append((graph, sum(price for _, price in group)))
    return Instance(tuple(arrangements))


def _random_graph(rng: random.Random, most: int, seconds: float, size: float) -> FactorGraph:
    numbers = np.random.default_rng(rng.randrange(2**32))
    sizes: list[int] = []
    while len(sizes) < 14 and math.prod(sizes) * 6 <= most:
        sizes.append(rng.randint(1, 6))
    is_whole = rng.random() < 0.5  # equal sums, so that ties are tried too
    count = len(sizes)
    scopes = [(v,) for v in range(count)]
    for v in range(1, count):
        scopes += [tuple(sorted({u, v})) for u in rng.sample(range(v), min(v, rng.randint(1, 2)))]
    if count > 2 and rng.random() < 0.3:
        scopes.append(tuple(sorted(rng.sample(range(count), 3))))
    factors: list[Factor] = []
    for scope in scopes:
        shape = tuple(sizes[v] for v in scope)
        if is_whole:
            time, memory = (numbers.integers(0, 5, shape) * 1.0 for _ in range(2))
        else:
            time, memory = numbers.random(shape) * seconds, numbers.random(shape) * size
        time = np.where(numbers.random(shape) < 0.05, np.inf, time)
        factors.append(Factor(scope, time, memory))
    return FactorGraph(tuple(sizes), tuple(factors))


def random_model(rng: random.Random) -> Instance:
    """A small model on a random cluster of two kinds of devices, as the search states it."""
    while True:
        graph = mlp(batch=8, width=rng.choice([8, 32, 256]), depth=rng.randint(1, 2), classes=8)
        machine = _unequal(rng)
        found: list[tuple[FactorGraph, float]] = []
        for sizes in rng.sample([(2,), (4,), (2, 2), (1,)], 2):
            one = _stated(rng, graph, machine, sizes)
            if math.prod(one.sizes) <= MOST_PLANS // 2:
                devices = tuple(range(math.prod(sizes)))
                found.append((one, machine.dollars_per_second(devices)))
        if found:
            return Instance(tuple(found))


def _stated(
    rng: random.Random, graph: OperatorGraph, machine: Cluster, sizes: tuple[int, ...]
) -> FactorGraph:
    axes = ("data", "tensor") if len(sizes) == 2 else ("tensor",)
    mesh = Mesh(axes=axes, sizes=sizes, devices=tuple(range(math.prod(sizes))))
    training = Training(recompute=rng.choice(["auto", "none"]))
    problem = Problem.of(
        Context.of(graph, machine, CostTable(), training), mesh, rng.choice([1, 2])
    )
    weights = Weights(
        each=rng.choice([1.0, 2.0]),
        once=1.0,
        exposed=(share := rng.choice([0.05, 0.5, 1.0])),
        synced=share,
    )
    return factor_graph(problem, weights)


def _unequal(rng: random.Random) -> Cluster:
    machine = cluster(
        2, 2, flops=rng.choice([1e9, 1e12, 1e14]), near=rng.choice([1e8, 1e10]),
        far=rng.choice([1e7, 1e9]),
    )  # fmt: skip
    kind = machine.kinds[0]
    slow = rng.choice([0.2, 0.5, 1.0])
    other = replace(
        kind, name="other", peak_flops=tuple((n, slow * r) for n, r in kind.peak_flops),
        memory_bandwidth=kind.memory_bandwidth * rng.choice([0.3, 1.0]),
    )  # fmt: skip
    devices = tuple(replace(one, kind=rng.randint(0, 1)) for one in machine.devices)
    return replace(machine, kinds=(kind, other), devices=devices)


def every_plan(instance: Instance) -> Costs:
    """Return (seconds, bytes, dollars) of every plan that is allowed."""
    rows: list[Costs] = []
    for graph, price in instance.arrangements:
        total = np.zeros((2, *graph.sizes))
        for factor in graph.factors:
            shape = [graph.sizes[v] if v in factor.scope else 1 for v in range(len(graph.sizes))]
            total[0] += factor.seconds.reshape(shape)
            total[1] += factor.bytes.reshape(shape)
        flat = total.reshape(2, -1).T
        flat = flat[np.isfinite(flat[:, 0])]
        rows.append(np.column_stack([flat, price * flat[:, 0]]))
    return np.concatenate(rows)


def mismatches(instance: Instance, rng: random.Random) -> list[str]:
    """Return the objectives in which solvers and brute force differ."""
    plans = every_plan(instance)
    seconds, memory, dollars = _optima(instance)
    wrong: list[str] = []
    for name, found, column in (
        ("time", seconds, 0), ("memory", memory, 1), ("money", dollars, 2),
    ):  # fmt: skip
        if not _same(found, plans[:, column].min(initial=math.inf)):
            wrong.append(name)
    if len(plans):
        low, high = plans[:, 1].min(), plans[:, 1].max()
        for share in (rng.random(), rng.random() ** 3):
            wrong += _within(instance, plans, low + share * (high - low))
    whole = [whole_frontier(graph).points for graph, _ in instance.arrangements]
    parts = [
        np.array([(p.seconds, p.bytes, price * p.seconds) for p in points]).reshape(-1, 3)
        for points, (_, price) in zip(whole, instance.arrangements, strict=True)
    ]
    flat = union([front(part[:, :2]) for part in parts])
    if not _alike(flat, _by_sorting(plans[:, :2])):
        wrong.append("frontier of time and memory")
    if not _alike(union([front(part) for part in parts]), _by_sorting(plans)):
        wrong.append("frontier of time, memory and money")
    return wrong


def _optima(instance: Instance) -> tuple[float, float, float]:
    best = [math.inf] * 3
    for graph, price in instance.arrangements:
        solved = graph.elimination().solve(np.array([(1.0, 0.0), (0.0, 1.0)]))
        seconds, memory = float(solved.values[0]), float(solved.values[1])
        best = [min(best[0], seconds), min(best[1], memory), min(best[2], price * seconds)]
    return best[0], best[1], best[2]


def _within(instance: Instance, plans: Costs, limit: float) -> list[str]:
    """Check the fastest plan within a limit, and that no bound lies above it."""
    best = plans[plans[:, 1] <= limit * (1 + 1e-12), 0].min(initial=math.inf)
    points = [fastest_within(graph, limit) for graph, _ in instance.arrangements]
    found = min((point.seconds for point in points if point is not None), default=math.inf)
    wrong = [] if _same(found, best) else ["time within a memory limit"]
    bound = min(
        hull(graph.elimination(), 2, limit).bound(limit) for graph, _ in instance.arrangements
    )
    return [*wrong, "lower bound"] if bound > best * (1 + CLOSE) else wrong


def _same(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= CLOSE * abs(other)


def _by_sorting(costs: Costs) -> Costs:
    """Return the non-dominated costs: of what is left the first in order stays, and all that is
    nowhere better goes."""
    rest = np.unique(costs, axis=0)
    kept: list[Costs] = []
    while len(rest):
        kept.append(rest[0])
        rest = rest[np.any(rest < rest[0] * (1 - 1e-12), axis=1)]
    return np.array(kept).reshape(-1, costs.shape[1])


def _alike(found: Front, expected: Costs) -> bool:
    """Whether two fronts agree but for rounding: each point has one of the other close to it."""
    for some, others in ((found.costs, expected), (expected, found.costs)):
        for row in some:
            if not np.isclose(others, row, rtol=CLOSE, atol=0).all(axis=1).any():
                return False
    return True


def pipeline_mismatches(rng: random.Random) -> list[str]:
    """Hold the exact pipeline planner against every pipeline, workers of two kinds among them."""
    graph, problem = random_problem(rng, most_layers=6, most_workers=4)
    expected = best_price(graph, problem)
    try:
        found = plan_exact(problem).seconds
    except NoPlan:
        found = math.inf
    return [] if _same(found, expected) else ["pipeline"]
