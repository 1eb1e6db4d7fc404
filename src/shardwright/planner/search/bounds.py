"""What pipelines take at least: how often their work counts, since the first microbatch and the last are waited
for, however the stages are cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.core.schedules import SCHEDULES
from shardwright.planner.model.arrangements import Arrangement


def least_rounds(stages: int, microbatches: int, schedule: str = "1f1b") -> tuple[float, float]:
    """Return (a, b) such that any pipeline takes at least a * (seconds of one microbatch through
    all stages) + b * (seconds once per step of all stages), however the work is cut.

    Stage s can neither start before nor end after the stages ahead of it have had their part of the
    first and the last microbatch, so T >= m t_s + sum of t before s. The weights of these that make
    every t_s count alike give a = 1 / (1 - (1 - 1/m)^p). What a stage does once per step may hide
    behind the backward of the stages ahead, so with several stages it counts nothing: b = 0.

    Where devices hold several chunks, ``stages`` are the devices and the first chunk may be next to
    nothing; where backward is split, next to nothing of it may be on the way back; without a flush
    nothing is filled. Then only the devices' own share is certain: T >= m t_s, a = m / p.
    """
    if stages == 1:
        return float(microbatches), 1.0
    order = SCHEDULES[schedule]
    if order.chunks or order.splits or not order.flushes:
        return microbatches / stages, 0.0
    return 1.0 / (1.0 - (1.0 - 1.0 / microbatches) ** stages), 0.0


@lru_cache(maxsize=1024)
def least_looped_rounds(stages: int, microbatches: int, chunks: int = 2) -> float:
    """Return the a of ``least_rounds`` where each of so many devices has several chunks, by turns.

    With P(c, s) the seconds of a microbatch before chunk c of device s, no device reaches that sooner, nor
    ends later than those after it: T >= P(c, s) + m * (chunks c and later of s). What fills a time of 1 with
    all of these tight is most, by linear programming; then P(c, s + 1) = (1 - 1/m) P(c, s) + P(c + 1, s) / m,
    where behind the last chunk P is 1. That is solved chunk by chunk, from the last, as a line in P(c, 0).
    """
    if stages == 1:
        return float(microbatches)
    share = 1.0 / microbatches
    # Of the chunk behind, at device s: P, and what P at its first adds.
    after = [(1.0, 0.0)] * stages
    ends: list[tuple[float, float]] = []
    for _ in range(chunks):
        # P: a constant, and the factors of its own first and of the next chunk's.
        rows = [(0.0, 1.0, 0.0)]
        for constant, slope in after:
            at, own, behind = ((1 - share) * part for part in rows[-1])
            rows.append((at + share * constant, own, behind + share * slope))
        constant, own, behind = rows[-1]
        end = constant / (1 - behind), own / (1 - behind)
        after = [(at + far * end[0], near + far * end[1]) for at, near, far in rows[:-1]]
        ends.append(end)
    whole = 0.0
    for constant, slope in reversed(ends):
        whole = constant + slope * whole
    return 1.0 / whole


def held_of_last(stages: int, microbatches: int) -> NDArray[np.int64]:
    """Return how many microbatches every device with several chunks holds of its last at least, when its first
    backward begins; of every other chunk it holds as many as the first device of its last."""
    return np.minimum(min(stages, microbatches), 2 * np.arange(stages)[::-1] + 1)


def least_alike_rounds(ahead: Sequence[int], microbatches: int, count: int) -> int:
    """Return an a such that devices with chunks by turns take at least a * (seconds of one microbatch through one
    block) where so many of their blocks are equal, ``ahead[s]`` of these among the first s blocks.

    Every chunk has a block at least, so a microbatch has come through the first s blocks when it reaches device s,
    and goes back through them behind it. With k_s of the equal blocks there, each 1 second, T >= ahead[s] + m k_s,
    in whatever chunks; k_s is a whole number. So a is the least T for which (T - ahead[s]) / m, rounded down, is
    enough for all of them on all devices.
    """
    seconds = -(-microbatches * count // len(ahead))
    while sum(max(0, seconds - one) // microbatches for one in ahead) < count:
        seconds += 1
    return seconds


def hidden_from_memory(stages: int, microbatches: int) -> float:
    """Return how many microbatches of a block, of all that would be held if every device held min(p, m) of all of its
    blocks, are not for each second that devices with several chunks take beyond those of one microbatch through all
    equal blocks, each 1 second.

    Only of devices' last chunks fewer are held (``held_of_last``). With z_s of the L equal blocks there, all others
    lie ahead of that chunk, but for those in last chunks from s on: T >= L - (z_s + z_(s+1) + ...) + m z_s. So
    (m - 1) z_s <= T - L + z_(s+1) + ...: from the last device on, z_s <= (T - L) / (m - 1) * (m / (m - 1))^(p-1-s).
    """
    if microbatches == 1:
        return 0.0  # one is held of whatever there is
    held = held_of_last(stages, microbatches)[::-1]
    growth = (microbatches / (microbatches - 1)) ** np.arange(stages)
    return float(((min(stages, microbatches) - held) * growth).sum() / (microbatches - 1))


def own_rounds(stages: int, microbatches: int) -> tuple[float, float]:
    """Return (a, b) as ``least_rounds`` does of what devices have to do themselves, on average, in whatever order
    and however many chunks: T >= m t + once."""
    return microbatches / stages, 1.0 / stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """What an arrangement takes at least, in seconds: in ``whole`` stages, by what devices do of their
    ``own``, whatever they wait for, and, in two chunks a device or more but at most ``most``, by what they must
    keep (``looped``). ``blocks`` are those of the model: no chunk has less of it."""

    arrangement: Arrangement
    blocks: int
    whole: float
    own: float
    looped: float = 0.0
    most: int = 1

    def chunks(self, asked: int) -> int:
        """Return how many chunks devices have where they have no more than is asked."""
        stages = self.arrangement.stages
        return max(1, min(asked, self.blocks // stages)) if stages > 1 else 1

    def share(self, chunks: int) -> float:
        """Return what is left of a bound for whole stages where devices have so many chunks at most."""
        p, m = self.arrangement.stages, self.arrangement.microbatches
        return least_looped_rounds(p, m, self.chunks(chunks)) / least_rounds(p, m)[0]

    def is_tight(self, chunks: int) -> bool:
        """Whether all that can be is known of devices with so many chunks at most."""
        return self.chunks(chunks) <= self.most

    def seconds(self, chunks: int) -> float:
        """Return the bound where devices have so many chunks at most."""
        rough = max(self.whole * self.share(chunks), self.own)
        return max(rough, min(self.whole, self.looped)) if self.is_tight(chunks) else rough


class Bounds:
    """What every arrangement takes at least, as far as it is known."""

    def __init__(self, known: Iterable[Least] = ()) -> None:
        self._known: dict[Arrangement, Least] = {}
        for one in known:
            self.note(one)

    def __iter__(self) -> Iterator[Least]:
        return iter(self._known.values())

    def __contains__(self, arrangement: Arrangement) -> bool:
        return arrangement in self._known

    def note(self, one: Least) -> None:
        """Learn a bound of an arrangement; all that is known of it is true."""
        before = self._known.get(one.arrangement, one)
        whole, own = max(one.whole, before.whole), max(one.own, before.own)
        kept = max(one, before, key=lambda each: (each.most, each.looped))
        self._known[one.arrangement] = replace(kept, whole=whole, own=own)

    def least(self, chunks: int = 2) -> float:
        """Return the least seconds where devices have so many chunks at most; infinity before anything is
        known."""
        return min((one.seconds(chunks) for one in self), default=math.inf)

    def weakest(self, chunks: int) -> Least | None:
        """Return the one that takes least where devices have so many chunks at most, of equals the first."""
        return min(self, key=lambda one: one.seconds(chunks), default=None)

    def busy(self) -> float:
        """Return the least seconds in which any arrangement's devices do their own work; infinity before
        anything is known."""
        return min((one.own for one in self), default=math.inf)

    def enough(self, nothing: Least) -> tuple[float, float]:
        """Return which ``whole`` and which ``own`` of an arrangement set no new bound, however many chunks its
        devices have."""
        two, many = self.least(), self.least(nothing.blocks)
        return max(two / nothing.share(2), many / nothing.share(nothing.blocks)), two
