"""The gradient noise scale: how large a batch is still worth its samples.

McCandlish et al., "An Empirical Model of Large-Batch Training" (arXiv 1812.06162, appendix A): the gradient of a
batch of B samples has E|G_B|^2 = |g|^2 + tr(Sigma) / B, so that two batch sizes tell both; data parallelism has
two of them in every step, the rank's own and the global one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


class NoiseScale:
    """Estimates tr(Sigma) / |g|^2 from squared norms of gradients of small and large batches.

    The two unbiased estimates are averaged on their own, exponentially (``decay``; 1: the plain mean of all), and then
    divided: their quotient step by step would be biased. Both averages are corrected for where they begin.
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f"the decay of an average is above 0 and at most 1, not {decay}")
        self.decay = decay
        self.steps = 0
        self._weight = self._signal = self._noise = 0.0

    def update(
        self, small_square: float, large_square: float, small_batch: float, large_batch: float
    ) -> None:
        """Take in one step: |G_b|^2 (the mean over ranks, if there are several) and |G_B|^2, and the samples of each."""
        if not 0 < small_batch < large_batch:
            raise ValueError(
                f"the noise shows between two batch sizes, not {small_batch} and {large_batch}"
            )
        if not math.isfinite(small_square + large_square):
            return  # a step whose scaled loss overflowed
        signal = (large_batch * large_square - small_batch * small_square) / (
            large_batch - small_batch
        )
        noise = (small_square - large_square) / (1 / small_batch - 1 / large_batch)
        keep = self.decay if self.decay < 1 else 1.0
        take = 1 - self.decay if self.decay < 1 else 1.0
        self.steps += 1
        self._weight = keep * self._weight + take
        self._signal = keep * self._signal + take * signal
        self._noise = keep * self._noise + take * noise

    @property
    def gradient_square(self) -> float:
        """The average of |g|^2, NaN before the first step."""
        return self._signal / self._weight if self._weight else math.nan

    @property
    def variance(self) -> float:
        """The average of tr(Sigma), of one sample."""
        return self._noise / self._weight if self._weight else math.nan

    @property
    def scale(self) -> float:
        """The noise scale in samples; NaN where no gradient stands out of the noise yet."""
        if not self.gradient_square > 0 or not self.variance >= 0:
            return math.nan
        return self.variance / self.gradient_square


@dataclass(frozen=True, slots=True, kw_only=True)
class Tradeoff:
    """Steps against samples: S = S_min (1 + noise / B), E = E_min (1 + B / noise), with E_min = noise S_min."""

    noise_scale: float
    least_steps: float = 1.0

    def steps(self, batch: float) -> float:
        """Return the steps to the same loss with this batch."""
        return self.least_steps * (1 + self.noise_scale / batch)

    def samples(self, batch: float) -> float:
        """Return the samples to the same loss."""
        return self.steps(batch) * batch

    def learning_rate(self, batch: float) -> float:
        """Return the share of the largest useful learning rate of SGD, 1 / (1 + noise / B)."""
        return 1 / (1 + self.noise_scale / batch)
