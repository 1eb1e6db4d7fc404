"""How the planner compiles its kernels: Numba, cached on disk where that can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba  # pyright: ignore[reportMissingTypeStubs]

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(function: Kernel) -> Kernel:
    """Compile with Numba, whose decorator has no types of its own."""
    njit = cast(Any, numba).njit
    try:
        return cast(Kernel, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # neither this folder nor the user's cache can be written
        return cast(Kernel, njit(nogil=True)(function))
