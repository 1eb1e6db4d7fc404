"""Exact selections of steps in a row, which look no lower than the one before did, and what finds them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shardwright.ddp import Compression, Compressor
from shardwright.ddp.passes import FEW, add_and_find
from shardwright.ddp.selecting import BLOCK
from tests.ddp import emulator
from tests.ddp.local import averaged, on_ranks

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, 5 * BLOCK + 3, 40 * BLOCK])
def test_one_pass_adds_to_the_bit_and_finds_all_that_reach_a_magnitude(size, dtype):
    generator = torch.Generator().manual_seed(size)
    one, other = torch.randn(2, size, generator=generator, dtype=torch.float64).to(dtype)
    one[size // 2], other[size - 1] = -9.0, math.nan
    one[size // 3] = -math.inf
    for least in (0.5, 3.0, 9.0):
        out = torch.full_like(one, 7.0)
        found = add_and_find(one, other, out, least)
        assert torch.equal((one + other).nan_to_num(5.0), out.nan_to_num(5.0))
        wanted = torch.nonzero(~(out.abs() < least)).view(-1)
        if len(wanted) > size // FEW:
            assert found is None
        else:
            assert torch.equal(found, wanted)
    assert size < 5 * BLOCK or found is not None


def drawn(ranks, steps, size=6000):
    """Gradients whose scale falls and rises: thresholds of a step are too low and too high for the next."""
    generator = torch.Generator().manual_seed(ranks)
    scales = [1, 1, 1, 1, 0.1, 0.01, 1, 100, 1e-3, 1e-3, 1, 1]
    return [
        [
            {"w": scale * torch.randn(size, generator=generator, dtype=torch.float64)}
            for _ in range(ranks)
        ]
        for scale in scales[:steps]
    ]


@pytest.mark.parametrize(("method", "ranks"), [("top-k", 1), ("top-k", 3), ("gtop-k", 4)])
def test_selections_of_steps_in_a_row_are_those_of_the_emulator(method, ranks):
    inputs = drawn(ranks, 12)
    chosen = Compression(method=method, density=0.003)
    means, compressors, _ = averaged(chosen, inputs)
    owed = [np.zeros(6000)] * ranks
    for number, step in enumerate(inputs):
        given = [one["w"].numpy() + rest for one, rest in zip(step, owed, strict=True)]
        mean, owed = emulator.step(method, given, 18)
        np.testing.assert_allclose(means[number][0]["w"].numpy(), mean, rtol=0, atol=1e-11)
    for compressor, rest in zip(compressors, owed, strict=True):
        np.testing.assert_allclose(compressor.owed("w"), rest, rtol=0, atol=1e-11)
        assert compressor.state_dict()["thresholds"]["w"][1] > 0


def test_what_is_not_finite_is_found_in_the_one_pass_and_nothing_is_owed_for_it():
    inputs = drawn(2, 6)
    inputs[4][1]["w"][77] = math.inf
    inputs[5][0]["w"][5] = math.nan
    found, compressors, _ = averaged(Compression(method="top-k", density=0.003), inputs)
    straight, others, _ = averaged(Compression(method="top-k", density=0.003), inputs[:4])
    assert all(bool(one["w"].isnan().all()) for step in found[4:] for one in step)
    assert [one.skipped for one in compressors] == [2, 2]
    for one, other in zip(compressors, others, strict=True):
        assert torch.equal(one.owed("w"), other.owed("w"))
    assert torch.equal(found[3][0]["w"], straight[3][0]["w"])


def test_who_goes_on_from_a_state_selects_the_same():
    inputs, chosen = drawn(2, 8), Compression(method="top-k", density=0.003)

    def stopped(wire):
        compressor = Compressor(chosen, wire)
        found = []
        for number, step in enumerate(inputs):
            if number == 4:
                state, compressor = compressor.state_dict(), Compressor(chosen, wire)
                compressor.load_state_dict(state)
            gradients = {name: one.clone() for name, one in step[wire.rank].items()}
            compressor.average(gradients)
            found.append(gradients)
        return found

    straight, _, _ = averaged(chosen, inputs)
    results, _ = on_ranks(2, stopped)
    for rank, found in enumerate(results):
        for step, mine in zip(straight, found, strict=True):
            assert torch.equal(step[rank]["w"], mine["w"])
