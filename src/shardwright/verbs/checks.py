"""What ``doctor`` looks at. Imports none of what it looks for."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path

from shardwright.report.units import bytes_text
from shardwright.runtime.cores import of_host
from shardwright.store import default_path
from shardwright.verbs.results import Check

NEEDED_FREE = 2**30


def doctor() -> tuple[Check, ...]:
    """Look at what is installed and what this machine can do, the most basic first. Imports no torch."""
    return (
        _python(),
        _package("torch", "to capture, profile and run", "pip install 'shardwright[train]'"),
        _package("safetensors", "for checkpoints", "pip install 'shardwright[train]'"),
        _package("transformers", "for hf: models", "pip install 'shardwright[models]'"),
        _cores(),
        _memory(),
        _disk(),
        _store(),
    )


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(
        name="python",
        is_ok=sys.version_info >= (3, 11),
        detail=version,
        remedy="use Python 3.11 or newer",
    )


def _package(name: str, purpose: str, remedy: str) -> Check:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, is_ok=False, detail=f"not installed ({purpose})", remedy=remedy)
    return Check(name=name, is_ok=True, detail=f"{version} ({purpose})")


def _cores() -> Check:
    cores = len(of_host())
    return Check(
        name="cores",
        is_ok=cores >= 2,
        detail=f"{cores} usable",
        remedy="one core trains on one rank only; give this process more",
    )


def _memory() -> Check:
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return Check(name="memory", is_ok=True, detail="unknown on this system")
    return Check(
        name="memory",
        is_ok=free >= 2 * NEEDED_FREE,
        detail=f"{bytes_text(free)} free",
        remedy="each rank needs about 0.5 GiB before the model; end other programs",
    )


def _disk() -> Check:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    return Check(
        name="disk",
        is_ok=free >= NEEDED_FREE,
        detail=f"{bytes_text(free)} free in {folder}",
        remedy="free some space: checkpoints are written beside the old ones first",
    )


def _store() -> Check:
    path = default_path()
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    writable = os.access(folder, os.W_OK)
    there = "there" if path.exists() else "made when first needed"
    return Check(
        name="measurements",
        is_ok=writable and (not path.exists() or Path(path).is_file()),
        detail=f"{path} ({there})",
        remedy="make it writable, or name another file in SHARDWRIGHT_STORE",
    )
