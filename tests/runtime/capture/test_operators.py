"""Sum divided by count against torch's own mean losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwright.runtime.capture.operators import (
    count_targets,
    cross_entropy_sum,
    nll_sum,
    update_running,
)

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("shape", [(12,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_sum_over_count_is_the_mean_cross_entropy(
    shape: tuple[int, ...], smoothing: float, is_weighted: bool
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(shape[0], 7, *shape[1:], dtype=torch.float64)
    target = torch.randint(0, 7, shape)
    target.view(-1)[::3] = -100
    weight = torch.rand(7, dtype=torch.float64) if is_weighted else None
    total = cross_entropy_sum(logits, target, weight, label_smoothing=smoothing)
    mean = total / count_targets(target, weight, dtype=torch.float64)
    torch.testing.assert_close(
        mean, F.cross_entropy(logits, target, weight, label_smoothing=smoothing)
    )


def test_likelihoods_of_pictures_have_gradients_however_their_memory_lies() -> None:
    torch.manual_seed(0)
    logs = torch.randn(2, 5, 3, 4, dtype=torch.float64).log_softmax(1)
    target = torch.randint(0, 5, (2, 3, 4))
    found = []
    for one in (logs, logs.to(memory_format=torch.channels_last), logs.mT.contiguous().mT):
        one.requires_grad_()
        nll_sum(one, target).backward()
        found.append(one.grad)
    torch.testing.assert_close(
        found[0], F.one_hot(target, 5).movedim(-1, 1) * -1.0, check_dtype=False
    )
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], check_stride=False)


def test_sum_over_count_is_the_mean_negative_log_likelihood() -> None:
    torch.manual_seed(0)
    logs = torch.randn(12, 7, dtype=torch.float64).log_softmax(-1)
    target = torch.arange(12) % 7
    mean = nll_sum(logs, target, ignore_index=3) / count_targets(target, ignore_index=3)
    torch.testing.assert_close(mean, F.nll_loss(logs, target, ignore_index=3))


def test_running_statistics_follow_batch_norm() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 5, dtype=torch.float64)
    norm = torch.nn.BatchNorm1d(3, momentum=0.3).double()
    norm(x)
    mean, variance = torch.zeros(3).double(), torch.ones(3).double()
    update_running(
        mean,
        variance,
        x.mean((0, 2), True),
        x.var((0, 2), unbiased=False, keepdim=True),
        0.3,
        40 / 39,
    )
    torch.testing.assert_close((mean, variance), (norm.running_mean, norm.running_var))
