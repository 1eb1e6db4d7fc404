"""The style of all tables. Apart, so that a pipeline is shown without the nouns of plans."""

from __future__ import annotations

from rich.table import Table


def plain_table(title: str) -> Table:
    """Return an empty table in the house's style."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        header_style="dim",
        padding=(0, 2, 0, 0),
        min_width=min(len(title), 100),
    )
