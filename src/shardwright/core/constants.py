"""Constants of a transform, as whoever prices or runs it reads them."""

from __future__ import annotations

from shardwright.core.graph import Constant


class Constants:
    """What is said by name. Reading raises KeyError where nothing is said under a name that has no default."""

    __slots__ = ()
    constants: tuple[tuple[str, Constant], ...]

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number."""
        said = dict(self.constants)
        return float(str(said[name] if default is None else said.get(name, default)))

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number."""
        return int(self.number(name, default))

    def word(self, name: str) -> str:
        """Return a word."""
        return str(dict(self.constants)[name])
