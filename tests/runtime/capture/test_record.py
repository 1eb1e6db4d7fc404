"""What the recorder asks torch, and what it tells of what torch said before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.runtime.capture.record import Recorder, Value, aten, shares_storage

pytestmark = pytest.mark.torch


class _Asked(TorchDispatchMode):
    """Notes which operators torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


def _look(value: Value) -> tuple[Any, ...]:
    meta = value.meta
    return meta.shape, meta.stride(), meta.dtype, meta.requires_grad


def test_equal_layers_ask_torch_once_how_their_results_look() -> None:
    recorder = Recorder()
    rows, weight = torch.empty(4, 8), torch.empty(6, 8, requires_grad=True)
    entered = [[recorder.enter(rows), recorder.enter(weight)] for _ in range(2)]
    first = recorder.emit(aten.linear.default, *entered[0])
    with _Asked() as asked:
        second = recorder.emit(aten.linear.default, *entered[1])
    assert not [one for one in asked.ran if "empty" not in one]
    assert _look(second) == _look(first) == ((4, 6), (6, 1), torch.float32, True)
    assert not shares_storage(second, first)
    with torch.no_grad():
        assert not recorder.emit(aten.linear.default, *entered[1]).meta.requires_grad


def test_what_is_equal_as_a_key_is_not_taken_for_the_same_call() -> None:
    recorder = Recorder()
    whole = recorder.enter(torch.empty(4, dtype=torch.int64))
    dtypes = [recorder.emit(aten.add.Tensor, whole, one).meta.dtype for one in (1, 1.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.int64]


def test_views_share_the_memory_of_what_they_are_made_of() -> None:
    recorder = Recorder()
    for _ in range(2):
        rows = recorder.enter(torch.empty(4, 8))
        assert shares_storage(recorder.emit(aten.transpose.int, rows, 0, 1), rows)
