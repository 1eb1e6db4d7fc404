"""Numbers that a model draws by Python or NumPy, drawn by torch: a graph can hold those."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.runtime.capture.memos import homes
from shardwright.runtime.capture.places import is_models_frame

# Functions of Python and NumPy that draw a number between 0 and 1, or two bounds.
_NUMBERS = ((random, ("random", "uniform")), (np.random, ("random", "rand", "uniform")))


@contextlib.contextmanager
def drawn_numbers(module: nn.Module | None) -> Iterator[None]:
    """Let numbers that a model draws by Python or NumPy be drawn by torch, by whatever name its files know how; of no
    model none."""
    if module is None:
        yield
        return
    plain = _draws(module)
    try:
        for home, name, draw in plain:
            setattr(home, name, functools.partial(_draw, draw))
        yield
    finally:
        for home, name, draw in plain:
            setattr(home, name, draw)


def _draws(module: nn.Module) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return where those that draw are held, by which names."""
    plain = [(home, name, getattr(home, name)) for home, names in _NUMBERS for name in names]
    known = {id(draw) for _, _, draw in plain}
    files = [(home, *item) for home in homes(module) for item in vars(home).items()]
    return plain + [one for one in files if id(one[2]) in known]


def _draw(plain: Callable[..., Any], *bounds: Any, **others: Any) -> Any:
    if others or len(bounds) not in (0, 2) or not is_models_frame(sys._getframe(1)):
        return plain(*bounds, **others)
    drawn = torch.rand((), dtype=torch.float64)
    return drawn if bounds in ((), (0, 1)) else bounds[0] + (bounds[1] - bounds[0]) * drawn


def is_unit(name: str, bounds: Sequence[float], kwargs: Any) -> bool:
    """Whether a call of torch draws between 0 and 1."""
    is_filled = name == "uniform_" and [*bounds] in ([], [0, 1]) and not kwargs
    return is_filled or name in ("rand", "rand_like")
