"""Lines of the user's model: what is refused says where it stands."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardwright.errors import CaptureError, said
from shardwright.runtime.capture.record import Unsupported

_NOT_MODEL = (Path(__file__).parents[2], Path(torch.__file__).parent)
_LIBRARY = Path(traceback.__file__).parent


def first_line(error: BaseException) -> str:
    """Return what an error says first, and the line of the model that it comes from."""
    lines = [line for line in said(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    if isinstance(error, Unsupported):
        text = str(error)
    place = model_line(error)
    return f"{text}, at {place}" if place else text


def model_line(error: BaseException) -> str:
    """Return file and line of the model's innermost frame, or of its text where that is no Python; ""
    where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    return next(_lines_of([*traceback.walk_tb(error.__traceback__)][::-1]), "")


def raised_at(error: BaseException) -> str:
    """Return file and line of the model's where an error was raised, "" where other code raised it."""
    return next(_lines_of([*traceback.walk_tb(error.__traceback__)][-1:]), "")


def running_line() -> str:
    """Return file and line of the model's innermost frame that runs now, "" where none does."""
    return next(_lines_of(traceback.walk_stack(sys._getframe())), "")


def _lines_of(frames: Iterable[tuple[FrameType, int]]) -> Iterator[str]:
    """Yield those that are the model's. Packages that are installed are part of it where a module of theirs
    runs."""
    for frame, line in frames:
        path = Path(frame.f_code.co_filename)
        if not _is_model(path):
            continue
        is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        is_library = is_installed or path.is_relative_to(_LIBRARY)
        if not is_library or (is_installed and isinstance(frame.f_locals.get("self"), nn.Module)):
            yield f"{path.name}:{line}"


def _is_model(path: Path) -> bool:
    return path.is_file() and not any(path.is_relative_to(folder) for folder in _NOT_MODEL)


def is_models_frame(frame: FrameType) -> bool:
    """Whether what runs there is the model's, or a library's that it uses."""
    return _is_model(Path(frame.f_code.co_filename))


def is_models_own(kind: type) -> bool:
    """Whether a class is written in a file of the model's; where in it takes parsing the file."""
    try:
        return _is_model(Path(inspect.getfile(kind)))
    except (OSError, TypeError):  # written in C, or in no file
        return False


def defined_at(made: Any) -> str:
    """Return file and line where a function or class of the model's begins, "" where it has none."""
    while isinstance(made, functools.partial):
        made = made.func
    made = inspect.unwrap(made)
    if not isinstance(made, type) and not hasattr(made, "__code__"):
        made = type(made)
    try:
        path = Path(inspect.getfile(made))
        line = made.__code__.co_firstlineno if hasattr(made, "__code__") else _source(made)[1]
    except (OSError, TypeError):  # written in C, or in no file
        return ""
    return f"{path.name}:{line}" if _is_model(path) else ""


def held_at(module: nn.Module, path: str) -> str:
    """Return file and line where the model's own code gives a module what it holds at a path of attributes, ""
    where none of its own classes is on the way."""
    found, owner = "", module
    for name in path.split("."):
        found = _line_naming(type(owner), name) or found
        owner = getattr(owner, name, None)
    return found


def _line_naming(kind: type, name: str) -> str:
    """Return the first line of a class of the model's that sets or registers an attribute, else the one it
    begins at."""
    own = [one for one in kind.__mro__ if defined_at(one)]
    word = re.escape(name)
    binding = re.compile(rf"""\bself\.{word}\b[^=(]*=(?!=)|(\(|^\s*|self, ?)["']{word}["'],""")
    for one in own:
        lines, first = _source(one)
        for at, line in enumerate(lines):
            if binding.search(line):
                return f"{Path(inspect.getfile(one)).name}:{first + at}"
    return defined_at(own[0]) if own else ""


_source = functools.lru_cache(maxsize=64)(inspect.getsourcelines)


@contextlib.contextmanager
def with_line(module: nn.Module) -> Iterator[None]:
    """Let complaints say the line of the model: that which ran, else the one where its forward begins."""
    try:
        yield
    except CaptureError as error:
        forward = getattr(type(module), "forward", None)  # what TorchScript makes has none
        place = error.place or model_line(error) or defined_at(forward)
        if error.place or not place:
            raise
        raise type(error)(str(error), place=place) from error
