"""Alternatives that a user names: what is named is kept, what is open is searched."""

from __future__ import annotations

from functools import cache

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.plan import Plan
from shardwright.errors import InputError
from shardwright.operators.splitting import find_samples
from shardwright.planner.search import Limits, Training, search
from shardwright.reasons import Wish, why_not
from tests.planner.search.models import cluster, opaque, residual

pytestmark = pytest.mark.usefixtures("short_climbs")

GRAPH = residual(batch=64, width=64, depth=1, classes=16)
FEW = Limits(max_candidates=2)
MACHINE = cluster(1, 8, flops=1e10, near=1e9, far=1e8)


@cache
def found(limits: Limits = FEW, **wish: object) -> Plan:
    return why_not(GRAPH, MACHINE, CostTable(), Wish(**wish), limits=limits)


@pytest.mark.parametrize(
    ("wish", "sizes", "stages"),
    [
        ({"tensor": 4}, {"data": 2, "tensor": 4}, 1),
        ({"tensor": 2, "data": 2}, {"data": 2, "tensor": 2}, 1),
        ({"stages": 2}, {"data": 4}, 2),
        ({"data": 8, "zero": 2}, {"data": 8}, 1),
        ({"seed_plan": "summa:2x2"}, {"row": 2, "column": 2}, 1),
    ],
)
def test_the_degrees_are_those_that_were_named(
    wish: dict[str, object], sizes: dict[str, int], stages: int
) -> None:
    strategy = found(**wish).strategy
    assert len(strategy.meshes) == stages
    if "seed_plan" not in wish:
        mesh = strategy.meshes[0]
        assert dict(zip(mesh.axes, mesh.sizes, strict=True)) == sizes
    assert strategy.meshes[0].sizes == tuple(sizes.values())


def test_an_alternative_that_is_not_compressed_is_searched_as_such() -> None:
    machine = cluster(4, 1, flops=1e9, near=1e9, far=1e8)
    sent = [
        why_not(
            GRAPH,
            machine,
            CostTable(),
            Wish(data=4),
            training=Training(least_sent=share),
            limits=FEW,
        )
        for share in (1.0, 0.01)
    ]
    assert sent[0].strategy == sent[1].strategy


@pytest.mark.parametrize("wish", [{"tensor": 8}, {"tensor": 4, "data": 2}, {"tensor": 4}])
def test_a_tensor_degree_splits_no_samples(wish: dict[str, int]) -> None:
    strategy, samples = found(**wish).strategy, find_samples(GRAPH).operator_dim
    split = [config.dims[-1] for config in strategy.configs]
    assert strategy.meshes[0].axes[-1] == "tensor"
    assert any(split)
    assert not any(one == sample for one, sample in zip(split, samples, strict=True) if one)


def test_a_tensor_degree_that_splits_nothing_is_refused() -> None:
    graph = residual(batch=64, width=18, depth=2, classes=9)
    wish = Wish(tensor=8, data=1)
    with pytest.raises(InputError, match="tp 8 splits operators"):
        why_not(graph, MACHINE, CostTable(), wish)


def test_a_data_degree_that_splits_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="dp 8 splits samples over so many devices"):
        why_not(opaque(), MACHINE, CostTable(), Wish(data=8))


def test_microbatches_and_recomputation_are_kept() -> None:
    strategy = found(data=8, microbatches=4, recompute=True).strategy
    assert strategy.pipeline.num_microbatches == 4
    assert strategy.recompute


def test_no_alternative_is_faster_than_the_best_plan() -> None:
    best = search(GRAPH, MACHINE, CostTable(), limits=FEW).best.predicted.step_seconds
    for wish in ({"tensor": 2}, {"tensor": 8}, {"stages": 2}, {"zero": 3}):
        assert found(**wish).predicted.step_seconds >= best * (1 - 1e-9)


def test_what_does_not_fit_is_returned_all_the_same() -> None:
    small = Limits(memory_bytes=1000.0, max_candidates=2)
    assert found(small, data=8).predicted.peak_bytes > 1000.0


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({}, "name an alternative"),
        ({"tensor": 2, "seed_plan": "cube"}, "both were named"),
        ({"zero": 4}, "ZeRO has the stages 0 to 3, not 4"),
        ({"tensor": 0}, "tp must be between 1 and"),
        ({"microbatches": 10**21}, "microbatches must be between 1 and 4,096, not 10{21}; choose"),
        ({"data": 8, "microbatches": 10**21}, "microbatches must be between"),
        ({"seed_plan": "1f1b:2x999999999999999999999"}, "the sizes of 1f1b"),
        ({"tensor": 16}, "takes 16 devices, but the cluster has 8"),
        ({"stages": 8}, "needs as many blocks"),
        ({"data": 7}, r"impossible here: .*divide the global batch of \d+, .*name other degrees"),
    ],
)
def test_what_cannot_be_is_refused(wish: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        found(**wish)
