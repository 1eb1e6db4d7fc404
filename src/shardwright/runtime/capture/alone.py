"""Tensors that are made after another one's dtype and device, made without it."""

from __future__ import annotations

from typing import Any

from shardwright.runtime.capture.record import Value, aten
from shardwright.runtime.capture.spellings import CASTS

# What takes another tensor only for its dtype and device, and what needs none.
MADE_ALONE = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
}
# What takes its shape, too: none to speak of where that is one number.
LIKE = {
    aten.zeros_like.default: aten.zeros.default,
    aten.ones_like.default: aten.ones.default,
    aten.full_like.default: aten.full.default,
    aten.empty_like.default: aten.empty.memory_format,
}


def can_be_alone(target: Any, args: list[Any]) -> bool:
    """Whether a call takes of another tensor what does not depend on the batch, or casts a number."""
    if target in CASTS:
        return not isinstance(args[0], Value)
    return target in MADE_ALONE or (target in LIKE and not args[0].meta.dim())


def made_alone(target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return a call that makes the same tensor without another: an initial state, or a mask to draw,
    depends neither on the batch nor on parameters."""
    lender, *rest = args
    if not isinstance(lender, Value):
        return aten.full.default, [[], lender], {"dtype": kwargs.get("dtype"), "device": None}
    dtype = kwargs.get("dtype") or lender.meta.dtype
    device = kwargs.get("device") or lender.meta.device
    if target in LIKE:
        return LIKE[target], [[], *rest], {"dtype": dtype, "device": device}
    return MADE_ALONE[target], rest, {"dtype": dtype, "device": device}
