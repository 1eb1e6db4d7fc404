"""What hooks keep for a loss of the same call is no state; what they keep for the next call is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from tests.runtime.equivalence import assert_equivalent

pytestmark = pytest.mark.torch
WIDTH = 4


class Probed(nn.Module):
    """Hooks leave features in a dict and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.features: dict[str, Any] = {}
        self.kept: list[Tensor] = []
        for name, layer in self.net.named_children():
            layer.register_forward_hook(self.keeper(name))
        self.net[0].register_forward_hook(lambda _m, _given, result: self.kept.append(result))

    def keeper(self, name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _given: Any, result: Tensor) -> None:
            self.features[name] = result

        return keep

    def extra(self, before: dict[str, Any]) -> Tensor:
        return self.features["1"].pow(2).mean() + self.kept[0].abs().mean()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before = dict(self.features)
        self.kept.clear()
        return F.mse_loss(self.net(x), y) + 0.1 * self.extra(before)


class Steady(Probed):
    """Compares its features with those of the call before: on one batch they are the same."""

    def extra(self, before: dict[str, Any]) -> Tensor:
        old = before.get("1", self.features["1"]).detach()
        return F.mse_loss(self.features["1"], old)


class Growing(Probed):
    """Keeps the features of all calls."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y) + 0.1 * self.kept[-1].abs().mean()


def build(make: Callable[[], nn.Module] = Probed) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    rows = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    return make().double(), {"x": rows[0], "y": rows[1]}


def test_features_that_hooks_keep_for_the_same_call_stay_in_the_graph() -> None:
    graph = capture(*build()).graph
    assert not [one.kind for one in graph.operators if one.kind.startswith("opaque.")]
    ways = {"samples": lambda graph: seed_strategy(graph, Seed(data=2, num_microbatches=2))}
    assert_equivalent(2, build, ways)


@pytest.mark.parametrize("make", [Steady, Growing])
def test_features_that_hooks_keep_for_later_calls_are_state(make: Callable[[], nn.Module]) -> None:
    graph = capture(*build(make)).graph
    assert [one.kind for one in graph.operators] == [f"opaque.{make.__name__}"]
