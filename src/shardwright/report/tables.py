"""The style of all tables. Apart, so that a pipeline is shown without the nouns of plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text


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


def filled_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    left: Sequence[str] = (),
) -> Table:
    """Return a table of texts as they stand, without markup; columns but the first and those named ``left``
    are numbers, to the right."""
    table = plain_table(title)
    for place, name in enumerate(columns):
        is_number = place > 0 and name not in left
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
