"""How a complaint about a file of tables reads: what pydantic found, in our words, with a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from shardwright.files.presets import suggest

# By a word in pydantic's name of a complaint.
_REMEDIES = {
    "literal": "choose one of these",
    "int_": "write a whole number, without quotes",
    "float_": "write a number, without quotes",
    "bool_": "write true or false, without quotes",
    "string_too": "write text of such a length",
    "string": "write text in quotes",
    "greater": "give a number within the bound",
    "less": "give a number within the bound",
    "too_short": "describe at least one",
    "too_long": "leave some out",
    "model": "write a table with keys",
    "dict": "write a table with keys",
    "tuple": "write a list in square brackets, or tables in double ones",
    "list": "write a list in square brackets, or tables in double ones",
}


def explain(error: ValidationError, table: type[BaseModel], manual: str) -> str:
    """Say what is wrong at the first place where something is, in a file of this ``table``."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = [part for part in first["loc"] if part != "__key__"]
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
    path = f"{path[:100]} ... {path[-100:]}" if len(path) > 210 else path or "the file"
    if first["type"] == "extra_forbidden":
        known = _fields_at(place[:-1], table)
        return f"unknown key {path!r}{suggest(str(place[-1])[:80], known)}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{path}: this key is needed; add it, {manual} says what it means"
    if first["type"] == "value_error":  # a rule of ours: with its own remedy
        return f"{path}: {message}"
    return f"{path}: {message}, not {first['input']!r:.80}; {_remedy(first['type'], manual)}"


def _remedy(kind: str, manual: str) -> str:
    """Return what to do about pydantic's sort of complaint."""
    for word, remedy in _REMEDIES.items():
        if word in kind:
            return remedy
    return f"write it as {manual} says"


def _fields_at(place: list[Any], table: type[BaseModel]) -> tuple[str, ...]:
    """Return the keys allowed in the table at a path."""
    for part in place:
        if part in table.model_fields:
            table = next(_tables_in(table.model_fields[part].annotation), table)
    return tuple(table.model_fields)


def _tables_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _tables_in(inner)
