"""Ways to remember: what a method returned, by its arguments, as long as its object lives; and how much of
what has no end."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar, cast

# So many answers to one question are kept, where it is asked in ever other ways. No answer depends on it.
KEPT = 8

Method = TypeVar("Method", bound=Callable[..., Any])


def remembered(method: Method) -> Method:
    """Let a method answer equal questions once; its arguments must be hashable, its object has no slots."""
    return cast(Method, _Remembered(method))


class _Remembered:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        # Looked up there from now on, before this is asked again.
        answers = cache(partial(self._method, instance))
        instance.__dict__[self._method.__name__] = answers
        return answers
