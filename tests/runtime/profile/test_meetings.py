"""What a message costs ranks that wait for it at once, told from what they computed before."""

import math

import torch

from shardwright.runtime.profile.beneath import computed


def test_who_waits_for_a_core_before_a_round_does_not_wait_for_the_message() -> None:
    """Four ranks of 4 ms on two cores: each runs undisturbed, two of them when the others are done."""
    ranks = torch.full((4, 3), 0.004, dtype=torch.float64)
    assert computed(ranks, ranks, 0.0, 2.0).tolist() == [0.008] * 3


def test_with_cores_of_their_own_ranks_wait_for_the_slowest() -> None:
    own = torch.tensor([[0.004, 0.004], [0.006, 0.004]], dtype=torch.float64)
    assert computed(own, own, 0.0, math.inf).tolist() == [0.006, 0.004]
    skewed = computed(own, own, 0.1, math.inf)
    torch.testing.assert_close(skewed, torch.tensor([0.0055, 0.0044], dtype=torch.float64))
