"""Small random profiles, and every pipeline of them tried one by one.

Written from docs/guides/pipelines.md alone, with sets and loops.
"""

import itertools
import math
import random

from shardwright.core.profile import Layer, LayerGraph, WorkerKind
from shardwright.layerwise import PipelineProblem, find_cuts

SCHEDULES = ("pipedream", "gpipe", "1f1b-sno", "1f1b-so", "1f1b-as", "fbp-as")


def eighths(number):
    """Bytes that add up exactly: what just fits would else depend on the order of additions. Seconds are none of a few
    binary digits then, which halve to what rounding makes of them."""
    return round(8 * number) / 8


def random_graph(rng, most_layers=6, chain=False):
    count = rng.randint(1, most_layers)
    layers = tuple(
        Layer(
            name=f"layer{i}",
            forward_seconds=rng.choice([0.0, 1.0, 2.0, eighths(rng.random() * 3)]),
            backward_seconds=rng.choice([0.0, 2.0, eighths(rng.random() * 5)]),
            activation_bytes=rng.choice([0.0, 1.0, eighths(rng.random() * 8)]),
            parameter_bytes=rng.choice([0.0, 0.0, 1.0, eighths(rng.random() * 8)]),
        )
        for i in range(count)
    )
    if chain:
        edges = tuple((i, i + 1) for i in range(count - 1))
    else:
        pairs = itertools.combinations(range(count), 2)
        edges = tuple(pair for pair in pairs if rng.random() < 0.5)
    names = list(range(count))
    rng.shuffle(names)  # positions in the file say nothing about the order of work
    moved = sorted(range(count), key=names.__getitem__)
    return LayerGraph(
        name="random",
        layers=tuple(layers[i] for i in moved),
        edges=tuple((names[a], names[b]) for a, b in edges),
    )


def random_problem(rng, most_layers=6, most_workers=4, chain=False, most_shards=1):
    """A graph and a problem about it; half of them limit the memory, a third mix two kinds."""
    graph = random_graph(rng, most_layers, chain)
    kinds = 1 if rng.random() < 0.67 else 2
    workers = tuple(
        WorkerKind(
            count=rng.randint(1, most_workers // kinds),
            speed=rng.choice([1.0, 1.0, 0.5, 2.0]),
            # No share of eighths among so few workers is as large.
            memory_bytes=rng.choice([math.inf, eighths(rng.uniform(2, 60)) + 0.03]),
        )
        for _ in range(kinds)
    )
    schedule = rng.choice(("pipedream", *SCHEDULES))
    return graph, PipelineProblem(
        cuts=find_cuts(graph),
        workers=workers,
        bandwidth=rng.choice([0.5, 2.0, 10.0, 1e6]),
        schedule=schedule,
        microbatches=0 if schedule == "pipedream" else rng.randint(1, 9),
        formula=rng.choice(("code", "paper")),
        shards=rng.randint(1, most_shards),
    )


def closed_sets(graph):
    """Every set of layers that has what its layers read."""
    for bits in itertools.product((False, True), repeat=len(graph.layers)):
        if all(bits[a] or not bits[b] for a, b in graph.edges):
            yield frozenset(i for i, bit in enumerate(bits) if bit)


def every_way(count, most):
    """Every (shards of a replica, whether replicas split the weights) of so many workers."""
    for shards in range(1, min(count, most) + 1):
        if count % shards == 0:
            yield shards, False
            if shards < count <= most:
                yield shards, True


def every_pipeline(graph, problem):
    """Every list of stages (set of layers, workers of each kind, shards, whether weights are split)
    with growing sets, ending with all layers."""
    sets = list(closed_sets(graph))
    everything = frozenset(range(len(graph.layers)))

    def go_on(done, left):
        if done == everything:
            yield []
            return
        for larger in sets:
            if done < larger:
                for used in itertools.product(*(range(n + 1) for n in left)):
                    rest = tuple(n - u for n, u in zip(left, used, strict=True))
                    for way in every_way(sum(used), problem.shards):
                        for tail in go_on(larger, rest):
                            yield [(larger, used, *way), *tail]

    return go_on(frozenset(), tuple(kind.count for kind in problem.workers))


def crossing_bytes(graph, done):
    return sum(
        layer.activation_bytes
        for i, layer in enumerate(graph.layers)
        if i in done and any(a == i and b not in done for a, b in graph.edges)
    )


def held(schedule, replicas, from_here, microbatches):
    ahead = (from_here - 1) // replicas
    most = math.ceil(microbatches / replicas)
    return {
        "pipedream": ahead + 1,
        "gpipe": most,
        "1f1b-sno": min(most, ahead + 1),
        "1f1b-as": min(most, ahead + 1),
        "1f1b-so": min(most, 2 * ahead + 1),
        "fbp-as": min(most, 2 * ahead + 2),
    }[schedule]


def read_bytes(graph, layers):
    """What the layers with weights among some read, each for itself."""
    return {
        b: sum(graph.layers[a].activation_bytes for a, to in set(graph.edges) if to == b)
        if graph.layers[b].parameter_bytes
        else 0.0
        for b in layers
    }


def all_reduce(problem, workers, size):
    if problem.formula != "paper":
        return 4 * (workers - 1) * size / (workers * problem.bandwidth)
    return 2 * (workers - 1) * size / problem.bandwidth


def busy(problem, forward, backward, message, x, replicas):
    """Busy seconds of a stage; x: seconds of its larger transfer."""
    compute = forward + backward
    if problem.schedule == "pipedream" and problem.formula != "paper":
        return max((compute + message) / replicas, 2 * x / replicas)
    if problem.schedule == "pipedream":
        return max(compute / replicas, message / replicas, 2 * x)
    rounds = math.ceil(problem.microbatches / replicas)
    if problem.schedule == "1f1b-sno":
        return rounds * (compute + 2 * x) + message
    if problem.schedule == "1f1b-as":
        return rounds * (max(forward, x) + max(backward, x)) + message
    return max(rounds * compute + message, rounds * 2 * x)


def price(graph, problem, stages):
    """Seconds of a pipeline, or infinity where a worker's memory is too small."""
    lanes = sum(sum(used) // shards for _, used, shards, _ in stages)
    done, slowest, step, passed = frozenset(), 0.0, 0.0, 0.0
    everything = range(len(graph.layers))
    for larger, used, shards, splits in stages:
        mine = [graph.layers[i] for i in larger - done]
        kinds = [kind for kind, n in zip(problem.workers, used, strict=True) if n]
        speed = min(kind.speed for kind in kinds)
        replicas = sum(used) // shards
        forward = sum(layer.forward_seconds for layer in mine) / speed / shards
        backward = sum(layer.backward_seconds for layer in mine) / speed / shards
        weights = sum(layer.parameter_bytes for layer in mine) / shards
        read = sum(read_bytes(graph, larger - done).values())
        message = all_reduce(problem, replicas, weights)
        third = all_reduce(problem, shards, read) / 2
        if splits:
            third, message = third + message / 2, 0.0
        forward, backward = forward + third, backward + 2 * third
        incoming, outgoing = crossing_bytes(graph, done), crossing_bytes(graph, larger)
        x = max(incoming, outgoing) / problem.bandwidth / shards
        if problem.formula == "published" and not done:
            x = 0.0  # the published optimizer forgets what the first stage sends
        mine_busy = busy(problem, forward, backward, message, x, replicas)
        slowest = max(slowest, mine_busy)
        step = max(step, passed + mine_busy)
        passed += forward + backward
        step = max(step, passed)
        passed += 2 * outgoing / problem.bandwidth / shards  # the first microbatch's way, and back
        count = held(problem.schedule, replicas, lanes, problem.microbatches)
        copies = count + 1 if problem.schedule == "pipedream" else 2
        size = copies * weights / (replicas if splits else 1)
        size += count * (sum(layer.activation_bytes for layer in mine) + incoming) / shards
        if shards > 1:
            size += min(read, max(read_bytes(graph, everything).values()))
        if splits:
            largest = max(layer.parameter_bytes for layer in graph.layers) / shards
            size += min(weights, largest)
        if size > min(kind.memory_bytes for kind in kinds) * (1 + 1e-12):
            return math.inf
        done, lanes = larger, lanes - replicas
    return step if problem.microbatches else slowest


def best_price(graph, problem):
    return min(price(graph, problem, each) for each in every_pipeline(graph, problem))


def seeds(count, start=0):
    return [random.Random(seed) for seed in range(start, start + count)]
