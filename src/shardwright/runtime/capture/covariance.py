"""``torch.cov`` and ``torch.corrcoef`` as the operators they stand for: torch asks there how large the divisor is, which no
trace of values knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


@contextlib.contextmanager
def traceable_covariance() -> Iterator[None]:
    """Let covariances and correlations of tensors without values be written out."""
    plain = {name: (getattr(torch, name), getattr(torch._C.TensorBase, name)) for name in _WAYS}

    def way(name: str) -> Any:
        def called(input: Tensor, **options: Any) -> Tensor:
            is_traced = isinstance(input, (FakeTensor, FunctionalTensor))
            return (_WAYS[name] if is_traced else plain[name][1])(input, **options)

        return called

    for name in _WAYS:
        setattr(torch, name, way(name))
        setattr(torch.Tensor, name, way(name))
    try:
        yield
    finally:
        for name, (function, _) in plain.items():
            setattr(torch, name, function)
            delattr(torch.Tensor, name)


def _covariance(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """Return the covariance of rows, whose columns may count several times (``fweights``) or have weights."""
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    weights = fweights if aweights is None else aweights
    if fweights is not None and aweights is not None:
        weights = fweights * aweights
    if weights is None:
        number: Any = rows.shape[1]
        centred = rows - (rows.sum(1) / number).unsqueeze(1)
        scaled, divisor = centred, max(number - correction, 0)
    else:
        number = weights.sum()
        centred = rows - ((rows * weights).sum(1) / number).unsqueeze(1)
        lost = 1.0 if aweights is None else (weights * aweights).sum() / number
        scaled, divisor = centred * weights, (number - correction * lost).clamp(min=0)
    return (centred @ scaled.t().conj() / divisor).squeeze()


def _correlation(input: Tensor) -> Tensor:
    """Return the covariance of rows of variance one."""
    found = _covariance(input)
    if found.dim() == 0:
        return found / found
    spread = (found.diagonal().real if found.is_complex() else found.diagonal()).sqrt()
    found = found / spread.unsqueeze(1) / spread
    return found if found.is_complex() else found.clamp(-1, 1)


_WAYS = {"cov": _covariance, "corrcoef": _correlation}
