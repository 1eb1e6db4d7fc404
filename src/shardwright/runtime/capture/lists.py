"""Calls over lists of tensors (``torch._foreach_lerp_``), one call for each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwright.runtime.capture.record import Unsupported, aten
from shardwright.runtime.capture.variables import Variable

_PREFIX = "aten::_foreach_"


def is_over_lists(target: Any) -> bool:
    """Whether an operator does to each tensor of a list what another does to one."""
    return target._schema.name.startswith(_PREFIX)


def singly(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, list[Any], Mapping[str, Any]]]:
    """Yield the calls of that other operator, in order."""
    packet = getattr(aten, target._schema.name.removeprefix(_PREFIX), None)
    for place in range(len(args[0])):
        given = [arg[place] if isinstance(arg, (list, tuple)) else arg for arg in args]
        name = "Tensor" if isinstance(given[-1], Variable) else "Scalar"
        names = [name] * (len(given) > 1) + ["default"]
        one = next((getattr(packet, name) for name in names if hasattr(packet, name)), None)
        if one is None or len(given) > len(one._schema.arguments):
            raise Unsupported(f"the operator {target}, over a list of tensors")
        yield one, given, kwargs
