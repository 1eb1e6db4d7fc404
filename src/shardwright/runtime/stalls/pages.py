"""Which files a loader reads, and whether their pages are in memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

PAGE = mmap.PAGESIZE
# Files of the interpreter and of the system are no data.
NOT_DATA = (".py", ".pyc", ".so", ".pth", ".nbi", ".nbc")
NOT_UNDER = ("/proc/", "/sys/", "/dev/", sys.prefix + "/", sys.base_prefix + "/", "/etc/")


class _Listener:
    """What Python opens, while somebody listens. A hook cannot be taken away, so there is one for all."""

    def __init__(self) -> None:
        self.heard: set[str] | None = None
        self.lock = threading.Lock()
        self.is_installed = False

    def __call__(self, event: str, details: tuple[object, ...]) -> None:
        heard = self.heard
        if heard is None or event != "open":
            return
        path, mode = details[0], details[1]
        if isinstance(path, (str, bytes, os.PathLike)) and not (
            isinstance(mode, str) and any(letter in mode for letter in "wax+")
        ):
            heard.add(os.path.abspath(os.fsdecode(path)))


_LISTENER = _Listener()


@contextlib.contextmanager
def listening() -> Iterator[set[str]]:
    """Collect the paths that this process opens for reading."""
    with _LISTENER.lock:
        if not _LISTENER.is_installed:
            sys.addaudithook(_LISTENER)
            _LISTENER.is_installed = True
        _LISTENER.heard = set()
        try:
            yield _LISTENER.heard
        finally:
            _LISTENER.heard = None


def mapped() -> set[str]:
    """Return the files that this process has open or mapped, libraries left out."""
    found = {os.path.realpath(entry) for entry in _links("/proc/self/fd")}
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        found |= {line.split(None, 5)[5] for line in lines if line.count(" /")}
    return found


def _links(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                yield os.readlink(entry.path)


def data_files(paths: Iterable[str]) -> tuple[str, ...]:
    """Return those paths that are regular files with data, in order."""
    found: list[str] = []
    for path in sorted(set(paths)):
        if path.endswith(NOT_DATA) or path.startswith(NOT_UNDER):
            continue
        with contextlib.suppress(OSError):
            about = os.stat(path)
            if stat.S_ISREG(about.st_mode) and about.st_size:
                found.append(path)
    return tuple(found)


def files_under(folders: Iterable[str]) -> tuple[str, ...]:
    """Return all files of folders, or the files themselves."""
    found: list[str] = []
    for one in folders:
        inside = (os.path.join(folder, name) for folder, _, names in os.walk(one) for name in names)
        found += [one] if os.path.isfile(one) else inside
    return data_files(os.path.abspath(path) for path in found)


def evict(paths: Iterable[str]) -> None:
    """Ask the kernel to forget the pages of files: without rights, and none that is dirty or mapped."""
    for path in paths:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(paths: Iterable[str]) -> float:
    """Return the share of the pages of files that is in memory (mincore); 0 of no page."""
    inside = total = 0
    for path in paths:
        here, all_of_it = _resident(path)
        inside, total = inside + here, total + all_of_it
    return inside / total if total else 0.0


def _resident(path: str) -> tuple[int, int]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return 0, 0
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    except OSError:
        return 0, 0
    if address in (None, ctypes.c_void_p(-1).value):
        return 0, 0
    pages = -(-size // PAGE)
    flags = (ctypes.c_ubyte * pages)()
    failed = libc.mincore(address, size, flags)
    libc.munmap(address, size)
    # The other bits are the kernel's; a data set has millions of pages.
    return (0, 0) if failed else (int((np.frombuffer(bytes(flags), np.uint8) & 1).sum()), pages)
