"""``flex_attention`` as the operators it stands for: scores of all pairs, its functions of them, softmax, a sum.

Torch compiles it, and has no gradient of it without a GPU, while models are captured without one; and no graph
of pure operators holds the functions that it is given. These are of scalars: here they are called once, with
all scores and places, whose dims meet in ``batch, heads, queries, keys``.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.errors import CaptureError


@contextlib.contextmanager
def traceable_flex() -> Iterator[None]:
    """Let ``flex_attention`` be written out, where a model has imported it."""
    module: Any = sys.modules.get("torch.nn.attention.flex_attention")
    if module is None:
        yield
        return
    changes: dict[str, Any] = {
        "flex_attention_hop": _written_out,
        "create_mask": _mask,
        "_ordered_to_dense": _dense,
        "_validate_device": lambda *_: None,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,  # else it would be compiled first
    }
    before = {name: getattr(module, name) for name in changes}
    try:
        vars(module).update(changes)
        yield
    finally:
        vars(module).update(before)


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    change: Any,
    mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what attention makes, and of each query the logarithm of its sum, to base 2, and its maximum."""
    b, heads, queries = query.shape[:3]
    key, value = (
        one[:, :, None].expand(b, -1, heads // one.shape[1], -1, -1).flatten(1, 2)
        for one in (key, value)
    )
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query.to(exact) @ key.to(exact).mT) * scale
    places = _places([b, heads, queries, key.shape[2]], query.device)
    with _Scalars():
        seen, scores = mask[-1](*places), change(scores, *places)
    scores = torch.where(seen, scores, -math.inf)
    highest = scores.amax(-1, keepdim=True)
    some = highest > -math.inf  # a query that sees no key gets zeros
    weights = torch.where(some, scores, 0.0).softmax(-1) * some
    total = scores.logsumexp(-1) / math.log(2)
    return weights.to(query.dtype) @ value, total, highest.squeeze(-1)


def _mask(
    change: Callable[..., Tensor],
    b: int | None,
    heads: int | None,
    queries: int,
    keys: int,
    device: Any,
) -> Tensor:
    """Return where a mask is true."""
    shape = [b or 1, heads or 1, queries, keys]
    with _Scalars():
        return change(*_places(shape, device)).expand(shape)


def _dense(counts: Tensor, places: Tensor, width: int) -> Tensor:
    """Return 1 at the first so many places of every row, 0 elsewhere, as ``width`` numbers a row."""
    is_one = torch.arange(places.shape[-1], device=places.device) < counts[..., None]
    found = places.new_zeros((*places.shape[:-1], width), dtype=torch.int32)
    return found.scatter_add(-1, places.long(), is_one.int()).clamp(max=1)


def _places(shape: list[int], device: Any) -> list[Tensor]:
    """Return for each dim the numbers along it."""
    counts = [torch.arange(count, device=device) for count in shape]
    return [one.reshape(-1, *[1] * (3 - dim)) for dim, one in enumerate(counts)]


class _Scalars(TorchFunctionMode):
    """Refuses to look up less than an element by place: what is left of a table would be taken for places."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            are_places = all(isinstance(one, int | Tensor) for one in places)
            if len(places) != args[0].dim() or not are_places:
                raise CaptureError(
                    "functions given to flex_attention must look up single elements, but one takes a part of a "
                    f"tensor of {args[0].dim()} dims; name all places at once, as in table[h, q]"
                )
        return func(*args, **(kwargs or {}))
