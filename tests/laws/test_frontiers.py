"""Law: every plan of a searched frontier trains as one process does.

Other laws draw strategies; here a search chooses them, for a drawn model, cluster, memory limit and
training. `make test` tries a few frontiers, `make laws` twenty.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.core.costs import CostTable
from shardwright.core.plan import Frontier
from shardwright.errors import NoPlan
from shardwright.planner.judge.evaluate import evaluate
from shardwright.planner.model.context import Context
from shardwright.planner.search import Limits, Training, search
from shardwright.planner.search.named import as_strategy
from shardwright.planner.space import Seed
from shardwright.runtime.capture import Captured, capture
from tests import zoo
from tests.laws.models import EXACT, MAX_NORM, OPTIMIZER, exact_llama
from tests.planner.search.models import cluster
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

MANY = "SHARDWRIGHT_LAWS" in os.environ
pytestmark = [pytest.mark.torch, pytest.mark.slow]
if not MANY:
    pytestmark.append(pytest.mark.usefixtures("short_climbs"))
FRONTIERS = 20 if MANY else 3
HOSTS = ((1, 2), (2, 1), (1, 3), (1, 4), (2, 2), (4, 1))
WIDTHS = (8, 12, 16, 32)
KNOWN: tuple[Callable[[], zoo.Example], ...] = (
    partial(zoo.gpt, tied=True, length=8), zoo.cnn_groupnorm, zoo.inception, exact_llama,
    zoo.lstm_translation, zoo.switching, partial(zoo.bert, length=8), zoo.windows,
)  # fmt: skip


class Mixed(nn.Module):
    """Mixes the positions of a sequence by attention, or by a product along them."""

    def __init__(self, width: int, length: int, attends: bool) -> None:
        super().__init__()
        self.norm, self.attends = nn.LayerNorm(width), attends
        self.into = nn.Linear(width, 3 * width) if attends else nn.Linear(length, length)
        self.out = nn.Linear(width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        y = self.norm(x_BLD)
        if not self.attends:
            return x_BLD + self.out(self.into(y.transpose(1, 2)).transpose(1, 2))
        batch, length, width = y.shape
        parts = self.into(y).view(batch, length, 3, 2, width // 2).unbind(2)
        query, key, value = (one.transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return x_BLD + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Gated(nn.Module):
    """Two layers with something between, beside what comes in."""

    def __init__(self, width: int, inner: int, bias: bool, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=bias)
        self.down, self.act = nn.Linear(inner, width, bias=bias), act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Drawn(nn.Module):
    """A stack of random layers between an embedding (or a linear layer) and a classifier."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        width, self.length = random.choice(WIDTHS), random.choice((4, 6, 8))
        self.reads_tokens = random.random() < 0.5
        inlet = nn.Embedding(32, width) if self.reads_tokens else nn.Linear(12, width)
        layers: list[nn.Module] = [inlet]
        for _ in range(random.randint(1, 4)):
            if random.random() < 0.4:
                layers.append(Mixed(width, self.length, random.random() < 0.6))
            else:
                act = random.choice((torch.relu, torch.tanh, F.gelu, F.silu))
                layers.append(Gated(width, random.choice(WIDTHS) * 2, random.random() < 0.5, act))
        self.layers = nn.Sequential(*layers, nn.LayerNorm(width))
        self.head = nn.Linear(width, 32, bias=False)
        if self.reads_tokens and random.random() < 0.5:
            self.head.weight = inlet.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x)).flatten(0, 1), y.flatten())


def drawn(seed: int) -> zoo.Example:
    """Build a random model with a batch of 4, 6 or 8."""
    random = Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module, batch = Drawn(random).double(), random.choice((4, 6, 8))
        size = (batch, module.length)
        x = torch.randn(*size, 12).double()
        tokens, y = (torch.randint(0, 32, size) for _ in range(2))
        return module, {"x": tokens if module.reads_tokens else x, "y": y}


@dataclass(frozen=True)
class Case:
    """A model, and what it is planned for. ``share``: of the memory that data parallelism needs, so
    much may be used, or all."""

    factory: Callable[[], zoo.Example]
    hosts: tuple[int, int]
    rates: dict[str, float]
    share: float | None
    training: Training


def case_of(seed: int) -> Case:
    random = Random(seed)
    known = random.random() < 0.4
    return Case(
        factory=random.choice(KNOWN) if known else partial(drawn, seed),
        hosts=random.choice(HOSTS),
        # So slow that dividing the work of small models pays, in most cases.
        rates={
            "flops": 10 ** random.uniform(7.5, 9.5),
            "near": 10 ** random.uniform(8, 11),
            "far": 10 ** random.uniform(8, 10),
        },
        share=random.choice((None, None, 0.9, 0.6, 0.4)),
        training=Training(
            precision="float64",
            optimizer_states=1,
            clips=random.random() < 0.3,
            batch_norm="synchronised",
            recompute=random.choice(("auto", "auto", "blocks")),
        ),
    )


def frontier_of(case: Case, captured: Captured) -> Frontier:
    """Search within the memory of a case, or in whatever more is needed."""
    where = cluster(*case.hosts, **case.rates)
    context = Context.of(captured.graph, where, CostTable(), case.training)
    usual = evaluate(context, as_strategy(context, Seed())).objective.peak_bytes
    for share in (case.share, 1.0, None):
        limits = Limits(memory_bytes=share and share * usual, max_candidates=3)
        try:
            return search(captured.graph, where, CostTable(), training=case.training, limits=limits)
        except NoPlan:
            continue
    raise AssertionError("without a limit there is a plan")


@pytest.mark.parametrize("seed", range(FRONTIERS))
def test_every_plan_of_a_searched_frontier_trains_as_one_process(seed: int) -> None:
    case = case_of(seed)
    module, batch = case.factory()
    captured = capture(module, batch, batch_norm="synchronised")
    max_norm = MAX_NORM if case.training.clips else None
    expected = train_plain(case.factory, OPTIMIZER, max_norm)
    plans = frontier_of(case, captured).plans
    assert any(len(plan.strategy.devices) > 1 for plan in plans)
    for plan in plans:
        assert plan.strategy.precision == "float64"
        runs, _ = train_rehearsed(
            captured, plan.strategy, module, batch, OPTIMIZER, max_norm, streams=seed % 2 == 1
        )
        assert len(runs) == len(plan.strategy.devices)
        for run in runs:
            assert_close(run, expected, f"{seed}: {plan.strategy.label}", EXACT)
