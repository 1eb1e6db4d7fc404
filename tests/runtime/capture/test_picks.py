"""Elements that are read and written by the numbers of their own rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch
WIDTH = 8


class Replaced(nn.Module):
    """Computes only the largest places of every row anew, and puts them among the others."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.first, self.again, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.behind = behind

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        places = h.detach().sum(-1).topk(3)[1]
        rows = torch.arange(len(h))[:, None]
        found = self.again(h[rows, places]).tanh()
        out = h.mean(1, keepdim=True).expand_as(h).clone()
        if self.behind:
            out[rows, places, :] = found
        else:
            out[rows, places] = found.mean()
        return F.mse_loss(self.head(out), y)


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for _, one in named], lr=0.1)


@pytest.mark.parametrize("behind", [True, False])
def test_what_is_put_into_its_own_row_stays_with_its_sample(behind: bool) -> None:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        x, y = torch.randn(2, 4, 6, WIDTH, dtype=torch.float64)
        return Replaced(behind).double(), {"x": x, "y": y}

    module, batch = build()
    captured = capture(module, batch)
    assert "aten.scatter.src" in [one.kind for one in captured.graph.operators]
    many = 2 if behind else 1  # the mean of all is read by every row
    strategy = seed_strategy(captured.graph, Seed(data=2, num_microbatches=many))
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(build, sgd), "put")
