"""Gradients taken inside forward are operators of the graph: split, cut into microbatches, trained as in PyTorch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vmap

from shardwright.core.strategy import Strategy
from shardwright.operators.splitting import find_samples
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.assemble import Captured
from shardwright.runtime.capture.convolved import convolution_backward
from shardwright.runtime.capture.record import aten
from shardwright.verbs.coverage import random_strategy
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch
sgd = partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    """Two layers beside what the models below do with them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(10)
        self.head = nn.Linear(10, 1)

    def energy(self, x: Tensor) -> Tensor:
        return self.head(self.norm(F.silu(self.one(x)))).squeeze(-1)

    def curved(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(F.silu(self.one(x)))).squeeze(-1)


class Forces(Net):
    """An interatomic potential: energies, and the gradients by places that are trained too."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy.square().mean() + F.mse_loss(-force, y)


class Potential(Net):
    """The gradient is taken in a module inside, the rest of which is not differentiated so."""

    class Inner(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.requires_grad_(True) if not x.requires_grad else x
                weights = torch.ones(len(x), dtype=x.dtype, device=x.device)
                return torch.autograd.grad(self.energy(x), x, weights, create_graph=True)[0]

    def __init__(self) -> None:
        super().__init__()
        self.inner = Potential.Inner()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.two(self.one(self.inner(x + y)).tanh()), y)


class Penalty(Net):
    """A critic whose gradient between the two batches has norm one."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        between = (0.3 * x + 0.7 * y).requires_grad_(True)
        score = self.energy(between)
        (slope,) = torch.autograd.grad(
            score, between, torch.ones_like(score), create_graph=True, retain_graph=True
        )
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        return self.energy(x).mean() - self.energy(y).mean() + 10 * penalty


class Laplacian(Net):
    """Second derivatives, one coordinate after another."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # Without the norm, of whose third derivatives PyTorch leaves out a part.
        x = x.clone().requires_grad_(True)
        first = torch.autograd.grad(self.curved(x).sum(), x, create_graph=True)[0]
        total = y.sum(-1) * 0
        for place in range(2):
            second = torch.autograd.grad(first[:, place].sum(), x, create_graph=True)[0]
            total = total + second[:, place]
        return (total - y.sum(-1)).square().mean()


class Mapped(Net):
    """The same by transforms of functions: one sample's gradient and second derivatives, mapped."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state = dict(self.named_parameters())

        slope = vmap(grad(self.energy))(x)
        curved = vmap(hessian(self.curved))(x).diagonal(dim1=1, dim2=2)
        rows = vmap(
            jacrev(lambda one: functional_call(self.one, {"weight": state["one.weight"]}, one))
        )
        return F.mse_loss(slope + curved, y) + 0.1 * rows(x).square().sum((1, 2)).mean()


class Partly(Net):
    """What is detached, made without gradients, or asked for without a graph stays so."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.one(x).tanh())
        (slope,) = torch.autograd.grad(
            F.mse_loss(self.two(h), y, reduction="sum"), h, retain_graph=True
        )
        with torch.no_grad():
            scale = self.one(x).abs().amax(1, keepdim=True) + 1
        (other,) = torch.autograd.grad((h * scale * h.detach()).sum(), h, create_graph=True)
        return (
            (h * slope).sum(-1).mean() + other.square().mean() + F.mse_loss(self.two(h.detach()), y)
        )


class InnerStep(Net):
    """A step on one half of the columns, judged on the other."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.one.weight
        inner = (x @ weight.T).square().mean()
        (step,) = torch.autograd.grad(inner, (weight,), create_graph=True)
        return F.mse_loss(self.two(x @ (weight - 0.1 * step).T), y)


class Balanced(Net):
    """Tasks whose weights follow the norms of their gradients at a shared layer (GradNorm): of scalars, by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.one(x).tanh()
        losses = F.mse_loss(self.two(h), y), self.head(h).square().mean()
        norms = [
            torch.autograd.grad(weight * loss, self.one.weight, create_graph=True)[0].norm()
            for weight, loss in zip(self.weights, losses, strict=True)
        ]
        return sum(losses) + (norms[0] - norms[1]).abs()


class Critic(Net):
    """A penalty on how steep a critic of convolutions is, as in WGAN-GP."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv1d(2, 4, 2, stride=2, padding=1, groups=2)
        self.back = nn.ConvTranspose1d(4, 2, 3, output_padding=1, stride=2)

    def score(self, x: Tensor) -> Tensor:
        return self.back(self.wide(x.view(len(x), 2, 3)).tanh()).square().sum((1, 2)).tanh()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = (0.3 * x + 0.7 * y).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.score(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + self.score(y).mean()


class LastLayer(Critic):
    """A weight of one loss by how steep it is at the last layer beside another (VQGAN)."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = self.score(x).mean(), self.score(y).square().mean()
        steep = [
            torch.autograd.grad(loss, self.wide.weight, retain_graph=True)[0] for loss in losses
        ]
        return losses[0] + losses[1] * (steep[0].norm() / steep[1].norm()).detach()


class WaveFunction(Net):
    """A determinant's Laplacian: of matrices that lie turned in memory, by a last gradient that needs no graph."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        orbitals = self.one(torch.stack((x, x.sin(), x.cos()), 1))[..., :9].view(-1, 3, 3, 3)
        turned, solved = torch.linalg.slogdet(orbitals.transpose(1, 2))[1], orbitals[:, 0].mT
        psi = turned.tanh().sum(1) + torch.linalg.det(orbitals[:, 1].mT).tanh()
        psi = (
            psi + torch.linalg.solve(solved, y[:, :3]).tanh().sum(1) + self.two(self.one(x)).sum(1)
        )
        (slope,) = torch.autograd.grad(psi.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, retain_graph=True)
        return (psi * (bend.square().sum(1) + slope.square().sum(1)).detach().tanh()).mean()


BY_SAMPLE = [Forces, Potential, Penalty, Laplacian, Mapped, Partly, Critic]


def made(kind: type[Net]) -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(0)
    return kind().double(), {name: torch.randn(8, 6, dtype=torch.float64) for name in "xy"}


def captured_whole(kind: type[Net]) -> Captured:
    captured = capture(*made(kind))
    assert not [op.kind for op in captured.graph.operators if op.kind.startswith("opaque.")]
    return captured


def check(kind: type[Net], captured: Captured, strategy: Strategy) -> None:
    module, batch = made(kind)
    for rank in train_rehearsed(captured, strategy, module, batch, sgd)[0]:
        assert_close(rank, train_plain(partial(made, kind), sgd), strategy.label)


@pytest.mark.parametrize("kind", [*BY_SAMPLE, InnerStep, Balanced, LastLayer])
def test_gradients_inside_forward_are_operators_that_split(kind: type[Net]) -> None:
    captured = captured_whole(kind)
    for strategy in (
        seed_strategy(captured.graph, Seed(data=2)),
        seed_strategy(captured.graph, Seed(data=2, zero=3)),
        seed_strategy(captured.graph, Seed(tensor=2)),
        random_strategy(captured.graph, 1),
    ):
        check(kind, captured, strategy)


@pytest.mark.parametrize("kind", BY_SAMPLE)
def test_gradients_of_samples_allow_microbatches(kind: type[Net]) -> None:
    captured = captured_whole(kind)
    assert find_samples(captured.graph).blocker == ""
    check(kind, captured, seed_strategy(captured.graph, Seed(data=2, num_microbatches=2)))


def test_matrices_that_arrive_otherwise_in_memory_are_factored_as_they_were_traced() -> None:
    captured = captured_whole(WaveFunction)
    graph, split = captured.graph, seed_strategy(captured.graph, Seed(data=2))
    gathered = [
        replace(config, dims=("",)) if "_linalg" in operator.kind else config
        for operator, config in zip(graph.operators, split.configs, strict=True)
    ]
    assert gathered != list(split.configs)
    for strategy in (split, replace(split, configs=tuple(gathered))):
        check(WaveFunction, captured, strategy)


def test_the_backward_of_a_convolution_is_that_of_torch() -> None:
    settings = itertools.product((1, 2, 3), (False, True), (1, 2), (1, 2), (0, 1), (1, 2), (2, 3))
    for rank, transposed, groups, stride, padding, dilation, width in settings:
        first, second = (4, 6 // groups) if transposed else (6, 4 // groups)
        weight = torch.randn(first, second, *[width] * rank, dtype=torch.float64)
        data = torch.randn(2, 4, *range(6, 6 + rank), dtype=torch.float64)
        rest = stride - 1 if transposed else 0
        how = (
            [stride] * rank,
            [padding] * rank,
            [dilation] * rank,
            transposed,
            [rest] * rank,
            groups,
        )
        gradient = torch.randn_like(aten.convolution(data, weight, None, *how))
        given = (gradient, data, weight, [6], *how, [True, True, True])
        for found, expected in zip(
            convolution_backward(*given), aten.convolution_backward(*given), strict=True
        ):
            torch.testing.assert_close(found, expected)


def test_a_step_on_the_whole_batch_allows_no_microbatches() -> None:
    assert "mixes samples" in find_samples(captured_whole(InnerStep).graph).blocker


class Weighed(Net):
    """A derivative that multiplies by a plain number."""

    def forward(self, x: Tensor) -> Tensor:
        return vmap(grad(lambda at: self.energy(at) + 0.5 * at.dot(at)))(x).square().mean()


def test_numbers_that_a_derivative_casts_are_made_in_that_dtype() -> None:
    graph = capture(Weighed(), {"x": torch.randn(8, 6)}, precision="bfloat16").graph
    made = [operator for operator in graph.operators if not operator.inputs]
    assert {operator.kind for operator in made} == {"aten.full.default"}
    assert {graph.tensors[one.outputs[0]].dtype for one in made} == {"bfloat16"}
