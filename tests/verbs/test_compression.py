"""What is told of plans that merge selections, or have momentum before them."""

from __future__ import annotations

import math

import pytest

from shardwright.core.strategy import Feedback, GradientSync
from shardwright.errors import InputError
from shardwright.verbs.compression import notes_of
from shardwright.verbs.request import Request


def test_what_diverges_or_learns_less_is_told_with_a_remedy() -> None:
    front = Feedback(momentum=0.9)
    for sync, optimizer, words in (
        (GradientSync(), "adamw", ()),
        (GradientSync(compressor="top-k", density=0.01), "sgd", ()),
        (GradientSync(compressor="top-k", density=0.01, feedback=front), "momentum", ()),
        (GradientSync(compressor="top-k", density=0.01, feedback=front), "sgd", ("no momentum",)),
        (GradientSync(compressor="gtop-k", density=0.01, feedback=front), "momentum", ("as many",)),
        (
            GradientSync(compressor="gtop-k-tree", density=0.01, feedback=front),
            "momentum",
            ("diverges", "as many"),
        ),
    ):
        notes = notes_of(sync, optimizer)
        assert len(notes) == len(words)
        assert all(word in note and "; " in note for word, note in zip(words, notes, strict=True))


@pytest.mark.parametrize("density", [0.0, 0.5, 2.0, math.inf, math.nan])
def test_what_sends_all_elements_has_no_other_density(density: float) -> None:
    for compressor in ("none", "int8"):
        with pytest.raises(InputError, match="send a share"):
            Request(compressor=compressor, density=density)
