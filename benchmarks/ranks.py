"""Ranks of a benchmark that run itself, each with its number."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def run_ranks(
    before: Sequence[Sequence[str]], script: Sequence[str], extra: Mapping[str, str], seconds: float
) -> None:
    """Run a script and its words once for each rank, behind what comes before that rank's command, with one thread and ``extra``
    in the environment. Raises RuntimeError where one fails, TimeoutExpired after so many seconds; none is left."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(extra)
    running = [
        subprocess.Popen([*prefix, sys.executable, *script, "--rank", str(rank)], env=environment)
        for rank, prefix in enumerate(before)
    ]
    try:
        codes = [one.wait(timeout=seconds) for one in running]
    finally:
        for one in running:
            one.kill()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
