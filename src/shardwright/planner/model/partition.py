"""Cutting a chain of blocks into pipeline stages, exactly.

All stages get equal meshes. A pipeline step takes (fill) one microbatch through every stage plus
(m - 1) rounds of the slowest stage plus the slowest stage's once-per-step work. The fill hardly
depends on the cuts, so the cuts minimise the bottleneck, subject to every stage's memory, which
depends on its position: an early 1F1B stage holds more microbatches than a late one
(Alpa, section 5.2, with equal submeshes and transfers added).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardwright.core.schedules import ScheduleName, in_flight

if TYPE_CHECKING:
    from shardwright.planner.model.cutting import Sums


@dataclass(frozen=True, eq=False)
class Chain:
    """Per block: seconds per microbatch, seconds once per step, bytes kept for the whole step,
    bytes
    per microbatch in flight and bytes needed once at a time (the largest of a stage counts).

    ``transfer[i]`` is the seconds per microbatch of sending what crosses from block i-1 to block i,
    forward and backward; ``transfer[0]`` is 0.
    """

    seconds: NDArray[np.float64]
    once: NDArray[np.float64]
    kept: NDArray[np.float64]
    in_flight: NDArray[np.float64]
    transient: NDArray[np.float64]
    transfer: NDArray[np.float64]

    @property
    def num_blocks(self) -> int:
        """How many blocks the chain has."""
        return len(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stage ``s`` holds the blocks ``starts[s] <= i < starts[s + 1]`` (the last runs to the end).

    ``bottleneck`` is the largest (m - 1) * per-microbatch + once-per-step seconds of a stage,
    ``fill`` the seconds of one microbatch through all stages, ``stage_bytes`` each stage's peak.
    """

    starts: tuple[int, ...]
    bottleneck: float
    fill: float
    stage_bytes: tuple[float, ...]

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.fill + self.bottleneck


def partition(
    chain: Chain,
    num_stages: int,
    num_microbatches: int,
    schedule: ScheduleName,
    limit: float,
) -> Partition | None:
    """Cut the chain into ``num_stages`` non-empty stages, or return None when nothing fits
    ``limit``.

    Dynamic program over (stage, end of stage), at most O(blocks^2 * stages). Among equal bottlenecks the
    earlier cut wins, so the result is deterministic.
    """
    count = chain.num_blocks
    if not 1 <= num_stages <= count:
        return None
    if num_stages == 1:
        whole = measure(chain, (0,), num_microbatches, schedule)
        return whole if whole.stage_bytes[0] <= limit else None
    # Late: importing Numba takes longer than cutting a small model.
    from shardwright.planner.model.cutting import extend

    sums = _sums(chain, num_microbatches)
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    cuts: list[NDArray[np.int64]] = []
    for stage in range(num_stages):
        held = in_flight(schedule, num_stages - 1 - stage, num_microbatches)
        best, begins = extend(sums, best, held, limit)
        cuts.append(begins)
    if not np.isfinite(best[count]):
        return None
    starts: list[int] = []
    end = count
    for table in reversed(cuts):
        end = int(table[end])
        starts.append(end)
    return measure(chain, tuple(reversed(starts)), num_microbatches, schedule)


def measure(
    chain: Chain, starts: tuple[int, ...], num_microbatches: int, schedule: ScheduleName
) -> Partition:
    """Work out what given cuts cost."""
    stages = len(starts)
    stops = (*starts[1:], chain.num_blocks)
    bottleneck, fill = 0.0, 0.0
    peaks: list[float] = []
    for stage, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        part = slice(start, stop)
        each = float(chain.seconds[part].sum()) + (float(chain.transfer[start]) if start else 0.0)
        bottleneck = max(bottleneck, (num_microbatches - 1) * each + float(chain.once[part].sum()))
        fill += each
        held = in_flight(schedule, stages - 1 - stage, num_microbatches)
        peak = chain.kept[part].sum() + held * chain.in_flight[part].sum()
        peaks.append(float(peak + chain.transient[part].max()))
    return Partition(starts=starts, bottleneck=bottleneck, fill=fill, stage_bytes=tuple(peaks))


def _sums(chain: Chain, num_microbatches: int) -> Sums:
    from shardwright.planner.model.cutting import Sums

    def before(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate(([0.0], np.cumsum(values)))

    return Sums(
        work=before((num_microbatches - 1) * chain.seconds + chain.once),
        kept=before(chain.kept),
        flight=before(chain.in_flight),
        transient=np.ascontiguousarray(chain.transient),
        receiving=(num_microbatches - 1) * chain.transfer,
    )
