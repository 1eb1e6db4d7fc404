"""Checks of values that a model makes with Python's ``if ...: raise`` and ``assert``.

A trace knows no values. Where they only decide whether forward raises, it goes on as if all were well,
which is what a step that does not raise has in common with the graph.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


@contextlib.contextmanager
def unchecked_values() -> Iterator[dict[str, None]]:
    """Let the truth of a traced tensor be that with which a check passes, where a check asks for it.

    Yields the places of such checks, as they are met.
    """
    of_tensor: Any = torch._C.TensorBase.__bool__
    of_symbol: Any = torch.SymBool.__bool__  # what becomes of ``tensor.item() > 0``
    met: dict[str, None] = {}

    def asked() -> bool | None:
        frame = sys._getframe(2)
        file, line = frame.f_code.co_filename, frame.f_lineno
        passes = _passing(file, len(linecache.getlines(file))).get(line)
        if passes is not None:
            met[f"{file}:{line}"] = None
        return passes

    @wraps(of_tensor)
    def truth(tensor: Tensor) -> bool:
        is_traced = isinstance(tensor, (FakeTensor, FunctionalTensor))
        passes = asked() if is_traced else None
        return of_tensor(tensor) if passes is None else passes

    def symbol(one: torch.SymBool) -> bool:
        passes = asked()
        return of_symbol(one) if passes is None else passes

    torch.Tensor.__bool__, torch.SymBool.__bool__ = truth, symbol  # type: ignore[method-assign]
    try:
        yield met
    finally:
        del torch.Tensor.__bool__
        torch.SymBool.__bool__ = of_symbol  # type: ignore[method-assign]


@lru_cache(maxsize=256)
def _passing(file: str, _: int) -> dict[int, bool]:
    """Map the lines of a file's checks to the truth with which each passes; linear in the file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    found: dict[int, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            wanted = True
        elif isinstance(node, ast.If) and not node.orelse and _only_raises(node.body):
            wanted = False
        else:
            continue
        truths = {wanted != is_negated for is_negated in _negations(node.test)}
        if len(truths) == 1:
            last = node.test.end_lineno or node.test.lineno
            found |= dict.fromkeys(range(node.lineno, last + 1), truths.pop())
    return found


def _only_raises(body: list[ast.stmt]) -> bool:
    """Whether statements make a message, and raise it."""
    return isinstance(body[-1], ast.Raise) and all(isinstance(one, ast.Assign) for one in body[:-1])


def _negations(test: ast.expr) -> Iterator[bool]:
    """Yield for every part of a test whether the test is true where the part is false."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _negations(value)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from (not inner for inner in _negations(test.operand))
    elif not (isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot))):
        yield False  # what is compared by identity is no tensor
