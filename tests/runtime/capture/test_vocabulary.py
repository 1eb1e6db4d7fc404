"""The two operators of a vocabulary's loss, in pieces, against torch's cross entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwright.runtime.capture.vocabulary import (
    block_width,
    vocabulary_cross_entropy_sum,
    vocabulary_logsumexp,
    whole_cross_entropy_sum,
)

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_shares_of_pieces_add_up_to_cross_entropy(
    pieces: int, smoothing: float, is_weighted: bool
) -> None:
    torch.manual_seed(0)
    scores = (50 * torch.randn(3, 5, 64, dtype=torch.float64)).requires_grad_()
    target = torch.randint(0, 64, (3, 5))
    target[0, ::2] = -100
    weight = torch.rand(64, dtype=torch.float64) if is_weighted else None
    expected = F.cross_entropy(
        scores.flatten(0, 1), target.flatten(), weight, reduction="sum", label_smoothing=smoothing
    )
    (wanted,) = torch.autograd.grad(expected, scores)
    parts = [part.detach().requires_grad_() for part in scores.chunk(pieces, -1)]
    blocks = torch.cat([vocabulary_logsumexp(part, block_width(64)) for part in parts], -1)
    shares = [
        vocabulary_cross_entropy_sum(
            part, target, blocks, weight, -100, smoothing, 64, at * part.shape[-1]
        )
        for at, part in enumerate(parts)
    ]
    torch.testing.assert_close(sum(shares), expected)
    gradients = [torch.autograd.grad(2 * s, p)[0] for s, p in zip(shares, parts, strict=True)]
    torch.testing.assert_close(torch.cat(gradients, -1), 2 * wanted)


def test_a_piece_of_impossible_classes_has_no_share_and_no_gradient() -> None:
    scores = torch.randn(6, 64, dtype=torch.float64)
    scores[:4, 32:] = -torch.inf  # a masked vocabulary: all of the second piece, of some rows
    scores.requires_grad_()
    target = torch.randint(0, 32, (6,))
    expected = F.cross_entropy(scores, target, reduction="sum")
    (wanted,) = torch.autograd.grad(expected, scores)
    parts = [part.detach().requires_grad_() for part in scores.chunk(2, -1)]
    blocks = torch.cat([vocabulary_logsumexp(part, 2) for part in parts], -1)
    shares = [
        vocabulary_cross_entropy_sum(part, target, blocks, classes=64, offset=32 * at)
        for at, part in enumerate(parts)
    ]
    torch.testing.assert_close(sum(shares), expected)
    gradients = [torch.autograd.grad(s, p)[0] for s, p in zip(shares, parts, strict=True)]
    torch.testing.assert_close(torch.cat(gradients, -1), wanted)


def test_half_precision_loses_no_more_than_torch_does() -> None:
    torch.manual_seed(0)
    exact = torch.randn(32, 128, dtype=torch.float64)
    target = torch.randint(0, 128, (32,))
    reference = F.cross_entropy(exact, target, reduction="sum")
    half = exact.bfloat16().requires_grad_()
    blocks = vocabulary_logsumexp(half, block_width(128))
    ours = vocabulary_cross_entropy_sum(half, target, blocks, classes=128)
    assert abs(ours.item() - reference) < 0.02 * reference
    assert torch.autograd.grad(ours, half)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("classes", "blocks"), [(50304, 32), (50257, 29), (32000, 32), (65, 13), (96, 32), (53, 1)]
)
def test_blocks_are_equal_and_as_many_as_divide(classes: int, blocks: int) -> None:
    assert block_width(classes) * blocks == classes


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("rows", [3, 5000])  # in one step of the kernel, and in several
def test_the_loss_of_all_classes_is_cross_entropy(
    rows: int, smoothing: float, is_weighted: bool
) -> None:
    torch.manual_seed(0)
    scores = (50 * torch.randn(rows, 2, 64, dtype=torch.float64)).requires_grad_()
    target = torch.randint(0, 64, (rows, 2))
    target[::2, 0] = -100
    weight = torch.rand(64, dtype=torch.float64) if is_weighted else None
    expected = F.cross_entropy(
        scores.flatten(0, 1), target.flatten(), weight, reduction="sum", label_smoothing=smoothing
    )
    ours = whole_cross_entropy_sum(scores, target, None, weight, -100, smoothing)
    torch.testing.assert_close(ours, expected)
    found, wanted = (torch.autograd.grad(2 * loss, scores)[0] for loss in (ours, expected))
    torch.testing.assert_close(found, wanted)
    half = scores.detach().bfloat16().requires_grad_()
    narrow = whole_cross_entropy_sum(half, target, None, weight, -100, smoothing)
    assert abs(narrow.item() - expected) < 0.02 * expected
    assert torch.autograd.grad(narrow, half)[0].dtype == torch.bfloat16
