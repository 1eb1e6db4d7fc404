"""The adaptive softmax without picking rows: every cluster of words is computed for every row.

Torch picks the rows whose word lies in a cluster, of which a trace cannot know how many there are. What is
computed for the others is passed over, and has no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules.adaptive import _ASMoutput

Adaptive = nn.AdaptiveLogSoftmaxWithLoss
WHOLE = (
    "a cluster of the adaptive softmax that no row of a batch falls into gets gradients of zero, in PyTorch none: "
    "weight decay and momentum move it in such a step, too"
)


def adaptive_notes(module: nn.Module) -> tuple[str, ...]:
    """Return what to know of a module that has an adaptive softmax."""
    return (WHOLE,) if any(isinstance(one, Adaptive) for one in module.modules()) else ()


@contextlib.contextmanager
def traceable_adaptive() -> Iterator[None]:
    """Let the adaptive softmax of tensors without values compute all clusters for all rows."""
    plain: Any = Adaptive.forward

    def forward(module: Adaptive, input_: Tensor, target_: Tensor) -> Any:
        is_traced = isinstance(input_, (FakeTensor, FunctionalTensor))
        if not is_traced or (input_.dim(), target_.dim()) != (2, 1):
            return plain(module, input_, target_)
        return _every_cluster(module, input_, target_)

    Adaptive.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        Adaptive.forward = plain  # type: ignore[method-assign]


def _every_cluster(module: Adaptive, rows: Tensor, target: Tensor) -> Any:
    place, inside = target, torch.zeros_like(rows[:, 0])
    for number, tail in enumerate(module.tail):
        low, high = module.cutoffs[number : number + 2]
        is_here = (target >= low) & (target < high)
        place = torch.where(is_here, module.shortlist_size + number, place)
        known = (target - low).clamp(0, high - low - 1)
        found = F.log_softmax(tail(rows), 1).gather(1, known.unsqueeze(1)).squeeze(1)
        inside = torch.where(is_here, found, inside)
    head = F.log_softmax(module.head(rows), 1).gather(1, place.unsqueeze(1)).squeeze(1)
    output = inside + head
    return _ASMoutput(output, (-output).mean())
