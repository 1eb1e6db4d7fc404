"""Law: what a plan's label claims is so, and no two plans of a frontier share one.

Claims are checked against the shapes that the lowered program runs: nothing of how labels are made.
"""

from __future__ import annotations

import math
import os
import re
from random import Random

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.errors import NoPlan
from shardwright.operators.splitting import find_samples
from shardwright.planner.lower import lower
from shardwright.planner.search import Limits, Survey, survey
from shardwright.verbs.narrate import axis_words
from tests.planner.search.models import cluster, images, mlp, opaque, residual, squares

MANY = "SHARDWRIGHT_LAWS" in os.environ
pytestmark = [] if MANY else [pytest.mark.usefixtures("short_climbs")]
FRONTIERS = 40 if MANY else 5
DEGREES = re.compile(r"([a-z]+(?: parallel| split)?) x (\d+(?: x \d+)*)")
GRID = re.compile(r"^(from )?(summa|tesseract|cube) ")


def searched(seed: int) -> tuple[OperatorGraph, Survey | None]:
    """Search for a drawn model on a drawn cluster, one so slow that dividing work pays."""
    random = Random(seed)
    width = random.choice((8, 16, 64))
    graph = (
        mlp(random.choice((4, 8)), width, random.randint(1, 3)),
        residual(random.choice((2, 4, 8)), width, random.randint(1, 2)),
        images(random.choice((1, 2)), 32, 1),
        squares(8, 16, 2),
        opaque(8),
    )[seed % 5]
    where = cluster(
        *random.choice(((1, 2), (1, 4), (2, 2), (1, 8))),
        memory=random.choice((80e9, 10 ** random.uniform(3.5, 6))),
        flops=10 ** random.uniform(7.5, 11),
        near=10 ** random.uniform(8, 11),
        far=10 ** random.uniform(8, 10),
    )
    try:
        return graph, survey(graph, where, CostTable(), limits=Limits(max_candidates=3))
    except NoPlan:
        return graph, None


def ratios(graph: OperatorGraph, strategy: Strategy) -> tuple[set[int], set[int]]:
    """Return by how much smaller than whole some device reads parameters, and samples of the batch."""
    program, samples = lower(graph, strategy), find_samples(graph)
    weights, rows = set[int](), set[int]()
    for segment in program.segments:
        for call in segment.calls:
            for tensor, value in zip(
                graph.operators[call.operator].inputs, call.operands, strict=True
            ):
                spec, local = graph.tensors[tensor], program.values[value].shape
                if spec.role == "parameter":
                    weights.add(math.prod(spec.shape) // math.prod(local))
                elif spec.role == "input" and samples.tensor_dim[tensor] == 0:
                    rows.add(spec.shape[0] // local[0])
    return weights, rows


def wrong_claims(graph: OperatorGraph, strategy: Strategy) -> list[str]:
    label, count = strategy.label, strategy.pipeline.num_microbatches
    weights, rows = ratios(graph, strategy)
    said: dict[str, int] = {}
    for match in DEGREES.finditer(label):
        said[match[1]] = math.prod(map(int, match[2].split(" x ")))
    groups = len({mesh.devices for mesh in strategy.meshes})
    stages = re.search(r"pipeline x (\d+)|(\d+) stages|on (\d+) groups", label)
    named = re.search(r"(\d+) microbatches", label)
    are_split, is_grid = max(weights, default=1) > 1, bool(GRID.match(label))
    claims = is_grid or any(f"{word} parallel" in said for word in ("tensor", "hybrid", "expert"))
    words = axis_words(strategy, graph)
    found = {
        "weights are split": are_split == claims or ("hybrid parallel" in said and claims),
        "explain says so": are_split == any("weights" in word for mesh in words for word in mesh),
        "microbatches": int(named[1] if named else 1) == count,
        "stages": int(next(filter(None, stages.groups())) if stages else 1) == groups,
    }
    if " and " not in label and "groups of devices" not in label:  # one mesh, or equal stages
        degrees = math.prod(size for word, size in said.items() if word != "pipeline")
        found["devices"] = is_grid or degrees * groups == len(strategy.devices)
        data = said.get("data parallel", 1) * count
        found["samples are split"] = any(row % data == 0 for row in rows) or data == 1
    return [what for what, holds in found.items() if not holds]


@pytest.mark.parametrize("seed", range(FRONTIERS))
def test_every_label_says_what_the_program_splits(seed: int) -> None:
    graph, found = searched(seed)
    if found is None:
        return
    plans = [plan.strategy for plan in found.frontier.plans]
    assert len({one.label for one in plans}) == len(plans)
    for strategy in {*plans, *(one.strategy for one in found.findings.evaluations)}:
        assert wrong_claims(graph, strategy) == [], strategy.label
