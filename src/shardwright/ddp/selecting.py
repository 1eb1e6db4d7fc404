"""Which elements are sent: the largest, exactly, by a threshold of an earlier step, or by one of a sample."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shardwright.ddp.settings import Compression
from shardwright.runtime.compression import NUMPYS, above, largest, sampled_threshold

SAMPLED = 0.01  # share of elements that a threshold is estimated from (Deep Gradient Compression)
LEAST_SAMPLE = 1024
# So many times as many elements as are sent reach the magnitude that is looked for in the next step; it is made anew
# where fewer or more than these do.
WIDER, LEAST_WIDER, MOST_WIDER = 4, 2, 8
BLOCK = 64  # elements, of which at most one is looked for: of more, another pass over memory finds them sooner


class Selector:
    """Selects in a rank's units: parameters, or buckets.

    ``thresholds`` are of units: the step that made one, and the magnitude. Exact selections look no lower, where enough
    reach it: what a step leaves behind is much of what the next one finds.
    """

    def __init__(self, settings: Compression, rank: int) -> None:
        self.settings, self.rank = settings, rank
        self.thresholds: dict[str, tuple[int, float]] = {}

    def add(self, name: str, kept: Tensor, new: Tensor, out: Tensor) -> Tensor | None:
        """Put the sum in ``out``; return where it may be among the largest, if that is found in the same pass over
        memory."""
        _, least = self.thresholds.get(name, (0, 0.0))
        is_known = self.settings.selection == "exact" and least > 0
        if not is_known or out.device.type != "cpu" or out.dtype not in NUMPYS:
            torch.add(kept, new, out=out)
            return None
        from shardwright.ddp.passes import add_and_find  # compiles, which others need not wait for

        return add_and_find(kept, new, out, least)

    def select(
        self, unit: Tensor, count: int, name: str, *, step: int, near: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the indices of the largest elements, in the way asked for; of those that are ``near`` for exact ones."""
        kind = self.settings.selection
        if count == len(unit):
            return largest(unit, count)
        if kind == "exact":
            return self._exact(unit, count, name, step, near.get(name))
        if bool(unit[0].isnan()):
            return largest(unit, count)
        if kind == "sample":
            sample = min(len(unit), max(LEAST_SAMPLE, round(SAMPLED * len(unit))))
            generator = drawing(self.settings.seed, f"{step} {self.rank} {name}")
            return above(unit, sampled_threshold(unit, count, sample, generator), count)
        made, threshold = self.thresholds.get(name, (-math.inf, 0.0))
        if step < made + self.settings.threshold_steps:
            return above(unit, threshold, count)
        found = largest(unit, count)
        self.thresholds[name] = (step, float(unit[found].abs().min()))
        return found

    def _exact(self, unit: Tensor, count: int, name: str, step: int, near: Tensor | None) -> Tensor:
        wide = WIDER * count
        if near is None or len(near) < count:
            self.thresholds.pop(name, None)
            if unit.device.type != "cpu" or BLOCK * wide > len(unit):
                return largest(unit, count)
            near = largest(unit, wide)
            self.thresholds[name] = (step, float(unit[near].abs().min()))
        sizes = unit[near].abs()
        if len(near) < LEAST_WIDER * count:
            self.thresholds.pop(name, None)
        elif len(near) > MOST_WIDER * count:
            self.thresholds[name] = (
                step,
                float(torch.topk(sizes, wide, sorted=False).values.min()),
            )
        return near[torch.topk(sizes, count, sorted=False).indices]


def drawing(seed: int, what: str) -> torch.Generator:
    """Return a generator for one purpose, equal on all ranks that say the same."""
    digest = hashlib.sha256(f"{seed} {what}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
