"""Models on which plans that a search chose once failed, or the search itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.operators.splitting import find_samples
from shardwright.planner.search import Limits, Training, search
from shardwright.planner.space import Part, Seed, place_parts
from tests import zoo
from tests.planner.search.models import cluster
from tests.runtime.equivalence import assert_close, assert_equivalent, captured_of, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def batch_of(*shape: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=generator).double() for _ in range(2))
    return {"x": x, "y": y}


class Grouped(nn.Module):
    """Rewards set off against those of a group of four samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gain = y.mean(-1).view(-1, 4)
        gain = gain - gain.mean(1, keepdim=True)
        return -(self.net(x).view(-1, 4).log_softmax(1) * gain).sum(1).mean()


def grouped() -> zoo.Example:
    torch.manual_seed(0)
    return Grouped().double(), batch_of(8, 8)


def test_a_batch_of_groups_is_cut_into_as_many_microbatches_as_it_has_groups() -> None:
    module, batch, captured = captured_of(grouped)
    assert find_samples(captured.graph).common == 2
    training = Training(precision="float64", optimizer_states=1)
    where = cluster(1, 2, flops=1e7, near=1e9)
    limits = Limits(max_candidates=2)
    plans = search(captured.graph, where, CostTable(), training=training, limits=limits).plans
    expected = train_plain(grouped, SGD)
    for plan in plans:
        assert plan.strategy.pipeline.num_microbatches <= 2
        for run in train_rehearsed(captured, plan.strategy, module, batch, SGD)[0]:
            assert_close(run, expected, plan.strategy.label)


class ReadAtTheEnd(nn.Module):
    """A weight of the first layer without its gradient, as ``detach`` gives it, behind the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        fixed = self.first.weight.detach()
        x = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return F.mse_loss(x @ fixed, y)


class UntrainedAtTheEnd(ReadAtTheEnd):
    """The same weight, as ``no_grad`` reads it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        goal = torch.tanh(self.second(torch.tanh(self.first(x))))
        with torch.no_grad():
            y = self.first(y)
        return F.mse_loss(self.third(goal), y)


def read_at_the_end(kind: type[nn.Module]) -> zoo.Example:
    torch.manual_seed(0)
    return kind().double(), batch_of(8, 8)


def three_stages(pieces: int, graph: OperatorGraph) -> Strategy:
    """Cut before the second and third products; what reads the first weight last is on the last."""
    products = [i for i, one in enumerate(graph.operators) if "linear" in one.kind][:3]
    bounds = [0, products[1], products[2], len(graph.operators)]
    parts = [
        Part(devices=(stage,), operators=tuple(range(*bounds[stage : stage + 2])), seed=Seed())
        for stage in range(3)
    ]
    return place_parts(graph, parts, Seed(num_microbatches=pieces))


@pytest.mark.parametrize("kind", [ReadAtTheEnd, UntrainedAtTheEnd])
def test_a_weight_that_another_stage_reads_without_a_gradient_is_sent_as_it_was(kind) -> None:
    builds = {f"{pieces} microbatches": partial(three_stages, pieces) for pieces in (1, 2)}
    assert_equivalent(3, partial(read_at_the_end, kind), builds)
