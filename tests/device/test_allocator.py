"""The caching allocator: what it reserves, by PyTorch's documented rules and by laws."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from shardwright.core.decoder import Decoder
from shardwright.core.graph import OperatorGraph
from shardwright.device.allocator import MIB, Block, CachingAllocator, DeviceMemory
from shardwright.device.replay import replay
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space import Seed, seed_strategy


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),  # small ones are cut from 2 MiB
        ([MIB, MIB], 2 * MIB),
        ([MIB + 1], 20 * MIB),  # up to 10 MiB from 20 MiB
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 9 * MIB], 40 * MIB),
        ([10 * MIB], 10 * MIB),  # more has its own, in steps of 2 MiB
        ([11 * MIB], 12 * MIB),
    ],
)
def test_segments_have_pytorchs_sizes(sizes: list[int], reserved: int) -> None:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.take(size)
    assert allocator.reserved == reserved


def test_what_was_cut_for_small_tensors_serves_no_larger_one() -> None:
    allocator = CachingAllocator()
    for block in [allocator.take(16 * MIB) for _ in range(4)]:
        allocator.give(block)
    large = allocator.take(64 * MIB)
    assert allocator.reserved == 128 * MIB
    allocator.give(large)
    # The other way round it does: a large one is cut, and merges again.
    parts = [allocator.take(16 * MIB) for _ in range(8)]
    assert allocator.reserved == 128 * MIB
    for block in parts:
        allocator.give(block)
    allocator.take(64 * MIB)
    assert allocator.reserved == 128 * MIB


def test_blocks_never_overlap_and_everything_merges_again() -> None:
    draw, allocator = random.Random(3), CachingAllocator()
    held: list[Block] = []
    for _ in range(3000):
        if held and draw.random() < 0.5:
            allocator.give(held.pop(draw.randrange(len(held))))
        else:
            held.append(allocator.take(int(10 ** draw.uniform(1, 8))))
        wanted = sum(block.wanted for block in held)
        assert allocator.allocated == wanted <= sum(b.size for b in held) <= allocator.reserved
    for block in held:
        allocator.give(block)
    assert allocator.allocated == 0
    before = allocator.reserved
    # Nothing is in pieces: what it has serves tensors as large as its largest segments.
    for size in sorted((int(10**8 * share) for share in (0.2, 0.3, 0.4)), reverse=True):
        allocator.take(size)
    assert allocator.reserved == before


def test_a_full_device_gets_back_the_segments_that_lie_free() -> None:
    memory = DeviceMemory(128 * MIB)
    main, other = CachingAllocator(memory), CachingAllocator(memory)
    for block in [main.take(16 * MIB) for _ in range(4)]:
        main.give(block)
    main.take(12 * MIB)  # in one of the four, which stays
    other.give(other.take(32 * MIB))
    assert (main.reserved, other.reserved) == (64 * MIB, 32 * MIB)
    main.take(100 * MIB)
    assert (main.reserved, other.reserved, memory.is_short) == (116 * MIB, 0, False)
    main.take(16 * MIB)
    assert memory.is_short


@cache
def decoder() -> OperatorGraph:
    from shardwright.runtime.capture.decoder import capture_decoder

    shape = Decoder(
        layers=4, hidden=256, heads=4, kv_heads=4, head_size=64, ffn=1024, vocab=4096, seq=512
    )
    return capture_decoder(shape, 4, "bfloat16")


@pytest.mark.torch
@pytest.mark.parametrize(
    "seed",
    [
        Seed(), Seed(tensor=2), Seed(data=2, zero=3), Seed(data=2, zero=3, recompute=True),
        Seed(stages=2, num_microbatches=4), Seed(data=2, zero=1, num_microbatches=2),
    ],
)  # fmt: skip
def test_a_replay_has_the_simulators_peak(seed: Seed) -> None:
    """Tensor by tensor here, by sums of bytes there."""
    graph = decoder()
    program = lower(graph, seed_strategy(graph, seed))
    peaks = simulate(program, np.ones(program.num_instructions)).peak_bytes
    for mesh, peak in enumerate(peaks):
        found = replay(program, graph, mesh)
        assert found.allocated == pytest.approx(peak, rel=0.05)
        assert found.allocated <= found.reserved
        # What it took without a limit is enough, and what its tensors take less a byte is not.
        assert not replay(program, graph, mesh, limit=found.reserved).is_short
        assert replay(program, graph, mesh, limit=found.allocated - 1).is_short


@pytest.mark.torch
def test_streams_do_not_share_memory() -> None:
    graph = decoder()
    program = lower(graph, seed_strategy(graph, Seed(data=2, zero=3)))
    shared, apart = (replay(program, graph, 0, streams=one) for one in (False, True))
    assert apart.reserved > shared.reserved
