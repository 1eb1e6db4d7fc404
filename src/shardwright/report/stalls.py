"""Where a step waits for its input: sentences, tables and one page of charts."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator

from shardwright.core.stalls import Stalls
from shardwright.report.units import bytes_text, seconds_text

PHASE_COLUMNS = ("a step", "time", "samples/s", "share")
KNOB_COLUMNS = ("what helps", "change", "samples/s", "gain")
WAITS_FOR = {
    "computation": "computation: its input is always there",
    "preparation": "preparation (decoding, augmenting, collating)",
    "fetching": "fetching from storage",
}


def phase_rows(found: Stalls) -> Iterator[tuple[str, ...]]:
    """Yield the parts of a step with cold data, and the whole."""
    whole = found.cold_seconds
    for name, seconds in (*_parts(found), ("in all", whole)):
        speed = rate_text(found.batch_samples / seconds) if name in {"computes", "in all"} else ""
        yield name, seconds_text(seconds), speed, f"{seconds / whole:.0%}"


def _parts(found: Stalls) -> tuple[tuple[str, float], ...]:
    return (
        ("computes", found.resident_seconds),
        ("waits for preparation", found.prep_stall),
        ("waits for storage", found.fetch_stall),
    )


def rate_rows(found: Stalls) -> Iterator[tuple[str, str]]:
    """Yield the rates by name."""
    rates = found.rates
    yield "computation (G)", rate_text(rates.compute)
    yield "preparation, data in memory (P)", rate_text(rates.prepare)
    yield "fetching from storage (S)", rate_text(rates.storage)
    yield "the loader alone", rate_text(rates.load(0.0))


def knob_rows(found: Stalls) -> Iterator[tuple[str, ...]]:
    """Yield what would help, the best first."""
    now = found.rates.speed(0.0)
    for knob in found.knobs():
        gain = f"{knob.speed / now:.2f}x"
        yield knob.name, knob.change, rate_text(knob.speed), gain


def sentences(found: Stalls) -> list[str]:
    """Say what binds, and what was measured."""
    binding = found.rates.binding(0.0)
    workers = f"{found.workers} workers" if found.workers else "no workers (in turns with the step)"
    said = [
        f"Training waits for {WAITS_FOR[binding]}.",
        f"Measured: {found.steps} batches of {found.batch_samples} samples in each phase, {workers}, "
        f"{found.ranks} rank(s), {found.cores} cores; rates are those of one rank.",
    ]
    if found.files is not None:
        said.append(
            f"Seen to be read: {found.files.count} file(s), {bytes_text(found.files.bytes)}; "
            f"{found.files.evicted:.0%} of their pages were out of memory for the cold phase."
        )
    if found.cache_bytes:
        said.append(
            f"A cache that never evicts needs {bytes_text(found.cache_bytes)} of "
            f"{bytes_text(found.dataset_bytes)} to take waiting for storage away."
        )
    return said + [f"Note: {note}." for note in found.notes]


def rate_text(rate: float) -> str:
    """Write samples per second; what takes no time has a dash."""
    return f"{rate:,.4g}" if math.isfinite(rate) and rate < 1e12 else "-"


def page_text(found: Stalls) -> str:
    """Return one self-contained page: where a step's time goes, and the two what-if curves."""
    import plotly.graph_objects as go  # type: ignore[import-untyped]  # a second that only this needs

    bars = go.Figure()
    for name, value in _parts(found):
        bars.add_bar(name=name, y=["a step"], x=[value * 1e3], orientation="h")
    bars.update_layout(barmode="stack", title="A step, cold data", xaxis_title="ms", height=260)
    cache = go.Figure()
    curve = found.cache_curve()
    cache.add_scatter(
        x=[x for x, _, _ in curve], y=[y for _, y, _ in curve], name="a cache that never evicts"
    )
    cache.add_scatter(
        x=[x for x, _, _ in curve], y=[y for _, _, y in curve], name="page cache (LRU)"
    )
    cache.update_layout(
        title="What if this share of the data were cached (modelled)",
        xaxis_title="share cached",
        yaxis_title="samples/s of a rank",
    )
    workers = go.Figure()
    counts = found.worker_curve()
    workers.add_scatter(x=[k for k, _ in counts], y=[v for _, v in counts], name="speed")
    workers.update_layout(
        title="What if there were so many workers (modelled)",
        xaxis_title="workers",
        yaxis_title="samples/s of a rank",
    )
    figures = [
        figure.to_html(full_html=False, include_plotlyjs="inline" if not place else False)
        for place, figure in enumerate((bars, cache, workers))
    ]
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in sentences(found))
    table = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in knob_rows(found)
    )
    head = "".join(f"<th>{html.escape(name)}</th>" for name in KNOB_COLUMNS)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Input of training</title>'
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto}"
        "td,th{padding:.2rem .8rem;text-align:left}</style></head><body>"
        f"<h1>Where a step waits for its input</h1><ul>{lines}</ul>"
        f"<h2>What would help</h2><table><tr>{head}</tr>{table}</table>{''.join(figures)}</body></html>"
    )
