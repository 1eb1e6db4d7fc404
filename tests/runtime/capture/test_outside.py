"""Forms of models from elsewhere that once ended as one opaque operator, or in the wrong refusal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=1.0)


class Merging(nn.Module):
    """Features put where tokens mark a place for them, after a look at how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.see, self.head = nn.Embedding(8, 4), nn.Linear(6, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor, image: Tensor, y: Tensor) -> Tensor:
        words, features = self.embed(x), self.see(image)
        mask = (x == 7).unsqueeze(-1).expand_as(words)
        torch._check(words[mask].numel() == features.numel())
        torch._check((x < 8).all().item(), lambda: "no such word")  # type: ignore[arg-type]
        merged = words.masked_scatter(mask, features)
        return nn.functional.cross_entropy(self.head(merged).flatten(0, 1), y.flatten())


def merging() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    x = torch.tensor([[1, 7, 7, 2], [7, 3, 7, 0], [4, 5, 7, 7], [7, 7, 6, 6]])
    image = torch.randn(4, 2, 6, dtype=torch.float64)
    return Merging().double(), {"x": x, "image": image, "y": x.flip(0)}


def test_what_a_model_checks_of_its_values_does_not_stop_its_capture() -> None:
    module, batch = merging()
    captured = capture(module, batch)
    kinds = [operator.kind for operator in captured.graph.operators]
    assert "aten.masked_scatter.default" in kinds
    assert not any(kind.startswith("opaque.") for kind in kinds)
    assert any("checks of its values" in note for note in captured.graph.notes)
    strategy = seed_strategy(captured.graph, Seed(data=2))
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(merging, sgd), "merging")
