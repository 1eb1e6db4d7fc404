"""Activation memory of a transformer layer (Korthikanti et al., arXiv:2205.05198, section 4).

Bytes of one layer that live from forward to backward, in 16 bits, with the scores of attention kept:
equation 1, and equations 2 and 4 on t tensor-parallel devices, without and with sequence parallelism.
The paper leaves out statistics of norms and biases, which are of order h and s times smaller.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.decoder import Decoder
from shardwright.core.program import Kind
from shardwright.planner.cost.recomputation import copies_kept
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy

pytestmark = pytest.mark.torch

S, B, H, A, T = 256, 4, 512, 4, 2


def at_the_end_of_forward(layers: int, seed: Seed) -> int:
    """Return the bytes alive on a device when backward begins, beyond those that always are."""
    from shardwright.runtime.capture.decoder import capture_decoder

    shape = Decoder(
        layers=layers, hidden=H, heads=A, kv_heads=A, head_size=H // A, ffn=4 * H, vocab=1024,
        seq=S, bias=True, positions=True, flash=False, dropout=0.1,
    )  # fmt: skip
    graph = capture_decoder(shape, B, "bfloat16").run_on("cuda")
    strategy = seed_strategy(graph, seed)
    if seed.sequence:  # what is gathered is gathered again ("we store only Y_i^s", section 4.2.2)
        inside = range(graph.blocks[1].start, graph.blocks[-1].start)
        strategy = replace(strategy, reshard_again=copies_kept(graph, inside))
    program = lower(graph, strategy)
    stop = int(np.flatnonzero(program.kind == Kind.BACKWARD)[0])
    return int((program.allocated[:stop] - program.freed[:stop]).sum())


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (Seed(precision="bfloat16"), S * B * H * (34 + 5 * A * S / H)),
        (Seed(tensor=T, precision="bfloat16"), S * B * H * (10 + 24 / T + 5 * A * S / (H * T))),
        (
            Seed(tensor=T, sequence=True, precision="bfloat16"),
            S * B * H / T * (34 + 5 * A * S / H),
        ),
    ],
    ids=["equation 1", "equation 2", "equation 4"],
)
def test_a_layer_keeps_what_the_paper_counts(seed: Seed, expected: float) -> None:
    layer = at_the_end_of_forward(5, seed) - at_the_end_of_forward(4, seed)
    assert layer == pytest.approx(expected, rel=0.02)
