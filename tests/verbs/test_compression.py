"""What is told of plans that merge selections, or have momentum before them."""

from __future__ import annotations

from shardwright.core.strategy import Feedback, GradientSync
from shardwright.verbs.compression import notes_of


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
