"""Memory of cross entropy as other software computes it, beside this machine's allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from shardwright.core.decoder import Decoder
from shardwright.planner.lower import lower
from shardwright.planner.simulate.memory import memory_over_time
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture.decoder import capture_decoder

pytestmark = pytest.mark.torch

# So many classes that nothing but the scores matters; ``SCORES`` are bytes of float32.
SHAPE = Decoder(
    layers=1, hidden=8, heads=1, kv_heads=1, head_size=8, ffn=8, vocab=8192, seq=256, tied=False
)
ALONE = Seed()
# Of what the sums of exponentials take for a moment.
SMALL = 0.15
SCORES = 4 * 2 * SHAPE.seq * SHAPE.vocab


def peak(loss: str, seed: Seed = ALONE) -> float:
    """Return the peak beyond what is always there, in scores of float32."""
    graph = capture_decoder(replace(SHAPE, loss=loss), 2, "bfloat16")
    program = lower(graph, seed_strategy(graph, replace(seed, precision="bfloat16")))
    count = program.num_instructions
    clock = torch.arange(count + 1, dtype=torch.float64).numpy()
    rows = memory_over_time(program, (clock[:-1], clock[1:]))[0]
    return float(rows[:, 1].max() - rows[0, 1]) / SCORES * seed.tensor


def measured() -> float:
    """Return what torch's own cross entropy takes at its peak, of scores that are then let go."""
    head = torch.randn(8, SHAPE.vocab, dtype=torch.bfloat16, requires_grad=True)
    x = torch.randn(2 * SHAPE.seq, 8, dtype=torch.bfloat16)
    labels = torch.zeros(2 * SHAPE.seq, dtype=torch.long)

    def step() -> None:
        F.cross_entropy((x @ head).float(), labels).backward()

    step()
    head.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    level = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            most = max(most, level)
    return most / SCORES


def test_torchs_cross_entropy_has_three_copies_at_once() -> None:
    assert peak("log_softmax") == pytest.approx(measured(), rel=0.02)
    assert peak("log_softmax") == pytest.approx(3, rel=0.03)


def test_loss_parallel_has_four() -> None:
    """Log-probabilities, marks, exponentials and their sum (torch/distributed/tensor/parallel/loss.py,
    ``_nll_loss_and_log_softmax_backward``)."""
    assert peak("log_softmax", Seed(tensor=2)) == pytest.approx(4, rel=0.03)


@pytest.mark.parametrize("seed", [ALONE, Seed(tensor=2)])
def test_megatrons_works_where_the_scores_lie(seed: Seed) -> None:
    """Scores of 16 bits and of 32; until 2023 a copy of these too, after the first are gone where the
    vocabulary is split (core/tensor_parallel/cross_entropy.py)."""
    assert peak("in place", seed) == pytest.approx(1.5, abs=SMALL)
    assert peak("copied", seed) == pytest.approx(2.5 if seed == ALONE else 2.0, abs=SMALL)


def test_a_compiled_loss_has_the_scores_as_they_come_and_their_gradient() -> None:
    """4 bytes a score of 16 bits, as ``torch.compile`` of the function above took with torch 2.13."""
    assert peak("compiled") == pytest.approx(1, abs=SMALL)
