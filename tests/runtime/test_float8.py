"""Products in 8-bit floats, compared with the same products of rounded numbers in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.core.float8 import PRODUCTS, is_float8_product
from shardwright.core.graph import OperatorGraph
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.operators import linear_blocks
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.float8 import SCALED, scaled_linear, scaled_linear_blocks
from shardwright.runtime.local_world import LocalWorld, run_locally
from tests.runtime.equivalence import batches

pytestmark = pytest.mark.torch
STEPS = 4


def nearest(tensor: Tensor, dim: int | None, wide: bool) -> Tensor:
    """Round a matrix as its 8-bit format does: to 3 bits of mantissa (2 of the wide one), by scales
    from the largest element; nothing is smaller than the least number of the format."""
    bits, most, least = (2, 57344.0, -16) if wide else (3, 448.0, -9)
    exact = tensor.double()
    largest = exact.abs().amax() if dim is None else exact.abs().amax(dim, keepdim=True)
    scale = (largest.float() / most).to(tensor.dtype).double()
    scaled = (tensor / scale.to(tensor.dtype)).double()  # in the tensor's own dtype
    _, exponent = torch.frexp(scaled)
    unit = 2.0 ** (exponent - 1 - bits).clamp(min=least).double()
    return (scaled / unit).round() * unit * scale


@pytest.mark.parametrize("by_row", [False, True])
def test_the_three_products_are_those_of_rounded_operands(by_row: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32).bfloat16().requires_grad_()
    weight = (torch.randn(48, 32) / 6).bfloat16().requires_grad_()
    bias = torch.randn(48).bfloat16().requires_grad_()
    result = scaled_linear(x, weight, bias, by_row)
    incoming = torch.randn(result.shape).bfloat16()
    result.backward(incoming)
    result = result.detach()
    rows, wide = (1, 0) if by_row else (None, None), not by_row
    flat, g = x.detach().flatten(0, 1), incoming.flatten(0, 1)
    w = weight.detach()
    expected = (
        nearest(flat, rows[0], False) @ nearest(w.t(), rows[1], False) + bias.detach().double()
    )
    to_x = nearest(g, rows[0], wide) @ nearest(w, rows[1], False)
    to_weight = nearest(g.t(), rows[0], wide) @ nearest(flat, rows[1], False)
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    for found, wanted in (
        (result.flatten(0, 1), expected),
        (x.grad.flatten(0, 1), to_x),
        (weight.grad, to_weight),
        (bias.grad, g.double().sum(0)),
    ):
        error = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert float(error) < 2.0**-7  # the result is bfloat16


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("rows", [True, False])
def test_several_maps_of_one_input_are_one_rounded_product(rows: bool, by_row: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32).bfloat16().requires_grad_()
    shape = (3, 48, 32) if rows else (32, 3, 48)
    weight = (torch.randn(shape) / 6).bfloat16().requires_grad_()
    bias = torch.randn(3, 48).bfloat16()
    results = scaled_linear_blocks(x, weight, bias, rows, by_row)
    plain = linear_blocks(x, weight, bias, rows)
    incoming = [torch.randn(one.shape).bfloat16() for one in plain]
    found = torch.autograd.grad(results, (x, weight), incoming)
    wanted = torch.autograd.grad(plain, (x, weight), incoming)
    for one, other in zip((*results, *found), (*plain, *wanted), strict=True):
        assert one.shape == other.shape
        assert not torch.equal(one, other)
        error = (one - other).detach().norm() / other.detach().norm()
        assert float(error) < 0.1  # 3 bits of mantissa, for gradients 2
    assert set(SCALED) == PRODUCTS


def test_scores_of_a_loss_stay_in_16_bits() -> None:
    def graph_of(width: int) -> OperatorGraph:
        module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, width))

        class Scored(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = module

            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                return F.cross_entropy(self.inner(x).float(), y)

        batch = {"x": torch.randn(64, 32), "y": torch.randint(0, 5, (64,))}
        return capture(Scored(), batch, precision="bfloat16").graph

    graph = graph_of(16)
    rounded = [
        is_float8_product(graph, one, tuple(graph.tensors[t].shape for t in one.inputs))
        for one in graph.operators
        if one.kind in PRODUCTS
    ]
    assert rounded == [True, False]


def test_narrow_products_stay_in_16_bits() -> None:
    """Adapters and routers: rounding what is wide takes longer than 8 bits save."""
    module = nn.Sequential(nn.Linear(512, 32), nn.Linear(32, 2048), nn.Linear(2048, 32))

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).sum()

    graph = capture(Summed(), {"x": torch.randn(64, 512)}, precision="bfloat16").graph
    rounded = [
        is_float8_product(graph, one, tuple(graph.tensors[t].shape for t in one.inputs))
        for one in graph.operators
        if one.kind in PRODUCTS
    ]
    assert rounded == [True, False, False]


class Net(nn.Module):
    """Three linear maps; sizes of the last do not divide by 16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.last = nn.Linear(32, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return F.cross_entropy(self.last(x).float(), y)


def train(seed: Seed, width: int = 64) -> list[list[float]]:
    """Return the losses on every rank."""
    torch.manual_seed(0)
    module = Net()
    batch = {"x": torch.randn(width, 32), "y": torch.randint(0, 5, (width,))}
    captured = capture(module, batch, precision="bfloat16")
    strategy = seed_strategy(captured.graph, seed)
    program = lower(captured.graph, replace(strategy, precision=seed.precision))
    adam = partial(torch.optim.AdamW, lr=1e-2)

    def run(world: LocalWorld) -> list[float]:
        options = RunOptions(world=world)
        mine = copy.deepcopy(module)
        executor = Executor(captured, program, mine, optimizer=adam, options=options)
        return [float(executor.step(one)) for one in batches(batch, STEPS)]

    return run_locally(run, len(strategy.devices))[0]


@pytest.mark.parametrize("precision", ["fp8", "fp8-row"])
def test_training_in_8_bits_is_near_bfloat16_and_is_not_it(precision: str) -> None:
    plain = train(Seed(precision="bfloat16"))[0]
    for seed in (Seed(), Seed(data=2, zero=3), Seed(tensor=2)):
        ranks = train(replace(seed, precision=precision))
        assert ranks[0] == ranks[-1]
        assert ranks[0] != plain
        torch.testing.assert_close(ranks[0], plain, rtol=0.03, atol=0)


def test_scales_by_row_do_not_depend_on_how_the_batch_is_split() -> None:
    """Forward at least: each sample has its own scale, and every rank the whole weight."""
    alone = train(Seed(precision="fp8-row"))[0]
    split = train(Seed(data=2, precision="fp8-row"))[0]
    assert alone[0] == pytest.approx(split[0], rel=1e-6)
