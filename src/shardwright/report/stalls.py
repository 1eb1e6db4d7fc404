"""Where a step waits for its input: sentences, tables and one page of charts."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator

from shardwright.core.stalls import ALIKE, Stalls
from shardwright.report.units import bytes_text, seconds_text

PHASE_COLUMNS = ("a step", "time", "samples/s", "share")
KNOB_COLUMNS = ("what helps", "change", "samples/s", "gain")
WAITS_FOR = {
    "preparation": "preparation (decoding, augmenting, collating)",
    "fetching": "fetching from storage",
}

KNOWN_BY = {
    "phase": "steps with data in memory, which were run",
    "replay": "steps whose workers take as much of a core as preparing does, and wait for nothing, which were run",
    "rates": "what one batch waits and works here (modelled, no step with data in memory could be run)",
}
# Less of a step is not told from noise.
MATERIAL = 0.05


def phase_rows(found: Stalls) -> Iterator[tuple[str, ...]]:
    """Yield the parts of a step with cold data, and the whole."""
    whole = found.cold_seconds
    for name, seconds in (*_parts(found), ("in all", whole)):
        speed = rate_text(found.batch_samples / seconds) if name in {"computes", "in all"} else ""
        yield name, seconds_text(seconds), speed, f"{seconds / whole:.0%}"


def _parts(found: Stalls) -> tuple[tuple[str, float], ...]:
    taking = found.taking_seconds
    return (
        ("computes", found.resident_seconds),
        *((("takes over a batch that is ready", taking),) if taking else ()),
        ("waits for preparation", found.prep_stall - taking),
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
    for knob in found.knobs():
        yield knob.name, knob.change, rate_text(knob.speed), f"{knob.gain:.2f}x"


def sentences(found: Stalls) -> list[str]:
    """Say what binds, and what was measured."""
    turns = (
        "works ahead by itself" if found.rates.is_ahead else "no workers (in turns with the step)"
    )
    workers = f"{found.workers} workers" if found.workers else turns
    said = [
        _verdict(found),
        f"Measured: {found.steps} batches of {found.batch_samples} samples in each phase, {workers}, "
        f"{found.ranks} rank(s), {found.cores} cores; rates are those of one rank.",
        f"Preparation and storage are told apart by {KNOWN_BY[found.cached_by]}.",
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


def _verdict(found: Stalls) -> str:
    """Say what binds; a step that takes turns with its loader is never without waiting for it."""
    binding, share = found.rates.binding(0.0), 1 - found.resident_seconds / found.cold_seconds
    taking = found.taking_seconds / found.cold_seconds
    if binding == "computation" and not found.rates.is_ahead:
        said = (
            "Computation takes most of a step, but the loader works in turns with it: "
            f"{max(0.0, share):.0%} of a step waits for input."
        )
    elif binding != "computation":
        said = f"Training waits for {WAITS_FOR[binding]}."
    elif taking > MATERIAL:
        said = (
            f"Training waits for computation: the loader is fast enough, but taking a ready batch over takes {taking:.0%} "
            "of a step, whatever the number of workers."
        )
    elif share > MATERIAL:
        said = (
            f"The loader is fast enough on average, yet {share:.0%} of a step is not computation: batches come in fits, "
            "or workers take the step's cores."
        )
    else:
        said = "Training waits for computation: its input is always there."
    if others := found.rates.nearly_binding(0.0):
        said += f" {' and '.join(others).capitalize()} may as well be what binds: within {ALIKE - 1:.0%} they are not told apart."
    return said


def rate_text(rate: float) -> str:
    """Write samples per second; what takes no time has a dash."""
    return f"{rate:,.4g}" if math.isfinite(rate) and rate < 1e12 else "-"


CACHE_COLUMNS = ("share cached", "a cache that never evicts, samples/s", "page cache, samples/s")
WORKER_COLUMNS = ("workers", "samples/s of a rank")


def cache_rows(found: Stalls) -> Iterator[tuple[str, ...]]:
    """Yield the speed by share cached, in tenths."""
    for share, kept, page in found.cache_curve(11):
        yield f"{share:.0%}", rate_text(kept), rate_text(page)


def worker_rows(found: Stalls) -> Iterator[tuple[str, ...]]:
    """Yield the speed by workers, as far as it grows and one further."""
    before = 0.0
    for count, speed in found.worker_curve():
        yield str(count), rate_text(speed)
        if speed <= before:
            return
        before = speed


def page_text(found: Stalls) -> str:
    """Return one self-contained page: where a step's time goes, and what if, as tables and curves."""
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in sentences(found))
    tables = "".join(
        f"<h2>{title}</h2>{_table(columns, rows)}"
        for title, columns, rows in (
            ("A step, with its data out of memory", PHASE_COLUMNS, phase_rows(found)),
            ("Rates", ("of", "samples/s"), rate_rows(found)),
            ("What would help (modelled)", KNOB_COLUMNS, knob_rows(found)),
            ("What if so much were cached (modelled)", CACHE_COLUMNS, cache_rows(found)),
            ("What if there were so many workers (modelled)", WORKER_COLUMNS, worker_rows(found)),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Input of training</title>'
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto}"
        "td,th{padding:.2rem .8rem;text-align:left}</style></head><body>"
        f"<h1>Where a step waits for its input</h1><ul>{lines}</ul>{_charts(found)}{tables}</body></html>"
    )


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _charts(found: Stalls) -> str:
    import plotly.graph_objects as go  # type: ignore[import-untyped]  # a second that only this needs

    bars, cache, workers = go.Figure(), go.Figure(), go.Figure()
    for name, value in _parts(found):
        bars.add_bar(name=name, y=["a step"], x=[value * 1e3], orientation="h")
    bars.update_layout(barmode="stack", title="A step, cold data", xaxis_title="ms", height=260)
    shares, kept, page = zip(*found.cache_curve(), strict=True)
    cache.add_scatter(x=shares, y=kept, name="a cache that never evicts")
    cache.add_scatter(x=shares, y=page, name="page cache (LRU)")
    if least := found.rates.least_cache():
        at = {"x": [least], "y": [found.rates.speed(least)]}
        cache.add_scatter(**at, name="more gains nothing", mode="markers", marker_size=11)
    counts, speeds = zip(*found.worker_curve(), strict=True)
    workers.add_scatter(x=counts, y=speeds, name="speed")
    if found.workers:
        at = {"x": [found.workers], "y": [found.rates.speed(0.0)]}
        workers.add_scatter(**at, name="now", mode="markers", marker_size=11)
    for figure, title, axis in (
        (cache, "What if this share of the data were cached (modelled)", "share cached"),
        (workers, "What if there were so many workers (modelled)", "workers"),
    ):
        figure.update_layout(title=title, xaxis_title=axis, yaxis_title="samples/s of a rank",
                             yaxis_rangemode="tozero")  # fmt: skip
    return "".join(
        figure.to_html(full_html=False, include_plotlyjs="inline" if figure is bars else False)
        for figure in (bars, cache, workers)
    )
