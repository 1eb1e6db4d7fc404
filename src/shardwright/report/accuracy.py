"""Statistics of predicted against published runs. Pure functions of cases."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, starmap

from shardwright.core.accuracy import Accuracy, Case, Order, Summary, Validation

APART = 0.05
Times = tuple[float, float]  # published, predicted


def validation(cases: Sequence[Case], file: str, seconds: float = 0.0) -> Validation:
    """Add cases up, per source in the order in which they appear, and overall."""
    of_source: dict[str, list[Case]] = {}
    for case in cases:
        of_source.setdefault(case.source, []).append(case)
    sources = tuple(summary(name, own) for name, own in of_source.items())
    timed = [one for one in sources if one.time.count]
    return Validation(
        file=file,
        cases=tuple(cases),
        sources=sources,
        overall=summary("all", cases),
        source_median=_mean([one.time.median for one in timed]),
        source_median_baseline=_mean([one.baseline.median for one in timed]),
        reasons=tuple(Counter(case.reason for case in cases if case.reason).most_common()),
        seconds=seconds,
    )


def summary(name: str, cases: Sequence[Case]) -> Summary:
    """Add the cases of a source up."""
    expressed = [case for case in cases if not case.reason]
    timed = [case for case in expressed if case.is_timed]
    ends = Counter((case.is_out_of_memory, case.fits) for case in expressed)
    return Summary(
        name=name,
        cases=len(cases),
        expressed=len(expressed),
        time=accuracy(case.error for case in timed),
        baseline=accuracy(case.baseline_error for case in timed),
        memory=accuracy(case.memory_error for case in expressed),
        order=order(timed, lambda case: case.predicted_seconds),
        baseline_order=order(timed, lambda case: case.baseline_seconds),
        coverage=_mean([float(case.is_covered) for case in timed]),
        foretold=ends[True, False],
        out_of_memory=ends[True, False] + ends[True, True],
        refused=ends[False, False],
        fitted=ends[False, False] + ends[False, True],
    )


def accuracy(errors: Iterable[float | None]) -> Accuracy:
    """Return the median and 90th percentile of absolute errors, and the median error (bias)."""
    known = [error for error in errors if error is not None]
    if not known:
        return Accuracy(count=0, median=math.nan, bias=math.nan, p90=math.nan)
    sizes = sorted(map(abs, known))
    return Accuracy(
        count=len(known),
        median=statistics.median(sizes),
        bias=statistics.median(known),
        p90=sizes[math.ceil(0.9 * len(sizes)) - 1],
    )


def order(cases: Sequence[Case], predicted: Callable[[Case], float | None]) -> Order:
    """Judge the order within groups, of seconds per token where their batches differ."""
    several = [times for times in _groups(cases, predicted).values() if len(times) > 1]
    pairs = [pair for times in several for pair in combinations(times, 2)]
    apart = [pair for pair in pairs if _is_apart(*pair)]
    regrets = [regret(times) for times in several]
    return Order(
        groups=len(several),
        pairs=len(pairs),
        tau=_mean(list(starmap(_sign, pairs))),
        pairs_apart=len(apart),
        tau_apart=_mean(list(starmap(_sign, apart))),
        mean_regret=_mean(regrets),
        worst_regret=max(regrets, default=math.nan),
    )


def _groups(
    cases: Sequence[Case], predicted: Callable[[Case], float | None]
) -> dict[str, list[Times]]:
    """Return the times of each group, of a layout once."""
    groups: dict[str, list[Times]] = {}
    seen: set[tuple[str, str]] = set()
    for case in cases:
        guess = predicted(case)
        if case.published_seconds is None or guess is None or (case.group, case.layout) in seen:
            continue
        seen.add((case.group, case.layout))
        pair = (case.published_seconds / case.work, guess / case.work)
        groups.setdefault(case.group, []).append(pair)
    return groups


def regret(times: Sequence[Times]) -> float:
    """Return by how much the one predicted fastest is slower than the fastest (the first of ties)."""
    return min(times, key=lambda pair: pair[1])[0] / min(published for published, _ in times) - 1


def _sign(one: Times, other: Times) -> float:
    """Return 1 where two are ordered as published, -1 where the other way, 0 for a tie of either."""
    return float(_compare(one[0], other[0]) * _compare(one[1], other[1]))


def _compare(a: float, b: float) -> int:
    return (a > b) - (a < b)


def _is_apart(one: Times, other: Times) -> bool:
    return max(one[0], other[0]) > (1 + APART) * min(one[0], other[0])


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
