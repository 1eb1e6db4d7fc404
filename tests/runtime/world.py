"""Several ranks for a test: ``run_ranks(2, function, argument)`` runs the function on each of them.

Functions must be importable (module level). The fork server has torch preloaded, so that after the
first call a world costs a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.runtime.launch import launch


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Run ``fn(*args)`` on ``n`` ranks of a fresh world; return their results in rank order."""
    return launch(fn, n, args, timeout=timeout, collective_timeout=timeout / 2)
