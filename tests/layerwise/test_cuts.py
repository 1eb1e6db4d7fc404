"""Cuts of graphs against all subsets of layers."""

import dataclasses
import random

import numpy as np
import pytest

from shardwright.core.profile import LayerGraph, WorkerKind
from shardwright.layerwise import PipelineProblem, find_cuts, plan_exact
from tests.layerwise.oracle import closed_sets, crossing_bytes, random_graph


def members(mask):
    return frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)


@pytest.mark.parametrize("seed", range(40))
def test_cuts_are_all_sets_of_layers_closed_under_what_they_read(seed):
    graph = random_graph(random.Random(seed), most_layers=8)
    cuts = find_cuts(graph)
    assert cuts.is_complete
    assert {members(mask) for mask in cuts.masks} == set(closed_sets(graph))
    for i, mask in enumerate(cuts.masks):
        mine = [graph.layers[k] for k in members(mask)]
        assert cuts.crossing[i] == pytest.approx(crossing_bytes(graph, members(mask)))
        assert cuts.parameter[i] == pytest.approx(sum(layer.parameter_bytes for layer in mine))
        larger = cuts.larger[cuts.offset[i] : cuts.offset[i + 1]]
        inside = [k for k, other in enumerate(cuts.masks) if mask != other and mask & other == mask]
        assert list(larger) == inside
        assert all(k > i for k in inside)


@pytest.mark.parametrize("seed", range(40))
def test_where_there_are_too_many_some_valid_ones_are_kept(seed):
    graph = random_graph(random.Random(seed), most_layers=9)
    everything = set(closed_sets(graph))
    cuts = find_cuts(graph, most=6)
    kept = {members(mask) for mask in cuts.masks}
    assert kept <= everything
    assert {frozenset(), frozenset(range(len(graph.layers)))} <= kept
    assert cuts.is_complete == (len(everything) <= 6)
    assert np.all(np.diff(cuts.forward + cuts.backward) >= -1e-12)


def with_free_layers(rng):
    """Most layers take no time and have no weights, as views and sums in a profile."""
    graph = random_graph(rng, most_layers=9)
    layers = tuple(
        dataclasses.replace(layer, forward_seconds=0.0, backward_seconds=0.0, parameter_bytes=0.0)
        if rng.random() < 0.6
        else layer
        for layer in graph.layers
    )
    return LayerGraph(name="free", layers=layers, edges=graph.edges)


def test_the_least_crossed_of_each_family_of_cuts_give_the_optimum_without_a_memory_limit():
    """Whether a layer without time or weights is in a cut changes only what crosses it."""
    fewer = 0
    for seed in range(150):
        rng = random.Random(f"free {seed}")
        graph = with_free_layers(rng)
        busy = [i for i, layer in enumerate(graph.layers) if is_busy(layer)]
        families = {frozenset(busy) & cut for cut in closed_sets(graph)}
        every, some = find_cuts(graph), find_cuts(graph, most=max(len(families), 2))
        assert some.has_least_crossing
        fewer += some.num_cuts < every.num_cuts
        for formula in ("code", "paper", "published"):
            best, found = (
                plan_exact(
                    PipelineProblem(
                        cuts=cuts,
                        workers=(WorkerKind(count=4),),
                        bandwidth=1.0,
                        formula=formula,
                    )
                )
                for cuts in (every, some)
            )
            assert found.seconds == pytest.approx(best.seconds, rel=1e-9, abs=1e-12), seed
            assert found.bound == found.seconds
    assert fewer > 30


def is_busy(layer):
    return bool(layer.forward_seconds or layer.backward_seconds or layer.parameter_bytes)
