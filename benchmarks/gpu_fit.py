"""Fit the constants of `planner/cost/software.py`: `python benchmarks/gpu_fit.py RUNS.csv [--runs 8]`.

Every run that can be expressed is predicted, and predicted again with each constant 20 % lower; so
its step time is known as a product of powers of the constants. They are then fitted by least squares
of the logarithm, each source counting the same, drawn towards the values in force (a prior of 15 %,
which is what keeps a constant that few runs depend on from following their noise). Leaving out one
source at a time says how far a prediction of a source that nobody fitted is off, and the spread of
those residuals is the half-width: 80 % of them lie within it.

Prints the constants with the range over the fits, the residuals by source, what all add up to as
`shardwright validate` adds it up (in force, fitted, left out), and the half-width.
Nothing is written: who changes a constant writes it into the table with its reason.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from shardwright.core.accuracy import Case
from shardwright.core.costs import CostTable
from shardwright.core.graph import DTYPE_BYTES, OperatorGraph
from shardwright.errors import ShardwrightError
from shardwright.files.runs import PublishedRun, read_runs
from shardwright.planner.cost import software
from shardwright.planner.search import Context, evaluate_closely
from shardwright.report.accuracy import validation
from shardwright.runtime.capture.decoder import capture_decoder
from shardwright.verbs.completed import completed
from shardwright.verbs.dimensions import Inexpressible
from shardwright.verbs.expression import Expression, express
from shardwright.verbs.validation import published_case, strategy_of

STEP, PRIOR, MOST_RUNS = 0.8, 0.15, 8
FIELDS = (
    "attention",
    "attention_later",
    "attention_backward",
    "memory",
    "collective",
    "host",
    "gap",
)


@dataclass(frozen=True)
class Known:
    """A run: the logarithm of predicted over published, and its slope in each constant's."""

    case: Case
    error: float
    slopes: dict[str, float]

    @property
    def source(self) -> str:
        return self.case.source

    def changed(self, change: np.ndarray, names: list[str]) -> float:
        """Return the error with constants changed by so much."""
        return self.error + sum(
            change[i] * self.slopes.get(name, 0.0) for i, name in enumerate(names)
        )


@contextmanager
def changed(name: str) -> Iterator[None]:
    """Lower one constant, in every profile or for one device."""
    profiles, limits = dict(software.PROFILES), software.SUSTAINED
    if name in FIELDS:
        for key, one in profiles.items():
            software.PROFILES[key] = replace(one, **{name: STEP * getattr(one, name)})
    elif name:
        lowered = [(part, STEP * share if part == name else share) for part, share in limits]
        software.SUSTAINED = tuple(lowered)
    try:
        yield
    finally:
        software.PROFILES.update(profiles)
        software.SUSTAINED = limits


def step(graph: OperatorGraph, said: Expression) -> float:
    context = Context.of(graph, replace(said.cluster), CostTable(), said.training)
    strategy = strategy_of(context, said, said.seeds[0])
    return evaluate_closely(context, strategy, runs_ahead=said.runs_ahead)[2].seconds


def known(run: PublishedRun, graph_of: Callable[[Expression], OperatorGraph]) -> Known | None:
    case = published_case(completed(run, []))
    published = case.published_seconds
    if published is None or run.oom or run.quality[:1] not in ("A", "B"):
        return None
    try:
        said = express(run)
        if len(said.seeds) > 1:
            return None  # the microbatch was not published
        graph = graph_of(said)
        base = step(graph, said)
        device = said.cluster.kinds[0].name
        limit = next((part for part, _ in software.SUSTAINED if part in device), "")
        slopes = {}
        for name in (*FIELDS, limit):
            with changed(name):
                slopes[name] = math.log(step(graph, said) / base) / math.log(STEP)
    except (Inexpressible, ShardwrightError, ValueError, NotImplementedError):
        return None
    later = not any(part in device for part in software.EARLIER)
    slopes["attention" if later else "attention_later"] = 0.0
    if later:  # every profile has its own
        slopes[f"attention_later {said.cluster.software}"] = slopes.pop("attention_later")
    case = replace(case, predicted_seconds=base)
    return Known(case, math.log(base / published), slopes)


def fitted(runs: list[Known], names: list[str]) -> np.ndarray:
    """Return the logarithms of what every constant is to be multiplied by."""
    count = {one.source: sum(run.source == one.source for run in runs) for one in runs}
    weight = np.array([1.0 / math.sqrt(count[run.source]) for run in runs]) / 0.05
    rows = np.array([[run.slopes.get(name, 0.0) for name in names] for run in runs])
    errors = np.array([run.error for run in runs])
    # Weigh down what no constant explains.
    change = np.zeros(len(names))
    for _ in range(10):
        left = np.abs(errors + rows @ change)
        robust = weight / np.sqrt(1 + (left / 0.1) ** 2)
        system = np.vstack([rows * robust[:, None], np.eye(len(names)) / PRIOR])
        wanted = np.concatenate([-errors * robust, np.zeros(len(names))])
        change = np.linalg.lstsq(system, wanted, rcond=None)[0]
    return change


def left_out(runs: list[Known], names: list[str]) -> dict[str, np.ndarray]:
    """Return the fit without each source."""
    return {
        source: fitted([run for run in runs if run.source != source], names)
        for source in dict.fromkeys(run.source for run in runs)
    }


def figures(runs: list[Known], errors: list[float]) -> str:
    """Return what errors (logarithms, one a run) add up to."""
    pairs = zip(runs, errors, strict=True)
    found = validation(
        [
            replace(run.case, predicted_seconds=math.exp(error) * (run.case.published_seconds or 0))
            for run, error in pairs
        ],
        "",
    )
    timed = [one.time.p90 for one in found.sources]
    order = found.overall.order
    return (
        f"median {found.source_median:.1%} and p90 {statistics.fmean(timed):.1%} averaged over sources, "
        f"median {found.overall.time.median:.1%}, p90 {found.overall.time.p90:.1%} of runs; "
        f"tau {order.tau:.2f}, {order.tau_apart:.2f} above 5 %, regret {order.mean_regret:.1%}, "
        f"{order.worst_regret:.1%} at worst"
    )


def half_width(residuals: dict[str, list[float]]) -> float:
    """Return the half-width that holds 80 % of the residuals, sources counting the same."""
    pairs = [(abs(math.expm1(x)), 1 / len(found)) for found in residuals.values() for x in found]
    total, reached = sum(share for _, share in pairs), 0.0
    for size, share in sorted(pairs):
        reached += share
        if reached >= 0.8 * total:
            return size
    return math.inf


def sampled(path: str, most: int) -> list[PublishedRun]:
    """Return some runs of every source, always the same."""
    runs, chooser = read_runs(path), random.Random(1)
    chosen = []
    for source in dict.fromkeys(run.source_id for run in runs):
        own = [run for run in runs if run.source_id == source]
        chosen += chooser.sample(own, min(most, len(own)))
    return sorted(chosen, key=lambda run: (run.model, run.seq, run.global_batch or 0, run.row))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs")
    help_text = "runs of a source at most, drawn with a seed"
    parser.add_argument("--runs", dest="most", type=int, default=MOST_RUNS, help=help_text)
    graphs: dict[object, OperatorGraph] = {}

    def graph_of(said: Expression) -> OperatorGraph:
        kept = said.precision if said.precision in DTYPE_BYTES else "bfloat16"
        key = (said.decoder, said.global_batch, kept)
        if key not in graphs:
            graphs.clear()
            graphs[key] = capture_decoder(*key)
        return graphs[key]

    given = parser.parse_args()
    found = [known(run, graph_of) for run in sampled(given.runs, given.most)]
    runs = [one for one in found if one is not None]
    names = sorted({name for run in runs for name in run.slopes if name})
    fits, change = left_out(runs, names), fitted(runs, names)
    print(f"{len(runs)} runs of {len(fits)} sources")
    print("constant                      times   least    most, leaving out a source")
    for i, name in enumerate(names):
        column = [math.exp(one[i]) for one in fits.values()]
        print(f"{name:28s} {math.exp(change[i]):6.3f}  {min(column):6.3f}  {max(column):6.3f}")
    now = [run.error for run in runs]
    fit = [run.changed(change, names) for run in runs]
    left = [run.changed(fits[run.source], names) for run in runs]
    print("source                         runs  now: median  bias   left out: median  bias")
    kept, lost = by_source(runs, now), by_source(runs, left)
    for source in fits:
        print(
            f"{source:30s} {len(kept[source]):4d}  "
            + "   ".join(
                f"{statistics.median(abs(math.expm1(x)) for x in some):11.1%} "
                f"{math.expm1(statistics.median(some)):+6.1%}"
                for some in (kept[source], lost[source])
            )
        )
    for what, errors in (("in force", now), ("fitted to all", fit), ("left out", left)):
        print(f"{what}: {figures(runs, errors)}")
        print(f"  half-width that holds 80 %: {half_width(by_source(runs, errors)):.1%}")


def by_source(runs: list[Known], errors: list[float]) -> dict[str, list[float]]:
    """Return errors by source."""
    found: dict[str, list[float]] = {}
    for run, error in zip(runs, errors, strict=True):
        found.setdefault(run.source, []).append(error)
    return found


if __name__ == "__main__":
    main()
