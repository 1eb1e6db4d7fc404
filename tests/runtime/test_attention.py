"""Masks as fused kernels of attention take them."""

from __future__ import annotations

import torch

from shardwright.runtime.attention import attend, dense_rows


def test_a_permuted_bias_is_copied_once_however_often_it_is_repeated() -> None:
    """As T5 makes it: numbers by pair of positions and head, heads first, the same for all samples."""
    table = torch.randn(6, 6, 4, dtype=torch.float64)
    bias = table.permute(2, 0, 1).unsqueeze(0).expand(8, 4, 6, 6)
    dense = dense_rows(bias)
    assert torch.equal(dense, bias)
    assert dense.stride(-1) == 1
    assert dense.untyped_storage().nbytes() == table.untyped_storage().nbytes()
    query, key, value = torch.randn(3, 8, 4, 6, 5, dtype=torch.float64)
    scores = torch.softmax(query @ key.transpose(-2, -1) / 5**0.5 + bias, -1)
    torch.testing.assert_close(attend(query, key, value, bias), scores @ value)


def test_what_lies_dense_or_is_repeated_along_a_row_stays() -> None:
    for mask in (torch.zeros(2, 1, 6, 6), torch.zeros(2, 1, 6, 1).expand(2, 1, 6, 6)):
        assert dense_rows(mask) is mask
