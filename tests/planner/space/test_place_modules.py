"""Parts by the names of their modules: who runs where, and what is refused."""

from __future__ import annotations

import pytest

from shardwright.core.graph import OperatorGraph
from shardwright.planner.space import ModulePart, Placement, Seed, place_modules
from tests import zoo

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    from shardwright.runtime.capture import capture

    return capture(*zoo.lstm_translation()).graph


def placed(graph: OperatorGraph, *parts: tuple[tuple[str, ...], tuple[int, ...]]) -> list[int]:
    """Return the part of every operator."""
    named = tuple(
        ModulePart(modules=names, devices=devices, seed=Seed(data=len(devices)))
        for names, devices in parts
    )
    placement = Placement(name="parts.toml", parts=named, whole=Seed())
    return [config.mesh for config in place_modules(graph, placement).configs]


def test_every_operator_runs_with_its_module_and_the_loss_where_its_inputs_come_from(
    graph: OperatorGraph,
) -> None:
    found = placed(
        graph, (("source_embed", "encoder"), (0, 1)), (("target_embed", "decoder"), (2,)),
        (("head",), (0, 1, 2, 3)),
    )  # fmt: skip
    wanted = {"source_embed": 0, "encoder": 0, "target_embed": 1, "decoder": 1, "head": 2, "": 2}
    names = [operator.module for operator in graph.operators]
    counts = [one.kind == "shardwright.count_targets" for one in graph.operators]
    assert [
        part for part, is_count in zip(found, counts, strict=True) if not is_count
    ] == [wanted[name] for name, is_count in zip(names, counts, strict=True) if not is_count]  # fmt: skip


def test_a_plain_name_wins_over_a_pattern_and_the_rest_goes_to_the_star(
    graph: OperatorGraph,
) -> None:
    found = placed(graph, (("*",), (0,)), (("*coder",), (1,)), (("decoder", "head"), (2,)))
    by_module = {one.module: part for one, part in zip(graph.operators, found, strict=True)}
    assert by_module["source_embed"] == 0
    assert by_module["encoder"] == 1
    assert by_module["decoder"] == 2


@pytest.mark.parametrize(
    ("pieces", "order", "told"),
    [
        (1, (), ""),
        (2, (), ", 1f1b, 2 microbatches"),
        (2, ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), ", an order of one's own, 2 microbatches"),
    ],
)
def test_a_label_tells_how_microbatches_go_through_the_parts(
    graph: OperatorGraph, pieces: int, order: tuple[str, ...], told: str
) -> None:
    parts = tuple(
        ModulePart(modules=names, devices=(device,), seed=Seed())
        for device, names in enumerate((("source_embed", "encoder"), ("*",)))
    )
    whole = Seed(num_microbatches=pieces)
    placement = Placement(name="parts.toml", parts=parts, whole=whole, order=order)
    assert place_modules(graph, placement).label == "single device on 0; single device on 1" + told


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (((("middle",), (0,)),), "'middle' of part 0 names no module .* outermost are decoder"),
        (((("decoder", "head"), (0,)), (("encoder",), (1,))), "feeds .* list the parts in another"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    graph: OperatorGraph, parts: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        placed(graph, *parts)
