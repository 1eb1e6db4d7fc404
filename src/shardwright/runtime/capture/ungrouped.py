"""Forwards that ask how many ranks there are: a graph is of the whole batch, which one process has.

Ranks of a run capture while their process group is there. Code such as ``if dist.is_initialized()``,
which gathers from others or divides by their number, would be traced with it, and count twice what a plan does itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def without_group() -> Iterator[None]:
    """Let there be no process group, as in the process in which a model is planned."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    member: Any = dist.GroupMember
    before = member.WORLD
    member.WORLD = None
    try:
        yield
    finally:
        member.WORLD = before
