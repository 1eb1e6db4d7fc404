"""Tables of predicted beside published runs, for a terminal or as rows of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardwright.core.accuracy import Accuracy, Case, Order, Summary, Validation
from shardwright.report.units import bytes_text, percent_text, seconds_text

Row = tuple[str, ...]

SOURCE_COLUMNS = (
    "source", "runs", "said", "median", "bias", "p90", "baseline", "tau", "tau > 5 %", "regret",
    "worst", "covered", "memory", "bias ",
)  # fmt: skip
CASE_COLUMNS = (
    "row", "source", "model", "hardware", "layout", "published", "predicted", "error", "memory",
    "predicted ", "error ",
)  # fmt: skip


def source_rows(found: Validation) -> Iterator[Row]:
    """Yield one row per source and one for all."""
    for one in (*found.sources, found.overall):
        yield _source_row(one)


def _source_row(one: Summary) -> Row:
    return (
        one.name,
        str(one.cases),
        str(one.expressed),
        _share(one.time.median),
        percent_text(one.time.bias),
        _share(one.time.p90),
        _share(one.baseline.median),
        _number(one.order.tau),
        _number(one.order.tau_apart),
        _share(one.order.mean_regret),
        _share(one.order.worst_regret),
        _share(one.coverage),
        _share(one.memory.median),
        percent_text(one.memory.bias),
    )


def case_rows(cases: Sequence[Case]) -> Iterator[Row]:
    """Yield one row per run, in the file's order."""
    for case in cases:
        predicted = case.reason or _seconds(case.predicted_seconds)
        if case.is_out_of_memory:
            published = "out of memory"
        else:
            published = _seconds(case.published_seconds)
        yield (
            str(case.row), case.source, case.model, case.hardware, case.layout, published, predicted,
            _error(case.error), _bytes(case.published_bytes), _bytes(case.predicted_bytes),
            _error(case.memory_error),
        )  # fmt: skip


def lines(found: Validation) -> list[str]:
    """Say in sentences what all runs add up to."""
    one = found.overall
    left = one.cases - one.expressed
    said = [
        f"step time: median error {_share(found.source_median)} averaged over sources "
        f"(baseline {_share(found.source_median_baseline)}), {_accuracy(one.time)} over "
        f"{one.time.count} runs; baseline {_accuracy(one.baseline)}",
        f"order within {one.order.groups} groups: {_order(one.order)}; baseline "
        f"{_order(one.baseline_order)}",
        f"memory: {_accuracy(one.memory)} over {one.memory.count} runs; out of memory foretold "
        f"{one.foretold} of {one.out_of_memory}, fitted runs refused {one.refused} of {one.fitted}",
        f"the stated half-width holds {_share(one.coverage)} of the runs",
        f"{left} of {one.cases} runs ({_share(left / one.cases)}) cannot be expressed",
    ]
    return said + [f"  {count:4d}  {reason}" for reason, count in found.reasons]


def _accuracy(one: Accuracy) -> str:
    return f"median {_share(one.median)}, bias {percent_text(one.bias)}, p90 {_share(one.p90)}"


def _order(one: Order) -> str:
    return (
        f"tau {_number(one.tau)} ({one.pairs} pairs), {_number(one.tau_apart)} where times differ by "
        f"more than 5 % ({one.pairs_apart}), the layout predicted best loses "
        f"{_share(one.mean_regret)} on average and {_share(one.worst_regret)} at worst"
    )


def _share(value: float) -> str:
    return f"{value * 100:.1f} %" if math.isfinite(value) else "-"


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


def _error(value: float | None) -> str:
    return "" if value is None else percent_text(value)


def _seconds(value: float | None) -> str:
    return "" if value is None else seconds_text(value)


def _bytes(value: float | None) -> str:
    return "" if value is None else bytes_text(value)
