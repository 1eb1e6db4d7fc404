"""Memory that a rank frees is its own again, without new pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PAGES = """
import resource
from shardwright.runtime.allocator import keep_freed_memory

print(keep_freed_memory())
size = 48 * 2**20
bytes(bytearray(b"x") * size)  # found once
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    bytes(bytearray(b"x") * size)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> tuple[bool, int]:
    ran = subprocess.run(
        [sys.executable, "-c", PAGES],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    kept, count = ran.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_memory_is_used_again_without_new_pages():
    kept, count = faults()
    assert kept
    assert count < 100


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_an_allocator_that_the_user_has_set_is_left_alone():
    kept, count = faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
    assert count > 5 * 48 * 2**20 // os.sysconf("SC_PAGESIZE")
