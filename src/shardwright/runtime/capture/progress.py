"""How far a capture is: which share of a model's modules it has called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwright.runtime.capture.prepare import LossOnly


@contextlib.contextmanager
def followed(tell: Callable[[float], None]) -> Iterator[None]:
    """Tell the share of each run of a model that is captured meanwhile."""
    total = count = 1

    def called(module: nn.Module, _: Any) -> None:
        nonlocal total, count
        if isinstance(module, LossOnly):
            total, count = sum(1 for _ in module.modules()), 0
        count += 1
        tell(min(count / total, 1.0))

    hook = register_module_forward_pre_hook(called)
    try:
        yield
    finally:
        hook.remove()
