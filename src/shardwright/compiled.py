"""How kernels are compiled: Numba, cached on disk where that can be written.

Import this module late: importing Numba takes longer than planning a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import numba  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
from numba.core.runtime import rtsys
from numpy.typing import NDArray

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
        kernel = njit(cache=True, nogil=True, **options)(function)
        _forgive(kernel._cache)
    except RuntimeError:  # neither this folder nor the user's cache can be written
        kernel = njit(nogil=True, **options)(function)
    _compile_once(kernel)
    return cast(Kernel, kernel)


def _compile_once(kernel: Any) -> None:
    """Let kernels that call this one see an integer where it is given a constant: Numba would compile it, and
    all that it calls, for each constant anew, also for the first value of a variable."""
    template, kind_of = kernel.get_call_template, cast(Any, numba).types.unliteral

    def template_of_kinds(args: tuple[Any, ...], kws: dict[str, Any]) -> object:
        kinds = {name: kind_of(one) for name, one in kws.items()}
        return template(tuple(kind_of(one) for one in args), kinds)

    kernel.get_call_template = template_of_kinds


def _forgive(cache: Any) -> None:
    """Let a cache on disk be as good as none where it cannot be read or written.

    What is read needs of Numba only what counts references: all that it knows of Python, which takes a tenth of a
    second to look up, is for what is compiled. (Another version of Numba may read in another way.)
    """
    load, keep = getattr(cache, "_load_overload", cache.load_overload), cache.save_overload

    def load_if_possible(signature: object, target: Any) -> object:
        try:
            rtsys.initialize(target)
            return load(signature, target)
        except (ImportError, AttributeError):  # it names what is not there in this version
            with suppress(OSError):
                cache.flush()
            return None

    def keep_if_possible(*overload: object) -> None:
        with suppress(OSError):  # a full disk, say: what is compiled is there all the same
            keep(*overload)

    cache.load_overload, cache.save_overload = load_if_possible, keep_if_possible


@inner
def fill(table: NDArray[np.int64], cells: NDArray[np.int64]) -> None:
    """Write a smaller table into one, from its first cell on. Numba compiles ``table[:n] = cells`` for 3 s: what
    it would say of unequal shapes."""
    for row in range(cells.shape[0]):
        for column in range(cells.shape[1]):
            table[row, column] = cells[row, column]
