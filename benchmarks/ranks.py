"""Ranks of a benchmark that run itself, each with its number."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def inside(names: Sequence[str]) -> list[list[str]]:
    """Return what comes before the command of a rank in each of these network namespaces."""
    return [["ip", "netns", "exec", name] for name in names]


def run_ranks(
    before: Sequence[Sequence[str]], script: Sequence[str], extra: Mapping[str, str], seconds: float
) -> None:
    """Run a script and its words once for each rank, as ``run_all`` does, behind what comes before that rank's
    command and with its number, which is also in the environment, as torchrun puts it there."""
    count = len(before)
    commands = [
        [*prefix, "env", f"RANK={rank}", f"WORLD_SIZE={count}", sys.executable, *script, "--rank", str(rank)]
        for rank, prefix in enumerate(before)
    ]  # fmt: skip
    run_all(commands, extra, seconds)


def run_all(commands: Sequence[Sequence[str]], extra: Mapping[str, str], seconds: float) -> None:
    """Run commands beside each other with one thread and ``extra`` in the environment. Raises RuntimeError where one
    fails, TimeoutExpired after so many seconds; none is left."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(extra)
    running = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        codes = [one.wait(timeout=seconds) for one in running]
    finally:
        for one in running:
            one.kill()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
