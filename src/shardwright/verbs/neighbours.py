"""What other programs take of this machine's processors while something is measured, which then seems slow.

Linux counts what its processors are busy with; elsewhere nobody is seen.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from shardwright.runtime.cores import of_host

# Of the fields of a processor in /proc/stat, in ticks: user, nice, system, irq, softirq, steal.
_BUSY = (1, 2, 3, 6, 7, 8)
# Up to this share nothing is said: a system's own services take as much.
USUAL = 0.1


class Neighbours:
    """Counts, from when it is made, what was neither this process nor its children that ended."""

    def __init__(self) -> None:
        self._begin, self._before = time.monotonic(), _others()

    @property
    def seconds(self) -> float:
        """Processor seconds that others took since then."""
        return max(0.0, _others() - self._before)

    def share(self, living: float = 0.0) -> float:
        """Return which part of the processors they had; ``living``: seconds of children that have not ended."""
        passed = len(of_host()) * max(time.monotonic() - self._begin, 1e-9)
        return max(0.0, self.seconds - living) / passed

    @property
    def notes(self) -> tuple[str, ...]:
        """What a planner should know of it; nothing where they took little."""
        share = self.share()
        if share <= USUAL:
            return ()
        told = (
            f"other programs took {share:.0%} of this machine's processors while it was measured: steps may be "
            "predicted too long; end them, and measure again with `--measure always`"
        )
        return (told,)


def _others() -> float:
    """Return the seconds that processors which we may use were busy for others, since some moment."""
    busy = 0
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/stat").read_text().splitlines():
            name, *_ = fields = line.split()
            if name[3:].isdigit() and int(name[3:]) in of_host():
                busy += sum(int(fields[place]) for place in _BUSY)
    own = sum(os.times()[:4])  # children that ended among them
    return busy / os.sysconf("SC_CLK_TCK") - own if busy else 0.0
