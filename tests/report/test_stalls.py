"""What is said of a loader: the verdict is true of the step, and the page has every figure of its curves."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from shardwright.core.stalls import InputRates, Stalls
from shardwright.report.stalls import page_text, phase_rows, sentences


def drawn(page: str) -> dict[str, dict[str, list[float]]]:
    """Return the lines of a page's charts by name."""
    figures = re.findall(r'Plotly\.newPlot\(\s*"[^"]+",\s*(\[.*?\]),\s*\{"', page, re.DOTALL)
    assert len(figures) == 3
    return {line["name"]: line for figure in figures for line in json.loads(figure)}


def found(*, ahead: bool, compute: float = 100.0, storage: float = 200.0) -> Stalls:
    """One sample a batch: 10 ms of computation, 1 ms of preparation, 5 ms of waiting for storage."""
    rates = InputRates(compute=compute, prepare=1000.0, storage=storage, crowd=1.0, is_ahead=ahead)
    cold = 1 / rates.speed(0.0)
    return Stalls(
        ranks=1, workers=int(ahead), cores=2, batch_samples=1, steps=8, rates=rates,
        resident_seconds=1 / compute, cached_seconds=max(1 / compute, 1 / rates.speed(1.0)),
        cold_seconds=cold, usual_seconds=cold,
    )  # fmt: skip


def test_a_loader_that_works_in_turns_is_never_said_to_be_free() -> None:
    said = sentences(found(ahead=False))[0]
    assert "in turns" in said
    assert "38%" in said  # 6 of 16 ms


@pytest.mark.parametrize(("storage", "word"), [(200.0, "computation"), (20.0, "storage")])
def test_a_loader_that_works_ahead_binds_or_does_not(storage: float, word: str) -> None:
    assert word in sentences(found(ahead=True, storage=storage))[0]


def test_taking_a_large_batch_over_is_neither_hidden_nor_cured_by_a_longer_queue() -> None:
    """A step of 10 ms whose input is always there, and 4 ms in which it is taken over from a worker."""
    free = replace(found(ahead=True), prefetch=2)
    taken = replace(
        free, rates=replace(free.rates, taking=0.004), cached_seconds=0.014, cold_seconds=0.014
    )
    assert "always there" in sentences(free)[0]
    assert "29% of a step" in sentences(taken)[0]
    assert (
        dict(row[:2] for row in phase_rows(taken))["takes over a batch that is ready"] == "4.00 ms"
    )
    helps = [knob.name for knob in taken.knobs()]
    assert "taking batches" in helps
    assert "prefetch" not in helps


def test_what_rates_do_not_tell_apart_is_said() -> None:
    """10 ms of computation, and 10 or 6 of one worker's."""
    assert "not told apart" in sentences(found(ahead=True, storage=1 / 0.009))[0]
    assert "not told apart" not in sentences(found(ahead=True))[0]


def test_the_page_has_what_ifs_as_tables_and_curves() -> None:
    page = page_text(found(ahead=False))
    cells = re.findall(r"<td>(.*?)</td>", page)
    # With all cached a step takes 11 ms, with none 16 ms; of half MinIO hits half.
    for text in ("100%", "90.91", "0%", "62.5", "50%", f"{1 / 0.0135:.4g}"):
        assert text in cells
    assert page.count("<h2>What if") == 2
    assert page.count("plotly-graph-div") >= 3
    lines = drawn(page)
    shares = lines["a cache that never evicts"]["x"]
    # In turns: 10 ms of computation, 1 of preparation, 5 of every sample that is not in memory.
    for name, hits in (
        ("a cache that never evicts", lambda share: share),
        (
            "page cache (LRU)",
            lambda share: share + (1 - share) * math.log1p(-min(share, 1 - 1e-16)),
        ),
    ):
        speeds = [1 / (0.011 + 0.005 * (1 - hits(share))) for share in shares]
        assert lines[name]["y"] == pytest.approx(speeds, rel=1e-9)
    # A worker beside the step: 6 ms a sample, two cores prepare two samples at once.
    counts = lines["speed"]["x"]
    speeds = [min(100, 2 / 0.001, count / 0.006) for count in counts]
    assert lines["speed"]["y"] == pytest.approx(speeds)
    assert "http" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
