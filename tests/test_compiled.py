"""Kernels: a cache on disk that cannot be read or written is as good as none; constants are compiled once."""

import os
import subprocess
import sys
from pathlib import Path

KERNEL = """
from {module} import Pair
from shardwright.compiled import compiled

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


# Files may not grow beyond so many bytes: as on a disk that is full.
FULL = """
import resource

_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
"""


def said(folder: Path) -> str:
    """What the kernel in a folder prints, with a cache that lasts there."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache")}
    # Python itself would keep bytecode that the limit of a file has cut off, and read it.
    command = [sys.executable, "-B", str(folder / "kernel.py")]
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


def test_a_disk_that_cannot_keep_what_was_compiled_changes_nothing(tmp_path):
    (tmp_path / "now.py").write_text(PAIR)
    (tmp_path / "kernel.py").write_text(FULL + KERNEL.format(module="now"))
    for _ in range(2):
        assert said(tmp_path) == "3\n"
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert all(path.stat().st_size <= 400 for path in kept)


CALLS = """
from shardwright.compiled import compiled, inner

@inner
def added(one, other):
    return one + other

@compiled
def total(pair):
    found = 0
    for one in pair:
        found = added(found, one)
    return added(added(found, 3), 4)

print(total((1, 2)), added.signatures)
"""


def test_a_kernel_that_is_given_constants_is_compiled_once(tmp_path):
    """Also for the first value of a variable."""
    (tmp_path / "kernel.py").write_text(CALLS)
    assert said(tmp_path) == "10 [(int64, int64)]\n"
