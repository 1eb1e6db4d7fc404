"""What every use of a function with a gradient of its own comes by, however it is held.

``Function.apply`` is not it: of ``swish = Swish.apply``, in a module or in a global as PyTorch's pages have it, what
``apply`` was then is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd.function import _SingleLevelFunction

_Base: Any = _SingleLevelFunction


def run_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function as torch does, whatever was put in the place of that."""
    return super(_Base, cls).apply(*args, **kwargs)  # type: ignore[misc]


@contextlib.contextmanager
def applied(instead: Callable[..., Any]) -> Iterator[None]:
    """Let all functions be run by ``instead``, which is given the class and the arguments."""
    before = _Base.__dict__.get("apply")
    _Base.apply = classmethod(instead)
    try:
        yield
    finally:
        if before is None:
            del _Base.apply
        else:
            _Base.apply = before
