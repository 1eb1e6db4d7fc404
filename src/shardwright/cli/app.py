"""The application that commands join."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="shardwright",
    help="Plan and run distributed PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
