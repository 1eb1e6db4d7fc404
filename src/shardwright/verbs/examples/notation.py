"""How an example call is written.

A call is written as the user would write it; ``F``, ``U``, ``I``, ``B`` stand for tensors: floats
of either sign, floats between 0 and 1, integers below ``high``, booleans; ``D`` for integers that
differ, ``P`` for positive definite matrices, ``V`` for pivots of factors; ``K`` is ``U`` where torch
has no gradient to give. Sizes are multiples of small numbers so that dims can be split, and
differ so that they cannot be confused: random shapes are made from an example by giving every
size another one, everywhere it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwright.core.example import Call, Drawn


def F(*shape: int) -> Drawn:
    """Floats of either sign."""
    return Drawn("float", shape)


def U(*shape: int) -> Drawn:
    """Floats between 0 and 1."""
    return Drawn("unit", shape)


def K(*shape: int) -> Drawn:
    """Floats between 0 and 1 to which no gradient flows."""
    return Drawn("constant", shape)


def P(*shape: int) -> Drawn:
    """Symmetric positive definite matrices."""
    return Drawn("definite", shape)


def I(*shape: int, high: int = 5) -> Drawn:  # noqa: E743
    """Integers from 0 to below ``high``."""
    return Drawn("integer", shape, high)


def D(*shape: int, high: int) -> Drawn:
    """Integers from 0 to below ``high``, different within the last two dims: where two write to one place, either may
    be the last."""
    return Drawn("places", shape, high)


def B(*shape: int) -> Drawn:
    """Booleans, at least one of each last dim true."""
    return Drawn("boolean", shape)


def C(*shape: int) -> Drawn:
    """Complex numbers."""
    return Drawn("complex", shape)


def V(*shape: int) -> Drawn:
    """Pivots: by which row each is exchanged, that or one below it, the first being 1."""
    return Drawn("pivots", shape)


def L(*values: int) -> Drawn:
    """A vector of given integers, where random ones would collide or not ascend."""
    return Drawn("given", values)


def call(*args: Any, **kwargs: Any) -> Call:
    """Write down one call."""
    return Call(args, kwargs)


def fixed(sizes: Sequence[int], one: Call) -> Call:
    """Keep some sizes of a call: where kernels read beyond the end instead of refusing shapes."""
    return replace(one, fixed=tuple(sizes))


def every(names: str, *calls: Call) -> dict[str, tuple[Call, ...]]:
    """Give the same calls to many ATen operators, listed with their overloads."""
    return {f"aten.{name}": calls for name in names.split()}
