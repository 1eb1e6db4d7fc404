"""Stages of equally many layers, as frameworks cut them."""

from __future__ import annotations

import pytest

from shardwright.core.decoder import Decoder
from shardwright.verbs.frameworks import even_stages

pytestmark = pytest.mark.torch


def layers_of(layers: int, stages: int) -> list[int] | None:
    """Return how many layers each stage has."""
    from shardwright.runtime.capture.decoder import capture_decoder

    shape = Decoder(
        layers=layers, hidden=64, heads=4, kv_heads=4, head_size=16, ffn=128, vocab=50_000, seq=32
    )
    graph = capture_decoder(shape, 2, "float32")
    cut = even_stages(graph, stages)
    if cut is None:
        return None
    assert cut == sorted(cut)
    assert (cut[0], cut[-1]) == (0, stages - 1)
    found = [0] * stages
    for block in graph.blocks[1:-1]:  # the first has the embedding, the last the head
        assert len(set(cut[block.start : block.stop])) == 1
        found[cut[block.start]] += 1
    return found


def test_layers_are_shared_out_evenly_however_heavy_the_head_is() -> None:
    assert layers_of(8, 4) == [2, 2, 2, 2]
    assert layers_of(6, 6) == [1, 1, 1, 1, 1, 1]


def test_ends_count_as_layers_where_that_makes_the_number_even() -> None:
    assert layers_of(7, 4) == [2, 2, 2, 1]
    assert layers_of(6, 4) == [1, 2, 2, 1]  # as Llama 3.1 405B: 126 layers, 8 stages


def test_what_is_even_in_no_way_is_left_to_others() -> None:
    assert layers_of(5, 4) is None
    assert layers_of(8, 1) is None
