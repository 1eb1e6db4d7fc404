"""Kernels take tensors however these lie in memory: those of a shard lie otherwise than the model's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from shardwright.operators.splitting.rules import KIND
from shardwright.runtime.rules import Case, Refused, draw
from shardwright.verbs.examples import EXAMPLES

pytestmark = pytest.mark.torch

# Capture writes others in place of these: ``reshape``, ``as_complex``, and a sum of the losses.
REPLACED = {
    "aten.view.default", "aten._unsafe_view.default", "aten.view_as.default",
    "aten.view_as_complex.default", "aten.nll_loss2d.default",
}  # fmt: skip
# PyTorch wants in a row what it looks for, which no rule cuts.
WHOLE = {"aten.isin.Tensor_Tensor"}


def backwards(tensor: Tensor) -> Tensor:
    """The first dim lies innermost."""
    dims = list(range(tensor.dim()))[::-1]
    return tensor.permute(dims).clone(memory_format=torch.contiguous_format).permute(dims)


def apart(tensor: Tensor) -> Tensor:
    """Between two elements lies one of another tensor."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def run(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    """Results and gradients of a call on memory as it is."""
    leaves = [
        tensor.detach().requires_grad_(flows)
        for tensor, flows in zip(tensors, case.differentiable, strict=True)
    ]
    results = case.run(leaves)
    ends = [one for one in results if one.requires_grad and one.is_floating_point()]
    wanted = [one for one in leaves if one.requires_grad]
    found = (
        torch.autograd.grad([one.cos().sum() for one in ends], wanted, allow_unused=True)
        if ends and wanted
        else ()
    )
    return [*results, *(one for one in found if one is not None)]


@pytest.mark.parametrize("laid", [backwards, apart])
def test_every_operator_gives_the_same_however_its_arguments_lie_in_memory(
    laid: Callable[[Tensor], Tensor],
) -> None:
    for kind in sorted(set(KIND) - REPLACED - WHOLE):
        for call in EXAMPLES[kind]:
            case = draw(kind, call, seed=1)
            try:
                if case.is_random or not case.results:
                    continue
            except Refused:
                continue
            plain = run(case, [tensor.clone() for tensor in case.tensors])
            for place in range(len(case.tensors)):
                tensors = [tensor.clone() for tensor in case.tensors]
                tensors[place] = laid(tensors[place])
                named = partial("{}{}: {}".format, kind, call)
                torch.testing.assert_close(run(case, tensors), plain, equal_nan=True, msg=named)
