"""Several ranks for a test: ``run_ranks(2, function, argument)`` runs the function on each of them.

Functions must be importable (module level). The fork server has torch preloaded, so that after the
first call a world costs a fraction of a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.runtime.launch import launch

ROOT = Path(__file__).parents[2]
FIRST_HOST, PORT = "10.84.0.1", "29500"


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Run ``fn(*args)`` on ``n`` ranks of a fresh world; return their results in rank order."""
    return launch(fn, n, args, timeout=timeout, collective_timeout=timeout / 2)


def start_rank(
    host: str, number: int, count: int, module: str, argument: str
) -> subprocess.Popen[str]:
    """Start a rank in a host's namespace as torchrun does, which takes longer than some tests; the
    first host is the rendezvous."""
    variables = {
        "RANK": str(number), "LOCAL_RANK": "0", "WORLD_SIZE": str(count),
        "MASTER_ADDR": FIRST_HOST, "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-m", module, argument],
        cwd=ROOT, env=os.environ | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
