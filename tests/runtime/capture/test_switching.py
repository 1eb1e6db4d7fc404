"""Parameters whose ``requires_grad`` forward switches: a graph without these flags trained them all, without
a word, where an actor learns from a critic that must not learn from it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import CaptureError
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.verbs.coverage import random_strategy
from tests.runtime.equivalence import assert_equivalent

pytestmark = pytest.mark.torch
WIDTH = 4


class Actor(nn.Module):
    """Actor and critic in one loss; the critic's parameters lie in a list since it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, out))
            for out in (WIDTH, 1)
        )
        self.fixed = list(self.critic.parameters())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.critic(x), y[:, :1])
        for parameter in self.fixed:
            parameter.requires_grad = False
        loss = loss - self.critic(self.actor(x)).mean()
        for parameter in self.fixed:
            parameter.requires_grad = True
        return loss


class Between(Actor):
    """By the module's own method, within what must stay whole since Python decides there."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x * self.decided(x), y)

    def decided(self, x: Tensor) -> float:
        return 1.0 if x.abs().sum().item() > 0 else 0.0


class Frozen(Actor):
    """Switched off before it is used, on every call, and left so."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.critic.requires_grad_(False)
        return -self.critic(self.actor(x)).mean() + F.mse_loss(self.actor(x), y)


class Leaving(Actor):
    """Switched off after it was used: the second step trains other parameters than the first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.critic(x), y[:, :1])
        self.critic.requires_grad_(False)
        return loss - self.critic(self.actor(x)).mean()


class Thawing(Actor):
    """Switched on while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.critic.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.critic.requires_grad_(True)
        return F.mse_loss(self.critic(x), y[:, :1]) + self.actor(x).mean()


def made(kind: type[Actor]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    rows = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    return kind().double(), {"x": rows[0], "y": rows[1]}


@pytest.mark.parametrize("kind", [Actor, Between, Frozen])
def test_a_parameter_that_is_switched_off_for_a_while_trains_as_in_plain_pytorch(
    kind: type[Actor],
) -> None:
    ways = {
        "samples": lambda graph: seed_strategy(graph, Seed(data=2)),
        "ZeRO-3": lambda graph: seed_strategy(graph, Seed(data=2, zero=3)),
        "at random": lambda graph: random_strategy(graph, 1),
    }
    assert_equivalent(2, lambda: made(kind), ways)


@pytest.mark.parametrize("kind", [Leaving, Thawing])
def test_a_switch_that_only_the_next_step_would_feel_is_refused(kind: type[Actor]) -> None:
    module, batch = made(kind)
    with pytest.raises(
        CaptureError, match=r"'critic\.0\.weight'.*other parameters than the second"
    ):
        capture(module, batch)
