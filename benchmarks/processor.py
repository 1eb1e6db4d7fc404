"""The processor that a benchmark ran on, for its report."""

from __future__ import annotations

import platform


def processor_name() -> str:
    """Return what the operating system calls the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return f"{names[0]} x {len(names)}" if names else platform.processor() or platform.machine()


def machine() -> str:
    """Return the processor and the version of Python."""
    return f"{processor_name()}, Python {platform.python_version()}"
