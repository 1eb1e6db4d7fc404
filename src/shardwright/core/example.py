"""An example call of an operator, as data: what to pass, with tensors still to be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

Draw = Literal[
    "float",
    "unit",
    "constant",
    "integer",
    "places",
    "boolean",
    "complex",
    "definite",
    "pivots",
    "given",
]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A tensor argument to be drawn at random.

    ``definite`` matrices are symmetric and positive definite. ``unit`` is between 0 and 1, ``constant`` likewise without a gradient, integers are below
    ``high``, ``places`` too, each once in its plane (the last two dims), ``pivots`` of factorised matrices are of 32 bits. A ``given`` vector holds its values in ``shape``.
    """

    draw: Draw
    shape: tuple[int, ...]
    high: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call, by position and by schema name; lists may hold tensors.

    ``fixed`` are sizes that no random shape may change.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fixed: tuple[int, ...] = ()

    def __str__(self) -> str:
        positional = [_text(value) for value in self.args]
        named = [f"{name}={_text(value)}" for name, value in self.kwargs.items()]
        return f"({', '.join([*positional, *named])})"


def as_list(value: Any) -> list[Any] | None:
    """Return an argument that is a list, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def _text(value: Any) -> str:
    if isinstance(value, Drawn):
        return f"{value.draw}{list(value.shape)}"
    items = as_list(value)
    return repr(value) if items is None else f"[{', '.join(map(_text, items))}]"
