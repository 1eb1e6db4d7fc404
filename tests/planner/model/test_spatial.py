"""Spatial parallelism by name and in the search, and what its halos cost."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.core.costs import CostTable
from shardwright.core.layout import local_shape
from shardwright.core.program import Kind
from shardwright.errors import InputError
from shardwright.planner.cost import price
from shardwright.planner.judge.evaluate import evaluate
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.model.messages import MessageCosts
from shardwright.planner.search import Limits, Training, search
from shardwright.planner.search.asked import asked_for
from shardwright.planner.search.named import least_seconds, named_strategies
from shardwright.planner.space.seeds import Seed, seed_strategy
from tests.planner.search.models import cluster, images, mlp

pytestmark = pytest.mark.usefixtures("short_climbs")
SLOW = {"flops": 1e11, "near": 1e10, "far": 1e9}


def context(devices: int) -> Context:
    graph = images(2, size=128, channels=16)
    return Context.of(graph, cluster(1, devices, **SLOW), CostTable(), Training())


@pytest.mark.parametrize(
    ("devices", "text", "sizes"),
    [
        (4, "spatial", (1, 4)),
        (8, "spatial:2x4", (2, 4)),
        (4, "spatial-2d", (1, 2, 2)),
        (8, "spatial-2d:2x4x1", (2, 4)),
    ],
)
def test_a_name_gives_strips_or_tiles(devices: int, text: str, sizes: tuple[int, ...]) -> None:
    few = asked_for(context(devices), text).few
    assert few.meshes[0].sizes == sizes


def test_models_without_images_are_refused() -> None:
    known = Context.of(mlp(), cluster(1, 4), CostTable(), Training())
    with pytest.raises(InputError, match="spatial splits the height of images"):
        asked_for(known, "spatial")


def test_a_convolutional_model_is_held_against_spatial_parallelism() -> None:
    labels = {named.few.label for named in named_strategies(context(4))}
    assert "spatial parallel x 4" in labels


def test_where_samples_are_few_the_search_splits_images() -> None:
    known = context(8)
    frontier = search(known.graph, known.cluster, CostTable(), limits=Limits(max_candidates=4))
    best = frontier.best
    assert any("h" in config.dims for config in best.strategy.configs)
    assert "spatial parallel" in best.strategy.label
    assert best.bound is None or best.bound.step_seconds <= best.predicted.step_seconds


@pytest.mark.parametrize("seed", [Seed(height=4), Seed(height=2, width=2), Seed(data=2, height=2)])
def test_the_search_prices_halos_as_the_simulator_does(seed: Seed) -> None:
    known = context(4)
    strategy = seed_strategy(known.graph, seed)
    program = lower(known.graph, strategy)
    seconds = price(program, known.graph, known.cluster, CostTable()).seconds
    halos = [number for number, m in enumerate(program.messages) if m.primitive == "halo"]
    is_halo = (program.kind == Kind.MESSAGE) & np.isin(program.item, halos)
    wires = MessageCosts(
        known.cluster, known.table, known.prices.message_seconds, strategy.meshes[0]
    )
    expected = 0.0
    for index, operator in enumerate(known.graph.operators):
        for tensor, pair in zip(
            operator.inputs,
            known.facts.placements(index, strategy.configs[index].dims).inputs,
            strict=True,
        ):
            spec = known.graph.tensors[tensor]
            if pair.halos and spec.producer >= 0:
                local = local_shape(spec.shape, pair.value, strategy.meshes[0].sizes)
                expected += wires.halos(local, spec.dtype, pair.halos)
    assert seconds[is_halo].sum() == pytest.approx(expected)
    assert expected > 0


@pytest.mark.parametrize("text", ["spatial", "spatial-2d", "spatial:2x2"])
def test_the_lower_bound_of_a_spatial_plan_is_below_its_simulation(text: str) -> None:
    known = context(4)
    for strategy in asked_for(known, text):
        assert least_seconds(known, strategy) <= evaluate(known, strategy).seconds
