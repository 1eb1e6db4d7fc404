"""When every instruction ran, and how many bytes were alive: simulated or measured, one type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of each instruction of one training step.

    ``start`` and ``end`` are seconds since the beginning of the step, one entry per instruction of
    the Program (NaN where a measured run did not see it). ``group`` maps instructions to mesh
    indices. ``memory`` holds, per mesh, an array of (seconds, bytes alive on each of its devices)
    rows in time order; ``peak_bytes`` is per mesh. ``critical`` lists instruction indices of one
    longest chain, last first (simulated timelines only), of so many ``laps``: steps, or the periods of a pipeline that is
    never flushed, in which instructions recur.

    A rank comes to a message at ``start``; nothing travels before the last that takes part has
    come, which is ``begun`` (None: at ``start``, as in simulations). ``waited`` are the seconds
    that the device stood still meanwhile, since it needed the result (None: not known). ``moved``: seconds that
    what computes spends on messages, taken from it and given to them (None: none; simulated timelines only).
    """

    source: Literal["simulated", "measured"]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    group: NDArray[np.int32]
    memory: tuple[NDArray[np.float64], ...]
    peak_bytes: tuple[float, ...]
    step_seconds: float
    critical: tuple[int, ...] = ()
    laps: int = 1
    begun: NDArray[np.float64] | None = None
    waited: NDArray[np.float64] | None = None
    moved: NDArray[np.float64] | None = None

    @property
    def worst_peak_bytes(self) -> float:
        """The largest peak over all devices."""
        return max(self.peak_bytes, default=0.0)

    @property
    def together_seconds(self) -> float:
        """What a step takes that all devices begin together."""
        return max(self.step_seconds, float(np.fmax.reduce(self.end, initial=0.0)))

    @property
    def working_from(self) -> NDArray[np.float64]:
        """When each instruction began to compute or to send, all who take part being there."""
        return self.start if self.begun is None else self.begun

    @property
    def worked_seconds(self) -> NDArray[np.float64]:
        """Seconds that each instruction computed or sent, without what it waited for others."""
        worked = self.end - self.working_from
        return worked if self.moved is None else worked + self.moved
