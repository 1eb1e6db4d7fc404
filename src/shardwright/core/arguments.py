"""What an annotation says of an argument: looked at where users call, so that what is wrong is one message."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from shardwright.errors import InputError

R = TypeVar("R")
P = ParamSpec("P")
# How annotations are said, and what is taken for them.
KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (Integral,)),
    "float": ("a number", (Real,)),
    "bool": ("True or False", (bool,)),
    "str": ("text", (str, os.PathLike)),
    "Path": ("a path", (str, os.PathLike)),
}

_OTHERS = ("Any", "Callable")


def fits(value: Any, words: Sequence[str], home: Mapping[str, Any] | None = None) -> bool:
    """Whether a value is of a kind that some word names, or of a class of ``home``; of one that is not there only
    the name counts."""
    if value is None or isinstance(value, bool):  # True is a whole number to Python
        return ("None" if value is None else "bool") in words
    return any(_is_a(value, word, home or {}) for word in words)


def _is_a(value: Any, word: str, home: Mapping[str, Any]) -> bool:
    name = word.partition("[")[0]
    if name in KINDS:
        return isinstance(value, KINDS[name][1])
    if name in home:
        is_one_text = name == "Sequence" and isinstance(value, str | bytes)
        return isinstance(value, home[name]) and not is_one_text
    return name in (one.__name__ for one in type(value).__mro__)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function refuse arguments that are of no kind which its annotations name.

    An annotation with an alias, a function or a class of elsewhere (``nn.Module``) is not looked at: who takes that
    says more of it.
    """
    signature = inspect.signature(function)
    home = inspect.unwrap(function).__globals__
    known = {name: _words(str(one.annotation), home) for name, one in signature.parameters.items()}
    for name, one in signature.parameters.items():
        if known[name] and one.default is not one.empty:  # None stands for what may be left out
            known[name] = [*known[name], "None"]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # Python says which are too many
            given = {}
        for name, value in given.items():
            check_argument(function.__name__, name, value, known[name], home)
        return function(*args, **kwargs)

    return call


def check_fields(values: Any) -> None:
    """Raise InputError for the first field of a dataclass that is of no kind which its annotation names."""
    for one in fields(values):
        words = _words(str(one.type), {})
        check_argument(type(values).__name__, one.name, getattr(values, one.name), words, {})


def check_argument(
    whose: str, name: str, value: Any, words: Sequence[str], home: Mapping[str, Any]
) -> None:
    """Raise InputError for a value that is of no kind that some word names; with no words any is."""
    if words and not fits(value, words, home):
        said = [KINDS[word][0] if word in KINDS else word for word in dict.fromkeys(words)]
        raise InputError(
            f"{whose} takes {' or '.join(said)} as {name}, not {value!r:.60}; pass that"
        )


def _words(annotation: str, home: Mapping[str, Any]) -> Sequence[str]:
    """Return the words of an annotation, none where some word is no kind and no class of ours."""
    words = re.split(r" \| (?![^\[]*\])", annotation)
    bases = [word.partition("[")[0] for word in words]
    is_known = all(
        one.isidentifier() and one not in _OTHERS and isinstance(home.get(one, type), type)
        for one in bases
    )
    return words if is_known else ()
