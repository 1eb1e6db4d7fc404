"""How much loss a model tolerates: the most with which it is as good after equally many steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real

from shardwright.errors import InputError

BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was tried: final losses by bound, 0 first. ``tolerated`` is the largest that held.

    ``spread`` is the standard deviation of final losses over seeds with nothing lost.
    """

    tolerated: float
    spread: float
    losses: dict[float, tuple[float, ...]]


def calibrate(
    train: Callable[[float, int], float], *, bounds: Sequence[float] = BOUNDS, seeds: int = 3
) -> Calibration:
    """Find what a model tolerates, given a function that trains it with a bound and a seed.

    It returns the loss after as many steps as always, and is called for each seed with 0, then with
    larger and larger bounds, up to the first with which losses are on average higher than with
    nothing lost, seed by seed, by more than the spread over seeds. Raises InputError.
    """
    _check(bounds, seeds)
    losses = {0.0: _losses(train, 0.0, seeds)}
    spread = statistics.stdev(losses[0.0])
    tolerated = 0.0
    for bound in bounds:
        losses[bound] = _losses(train, bound, seeds)
        worse = statistics.mean(
            mine - exact for mine, exact in zip(losses[bound], losses[0.0], strict=True)
        )
        if not worse <= spread:  # not a number is worse
            break
        tolerated = bound
    return Calibration(tolerated, spread, losses)


def _check(bounds: Sequence[float], seeds: int) -> None:
    are_shares = isinstance(bounds, Iterable) and all(
        isinstance(one, Real) and 0 < one < 1 for one in bounds
    )
    if not isinstance(seeds, int) or seeds < 2 or not are_shares or list(bounds) != sorted(bounds):
        raise InputError(
            "a spread needs two seeds or more, and bounds are above 0 and below 1, smallest first, not "
            f"{seeds!r:.40} seeds and {bounds!r:.80}; mend them"
        )


def _losses(train: Callable[[float, int], float], bound: float, seeds: int) -> tuple[float, ...]:
    given = [train(bound, seed) for seed in range(seeds)]
    try:
        found = tuple(map(float, given))
    except (TypeError, ValueError):
        raise InputError(
            f"train(bound, seed) returns the loss at its end, a number, not {given[0]!r:.40}; let it return that"
        ) from None
    if bound == 0 and not all(map(math.isfinite, found)):
        raise InputError(
            f"training must end with a finite loss where nothing is lost, not {found}; train a model that does"
        )
    return found
