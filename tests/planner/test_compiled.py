"""Kernels on disk: a cache that cannot be read or written is as good as none."""

import os
import subprocess
import sys
from pathlib import Path

KERNEL = """
from {module} import Pair
from shardwright.planner.compiled import compiled

@compiled
def total(pair):
    return pair.one + pair.other

print(total(Pair(1, 2)))
"""
PAIR = """
from typing import NamedTuple

class Pair(NamedTuple):
    one: int
    other: int
"""


def said(folder: Path) -> str:
    """What the kernel in a folder prints, with a cache that lasts there."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, str(folder / "kernel.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_an_earlier_version_compiled_is_compiled_anew(tmp_path):
    for module in ("earlier", "later"):
        (tmp_path / f"{module}.py").write_text(PAIR)
        (tmp_path / "kernel.py").write_text(KERNEL.format(module=module))
        assert said(tmp_path) == "3\n"
        (tmp_path / f"{module}.py").unlink()
    (tmp_path / "later.py").write_text(PAIR)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache/**/*.nb?")}
    assert said(tmp_path) == "3\n"
    assert (
        {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache/**/*.nb?")} == before != {}
    )
