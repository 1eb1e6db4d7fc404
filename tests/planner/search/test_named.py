"""Strategies asked for by name: their grids, their refusals, and their place in the search."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.core.codec import decode, encode
from shardwright.core.costs import CostTable
from shardwright.errors import InputError, NoPlan
from shardwright.files.planfile import read_graph
from shardwright.planner.judge.evaluate import evaluate
from shardwright.planner.model.context import Context
from shardwright.planner.search import Limits, Training, search
from shardwright.planner.search.asked import asked_for
from shardwright.planner.search.named import grid_strategies, least_seconds
from shardwright.planner.space import ModulePart, Placement, Seed
from tests.planner.search.models import cluster, images, residual

pytestmark = pytest.mark.usefixtures("short_climbs")
SLOW = {"flops": 1e10, "near": 1e9, "far": 1e8}


def context(devices: int, batch: int = 64) -> Context:
    graph = residual(batch=batch, width=64, depth=3, classes=16)
    return Context.of(graph, cluster(1, devices, **SLOW), CostTable(), Training())


@pytest.mark.parametrize(
    ("devices", "text", "sizes"),
    [
        (8, "megatron", (1, 8)),
        (8, "megatron:4x2", (4, 2)),
        (8, "megatron-sequence:2x4", (2, 4)),
        (4, "summa", (2, 2)),
        (16, "summa", (4, 4)),
        (8, "summa:2x4", (2, 4)),
        (8, "tesseract", (2, 2, 2)),
        (32, "tesseract", (2, 4, 4)),
        (8, "cube", (2, 2, 2)),
        (8, "cube:4x1x2", (4, 1, 2)),
    ],
)
def test_a_name_gives_a_grid(devices: int, text: str, sizes: tuple[int, ...]) -> None:
    found = asked_for(context(devices), text)
    assert found.few.meshes[0].sizes == found.many.meshes[0].sizes == sizes


@pytest.mark.parametrize(
    ("text", "devices", "chunks", "pieces"),
    [
        ("gpipe:2x8", [(0, 1, 2, 3), (4, 5, 6, 7)], 1, 8),
        ("1f1b-so:4x16", [(0, 1), (2, 3), (4, 5), (6, 7)], 1, 16),
        ("interleaved:2x2x8", [(0, 1, 2, 3), (4, 5, 6, 7)], 2, 8),
        ("interleaved", [(0, 1, 2, 3), (4, 5, 6, 7)], 2, 4),
    ],
)
def test_the_name_of_a_schedule_gives_a_pipeline(
    text: str, devices: list[tuple[int, ...]], chunks: int, pieces: int
) -> None:
    found = asked_for(context(8), text)
    assert [mesh.devices for mesh in found.few.meshes] == devices * chunks
    assert found.few.pipeline.num_microbatches == pieces
    assert found.few.pipeline.schedule == text.partition(":")[0]
    assert found.many == found.few


def test_the_name_of_a_staleness_gives_stages_of_one_device_or_several() -> None:
    for text, devices, sizes, pieces in (
        ("stash", [(one,) for one in range(4)], (1,), 1),
        ("spectrain-v2:2", [(0, 1), (2, 3)], (2,), 1),
        ("spectrain-v1:2x2", [(0, 1), (2, 3)], (1, 2), 1),
        ("2bw", [(one,) for one in range(4)], (1,), 4),
        ("2bw:2x4", [(0, 1), (2, 3)], (2,), 4),
        ("xpipe:2x8x2", [(0, 1), (2, 3)], (1, 2), 8),
    ):
        found = asked_for(context(4), text).few
        assert found.pipeline.num_microbatches == pieces
        assert [mesh.devices for mesh in found.meshes] == devices
        assert {mesh.sizes for mesh in found.meshes} == {sizes}
        assert found.pipeline.staleness == text.partition(":")[0]


def test_servers_are_the_first_devices_or_lie_on_workers_where_there_are_too_few() -> None:
    for text, servers, workers, label in (
        ("parameter-server:4x2", (0, 1), (2, 3, 4, 5), "parameter server x 2, 4 workers"),
        ("parameter-server:8x2", (0, 4), tuple(range(8)), "on the workers' devices, 8 workers"),
        ("parameter-server", tuple(range(8)), tuple(range(8)), "parameter server x 8 on the"),
    ):
        found = asked_for(context(8), text)
        assert [mesh.devices for mesh in found.few.meshes] == [servers, workers]
        assert label in found.few.label
        assert {config.mesh for config in found.few.configs} == {1}
        judged = evaluate(context(8), found.few)
        assert 0.0 < judged.seconds < math.inf


@pytest.mark.parametrize(
    ("devices", "text", "message"),
    [
        (8, "stash:3", "at least 2 stages .* but stash asks for 3 stages with 1 devices"),
        (8, "stash:2x3", "2 stages with 3 devices"),
        (16, "stash:2", "cluster's 16, and 4 samples"),
        (8, "stash:2x2x2", r"written STAGES\[xTENSOR\], such as 2x2, not"),
        (8, "2bw:2x3", "4 data-parallel devices, but 4 samples do not divide"),
        (8, "xpipe:2", r"written STAGESxMICROBATCHES\[xTENSOR\], such as"),
        (8, "ring", "must be one of megatron.*, not 'ring'"),
        (8, "cube:2x2", "the sizes of cube are written IxJxL"),
        (8, "cube:2x2x4", "needs 16 devices, but the cluster has 8"),
        (8, "summa", "summa takes q x q devices, q at least 2, but the cluster has 8; choose"),
        (4, "cube", "cube takes q x q x q devices"),
        (8, "gpipe:3x4", "at least 2 stages, a divisor of the 8 devices"),
        (8, "interleaved:4x4", "written STAGESxCHUNKSxMICROBATCHES, such as 2x2x2, not '4x4'"),
        (8, "1f1b-so:2x8", "4 data-parallel devices, but 4 samples do not divide"),
        (4, "parameter-server:5x1", "5 workers and 1 servers are asked for, and there are 4 dev"),
        (4, "parameter-server:3x1", "3 workers and 1 servers .* and 4 samples; name others"),
        (8, "cube:8x1x1", "the global batch into 8 equal pieces, but its size is 4; choose a mult"),
        (8, "1f1b:8x4", "blocks cannot make 8 stages; ask for fewer stages"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(devices: int, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        asked_for(context(devices, batch=4), text)


def test_a_named_plan_says_so_and_nothing_is_searched() -> None:
    known = context(8)
    frontier = search(known.graph, known.cluster, CostTable(), seed_plan="cube")
    assert len(frontier.plans) == 1
    assert frontier.best.strategy.label.startswith("cube 2x2x2 (3-D tensor parallel)")
    assert "asked for by name (cube)" in frontier.best.reason
    assert frontier.best.bound is None


def test_a_named_plan_that_does_not_fit_is_refused_with_what_is_missing() -> None:
    known, small = context(8), Limits(memory_bytes=1000.0)
    with pytest.raises(NoPlan, match=r"cube 2x2x2.* too much"):
        search(known.graph, known.cluster, CostTable(), seed_plan="cube", limits=small)


@pytest.mark.parametrize("devices", [4, 8, 16])
def test_the_quick_bound_lies_below_the_simulated_grid(devices: int) -> None:
    known = context(devices)
    found = list(grid_strategies(known))
    assert len(found) == {4: 1, 8: 2, 16: 1}[devices]
    for strategy in (one for pair in found for one in pair):
        least = least_seconds(known, strategy)
        assert 0 < least <= evaluate(known, strategy).seconds


def test_no_plan_is_shown_with_a_bound_above_it() -> None:
    known = context(4)
    frontier = search(known.graph, known.cluster, CostTable(), limits=Limits(max_candidates=4))
    for plan in frontier.plans:
        bound = plan.bound.step_seconds if plan.bound else -math.inf
        assert bound <= plan.predicted.step_seconds


def test_a_grid_of_images_smaller_than_their_halos_is_refused() -> None:
    graph = images(batch=16, size=8)  # windows of 5 reach 2 rows far: 4 pieces at most
    known = Context.of(graph, cluster(1, 8, **SLOW), CostTable(), Training())
    with pytest.raises(InputError, match="its windows allow 4 pieces at most; choose a smaller"):
        asked_for(known, "summa:1x8")


def test_megatron_is_refused_where_it_would_split_nothing() -> None:
    known = Context.of(images(), cluster(1, 2, **SLOW), CostTable(), Training())
    with pytest.raises(InputError, match=r"megatron splits linear layers .* none that 2 devices"):
        asked_for(known, "megatron:1x2")


def test_an_order_of_parts_is_planned_or_refused() -> None:
    graph = read_graph(Path(__file__).parents[3] / "examples" / "mlp.graph.json")
    known = Context.of(graph, cluster(1, 2, **SLOW), CostTable(), Training())
    last = graph.operators[-1].module or max(operator.module for operator in graph.operators)
    parts = tuple(
        ModulePart(devices=(device,), modules=modules, seed=Seed())
        for device, modules in enumerate((("*",), (last,)))
    )
    order = ("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0")
    whole = Seed(num_microbatches=2)
    wanted = Placement(name="parts.toml", parts=parts, whole=whole, order=order)
    found = asked_for(known, wanted).few
    assert (found.pipeline.schedule, found.pipeline.order) == ("custom", order)
    assert decode(type(found), encode(found)) == found
    with pytest.raises(InputError, match=r"parts.toml is impossible here: .* lacks actions: 0B0"):
        asked_for(known, replace(wanted, order=("0F0 0F1 0B1", order[1])))
    elsewhere = replace(parts[1], devices=(16,))
    with pytest.raises(InputError, match=r"0 to 1, but it names 16; name others"):
        asked_for(known, replace(wanted, parts=(parts[0], elsewhere)))
