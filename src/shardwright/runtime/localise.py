"""Turn a captured call with global shapes into one that a device can run on its shard.

Two things in a captured call know about the whole tensor: the shape arguments of operators that
make or re-view tensors, and the device of factories. Everything else is independent of the shard,
or the operator's rule forbids the split. Used by the segments and by the profiler, so that what is
measured is what is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwright.core.graph import Operator

if TYPE_CHECKING:
    from shardwright.runtime.capture import CapturedCall

# The schema names under which ATen operators take the shape of their result.
RESULT_SHAPE_ARGUMENTS = ("size", "shape")
# Operators whose argument of such a name is something else than the shape of the result.
NOT_A_RESULT_SHAPE = frozenset({"aten.as_strided", "aten.fold", "aten.im2col", "aten.col2im"})


def localise(
    call: CapturedCall,
    operator: Operator,
    result_shapes: tuple[tuple[int, ...], ...],
    device: torch.device | str,
    unpadded: Sequence[int] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call's arguments for results of the local ``result_shapes`` on ``device``.

    Tensor placeholders stay where they are. An absent device means the tensors' own where the
    operator reads any, else ``device``. ``result_shapes`` has one entry per operator output; only
    the first is looked at, since no operator takes the shapes of several results. The dims
    ``unpadded`` of the first operand come with their halos: they are not padded once more.
    """
    args, kwargs = list(call.args), dict(call.kwargs)
    schema = getattr(call.target, "_schema", None)
    if schema is None:
        return tuple(args), kwargs
    shape, family = list(result_shapes[0]), _family(call.target)
    for position, argument in enumerate(schema.arguments):
        name = argument.name
        given = args[position] if position < len(args) else kwargs.get(name)
        if name == "device":
            follows = bool(operator.inputs) and "Optional" in str(argument.type)
            value = None if given is None and follows else torch.device(device)
        elif name in RESULT_SHAPE_ARGUMENTS and _is_shape(given):
            value = _local_shape(family, given, shape)
        elif name == "sizes" and family == "aten.unflatten":
            value = _unflattened(given, args, kwargs, shape)
        elif name == "padding" and unpadded and given is not None:
            value = _without_padding(family, given, unpadded, len(shape))
        else:
            continue
        if position < len(args):
            args[position] = value
        elif value is not None:
            kwargs[name] = value
    return tuple(args), kwargs


def _local_shape(family: str, given: Any, shape: list[int]) -> Sequence[int]:
    """Return the shape argument of an operator whose result has the local ``shape``."""
    if family in NOT_A_RESULT_SHAPE:
        return given
    if family == "aten.affine_grid_generator":
        return [shape[0], *given[1:]]  # of the image, not of the grid
    return list(shape)


def _without_padding(family: str, given: Any, unpadded: Sequence[int], rank: int) -> list[int]:
    """Return the padding of each of the last dims, as many as the operator's name says, 0 where it is there already."""
    every = [given] if isinstance(given, int) else list(given)
    digits = [int(letter) for letter in family if letter.isdigit()]
    count = digits[0] if digits else len(every)
    first = rank - count
    every = every if len(every) == count else every * count
    return [0 if dim + first in unpadded else size for dim, size in enumerate(every)]


def _family(target: Any) -> str:
    """Return ``aten.view`` for ``aten.view.default``."""
    return str(target).rpartition(".")[0]


def _is_shape(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and all(isinstance(size, int) for size in given)


def _unflattened(
    given: Any, args: list[Any], kwargs: dict[str, Any], shape: list[int]
) -> list[int]:
    """Return the part of the result shape that ``unflatten(input, dim, sizes)`` opens up."""
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    input_rank = len(shape) - len(given) + 1
    start = dim % input_rank
    return shape[start : start + len(given)]
