"""Folders that processes of one user share under a name: in shared memory where that is large enough.

Each holds a lock; the last one removes the folder, and what killed processes leave is swept by the next start.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shardwright.errors import InputError, RunError
from shardwright.runtime.scratch import PREFIX, SHARED_MEMORY, claim, join, leave, sweep

_PATIENCE = 30.0  # seconds to wait for somebody who is removing a folder of the same name
MOST_NAME = 100
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Home:
    """A folder that is there as long as some process holds it.

    ``place`` says where it lies and why.
    """

    def __init__(self, path: Path, lock: int, place: str) -> None:
        self.path, self.place = path, place
        self._lock, self._process = lock, os.getpid()

    def close(self) -> None:
        """Leave; the last one removes the folder. A forked child only closes its copy of the lock."""
        if os.getpid() == self._process:
            leave(self.path, self._lock)
        else:
            os.close(self._lock)


def open_home(
    name: str,
    size: int,
    make: Callable[[Path], None],
    *,
    kind: str,
    folder: str | Path | None = None,
) -> Home:
    """Join the folder of this name, or make it: ``make`` fills it before anybody else sees it.

    It lies under ``folder``, or in shared memory, or, where ``size`` bytes are not free there, in the folder for
    temporary files. An empty name is nobody else's.
    """
    if not re.fullmatch(r"[\w.-]*", name) or len(os.fsencode(name)) > MOST_NAME:
        raise InputError(
            f"a name that processes share has at most {MOST_NAME} bytes of letters, digits, '.', '-' and '_', not {name!r}; rename it"
        )
    places = _places(size, folder)
    full = f"{PREFIX}{kind}-{os.getuid()}-{name or secrets.token_hex(8)}"
    for parent in places:
        sweep(parent, f"{PREFIX}*")
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        found = _joined_of(places, full) or _made_of(places, full, make)
        if found is not None:
            return found
        for parent in places:
            sweep(parent, full)
        time.sleep(0.01)
    raise RunError(
        f"processes join a {kind} that is whole, but {full} was neither whole nor gone after {_PATIENCE:.0f} s; "
        "remove it, or choose another name"
    )


def _joined_of(places: dict[Path, str], full: str) -> Home | None:
    for parent, place in places.items():
        if (lock := _joined(parent / full)) is not None:
            return Home(parent / full, lock, place)
    return None


def _made_of(places: dict[Path, str], full: str, make: Callable[[Path], None]) -> Home | None:
    """Make a folder in the first place that has room; None where somebody was faster."""
    for parent, place in places.items():
        if (lock := _made(parent, parent / full, make)) is not None:
            return Home(parent / full, lock, place)
        if (parent / full).exists():
            return None
    raise InputError(
        f"a cache needs room, and there is none in {', '.join(map(str, places))}; "
        "make some, or name a folder on a larger disk"
    )


def _places(size: int, folder: str | Path | None) -> dict[Path, str]:
    """Return where the folder may lie, the best first, each with its reason."""
    if folder is not None:
        parent = Path(folder).resolve()
        if not parent.is_dir():
            raise InputError(f"the folder of a cache exists, but {parent} does not; make it")
        return {parent: f"files in {parent}, as asked"}
    disk = Path(tempfile.gettempdir()).resolve()
    if not os.access(SHARED_MEMORY, os.W_OK):
        return {disk: f"memory-mapped files in {disk}: this machine has no {SHARED_MEMORY}"}
    free = _free(SHARED_MEMORY)
    memory = f"shared memory ({SHARED_MEMORY})"
    short = f"memory-mapped files in {disk}: {SHARED_MEMORY} has {free:,} bytes free, and {size:,} are asked for"
    if free >= size:
        return {SHARED_MEMORY: memory, disk: short}
    return {disk: short, SHARED_MEMORY: memory}


def _free(folder: Path) -> int:
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize


def _joined(path: Path) -> int | None:
    """Return the lock of a folder that is there, and ours."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return None
    if about.st_uid != os.getuid() or path.is_symlink() or not path.is_dir():
        raise InputError(f"{path} belongs to somebody else; choose another name")
    return join(path)


def _made(parent: Path, path: Path, make: Callable[[Path], None]) -> int | None:
    """Return the lock of a new folder; None where somebody was faster, or there is no room."""
    try:
        fresh = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise InputError(
            f"a cache lies in a folder that may be written, but {parent} may not ({error.strerror}); name another"
        ) from None
    lock = claim(fresh, shared=True)
    try:
        make(fresh)
        fresh.rename(path)  # refused where a folder of that name has anything in it
    except BaseException as error:
        shutil.rmtree(fresh, ignore_errors=True)
        os.close(lock)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, *NO_SPACE):
            return None
        raise
    return lock
