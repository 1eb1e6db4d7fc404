"""What torch's allocator gives and takes back on a CPU, as torch's profiler tells it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocations(run: Callable[[], object]) -> list[tuple[int, int]]:
    """Return when (nanoseconds of the system's clock) so many bytes were given (above 0) or taken back while
    something ran."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler talks on standard error
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler
    kineto: Any = results.kineto_results if results is not None else None
    events = kineto.events() if kineto is not None else []
    return sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
