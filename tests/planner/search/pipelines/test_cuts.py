"""Cuts of graphs against all subsets of layers."""

import random

import numpy as np
import pytest

from shardwright.planner.search.pipelines import find_cuts
from tests.planner.search.pipelines.oracle import closed_sets, crossing_bytes, random_graph


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
