"""How long something takes: repeated until the spread is small, medians and quartiles reported."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Shorter samples drown in the clock's and the interpreter's own time.
SAMPLE_SECONDS = 3e-4
MIN_SAMPLES = 3
ENOUGH_SAMPLES = 7
MAX_SAMPLES = 200
ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median, half the distance between the quartiles, and how many runs that is made of."""

    seconds: float
    spread: float
    count: int


def summarise(samples: list[float], runs_per_sample: int = 1) -> Timing:
    """Return the median and half the interquartile distance of samples."""
    middle = statistics.median(samples)
    if len(samples) < 2:
        return Timing(seconds=middle, spread=middle, count=runs_per_sample)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(seconds=middle, spread=(high - low) / 2, count=len(samples) * runs_per_sample)


def middle_of(rounds: Sequence[Mapping[str, Timing]]) -> dict[str, Timing]:
    """Return of each name the middle one of the rounds that have it: what else a machine does lasts for seconds, and
    befalls steps, too."""
    found: dict[str, list[Timing]] = {}
    for one in rounds:
        for name, timing in one.items():
            found.setdefault(name, []).append(timing)
    ordered = {name: sorted(times, key=lambda one: one.seconds) for name, times in found.items()}
    return {name: times[(len(times) - 1) // 2] for name, times in ordered.items()}


def measure(
    run: Callable[[int], None],
    *,
    budget_seconds: float,
    tolerance: float = 0.02,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time ``run(n)``, which does the work n times, and return seconds per time.

    Stops when half the interquartile distance is below ``tolerance`` of the median or the budget is
    used, after three samples at least. With ``time.thread_time`` as the clock, what other programs
    take of the core does not count; right for work that one thread does without waiting.
    """
    begin = time.perf_counter()
    run(1)
    number = 1
    while True:
        start = clock()
        run(number)
        once = clock() - start
        if once >= SAMPLE_SECONDS or time.perf_counter() - begin > budget_seconds / 2:
            break
        number = min(
            number * 10, max(number * 2, int(number * SAMPLE_SECONDS / max(once, 1e-7)) + 1)
        )

    def sample() -> float:
        start = clock()
        run(number)
        return (clock() - start) / number

    return sampled(sample, number, begin + budget_seconds, tolerance)


def sampled(
    sample: Callable[[], float], number: int, deadline: float, tolerance: float = 0.02
) -> Timing:
    """Summarise samples, each of ``number`` runs, until they are steady or ``time.perf_counter`` passes a
    deadline, after three of them at least."""
    samples: list[float] = []
    while len(samples) < MAX_SAMPLES:
        samples.append(sample())
        if len(samples) < MIN_SAMPLES:
            continue
        if time.perf_counter() > deadline:
            break
        if len(samples) >= ENOUGH_SAMPLES:
            timing = summarise(samples, number)
            if timing.spread <= tolerance * timing.seconds:
                break
    return summarise(samples, number)
