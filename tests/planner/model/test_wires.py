"""Messages are priced by the steps that lowering would write."""

import itertools

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.layout import PARTIAL, REPLICATE
from shardwright.core.strategy import Mesh
from shardwright.planner.model.context import Context
from shardwright.planner.model.messages import MessageCosts
from shardwright.planner.model.training import Training
from shardwright.planner.space import reshard_steps
from tests.planner.search.models import cluster, mlp


@pytest.mark.parametrize("shape", [(64, 128, 32), (8, 4, 4096)])
def test_two_axis_reshards_cost_what_their_steps_cost(shape: tuple[int, ...]) -> None:
    context = Context.of(mlp(), cluster(2, 4), CostTable(), Training())
    mesh = Mesh(axes=("data", "tensor"), sizes=(2, 4), devices=tuple(range(8)))
    wires = MessageCosts(context.cluster, context.table, context.prices.message_seconds, mesh)
    places = (REPLICATE, PARTIAL, 0, 1, 2)
    checked = 0
    for source, target in itertools.product(itertools.product(places, places), repeat=2):
        try:
            steps = reshard_steps(shape, "float32", source, target, mesh.sizes)
        except ValueError:
            assert wires.reshard(shape, "float32", source, target) == float("inf")
            continue
        expected = sum(wires.message(step.primitive, step.axes, step.bytes) for step in steps)
        assert wires.reshard(shape, "float32", source, target) == pytest.approx(expected)
        checked += 1
    assert checked > 100
