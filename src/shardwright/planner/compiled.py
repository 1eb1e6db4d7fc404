"""How the planner compiles its kernels: Numba, cached on disk where that can be written.

Import this module late: importing Numba takes longer than planning a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba  # pyright: ignore[reportMissingTypeStubs]

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(function: Kernel) -> Kernel:
    """Compile with Numba, whose decorator has no types of its own."""
    return _compile(function, no_cfunc_wrapper=True)


def inner(function: Kernel) -> Kernel:
    """Compile a function that only kernels call: without its door to Python it compiles faster."""
    return _compile(function, no_cfunc_wrapper=True, no_cpython_wrapper=True)


def numeric(function: Kernel) -> Kernel:
    """Compile a function in which a division by zero is infinite, as in NumPy, not an error."""
    return _compile(function, no_cfunc_wrapper=True, error_model="numpy")


def _compile(function: Kernel, **options: bool | str) -> Kernel:
    njit = cast(Any, numba).njit
    try:
        return cast(Kernel, njit(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # neither this folder nor the user's cache can be written
        return cast(Kernel, njit(nogil=True, **options)(function))
