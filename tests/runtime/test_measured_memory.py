"""Measured memory: every byte that comes is seen to go, and peaks are those that were predicted."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space.grids import Grid, grid_strategy
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor
from tests import zoo
from tests.runtime.equivalence import captured_of
from tests.runtime.world import run_ranks

SGD = partial(torch.optim.SGD, lr=0.1)
# What gloo's reduce-scatter needs besides: the terms of the sum (``Cluster.scatter_copies``).
TERMS = 1.0
DTYPES = {False: torch.float64, True: torch.float32}  # by whether it is kept in half precision


def peaks(
    plans: list[Seed | Grid], options: dict[str, int]
) -> list[tuple[float, list[float], list[float]]]:
    """Return, per plan: bytes left over after one step, and measured and predicted peaks."""
    torch.set_num_threads(1)
    found: list[tuple[float, list[float], list[float]]] = []
    made = {half: partial(zoo.gpt, **options, dtype=dtype) for half, dtype in DTYPES.items()}
    for plan in plans:
        half = isinstance(plan, Seed) and plan.precision == "bfloat16"
        precision = "bfloat16" if half else None
        module, batch, captured = captured_of(made[half], precision=precision)
        make = grid_strategy if isinstance(plan, Grid) else seed_strategy
        program = lower(captured.graph, make(captured.graph, plan))
        executor = Executor(captured, program, copy.deepcopy(module), optimizer=SGD)
        executor.step(batch)
        timeline = executor.profile_step(batch)
        mine = timeline.memory[executor.stage]
        states = [program.strategy.optimizer_states * p for p in _trained_bytes(executor)]
        seconds = np.ones(program.num_instructions)
        predicted = simulate(program, seconds, scatter_copies=TERMS).peak_bytes
        found.append(
            (
                float(mine[-1, 1] - mine[0, 1]),
                list(timeline.peak_bytes),
                [peak - states[0] for peak in predicted],
            )
        )
        executor.close()
    return found


def _trained_bytes(executor: Executor) -> list[int]:
    """Bytes of this rank's masters: plans count states that plain SGD does not have."""
    masters = [master.parameter for master in executor.machine.parameters.masters]
    return [sum(p.numel() * p.element_size() for p in masters)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "plans"),
    [
        (
            {"width": 64, "length": 64},
            [
                Seed(tensor=2),
                Seed(tensor=2, sequence=True),
                Seed(data=2, zero=3, recompute=True),
                Grid(name="cube", sizes=(1, 2, 1)),
            ],
        ),
        (
            {"width": 128, "length": 8, "depth": 3},
            [
                Seed(data=2, zero=1, num_microbatches=4),
                Seed(data=2, num_microbatches=4, precision="bfloat16"),
                Seed(data=2, zero=2, num_microbatches=4, precision="bfloat16"),
            ],
        ),
    ],
    ids=["activations fill the memory", "weights fill the memory"],
)
def test_peaks_of_two_ranks_equal_the_allocators(
    options: dict[str, int], plans: list[Seed | Grid]
) -> None:
    """What a thread of gloo was the last to hold is seen to go as well."""
    for found in run_ranks(2, peaks, plans, options):
        for left, measured, predicted in found:
            assert left == 0.0
            assert measured == pytest.approx(predicted, rel=0.01)


class Chosen(nn.Module):
    """A wide layer that runs as it is, since values choose what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 512), nn.Linear(512, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many numbers."""
        hidden = torch.sigmoid(self.up(x))
        return self.down(torch.tanh(hidden if x.sum() < 1e9 else -hidden))


class Around(nn.Module):
    """One such layer between two that are captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 16), Chosen(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        return self.last(self.middle(self.first(x))).square().mean()


def peak_alone(
    captured: Captured, model: nn.Module, batch: dict[str, Tensor], seed: Seed | None = None
) -> tuple[float, float]:
    """Return the measured and the predicted peak of a step on one device."""
    program = lower(captured.graph, seed_strategy(captured.graph, seed or Seed()))
    executor = Executor(captured, program, model, optimizer=SGD)
    for _ in range(2):  # oneDNN keeps what it made first
        executor.step(batch)
    (measured,) = executor.profile_step(batch).peak_bytes
    (predicted,) = simulate(
        program, np.ones(program.num_instructions), scatter_copies=TERMS
    ).peak_bytes
    states = program.strategy.optimizer_states * sum(_trained_bytes(executor))
    executor.close()
    return measured, predicted - states


def test_what_a_module_that_runs_as_it_is_keeps_inside_is_foreseen() -> None:
    """Two of its rows' 512 numbers, which are no tensors of the graph, are most of the peak. What it has at most in
    backward is taken for what it has when its gradient comes; by then that is gone."""
    torch.manual_seed(0)
    model, batch = Around().double(), {"x": torch.randn(1024, 16, dtype=torch.float64)}
    captured = capture(model, batch)
    (middle,) = [one for one in captured.graph.operators if one.kind.startswith("opaque")]
    assert middle.kept_bytes == 2 * 8 * 1024 * 512
    measured, predicted = peak_alone(captured, model, batch)
    assert measured > middle.kept_bytes
    assert measured == pytest.approx(predicted, rel=0.025)


class Layers(nn.Module):
    """Blocks one behind the other; the loss is a mean of squares."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class Residual(nn.Module):
    """Convolutions with a strided skip; the last operator's result is its own."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(narrow, wide, 3, 2, 1), nn.Conv2d(wide, wide, 3, 1, 1)
        self.norm, self.skip = nn.BatchNorm2d(wide), nn.Conv2d(narrow, wide, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return half as many rows and columns."""
        return (self.norm(self.second(self.first(x).relu())) + self.skip(x)).relu()


class Steps(nn.Module):
    """A recurrence step by step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last state."""
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return state


class Outer(nn.Module):
    """Linear attention: sums of outer products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what lies along the diagonal of the sums so far."""
        keys, values = nn.functional.elu(self.keys(x)) + 1, self.values(x)
        sums = torch.einsum("bsd,bse->bsde", keys, values).cumsum(1)
        return torch.einsum("bsd,bsde->bse", keys, sums) / keys.sum(-1, keepdim=True)


class Bilinear(nn.Module):
    """What two layers say of a row, multiplied by a tensor of three dims: torch makes all products first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.core = nn.Parameter(torch.randn(width, width, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many numbers."""
        return torch.einsum("nti,ntj,ijk->ntk", self.one(x), self.two(x), self.core)


class Members(nn.Module):
    """Members of an ensemble that share a map, scale and shift what comes of it, each for itself, and add up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width, bias=False)
        self.scale, self.shift = (nn.Parameter(torch.randn(4, width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many numbers."""
        return torch.addcmul(self.shift, self.shared(x)[:, None], self.scale).sum(1)


def encoder(width: int, drops: float) -> nn.Module:
    """Reads its batch with the dims turned round, so that products copy what they read."""
    return nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=drops, batch_first=True)


@pytest.mark.parametrize(
    ("model", "shape", "within"),
    [
        (Layers(nn.Linear(64, 64), encoder(64, 0.0), encoder(64, 0.0)), (16, 32, 64), 0.01),
        (Layers(nn.Linear(64, 64), encoder(64, 0.1), encoder(64, 0.1)), (16, 32, 64), 0.01),
        (Layers(nn.Conv2d(3, 16, 3, 1, 1), Residual(16, 32), Residual(32, 64)), (16, 3, 32, 32), 0.01),
        (Layers(nn.Linear(96, 96), Steps(96)), (32, 16, 96), 0.01),
        (Layers(nn.Linear(96, 96), Steps(96)), (8, 6, 96), 0.02),
        (Layers(nn.Linear(32, 32), Outer(32), nn.Linear(32, 32), Outer(32)), (8, 64, 32), 0.02),
        (Layers(nn.Linear(16, 16), Bilinear(16), nn.Linear(16, 16), Bilinear(16)), (8, 16, 16), 0.01),
        (Layers(Members(32)), (64, 32), 0.02),
        (Layers(nn.Conv2d(3, 24, 1), nn.ReLU6(), nn.ConvTranspose2d(24, 1, 4, 2, 1)), (32, 3, 16, 16), 0.01),
    ],
    ids=["encoder", "dropout", "residual", "recurrence", "weights of a recurrence", "outer products", "bilinear", "members", "transposed convolution"],
)  # fmt: skip
def test_peaks_of_other_models_are_foreseen(
    model: nn.Module, shape: tuple[int, ...], within: float
) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    batch = {"x": torch.randn(shape)}
    captured = capture(model, batch)
    measured, predicted = peak_alone(captured, model, batch)
    assert measured == pytest.approx(predicted, rel=within)


class Attending(nn.Module):
    """Attention with a bias that is the same for all samples."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return as many numbers."""
        q, k, v = self.maps(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        odds = (q @ k.transpose(-2, -1) + bias).softmax(-1)
        return x + self.out((odds @ v).transpose(1, 2).flatten(2))


class Biased(nn.Module):
    """Such layers whose bias is looked up once, in a block of its own, and expanded over samples."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * length - 1, 2)
        places = torch.arange(length)
        self.register_buffer("apart", places[:, None] - places + length - 1)
        self.layers = nn.ModuleList(Attending(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        bias = self.table(self.apart).permute(2, 0, 1)[None].expand(x.shape[0], -1, -1, -1)
        for layer in self.layers:
            x = layer(x, bias)
        return x.square().mean()


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_expanded_in_one_block_for_others_takes_what_lies_in_memory(
    recompute: bool,
) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batch = Biased(16, 64), {"x": torch.randn(16, 64, 16)}
    captured = capture(model, batch)
    measured, predicted = peak_alone(captured, model, batch, Seed(recompute=recompute))
    assert measured == pytest.approx(predicted, rel=0.01)


class Halves(nn.Module):
    """A layer over halves that are written side by side into memory made for them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many numbers."""
        made = x.new_empty(x.shape)
        made[..., :32] = self.left(x[..., 32:])
        made[..., 32:] = self.right(x[..., :32])
        return x + torch.tanh(made)


class Stacked(nn.Module):
    """Four of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Halves() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_what_is_written_to_goes_with_the_block_that_writes_it() -> None:
    """Of what was there before nothing is wanted again."""
    graph = capture(Stacked(), {"x": torch.randn(64, 64)}).graph
    program = lower(graph, seed_strategy(graph, Seed()))
    gone = [
        graph.tensors[program.values[value].tensor].name
        for segment in program.segments
        for value in segment.unused_in_backward
    ]
    assert gone == [op.name for op in graph.operators if op.kind == "aten.empty.memory_format"]


class Tied(nn.Module):
    """Words in and out by one table, which is most of what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        made = self.table(x)
        for layer in self.layers:
            made = made + torch.tanh(layer(made))
        return nn.functional.cross_entropy(made @ self.table.weight.T, y)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_of_a_tied_weight_are_added_in_place_once_they_are_a_sum(count: int) -> None:
    """They are one from the first microbatch on; of others the second term is added out of place."""
    torch.manual_seed(0)
    model, tokens = Tied(), torch.randint(0, 2000, (2, 64))
    batch = {"x": tokens[0], "y": tokens[1]}
    found = peak_alone(capture(model, batch), model, batch, Seed(num_microbatches=count))
    assert found[0] == pytest.approx(found[1], rel=0.003)
