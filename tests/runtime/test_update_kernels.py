"""Updates by one kernel, where the choice was left to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw
from torch import Tensor

from shardwright.runtime.update import choose_kernels

ADAMS = (torch.optim.Adam, torch.optim.AdamW)
SETTINGS = draw.fixed_dictionaries(
    {
        "lr": draw.floats(1e-4, 0.5),
        "weight_decay": draw.sampled_from((0.0, 0.1)),
        "amsgrad": draw.booleans(),
        "maximize": draw.booleans(),
    }
)


def updated(
    kind: Any, settings: dict[str, Any], gradients: list[list[Tensor | None]], *, chooses: bool
) -> list[Tensor]:
    """Return parameters after a step by each row of gradients."""
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.rand(size, dtype=torch.float64, generator=generator).requires_grad_()
        for size in (1, 7, 130)
    ]
    optimizer = kind(parameters, **settings)
    if chooses:
        choose_kernels(optimizer)
        assert optimizer.param_groups[0]["fused"]
    for row in gradients:
        for parameter, gradient in zip(parameters, row, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
    return [one.detach() for one in parameters]


@pytest.mark.parametrize("kind", ADAMS)
@given(settings=SETTINGS, seed=draw.integers(0, 99), late=draw.integers(0, 2))
def test_one_kernel_updates_as_torch_does_by_itself(kind, settings, seed, late):
    generator = torch.Generator().manual_seed(seed)
    gradients: list[list[Tensor | None]] = [
        [torch.randn(size, dtype=torch.float64, generator=generator) for size in (1, 7, 130)]
        for _ in range(4)
    ]
    gradients[0][late] = None  # a parameter that the first batch does not reach
    own = updated(kind, settings, gradients, chooses=False)
    for mine, theirs in zip(updated(kind, settings, gradients, chooses=True), own, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("parameter", "settings"),
    [
        (torch.rand(4, 3), {"foreach": True}),
        (torch.rand(4, 3), {"foreach": False}),
        (torch.rand(4, 3), {"fused": False}),
        (torch.rand(4, 3), {"differentiable": True}),
        (torch.rand(3, 4).t(), {}),
        (torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last), {}),
        (torch.rand(4, 3, dtype=torch.bfloat16), {}),
        (torch.rand(4, 3, dtype=torch.complex64), {}),
    ],
)
def test_what_was_chosen_or_is_not_one_kernels_is_left_as_it_is(parameter, settings):
    optimizer = torch.optim.AdamW([parameter.requires_grad_()], **settings)
    before = dict(optimizer.param_groups[0])
    choose_kernels(optimizer)
    assert optimizer.param_groups[0] == before


def test_other_optimizers_are_left_as_they_are():
    class Mine(torch.optim.AdamW):
        """May count the parameters that it is called with."""

    for kind in (torch.optim.SGD, torch.optim.Adagrad, Mine):
        optimizer = kind([torch.rand(4).requires_grad_()], lr=0.1)
        choose_kernels(optimizer)
        assert not optimizer.param_groups[0].get("fused")
