"""Losses that ride with gradients in float32: what they add up to."""

from __future__ import annotations

import math

import pytest
import torch

from shardwright.runtime.loss import terms


def added_up(numbers: list[float], dtype: torch.dtype) -> float:
    """Return the sum of all terms as ranks add them, place by place in a dtype, one after the other."""
    total = torch.zeros(len(terms(0.0, dtype)), dtype=dtype)
    for number in numbers:
        total += torch.tensor(terms(number, dtype), dtype=dtype)
    return math.fsum(total.tolist())


@pytest.mark.torch
def test_losses_of_like_size_add_up_as_in_float64() -> None:
    source = torch.Generator().manual_seed(1)
    for ranks in (2, 3, 64):
        shares = torch.rand(200, ranks, generator=source) * 3 + 0.05
        for row in shares.tolist():
            assert added_up(row, torch.float32) == math.fsum(row)
            # In float64 a number is its own term.
            assert added_up(row, torch.float64) == torch.tensor(0.0).double().add_(sum(row)).item()


@pytest.mark.torch
def test_losses_that_are_far_apart_add_up_at_least_as_in_float32() -> None:
    for shares in ([1e-30, 5.0], [3e7, -1.1e-3, 2.0], [1e38, 1e-38], [0.0, -0.0]):
        expected = math.fsum(shares)
        assert abs(added_up(shares, torch.float32) - expected) <= 2**-22 * abs(expected)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_loss_that_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    assert math.isnan(added_up([1.0, math.nan], dtype))
    assert added_up([1.0, math.inf], dtype) == math.inf
    assert added_up([-math.inf, 2.5], dtype) == -math.inf
