"""Ways in which people write models, each of which once trained differently, crashed, or ran whole.

All train on two ranks as plain PyTorch does, in float64: by samples, and split at random.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.operators.splitting import find_samples
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.evaluating import bind_tensors, evaluate
from shardwright.verbs.coverage import random_strategy
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch
WIDTH = 8


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for _, one in named if one.requires_grad], lr=0.1)


class Model(nn.Module):
    """A body between two layers, under mean squared error."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.body(self.first(x))), y)


class Rounded(torch.autograd.Function):
    """Rounds, and lets gradients of small numbers through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        passed = gradients[0].clone()
        passed[x.abs() > 1] = 0
        return passed, None


class Normed(torch.autograd.Function):
    """Divides rows by their norms, which it takes for constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        norm = x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(norm)
        return x / norm

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / ctx.saved_tensors[0]


class Shared(torch.autograd.Function):
    """Divides gradients by how many numbers there are: pointwise, but it knows the shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (100.0 / gradients[0].numel())


class Applies(nn.Module):
    """Applies a function of its own gradient."""

    def __init__(self, function: Any, *options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, *self.options)


class Reentrant(nn.Module):
    """Is recomputed by the older way of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=True)


class Nested(nn.Module):
    """Recomputes within what is recomputed, and by the older way what nothing before has a gradient for: then
    PyTorch has none for the layers inside either. Stays whole where it looks at values."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.looks = looks

    def outer(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.one, x, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.looks and x.mean().item() < -100:
            return x
        x = checkpoint(self.outer, x, use_reentrant=False)
        return x + checkpoint(self.two, x.detach(), use_reentrant=True)


class Codebook(nn.Module):
    """Means of what was near to them, moved through ``.data``, as vector quantisers are written."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: Tensor
        self.register_buffer("codes", torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = F.one_hot(((rows[:, None] - self.codes) ** 2).sum(-1).argmin(1), 4).to(x.dtype)
        found = (chosen @ self.codes).view_as(x)
        if self.training:
            self.codes.data.mul_(0.9).add_(chosen.t() @ rows.detach(), alpha=0.1)
        return x + (found - x).detach()


class Iterated(nn.Module):
    """Moves a buffer towards an eigenvector of its weight, which one operator splits, another not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.place: Tensor
        self.register_buffer("place", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            place = F.normalize(self.weight @ self.place, dim=0)
            self.place.copy_(place)
        return F.linear(x, self.weight / (1 + torch.dot(place, self.weight @ place).abs()))


class Spectrum(nn.Module):
    """A Fourier operator: few frequencies times complex weights, written into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.fft.rfft(x, dim=1)
        kept = torch.zeros_like(seen)
        kept[:, :3] = seen[:, :3] * self.weight.t()
        return torch.fft.irfft(kept, n=x.shape[1], dim=1)


class Draws(nn.Module):
    """Begins with random numbers, which do not matter."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0 * torch.randint(0, 9, (x.shape[0], 1, 1)))


class Variational(nn.Module):
    """Has a distribution, which checks its arguments by default."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.both(x).chunk(2, -1)
        return torch.distributions.Normal(mean, log.exp()).log_prob(x)


class Picks(nn.Module):
    """Takes elements along a dim by an index that is broadcast."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.take_along_dim(x, x[..., :1].argsort(1), 1) / torch.linalg.norm(
            x, dim=-1, keepdim=True
        )


class Checked(nn.Module):
    """Looks at values only to complain, in four ways."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] and x.max() > 1e6:
            raise ValueError("too large")
        assert not x.isnan().any(), "not a number"
        if not (x.abs().sum() > 0 and x.min().item() > -1e6):
            raise ValueError("too small")
        loss = F.gaussian_nll_loss(x, self.inner(x), torch.ones_like(x), reduction="none")
        return loss + x


class Instance(nn.Module):
    """A norm over every sample that keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Recomputed(nn.Module):
    """Looks at values, so that it stays whole, and recomputes a part of itself."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5 if x.mean().item() > -100 else x
        return x + checkpoint(self.inner, x, use_reentrant=self.is_reentrant)


class Inferred(nn.Module):
    """A layer that is read in inference mode only, and one both so and with its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @torch.inference_mode()
    def features(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = self.two(x).std()
        return self.two(x) / (scale.clone() + 1) + self.features(x).clone()


class Hashed(nn.Module):
    """Rows of a table found by a hash of places, made by operators in place as hash grids do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        corner = (x * 4).floor().long()
        found = torch.zeros_like(corner[..., 0])
        for place, prime in enumerate((1, 2654435761, 805459861)):
            found ^= corner[..., place] * prime
        found &= 15
        return x + self.table(found)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "pointwise function": lambda: Applies(Rounded, 4.0),
    "reentrant checkpoint": Reentrant,
    "nested checkpoints": Nested,
    "codebook": Codebook,
    "iterated": Iterated,
    "spectrum": Spectrum,
    "draws first": Draws,
    "distribution": Variational,
    "picks": Picks,
    "instance norm": Instance,
    "checks": Checked,
    "inference mode": Inferred,
    "hashes": Hashed,
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
}
OPAQUE: dict[str, Callable[[], nn.Module]] = {
    "function over rows": lambda: Applies(Normed),
    "function that knows its shape": lambda: Applies(Shared),
    "checkpoint inside": lambda: Recomputed(False),
    "reentrant checkpoint inside": lambda: Recomputed(True),
    "nested checkpoints inside": lambda: Nested(looks=True),
}
WAYS: dict[str, Callable[[OperatorGraph], Strategy]] = {
    "samples, sharded parameters": lambda graph: seed_strategy(graph, Seed(data=2, zero=3)),
    "at random": lambda graph: random_strategy(graph, 1),
}


def example(make: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    # Old weight norm keeps a product that ``double`` would not reach.
    torch.set_default_dtype(torch.float64)
    try:
        return Model(make()), {"x": torch.randn(4, 6, WIDTH), "y": torch.randn(4, 6, WIDTH)}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", [*WHOLE, *OPAQUE])
def test_models_train_as_they_are_written(name: str) -> None:
    make = (WHOLE | OPAQUE)[name]
    module, batch = example(make)
    captured = capture(module, batch)
    kinds = [operator.kind for operator in captured.graph.operators]
    assert any(kind.startswith("opaque.") for kind in kinds) == (name in OPAQUE)
    plain = train_plain(lambda: example(make), sgd)
    for way, splits in WAYS.items():
        runs, _ = train_rehearsed(captured, splits(captured.graph), example(make)[0], batch, sgd)
        assert_close(runs[0], plain, f"{name}, {way}")


def test_a_weight_that_is_computed_before_forward_is_captured() -> None:
    """PyTorch itself does not copy a module with the weight norm of old."""
    module, batch = example(old_weight_norm)
    captured = capture(module, batch)
    loss = evaluate(captured, bind_tensors(captured, module, batch))
    torch.testing.assert_close(loss, module(**batch), rtol=1e-12, atol=0)


class Spoken(nn.Module):
    """Speech whose classes are picked by a mask, all in one row, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = y >= 0
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        lengths = torch.full(size=(len(x),), fill_value=x.shape[1], dtype=torch.long)
        return F.ctc_loss(scores, y.masked_select(mask), lengths, mask.sum(-1), reduction="sum")


def spoken() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    classes = torch.tensor([[1, 2, -1, -1], [3, -1, 4, 1], [-1, -1, 2, -1], [2, 1, 2, 3]])
    return Spoken().double(), {"x": torch.randn(4, 12, WIDTH, dtype=torch.float64), "y": classes}


def test_classes_that_a_mask_picks_stay_with_their_samples() -> None:
    module, batch = spoken()
    captured = capture(module, batch)
    assert "shardwright.ctc_losses" in [operator.kind for operator in captured.graph.operators]
    strategy = seed_strategy(captured.graph, Seed(data=2, num_microbatches=2))
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(spoken, sgd), "speech")


def test_what_a_mask_picks_is_nothing_else_than_classes() -> None:
    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).masked_select(x > 0).pow(2).mean()

    graph = capture(Picked(), {"x": torch.randn(4, 4)}).graph
    assert [one.kind for one in graph.operators] == ["aten.linear.default", "opaque.Picked"]


def test_samples_of_torchs_attention_can_be_cut_in_microbatches() -> None:
    """Its last projection is of rows in which samples come second."""

    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True).double()
        made = torch.randn(2, 4, 5, WIDTH, dtype=torch.float64)
        return Model(layer).double(), {"x": made[0], "y": made[1]}

    module, batch = build()
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(stages=2, num_microbatches=4))
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(build, sgd), "attention")


def test_a_buffer_that_each_microbatch_would_find_changed_allows_one_only() -> None:
    captured = capture(*example(Iterated))
    assert "changes body.place, which forward reads" in find_samples(captured.graph).blocker
