"""What may be said of an option, stated beside the field that holds it.

The checks here, the options of the command line and the keywords of the verbs follow from it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ParamSpec, TypeVar

from shardwright.core.arguments import KINDS, fits
from shardwright.errors import InputError

A = TypeVar("A")
R = TypeVar("R")
P = ParamSpec("P")
FINITE = "the {name} must be finite and not negative, not {value}; choose it so"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a field's value may be, and how it is called on the command line.

    ``flags`` besides the field's own name with dashes, which any that begins with ``--`` replaces.
    ``one_of``: all words that it may be; a function where naming them takes imports. ``says`` is the
    complaint about a number outside ``least`` to ``most``, finite in any case.
    """

    help: str = ""
    flags: tuple[str, ...] = ()
    one_of: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()
    least: float | None = None
    most: float = math.inf
    says: str = "the {name} must be between {least} and {most}, not {value}; choose it within these"


def option(default: Any, help: str = "", *flags: str, **about: Any) -> Any:
    """Make a field of a frozen dataclass an option; ``about`` are further fields of ``Option``."""
    return field(default=default, metadata={"option": Option(help=help, flags=flags, **about)})


def options_of(kind: type) -> dict[str, Option]:
    """Return the options among a dataclass's fields, in order."""
    return {one.name: one.metadata["option"] for one in fields(kind) if "option" in one.metadata}


def check_options(values: Any) -> None:
    """Raise InputError for the first option of another type, that is none of its words, or out of its bounds.

    A default is one of the words and within the bounds.
    """
    for one in fields(values):
        about: Option | None = one.metadata.get("option")
        value = getattr(values, one.name)
        if about is None or value == one.default:
            continue
        name = one.name.replace("_", " ")
        _check_kind(name, value, str(one.type))
        if about.one_of:
            known = about.one_of() if callable(about.one_of) else about.one_of
            check_word(name, value, known)
        if about.least is not None and not (
            about.least <= value <= about.most and value < math.inf
        ):
            bounds = {"least": about.least, "most": about.most}
            raise InputError(about.says.format(name=name, value=value, **bounds))


def _check_kind(name: str, value: Any, annotation: str) -> None:
    """Raise InputError for a value of another type than annotated; of several values only one text is seen."""
    if annotation.startswith("tuple") and isinstance(value, str):
        raise InputError(f"{name} must be a tuple, not {value!r:.40}; put it into one")
    words = annotation.split(" | ")
    known = [word for word in words if word in KINDS]
    is_known = len(known) + words.count("None") == len(words)
    if is_known and not fits(value, words):
        said = " or ".join(KINDS[word][0] for word in known)
        raise InputError(f"{name} must be {said}, not {value!r:.40}; change its type")


def check_word(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise InputError unless a word is a known one."""
    if value not in known:
        raise InputError(
            f"{name} must be one of {', '.join(known)}, not {str(value)[:40]!r}; choose one"
        )


def takes(arguments: Callable[P, A]) -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """Let callers of a verb, which takes one dataclass, write its fields as arguments.

    Type checkers, editors and ``help`` see the fields as the verb's own parameters.
    """

    def decorate(verb: Callable[[A], R]) -> Callable[P, R]:
        @functools.wraps(verb)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return verb(arguments(*args, **kwargs))

        signature = inspect.signature(arguments)
        result = inspect.signature(verb).return_annotation
        call.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
        # Python's complaint about a wrong argument names the verb.
        arguments.__init__.__qualname__ = verb.__qualname__  # type: ignore[misc]
        return call

    return decorate
