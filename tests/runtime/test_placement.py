"""Operators on different devices at different degrees train like the single process, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import GradientSync, Strategy
from shardwright.planner.lower import lower
from shardwright.planner.space import Part, Seed, place_parts
from shardwright.runtime.capture import capture
from tests import zoo
from tests.runtime.equivalence import assert_equivalent

pytestmark = pytest.mark.ranks
Placed = tuple[tuple[int, ...], Seed, tuple[str, ...]]


def placed(parts: tuple[Placed, ...], whole: Seed, graph: OperatorGraph) -> Strategy:
    """Place operators by the beginning of their module's path or name; the last part has the rest."""

    def part_of(name: str, module: str) -> int:
        for number, (_, _, prefixes) in enumerate(parts):
            if any(module.startswith(prefix) or name == prefix for prefix in prefixes):
                return number
        return len(parts) - 1

    owner = [part_of(operator.name, operator.module) for operator in graph.operators]
    return place_parts(
        graph,
        [
            Part(
                devices=devices,
                operators=tuple(i for i, one in enumerate(owner) if one == number),
                seed=seed,
            )
            for number, (devices, seed, _) in enumerate(parts)
        ],
        whole,
    )


ONE = Seed()
BRANCHES = (
    ((0, 1), Seed(data=2), ("stem", "relu")),
    ((0,), ONE, ("left",)),
    ((1,), ONE, ("right",)),
    ((0, 1), Seed(data=2), ()),
)


def test_branches_run_on_devices_of_their_own() -> None:
    builds = {
        "once": partial(placed, BRANCHES, ONE),
        "microbatches": partial(placed, BRANCHES, Seed(num_microbatches=2)),
    }
    assert_equivalent(2, zoo.inception, builds, processes=True)


def clipped(parts: tuple[Placed, ...], graph: OperatorGraph) -> Strategy:
    return replace(placed(parts, ONE, graph), clips=True)


def test_the_norm_of_a_rank_on_several_meshes_counts_every_shard_once() -> None:
    assert_equivalent(2, zoo.inception, {"clipped": partial(clipped, BRANCHES)}, max_norm=0.1)


def test_branches_are_independent_in_the_program() -> None:
    module, batch = zoo.inception()
    graph = capture(module, batch).graph
    program = lower(graph, placed(BRANCHES, ONE, graph))
    before = [set() for _ in range(program.num_instructions)]
    for index in range(program.num_instructions):
        for cause in program.predecessor[program.offset[index] : program.offset[index + 1]]:
            before[index] |= before[cause] | {int(cause)}
    branch = [set(np.flatnonzero(program.group == mesh).tolist()) for mesh in (1, 2)]
    forward = [{i for i in one if program.kind[i] == 0} for one in branch]
    assert forward[0]
    assert forward[1]
    for index in forward[1]:
        assert not before[index] & branch[0]


def test_stages_have_widths_of_their_own() -> None:
    wide_first = (((0, 1), Seed(data=2), ("layers.0", "embed", "position", "add")), ((2,), ONE, ()))
    narrow_first = (
        ((0,), ONE, ("layers.0", "embed", "position", "add")),
        ((1, 2), Seed(tensor=2), ()),
    )
    builds = {
        "2 then 1": partial(placed, wide_first, Seed(num_microbatches=2)),
        "1 then 2": partial(placed, narrow_first, Seed(num_microbatches=4, schedule="gpipe")),
        "1 then 2, recomputed": partial(placed, narrow_first, Seed(recompute=True)),
    }
    assert_equivalent(3, zoo.gpt, builds)


def test_tied_parameters_cross_between_meshes_of_different_size() -> None:
    parts = (
        ((0,), ONE, ("layers.0", "embed", "position", "add")),
        ((1, 2), Seed(data=2, zero=1), ()),
    )
    other = (
        ((0, 1), Seed(data=2, zero=3), ("layers.0", "embed", "position", "add")),
        ((2,), ONE, ()),
    )
    builds = {
        "home on one device": partial(placed, parts, Seed(num_microbatches=2)),
        "home in shards": partial(placed, other, ONE),
    }
    assert_equivalent(3, partial(zoo.gpt, tied=True), builds)


class Again(nn.Module):
    """Reads one weight before and behind a cut within a block, and one layer before and behind a cut between blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.shared, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.weight).tanh() @ self.weight
        return self.head(self.shared(self.shared(x).tanh())).square().mean()


def again() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(1)
    return Again().double(), {"x": torch.randn(4, 4, dtype=torch.float64)}


def summed(parts: tuple[Placed, ...], in_one_message: bool, graph: OperatorGraph) -> Strategy:
    buckets = (tuple(reversed(graph.parameters)),) if in_one_message else ()
    return replace(placed(parts, ONE, graph), gradient_sync=GradientSync(buckets=buckets))


def test_weights_read_before_and_behind_a_cut_get_every_gradient() -> None:
    sharded, halves = Seed(data=2, zero=1), Seed(data=2)
    within = (((0, 1), sharded, ("matmul", "tanh")), ((2, 3), sharded, ()))
    first = ("matmul", "tanh", "matmul_1", "linear", "tanh_1")
    between = (((0, 1), halves, first), ((2, 3), halves, ()))
    builds = {
        "cut within a block": partial(summed, within, False),
        "cut between blocks": partial(summed, between, True),
    }
    assert_equivalent(4, again, builds)


def test_encoder_and_decoder_run_on_different_devices() -> None:
    parts = (
        ((0,), ONE, ("embedding", "lstm", "zeros", "zeros_1")),
        ((1,), ONE, ("embedding_1", "lstm_1")),
        ((0, 1), Seed(data=2), ()),
    )
    adam = partial(torch.optim.AdamW, lr=1e-2)
    assert_equivalent(2, zoo.lstm_translation, {"parts": partial(placed, parts, ONE)}, adam)


def test_parts_must_cover_the_graph_and_fit_their_devices() -> None:
    module, batch = zoo.mlp()
    graph = capture(module, batch).graph
    everything = tuple(range(len(graph.operators)))
    part = Part(devices=(0, 1), operators=everything, seed=Seed(data=2))
    with pytest.raises(ValueError, match="belongs to no part"):
        place_parts(graph, [replace(part, operators=everything[1:])], ONE)
    with pytest.raises(ValueError, match="belongs to parts 0 and 1"):
        place_parts(graph, [part, part], ONE)
    with pytest.raises(ValueError, match="must be a part's number of devices"):
        place_parts(graph, [replace(part, devices=(0, 1, 2))], ONE)
