"""What ``shardwright advise`` is made of: how to configure a run.

Each answer is an ``Advice``, which names its inputs, assumptions and sources.
"""

from __future__ import annotations

from pathlib import Path

from shardwright.core.advice import Advice


def save_advice(found: Advice, path: str | Path) -> str:
    """Write a page of charts; nothing for an empty path. Returns where it is."""
    if not str(path):
        return ""
    from shardwright.report.advice import page_text

    Path(path).write_text(page_text(found), encoding="utf-8")
    return str(path)
