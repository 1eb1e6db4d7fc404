"""Ranks on CPUs keep the memory that a step frees.

The C library gives large blocks back to the system at once and asks for them again in the next
step, where every page is cleared anew: up to half of a step whose tensors are large (decision
0029).
"""

from __future__ import annotations

import ctypes
import os
import sys

# Numbers of mallopt's parameters in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK = 2**30
_OWN_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> bool:
    """Let this process keep what it frees for the next step; return whether that was done.

    Blocks beyond 1 GiB still go back. Nothing is changed where the user has set the allocator by
    environment (``MALLOC_TRIM_THRESHOLD_`` and the like, ``GLIBC_TUNABLES``), nor where the C
    library is not glibc.
    """
    is_set = any(name in os.environ for name in _OWN_VARIABLES)
    if is_set or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_TRIM_THRESHOLD, -1))
