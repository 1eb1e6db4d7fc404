"""Advice as one page: the answer, what it rests on, a table and charts."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from shardwright.core.advice import Advice, Curve


def page_text(found: Advice) -> str:
    """Return one self-contained page."""
    figures = [
        _figure(curve).to_html(full_html=False, include_plotlyjs="inline" if not place else False)
        for place, curve in enumerate(found.curves)
    ]
    inputs = [f"{name}: {value}" for name, value in found.inputs]
    table = ""
    if found.rows:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in found.columns)
        table = f"<table><tr>{head}</tr>{''.join(map(_row, found.rows))}</table>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(found.title)}</title>"
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto}"
        "td,th{padding:.2rem .8rem;text-align:left}</style></head><body>"
        f"<h1>{html.escape(found.title)}</h1>{_list(found.answers)}{table}{''.join(figures)}"
        f"<h2>Inputs</h2>{_list(inputs)}<h2>Assumptions</h2>{_list(found.assumptions)}"
        f"<h2>Sources</h2>{_list(found.sources)}</body></html>"
    )


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def _row(row: tuple[str, ...]) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"


def _figure(curve: Curve) -> Any:
    import plotly.graph_objects as go  # type: ignore[import-untyped]  # a second that only this needs

    figure = go.Figure()
    for name, points in curve.lines:
        mode = "lines+markers" if len(points) <= 12 else "lines"
        figure.add_scatter(
            x=[x for x, _ in points], y=[y for _, y in points], name=html.escape(name), mode=mode
        )
    if curve.marked:
        figure.add_scatter(
            x=[x for x, _ in curve.marked],
            y=[y for _, y in curve.marked],
            name="advised",
            mode="markers",
            marker={"size": 12, "symbol": "diamond"},
        )
    figure.update_layout(title=curve.title, xaxis_title=curve.across, yaxis_title=curve.up)
    return figure
