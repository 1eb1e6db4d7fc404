"""Captures that the processes of one run of tests share: what one of them has captured the others read."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.runtime.capture import Captured

FOLDER = "SHARDWRIGHT_TESTS_CAPTURES"
NOT_TO_PICKLE = (pickle.PicklingError, AttributeError, TypeError)


def shared(make: Callable[[], Captured], *of: object) -> Captured:
    """Return a capture of what ``of`` names: one process makes it, and others that want it wait for that.
    Where it has no name (a factory inside a function), or holds modules, everybody makes its own."""
    from torch import nn

    try:
        name = hashlib.sha256(pickle.dumps(of)).hexdigest()
    except NOT_TO_PICKLE:
        return make()
    if FOLDER not in os.environ:
        return make()
    path = Path(os.environ[FOLDER], name)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return pickle.loads(path.read_bytes())
        captured = make()
        if not any(isinstance(call.target, nn.Module) for call in captured.calls):
            with contextlib.suppress(*NOT_TO_PICKLE):
                partial = path.with_suffix(".partial")
                partial.write_bytes(_pickled(captured))
                partial.replace(path)
        return captured


def _pickled(captured: Captured) -> bytes:
    """Torch's operators, which cannot be pickled, travel by name."""
    from torch._ops import OpOverload

    from shardwright.runtime.profile.shards import Overload

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, OpOverload):
                return Overload.find, (Overload(name=str(obj)),)
            return NotImplemented

    data = io.BytesIO()
    Pickler(data).dump(captured)
    return data.getvalue()
