"""The phases of a stage: the lists of steps that lowering writes, and how they follow each other.

What comes behind (waits, lifetimes, the order of all instructions) goes by this table.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

# What a phase may be. It runs before all microbatches, with each of them, or behind them all.
BEFORE, EACH, BEHIND = 1, 2, 4
STASHES = 8  # what it makes is there when phases which add read it, unless these make it first
ADDS = 16  # to gradients of the microbatches before
ASIDE = (
    32  # runs with all microbatches but the last: what is behind it goes by the one that stands in
)
UPDATES = 64  # its update gives back what lived for the whole step


class Phase(IntEnum):
    """The lists of steps, in the order in which they are looked at.

    Where backward is split, ``INPUT`` is its first half (I) and ``BACKWARD`` the other (W); else it is empty.
    ``LAST`` stands in for ``BACKWARD`` with the last microbatch. ``SEND`` and ``RECEIVE`` are what
    meshes exchange behind it.
    """

    PROLOGUE = 0
    FORWARD = 1
    INPUT = 2
    BACKWARD = 3
    LAST = 4
    SEND = 5
    RECEIVE = 6
    EPILOGUE = 7

    @property
    def instance(self) -> Phase:
        """The phase as whose instances its own are counted."""
        return _STANDS_IN_FOR.get(self, self)

    @property
    def sender(self) -> Phase:
        """The phase in which other meshes send what it receives."""
        return Phase.SEND if self is Phase.RECEIVE else self

    @property
    def is_each(self) -> bool:
        """Whether every microbatch has an instance of it."""
        return bool(FLAGS[self] & EACH)


_STANDS_IN_FOR = {Phase.LAST: Phase.BACKWARD}
FLAGS = np.array(
    [
        BEFORE, EACH | STASHES, EACH | STASHES | ADDS, EACH | ADDS | ASIDE, EACH | ADDS, BEHIND, BEHIND,
        BEHIND | UPDATES,
    ]
)  # fmt: skip
# Stands for the number of a phase where the last compute before this instance is waited for.
PREVIOUS = len(Phase)
