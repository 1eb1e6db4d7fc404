"""Spellings that once had no rule, kept a model from microbatches, or made it opaque: second names of operators, rows picked
by their own numbers in every spelling, a loss behind its weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.operators.keeping.kept import saved_tensors
from shardwright.planner.lower import lower
from shardwright.planner.simulate.memory import memory_over_time
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.composed import COMPOSED, NAMES
from shardwright.runtime.executor import Executor
from shardwright.verbs.coverage import coverage
from tests.runtime.equivalence import assert_equivalent
from tests.runtime.strategies import named

pytestmark = pytest.mark.torch

Make = Callable[[Tensor, Tensor], Tensor]
WAYS = named(Seed(data=2, num_microbatches=2), Seed(tensor=2))


class Made(nn.Module):
    """Something made of scaled rows and the scales."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make, self.scale = make, nn.Parameter(torch.linspace(0.1, 0.9, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.make(x * self.scale, self.scale).square().mean()


def made(make: Make) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Made(make).double(), {"x": torch.randn(4, 4, 8, dtype=torch.float64)}


def rows(x: Tensor, *form: int) -> Tensor:
    return torch.arange(x.shape[0]).view(-1, *form)


def best(x: Tensor) -> Tensor:
    return x[:, :, :3].argsort(1)


SPELLINGS: dict[str, Make] = {
    "second names": lambda x, w: (
        torch.arctan2(x, w).moveaxis(1, 2) * torch.arccos(x.tanh() / 2).moveaxis((1, 2), (2, 1))
    ),
    "comparisons": lambda x, w: torch.where(torch.greater(x, 0) & torch.less_equal(x, w), x, x * w),
    "stacked": lambda x, w: torch.hstack([x, torch.dstack([x[..., :4], x[..., 4:] * w[:4]])]),
    "turned": lambda x, w: torch.fliplr(x) * torch.float_power(w, 2),
    "cut": lambda x, w: torch.hsplit(x, 2)[0] + torch.dsplit(x.repeat(1, 1, 2), [8])[1][:, 2:],
    "diagonals": lambda x, w: x @ torch.diag(w) + torch.diag(w[:, None] @ w[None]),
    "products": lambda x, w: x @ torch.linalg.multi_dot([w[:, None], w[None], torch.diagflat(w)]),
    "special": lambda x, w: torch.special.log_softmax(x, -1) * torch.special.ndtr(w),
    "no second name": lambda x, w: (
        torch.i0(x) + torch.special.entr(w.sigmoid()) + torch.polygamma(1, w.abs() + 1)
    ),
    "points": lambda x, w: x[rows(x, 1, 1).expand(-1, 4, 3), best(x)] * w,
    "joined to nothing": lambda x, w: torch.cat(
        [torch.cat([torch.tensor([], dtype=x.dtype), x], 1), x * w], 1
    ),
    "repeated": lambda x, w: x[rows(x, 1, 1).repeat(1, 4, 3), best(x)] * w,
    "quantiles": lambda x, w: (x * w).quantile(torch.tensor([0.2, 0.5], dtype=x.dtype), -1),
    "counted": lambda x, w: x.nansum(-1, True) * torch.isin(best(x), torch.tensor([0, 2])) * w[0],
    "sound": lambda x, w: torch.istft(
        torch.stft(x.flatten(1), 8, 3, window=w, return_complex=True), 8, 3, window=w, length=30
    ),
    "leaks": lambda x, w: F.rrelu(x - 1) * torch.dist(w, w.square()),
    "columns": lambda x, w: torch.linalg.solve_triangular(
        torch.eye(8, dtype=x.dtype) + torch.tril(w.outer(w)), x.flatten(0, 1).mT, upper=False
    ),
}


class Weighed(nn.Module):
    """A loss behind the weight that is learned for it, in a vector of one."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.doubt = nn.Linear(8, 1), nn.Parameter(torch.full((1,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.exp(-self.doubt) * self.net(x).square().mean() + self.doubt).squeeze()


def weighed() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Weighed().double(), {"x": torch.randn(4, 8, dtype=torch.float64)}


def test_a_loss_may_stand_behind_its_weight() -> None:
    assert_equivalent(2, weighed, WAYS, partial(torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_what_is_spelled_otherwise_splits_all_the_same(spelling: str) -> None:
    factory = partial(made, SPELLINGS[spelling])
    found = coverage(capture(*factory()).graph)
    assert found.num_with_rule == found.num_operators
    assert_equivalent(2, factory, WAYS, partial(torch.optim.SGD, lr=0.1))


def test_every_name_that_is_taken_apart_is_composed_by_pytorch() -> None:
    composed = "CompositeImplicitAutograd"
    for one in COMPOSED:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(one.name(), composed), one
    assert {one.name().split("::")[1].split(".")[0] for one in COMPOSED} == set(NAMES.split())


class Rounded(nn.Module):
    """Weights that are rounded in forward and trained as if they were not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        step = self.weight.detach().abs().amax() / 7
        rounded = (self.weight / step).round().clamp(-8, 7) * step
        return (x @ (self.weight + (rounded - self.weight).detach())).square().mean()


def rounded() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Rounded().double(), {"x": torch.randn(8, 64, dtype=torch.float64)}


def test_nothing_is_kept_for_a_gradient_of_what_is_only_read_detached() -> None:
    graph = capture(*rounded()).graph
    kept = {operator.kind: saved_tensors(graph, operator)[:2] for operator in graph.operators}
    assert kept["aten.clamp.default"] == kept["aten.round.default"] == ((), ())
    assert_equivalent(2, rounded, WAYS, partial(torch.optim.SGD, lr=0.1))


def test_peaks_of_what_is_only_read_detached_are_those_predicted() -> None:
    module, batch = rounded()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed()))
    executor = Executor(captured, program, module, optimizer=torch.optim.AdamW)
    executor.step(batch)
    measured = executor.profile_step(batch).worst_peak_bytes
    executor.close()
    seconds = np.zeros(program.num_instructions)
    assert max(memory_over_time(program, (seconds, seconds))[0][:, 1]) == pytest.approx(
        measured, rel=0.02
    )
