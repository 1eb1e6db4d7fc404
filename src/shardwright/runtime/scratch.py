"""Folders that are to be gone when their process is: made here, and swept by the next start.

A folder is claimed by a locked file in it, so that it is known as ours and, since a lock ends with
its process, as abandoned; a process number could belong to another process by then, or to another
container that shares the disk. What nobody claimed, or began to, or somebody else owns, is never touched.
"""

from __future__ import annotations

import fcntl
import getpass
import multiprocessing.util
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "shardwright-"
SHARED_MEMORY = Path("/dev/shm")
# multiprocessing keeps the fork server's socket in a folder of its own.
_SOCKETS = "pymp-*"
_SOCKET_NAME = len("/pymp-12345678/listener-12345678")
_MOST_OF_A_SOCKET = 103  # bytes of a path in macOS' sockaddr_un; Linux' has 107
_OWNER = ".shardwright-owner"
# Making a folder and claiming it takes no longer, unless its process was killed between the two.
_CLAIMING_SECONDS = 10.0
_ROOM = 2**20  # bytes


@contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Give a private folder that is removed afterwards, in ``parent`` where that can be written and has some
    room, else among temporary files; and remove what killed processes left."""
    _tidy()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent if _has_room(parent) else None))
    try:
        lock = claim(folder)
    except OSError:  # a disk that is full
        folder.rmdir()
        raise
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        release(lock)
        drop_compiler_folder()


def _tidy() -> None:
    """Remove what killed processes left."""
    sweep(Path(tempfile.gettempdir()), f"{PREFIX}*")
    sweep(_home_of_sockets(), _SOCKETS)
    sweep(SHARED_MEMORY, f"{PREFIX}*")
    drop_compiler_folder()


def _has_room(parent: Path | None) -> bool:
    if parent is None or not os.access(parent, os.W_OK):
        return False
    return shutil.disk_usage(parent).free >= _ROOM


def claim(folder: Path, *, shared: bool = False) -> int:
    """Mark a folder as this process's until it is released, or the process ends; return the lock.

    ``shared``: others may ``join``, and it is abandoned when the last has gone.
    """
    # Under its name it is never seen unlocked.
    fresh = folder / f"{_OWNER}.{os.getpid()}"
    lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:  # a disk without locks: nobody will sweep it there
        fresh.unlink()
        return lock
    fresh.rename(folder / _OWNER)
    return lock


def claim_multiprocessing() -> None:
    """Claim the folder that multiprocessing keeps until this process ends, unless it is claimed; then also remove
    what killed processes left, for commands that need no other folder."""
    usual = tempfile.tempdir
    tempfile.tempdir = str(_home_of_sockets())
    try:
        folder = Path(multiprocessing.util.get_temp_dir())
    finally:
        tempfile.tempdir = usual
    if not (folder / _OWNER).exists():
        claim(folder)
        _tidy()


def _home_of_sockets() -> Path:
    """The folder of temporary files, or /tmp where that has too long a name for a socket in it."""
    usual = tempfile.gettempdir()
    fits = len(os.fsencode(usual)) + _SOCKET_NAME <= _MOST_OF_A_SOCKET
    return Path(usual if fits else "/tmp")  # multiprocessing makes a private folder in it


def join(folder: Path) -> int | None:
    """Claim a folder beside those who share it; return the lock, None where there is no such folder
    or somebody is removing it."""
    try:
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if _is_of(lock, folder):
            return lock
    os.close(lock)
    return None


def leave(folder: Path, lock: int) -> None:
    """Give a shared claim back, and remove the folder where nobody else holds one."""
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_of(lock, folder):
                _remove(folder)
    finally:
        os.close(lock)


def _is_of(lock: int, folder: Path) -> bool:
    """Whether the lock is still that of the folder: it may have been removed, and made again."""
    return os.path.samestat(os.fstat(lock), (folder / _OWNER).lstat())


def _remove(folder: Path) -> None:
    """Remove a folder, its claim last: whoever is killed meanwhile leaves what can be swept."""
    for one in folder.iterdir():
        if one.name == _OWNER:
            continue
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one, ignore_errors=True)
        else:
            one.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def release(lock: int) -> None:
    """Give a claim back; its folder is gone, or stays for good (``unclaim``)."""
    os.close(lock)


def unclaim(folder: Path) -> None:
    """Let a folder outlive its process."""
    (folder / _OWNER).unlink(missing_ok=True)


def sweep(parent: Path, *patterns: str) -> None:
    """Remove folders that were claimed by processes of this user which are gone."""
    for pattern in patterns:
        for folder in parent.glob(pattern):
            with suppress(OSError):
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    about, user = folder.lstat(), os.getuid()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != user:
        return
    if not (folder / _OWNER).exists() and time.time() - about.st_mtime > _CLAIMING_SECONDS:
        _remove_if_never_claimed(folder)
        return
    lock = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid == user:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its owner lives
            if _is_of(lock, folder):
                _remove(folder)
    finally:
        os.close(lock)


def _remove_if_never_claimed(folder: Path) -> None:
    """Remove what has nothing in it but claims that did not get their name: who made it was killed then."""
    claims = list(folder.iterdir())
    if claims and all(one.name.startswith(f"{_OWNER}.") for one in claims):
        for one in claims:
            one.unlink()
        folder.rmdir()


def drop_compiler_folder() -> None:
    """Remove the folder that importing torch's compiler makes, unless something was compiled.

    Whoever compiles later makes it again.
    """
    with suppress(OSError, KeyError):  # not empty, not there, or a user without a name
        os.rmdir(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
