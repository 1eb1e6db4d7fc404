"""Closed forms of exchanges against the rounds that the algorithms go through."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.layerwise.allreduce import (
    AUTO,
    Wire,
    all_reduce_seconds,
    all_reduces,
    gtop_k_seconds,
    top_k_seconds,
)

WIRE = Wire(latency=1e-4, bandwidth=1e8, reduction=3e-9)
SIZE = 1e6


def played(rounds: list[tuple[float, bool]]) -> float:
    """Sum up rounds of (bytes sent, whether they are added up)."""
    return sum(
        WIRE.latency + size / WIRE.bandwidth + WIRE.reduction * size * adds for size, adds in rounds
    )


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_forms_are_the_sums_of_their_rounds(workers: int):
    steps = workers.bit_length() - 1
    part = [SIZE / workers] * (workers - 1)
    halves = [SIZE / 2 ** (step + 1) for step in range(steps)]
    rounds = {
        "ring": [(size, True) for size in part] + [(size, False) for size in part],
        "recursive-doubling": [(SIZE, True)] * steps,
        "halving-doubling": [(size, True) for size in halves] + [(size, False) for size in halves],
        "tree": [(SIZE, True)] * steps + [(SIZE, False)] * steps,
    }
    for name, one in rounds.items():
        assert all_reduce_seconds(SIZE, workers, WIRE, name) == pytest.approx(played(one)), name
    assert all_reduce_seconds(SIZE, workers, WIRE) == pytest.approx(
        min(map(played, rounds.values()))
    )


@pytest.mark.parametrize("workers", [2, 3, 6, 8, 100])
def test_no_wire_carries_less_than_every_worker_must_send(workers: int):
    least = 2 * (workers - 1) / workers * SIZE / WIRE.bandwidth
    for latency in (0.0, 1e-4):
        wire = Wire(latency=latency, bandwidth=WIRE.bandwidth)
        assert all_reduce_seconds(SIZE, workers, wire) >= least * (1 - 1e-12)
        assert all_reduce_seconds(SIZE, workers, wire, "double-tree") < all_reduce_seconds(
            SIZE, workers, wire, "tree"
        )


@pytest.mark.parametrize("workers", [1, 2, 12])
@pytest.mark.parametrize("algorithm", [AUTO, "ring", "double-tree"])
def test_many_sizes_take_what_each_of_them_does(workers: int, algorithm: str):
    sizes = np.array([0.0, 1.0, 1e3, 1e5, 1e9])
    alone = [all_reduce_seconds(size, workers, WIRE, algorithm) for size in sizes]
    assert all_reduces(workers, WIRE, algorithm)(sizes).tolist() == alone


def test_a_worker_alone_and_nothing_to_send_take_no_time():
    assert all_reduce_seconds(SIZE, 1, WIRE) == all_reduce_seconds(0, 4, WIRE) == 0
    assert top_k_seconds(10, 1, WIRE) == gtop_k_seconds(0, 4, WIRE) == 0


def test_a_tree_of_the_largest_overtakes_gathering_them_at_eight_workers():
    """Shi et al., ICDCS 2019: 4 log2 P against 2 (P - 1) numbers for each one kept, latency aside."""
    wire = Wire(latency=0.0, bandwidth=1e9)
    assert gtop_k_seconds(1000, 4, wire) > top_k_seconds(1000, 4, wire)
    assert gtop_k_seconds(1000, 8, wire) < top_k_seconds(1000, 8, wire)
    assert top_k_seconds(1000, 8, wire) == pytest.approx(8 * 1000 * 7 / 1e9)
    assert gtop_k_seconds(1000, 8, wire) == pytest.approx(2 * 3 * 8 * 1000 / 1e9)
