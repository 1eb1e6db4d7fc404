"""Shardwright plans and runs distributed PyTorch training.

The public names are imported when they are first used: importing this package imports no torch.
A rank that torchrun's agent has started ends with it from the import on.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from shardwright.core.version import VERSION

if TYPE_CHECKING:
    from shardwright.api import (
        build,
        capture,
        compare,
        diff,
        doctor,
        explain,
        plan,
        profile,
        read_plan,
        run,
        simulate,
        verify,
        why_not,
        write_plan,
    )
    from shardwright.core.cluster import Cluster
    from shardwright.core.graph import OperatorGraph
    from shardwright.core.plan import Frontier, Plan
    from shardwright.reasons import Wish
    from shardwright.verbs.request import Job, Request, Trial

__version__ = VERSION

_HOMES = {
    "Cluster": "shardwright.core.cluster",
    "Frontier": "shardwright.core.plan",
    "Job": "shardwright.verbs.request",
    "OperatorGraph": "shardwright.core.graph",
    "Plan": "shardwright.core.plan",
    "Request": "shardwright.verbs.request",
    "Trial": "shardwright.verbs.request",
    "Wish": "shardwright.reasons",
    "build": "shardwright.api",
    "capture": "shardwright.api",
    "compare": "shardwright.api",
    "diff": "shardwright.api",
    "doctor": "shardwright.api",
    "explain": "shardwright.api",
    "plan": "shardwright.api",
    "profile": "shardwright.api",
    "read_plan": "shardwright.api",
    "run": "shardwright.api",
    "simulate": "shardwright.api",
    "verify": "shardwright.api",
    "why_not": "shardwright.api",
    "write_plan": "shardwright.api",
}

__all__ = [
    "Cluster", "Frontier", "Job", "OperatorGraph", "Plan", "Request", "Trial", "Wish", "build", "capture",
    "compare", "diff", "doctor", "explain", "plan", "profile", "read_plan", "run", "simulate", "verify", "why_not", "write_plan",
]  # fmt: skip

if "TORCHELASTIC_RUN_ID" in os.environ and os.getsid(0) == os.getpid():  # the agent's own child
    from shardwright.runtime.lifeline import die_with_agent

    die_with_agent()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'shardwright' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
