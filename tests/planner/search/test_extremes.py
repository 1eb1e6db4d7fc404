"""Models and clusters at the ends of what people plan: minutes once, now a bounded time and memory."""

from __future__ import annotations

import resource

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.files.clusterfile import parse_cluster
from shardwright.planner.search import Survey, survey
from tests.planner.search.models import mlp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
GIB = 2**30


def planned(graph: OperatorGraph, cluster: str) -> Survey:
    """Plan to the end, within a memory of 2 GiB more than there was."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = survey(graph, parse_cluster(cluster), CostTable()).settled()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < 2 * GIB
    return found


def test_hundreds_of_layers() -> None:
    found = planned(mlp(batch=64, width=64, depth=500), "1x2xH100")
    assert len(found.frontier.best.strategy.configs) > 500


def test_billions_of_samples() -> None:
    assert planned(mlp(batch=2**31), "2x8xH100").frontier.best.predicted.step_seconds > 0
