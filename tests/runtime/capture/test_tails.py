"""Forwards that no graph can hold keep their first modules in it, wherever nothing else depends on these."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.errors import RunError
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.assemble import Captured
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch
sgd = partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    """Two layers and a loss over the rows that are large, of which nobody knows how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(6, 8), nn.Linear(8, 4), nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.two(self.norm(self.one(x)).relu()), y)

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        large = torch.nonzero(y.sum(-1) > 0).squeeze(1)
        error = (h[large] * self.scale - y[large]).pow(2).mean(-1)
        return error[error > error.mean()].mean() if len(error) > 1 else h.mean()


class Written(Net):
    """Writes results of modules before they are used, and after."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.one(x)
        h *= 0.5
        g = self.two(h.clone().relu_())
        g += h[:, :4]
        return self.loss(g, y)


class Recomputed(Net):
    """Its modules are checkpointed."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = checkpoint(self.one, x, use_reentrant=False)
        return self.loss(checkpoint(lambda z: self.two(z.relu()), h, use_reentrant=True), y)


class Many(Net):
    """Modules of several results, some not tensors; logs beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor | int]:
        h, _ = self.gru(self.one(x)[:, None])
        h, weights = self.attention(h, h, h, need_weights=False)
        return {"loss": self.loss(h[:, 0], y), "depth": 2, "logits": h, "none": weights}  # type: ignore[dict-item]


class Again(Net):
    """Uses a module, and the weight of another, behind the pick too."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.two(self.one(x))
        back = self.one(x[y.sum(-1) > 0]) @ self.two.weight.T
        return self.loss(h, y) + back.sin().mean()


class Placed(Net):
    """Asks modules that were called before where they are."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.two(self.one(x))
        return self.loss(h, y.to(self.one.weight.device))


class Stopped(Net):
    """A teacher without gradients."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.two(self.one(x))
        return self.loss(self.two(self.one(x)).tanh(), goal)


class Solved(Net):
    """Gives a module what a hook differentiates by in backward, as equilibrium models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.tanh(self.inner(torch.zeros_like(x)) + x)
        z = torch.tanh(self.inner(z) + x)
        start = z.detach().requires_grad_()
        again = torch.tanh(self.inner(start) + x)

        def solve(grad: Tensor) -> Tensor:
            return grad + torch.autograd.grad(again, start, grad, retain_graph=True)[0]

        z.register_hook(solve)
        return F.mse_loss(self.outer(z), y)


class Inner(nn.Module):
    """A part of a model whose forward has such a rest."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.narrow(self.wide(x).relu())
        return h / float(h.abs().max().item()) if h.abs().max().item() > 0.1 else h


class Outer(Net):
    """Parts with such rests in a model that has one itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.two(self.one(self.inner(x))), y)


class Kept(Net):
    """A module leaves something behind that the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Leaving()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.two(self.first(x)) + self.first.left[:, :4], y)


class Leaving(nn.Module):
    """Keeps what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.left = nn.Linear(6, 8), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.left = self.linear(x)
        return self.left.relu()


class Hooked(Net):
    """A hook keeps what a module makes."""

    def __init__(self) -> None:
        super().__init__()
        self.one.register_forward_hook(lambda one, _, result: setattr(one, "made", result))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.two(self.one(x))
        return self.loss(h + self.one.made[:, :4], y)  # type: ignore[operator, index]


class Counted(Net):
    """Counts in a buffer of its own, and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        return self.loss(self.two(self.one(x)) / self.count, y)


def build(kind: type[Net]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(8, 6, dtype=torch.float64)
    return kind().double(), {"x": x, "y": x[:, :4].flip(0)}


def captured(kind: type[Net]) -> tuple[Captured, list[str], nn.Module, dict[str, Tensor]]:
    module, batch = build(kind)
    made = capture(module, batch)
    return made, [one.kind for one in made.graph.operators], module, batch


@pytest.mark.parametrize(
    ("kind", "linears"),
    [
        (Net, 2),
        (Written, 2),
        (Recomputed, 2),
        (Many, 1),
        (Again, 2),
        (Placed, 2),
        (Stopped, 4),
        (Outer, 4),
    ],
)
def test_what_is_behind_the_first_modules_is_opaque_alone_and_trains_equally(
    kind: type[Net], linears: int
) -> None:
    made, found, module, batch = captured(kind)
    assert found.count("aten.linear.default") >= linears
    assert 1 <= sum(one.startswith("opaque.") for one in found) <= 2
    expected = train_plain(partial(build, kind), sgd)
    for seed in (Seed(data=2, zero=3), Seed(tensor=2)) if kind is Net else (Seed(data=2),):
        strategy = seed_strategy(made.graph, seed)
        runs, _ = train_rehearsed(made, strategy, module, batch, sgd)
        assert_close(runs[0], expected, seed.label)


class Noisy(Net):
    """Draws noise that both a module and the loss see."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        return self.loss(self.two(self.one(x + noise)), y + noise[:, :4])


class Halved(Net):
    """Does without its first module in evaluation."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.one(x) if self.training else F.pad(x, (0, 2))
        return self.loss(self.two(h), y)


class Cleared(Net):
    """Writes its argument."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.two(self.one(x.mul_(0.5))), y)


@pytest.mark.parametrize("kind", [Kept, Hooked, Counted, Noisy, Halved, Cleared, Solved])
def test_forwards_in_which_more_passes_than_results_of_modules_stay_whole(kind: type[Net]) -> None:
    assert captured(kind)[1] == [f"opaque.{kind.__name__}"]


def test_a_way_that_uses_parameters_of_modules_that_were_called_before_is_no_silent_one() -> None:
    class Sometimes(Net):
        """Uses a weight behind its module on other data than the example."""

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.two(self.one(x))
            return self.loss(h, y) + (self.two.weight.sum() if y[0, 0].item() > 50 else 0)

    made, _, module, batch = captured(Sometimes)
    strategy = seed_strategy(made.graph, Seed(data=2))
    train_rehearsed(made, strategy, module, batch, sgd)
    with pytest.raises(RunError, match="failed in step 0"):
        train_rehearsed(made, strategy, module, batch | {"y": batch["y"] + 100}, sgd)
