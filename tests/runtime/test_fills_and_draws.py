"""Initial states, masks and noise are made per sample: they stop neither microbatches nor pipelines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.operators.splitting import find_samples
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from tests import zoo
from tests.runtime.equivalence import captured_of

pytestmark = pytest.mark.torch
SGD = partial(torch.optim.SGD, lr=0.1)
SEEDS = [
    Seed(num_microbatches=4),
    Seed(data=2, num_microbatches=2),
    Seed(stages=2, num_microbatches=2),
    Seed(data=2, zero=3, num_microbatches=4),
]


class Two(nn.Module):
    """Two maps of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)


class InitialState(Two):
    """A recurrence of its own, from zeros made like an activation."""

    def forward(self, x: Tensor) -> Tensor:
        state = self.first(x).new_zeros(x.shape[0], 6)
        for step in range(3):
            state = torch.tanh(self.first(x[:, step]) + self.second(state))
        return state.square().mean()


class Cells(Two):
    """Cells of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.plain = nn.GRUCell(6, 6), nn.LSTMCell(6, 6), nn.RNNCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        state = self.first(x).new_zeros(x.shape[0], 6)
        pair = (state, state)
        for step in range(2):
            state = self.plain(self.gru(x[:, step], state), state)
            pair = self.lstm(self.second(state), pair)
        return (pair[0] * pair[1]).square().mean()


class Padded(Two):
    """Zeros before, ones as weights, a constant of another shape."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.cat([x.new_zeros(x.shape[0], 1, 6), x], 1)
        weights = x.new_ones(x.shape[:2]).unsqueeze(-1) * x.new_full((5, 1), 0.5)
        return (self.second(x) * weights - torch.ones_like(x)).square().mean()


class Masked(Two):
    """SpecAugment: places that a mask names get a trained vector; others get zero."""

    def __init__(self) -> None:
        super().__init__()
        self.blank = nn.Parameter(torch.linspace(-1.0, 1.0, 6))

    def forward(self, x: Tensor) -> Tensor:
        mask, x = x[..., 0] > 0.5, self.first(x).clone()
        x[mask] = self.blank
        x = x.clone()
        x[x > 1.0] = 0.0
        return self.second(x).square().mean()


class Factored(Two):
    """Log determinants of one matrix per sample."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        gram = y @ y.transpose(-1, -2) + 3 * torch.eye(y.shape[1], dtype=y.dtype)
        factor = torch.linalg.cholesky(gram)
        return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1).mean()


class DropPath(Two):
    """Stochastic depth as timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.5).div_(0.5)
        return (x + self.second(x) * keep).square().mean()


class Noisy(Two):
    """A variational autoencoder's draw."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        noise = torch.randn_like(self.first(x))
        kept = torch.bernoulli(torch.sigmoid(self.second(x)).detach())
        return {"loss": self.second(self.first(x) + noise * kept).square().mean(), "noise": noise}


class Jittered(Two):
    """A router's input times noise between two bounds, as Switch Transformers have it."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        noise = torch.empty_like(x).uniform_(1.0 - 0.01, 1.0 + 0.01)
        return {"loss": self.second(self.first(x) * noise).square().mean(), "noise": noise}


def made(kind: Callable[[], nn.Module]) -> zoo.Example:
    torch.manual_seed(0)
    return kind().double(), {"x": torch.randn(8, 4, 6, dtype=torch.float64)}


def trained(
    kind: Callable[[], nn.Module], seed: Seed, outputs: tuple[str, ...] = ()
) -> list[tuple[list[float], nn.Module, dict[str, Tensor]]]:
    """Return losses of three steps, the module and the outputs of the last, of every rank."""
    module, batch, captured = captured_of(made, kind, outputs=outputs)
    assert find_samples(captured.graph).blocker == ""
    program = lower(captured.graph, seed_strategy(captured.graph, seed))

    def train(world: LocalWorld) -> tuple[list[float], nn.Module, dict[str, Tensor]]:
        mine, options = copy.deepcopy(module), RunOptions(world=world, seed=3)
        executor = Executor(captured, program, mine, optimizer=SGD, options=options)
        losses = [float(executor.step(batch, outputs)) for _ in range(3)]
        executor.to_module(mine)
        return losses, mine, executor.outputs

    return run_locally(train, len(program.strategy.devices))[0]


@pytest.mark.parametrize("kind", [InitialState, Cells, Padded, Masked, Factored])
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
def test_fills_masks_cells_and_factors_train_as_in_one_process(
    kind: Callable[[], nn.Module], seed: Seed
) -> None:
    plain, batch = made(kind)
    optimizer, expected = SGD(plain.parameters()), list[float]()
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain(**batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for losses, module, _ in trained(kind, seed):
        assert losses == pytest.approx(expected, rel=1e-10)
        for one, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_paths_are_dropped_alike_under_every_plan() -> None:
    (expected, _, _), *_ = trained(DropPath, Seed())
    for seed in SEEDS:
        for losses, _, _ in trained(DropPath, seed):
            assert losses == pytest.approx(expected, rel=1e-10), seed.label
    assert len(set(expected)) == 3


@pytest.mark.parametrize("seed", SEEDS[:3], ids=lambda seed: seed.label)
def test_every_sample_has_noise_of_its_own(seed: Seed) -> None:
    ranks = trained(Noisy, seed, ("noise",))
    noise = ranks[0][2]["noise"].flatten()
    assert len(noise.unique()) == 8 * 4 * 6
    assert 0.5 < float(noise.std()) < 1.5
    assert {tuple(losses) for losses, _, _ in ranks} == {tuple(ranks[0][0])}


@pytest.mark.parametrize("seed", SEEDS[:3], ids=lambda seed: seed.label)
def test_noise_keeps_to_the_bounds_that_it_was_given(seed: Seed) -> None:
    noise = trained(Jittered, seed, ("noise",))[0][2]["noise"]
    assert 0.99 <= float(noise.min()) < 0.995
    assert 1.005 < float(noise.max()) <= 1.01


def test_a_mask_with_a_value_for_every_place_still_needs_the_whole_batch() -> None:
    class Scattered(Two):
        """As many values as the mask has places: which is whose depends on the other samples."""

        def forward(self, x: Tensor, values: Tensor) -> Tensor:
            x = self.first(x).clone()
            x[torch.arange(8), 0] = F.relu(self.second(values))
            return x.square().mean()

    module, batch = made(Scattered)
    batch["values"] = torch.randn(8, 6, dtype=torch.float64)
    captured = capture(module, batch)
    assert "index_put" in find_samples(captured.graph).blocker


class Normed(Two):
    """Statistics of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x))).square().mean()


class Summed(Two):
    """Running sums over the samples."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).cumsum(0)).square().mean()


class Contrasted(Two):
    """Every sample beside every other."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).flatten(1)
        return F.cross_entropy(h @ h.t(), torch.arange(8))


class Counted(Two):
    """A counter that forward reads and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.first(x) * self.calls).square().mean()


@pytest.mark.parametrize(
    ("kind", "cause", "remedy"),
    [
        (Normed, "norm) mixes samples", "--batch-norm local takes that of a microbatch"),
        (Summed, "(aten.cumsum.default) mixes samples", "let it run along another"),
        (Contrasted, "mixes samples", "split them over devices instead"),
        (Counted, "changes calls, which forward reads", "change it after the step instead"),
    ],
)
def test_what_mixes_samples_is_named_with_what_mends_it(
    kind: Callable[[], nn.Module], cause: str, remedy: str
) -> None:
    graph = capture(*made(kind), batch_norm="synchronised").graph
    for seed in SEEDS:
        with pytest.raises(InputError) as refused:
            lower(graph, seed_strategy(graph, seed))
        assert cause in str(refused.value)
        assert remedy in str(refused.value)


def test_batch_norm_over_microbatches_allows_them_as_its_refusal_says() -> None:
    graph = capture(*made(Normed)).graph
    for seed in SEEDS:
        lower(graph, seed_strategy(graph, seed))


class Latents(Two):
    """A trained row for every sample of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.linspace(0.0, 1.0, 8).unsqueeze(-1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x).mean(1) + self.rows).square().mean()


def test_parameters_of_the_whole_batch_allow_devices_but_no_microbatches() -> None:
    module, batch = made(Latents)
    graph = capture(module, batch).graph
    samples = find_samples(graph)
    assert "made of parameters for the whole batch" in samples.blocker
    strategy = seed_strategy(graph, Seed(data=2))
    assert any(
        sample in config.dims
        for config, sample in zip(strategy.configs, samples.operator_dim, strict=True)
        if sample
    )
