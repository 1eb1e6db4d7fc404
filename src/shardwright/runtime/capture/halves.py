"""Operators without kernels for 16-bit floats, on processors and GPUs alike: a model with one of these trains in
float32, or casts around it as ``torch.autocast`` would."""

from __future__ import annotations

from typing import NoReturn

import torch

from shardwright.core.graph import OperatorGraph
from shardwright.errors import PrecisionError

HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_FAMILIES = ("fft_", "_fft_", "linalg_", "_linalg_", "cholesky", "_cholesky", "lu_", "_lu_", "cdist", "_cdist", "pdist", "_pdist")  # fmt: skip
_NAMES = frozenset({
    "triangular_solve", "inverse", "pinverse", "det", "logdet", "slogdet", "geqrf", "orgqr", "ormqr", "qr", "svd",
    "stft", "istft", "complex", "polar", "ctc_loss", "_ctc_loss",
})  # fmt: skip
_MULTIPLY = frozenset(
    f"linalg_{name}"
    for name in (
        "vector_norm", "matrix_norm", "norm", "cross", "vecdot", "multi_dot", "matmul", "matrix_power",
        "matrix_exp", "diagonal",
    )
)  # fmt: skip


def check_halves(graph: OperatorGraph, dtype: torch.dtype | None) -> None:
    """Raise PrecisionError for the first operator that is given what it cannot compute in."""
    if dtype not in HALVES:
        return
    for operator in graph.operators:
        given = (graph.tensors[index].dtype for index in operator.inputs)
        if _is_without(operator.kind) and HALVES[dtype] in given:
            refuse(dtype, f"{operator.kind}, in {operator.module or 'the model itself'}")


def _is_without(kind: str) -> bool:
    space, name, *_ = kind.split(".")
    is_known = name in _NAMES or name.startswith(_FAMILIES)
    return space == "aten" and is_known and name not in _MULTIPLY


def names_half(error: BaseException, dtype: torch.dtype | None) -> bool:
    """Whether an error speaks of the 16-bit floats that a model was asked in."""
    words = {torch.bfloat16: ("BFloat16", "bfloat16"), torch.float16: ("Half", "float16")}
    return dtype in HALVES and any(word in str(error) for word in words[dtype])


def refuse(dtype: torch.dtype | None, what: object) -> NoReturn:
    """Raise PrecisionError."""
    assert dtype is not None
    raise PrecisionError(
        f"a model that is planned in {HALVES[dtype]} needs kernels for it, but has none for a part: {what}; plan in float32 "
        "(--precision float32), or cast to float32 around that part"
    )
