"""What jobs on one host that share prepared chunks know of each other, in shared memory.

Chunks have numbers that go on from epoch to epoch, and a ring of slots. Whoever is free takes the next chunk whose
slot is empty, prepares it and stages it; each job that was there then takes it once, and the last one frees the slot.
Who lives holds a lock on a file of its own. All changes are made under one lock, which ends with its holder, each by
one store that is the last: whoever is killed leaves the state before it or after.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardwright.caching.home import open_home
from shardwright.caching.minio import locked
from shardwright.errors import InputError, RunError

MOST_JOBS, _MOST_LIVES = 64, 256
_NOBODY = _MOST_LIVES  # takes the chunks of the dead, until somebody takes them over
# Cells of 8 bytes. The head: what all agree on, the next chunk to be taken, whether the first epoch has begun.
_AGREED, _NEXT, _BEGUN, _HEAD = slice(0, 5), 5, 6, 8
# Of a life: what it is, whose process, the next chunk it wants, whether it prepares for itself meanwhile.
_KIND, _TOKEN, _WANTS, _ASIDE, _LIFE = 0, 1, 2, 3, 4
_FREE, JOB, WORKER = 0, 1, 2
# Of a slot: state, chunk, who prepares it, jobs that have still to take it (bits), length and check of its bytes.
_STATE, _CHUNK, _WHO, _JOBS, _LENGTH, _CHECK, _SLOT = 0, 1, 2, 3, 4, 5, 6
_EMPTY, _TAKEN, _READY = 0, 1, 2

_process_token = (0, 0)


def _token() -> int:
    """Return a number of this process, another one after a fork."""
    global _process_token  # noqa: PLW0603
    if _process_token[0] != os.getpid():
        _process_token = (os.getpid(), secrets.randbits(63) | 1)
    return _process_token[1]


class Stuck(RunError):
    """A job is stopped while it changes what all share."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A chunk that is ready for a job: length and checksum of its file; a length of 0 says: prepare it yourself."""

    slot: int
    length: int
    check: int


def _mapped(path: Path) -> memoryview[int]:
    """Return the cells of a board's file, none of one that is not whole."""
    try:
        with path.open("r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
    except (OSError, ValueError, TypeError):
        return memoryview(b"").cast("Q")


class Board:
    """The board of one name; ``agreed`` are samples, chunk, seed and depth, alike for all."""

    def __init__(self, name: str, agreed: tuple[int, int, int, int], folder: Path | None) -> None:
        self._depth = depth = agreed[3]
        self._chunks = -(-agreed[0] // agreed[1])
        cells = _HEAD + _MOST_LIVES * _LIFE + depth * _SLOT

        def make(at: Path) -> None:
            with (at / "board").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, cells * 8)
                file.write(b"".join(one.to_bytes(8, "little") for one in (cells, *agreed)))

        self._home = open_home(name, cells * 8, make, kind="staging", folder=folder)
        self.path, self.place = self._home.path, self._home.place
        self._cells = _mapped(self.path / "board")
        found = tuple(self._cells[_AGREED])
        if (len(self._cells), *found) != (cells, cells, *agreed):
            self._home.close()
            raise InputError(
                f"jobs that share {name!r} agree on samples, chunk, seed and depth, but these are {found[1:]} there, "
                f"not {agreed}; give all the same, or choose another name"
            )
        self._turn = os.open(self.path / "turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._life = -1
        self._held = -1

    def close(self) -> None:
        """Live no longer, and leave."""
        if self._life >= 0:
            with suppress(Stuck), self._changing():
                self._bury(self._life)
            os.close(self._held)  # then it is dead to the others
            self._life = -1
        os.close(self._turn)
        self._home.close()

    def file_of(self, slot: int) -> Path:
        """Return where the bytes of a slot are."""
        return self.path / f"chunk.{slot}"

    def live(self, kind: int) -> None:
        """Begin to be a job or a worker."""
        with self._changing():
            self._reap()
            lives = range(MOST_JOBS) if kind == JOB else range(MOST_JOBS, _MOST_LIVES)
            for number in lives:
                if self._life_cell(number, _KIND) != _FREE:
                    continue
                self._held = os.open(
                    self.path / f"life.{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
                )
                # Not flock: a forked child must not keep its parent alive.
                fcntl.lockf(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._life = number
                self._put_life(number, _ASIDE, 1)
                self._put_life(number, _TOKEN, _token())
                self._put_life(number, _KIND, kind)
                return
        raise RunError(
            f"{MOST_JOBS} jobs share a staging area at most; use another name for the rest"
        )

    def begin_epoch(self, least: int) -> int:
        """Return the number of the first chunk of this job's next epoch, ``least`` or later."""
        with self._changing():
            self._reap()
            cells = self._life_at(self._life)
            reached = max(least, self._cells[_NEXT] if cells[_ASIDE] else cells[_WANTS])
            first = -(-reached // self._chunks) * self._chunks
            for slot in self._slots():
                if slot[_CHUNK] < first:
                    self._strike(slot, 1 << self._life)
            cells[_WANTS] = first
            cells[_ASIDE] = 0
            return first

    def begin(self, jobs: int, waited: bool) -> bool:
        """Return whether chunks may be prepared: so many jobs were there once, or were waited for."""
        with self._changing():
            self._reap()
            if waited or len(self._jobs()) >= jobs:
                self._cells[_BEGUN] = 1
            return bool(self._cells[_BEGUN])

    def take(self) -> tuple[int, int] | None:
        """Return slot and number of a chunk to prepare now, None where there is none."""
        with self._changing():
            wanted = [self._life_cell(job, _WANTS) for job in self._jobs()]
            if not self._cells[_BEGUN] or not wanted:
                return None
            return self._left_by_the_dead(wanted) or self._next(wanted)

    def _left_by_the_dead(self, wanted: list[int]) -> tuple[int, int] | None:
        """Take over a chunk that is still wanted; free the slots of those that are not.

        Whoever takes has nothing in hand: what is its own was interrupted.
        """
        for place, slot in enumerate(self._slots()):
            if slot[_STATE] == _TAKEN and (slot[_WHO] == self._life or self._is_dead(slot[_WHO])):
                if min(wanted) <= slot[_CHUNK]:
                    slot[_WHO] = self._life
                    self._cells[_NEXT] = max(self._cells[_NEXT], slot[_CHUNK] + 1)
                    return place, slot[_CHUNK]
                slot[_STATE] = _EMPTY
        return None

    def _next(self, wanted: list[int]) -> tuple[int, int] | None:
        """Take the next chunk, where its slot is free."""
        chunk = max(self._cells[_NEXT], min(wanted))
        place = chunk % self._depth
        slot = self._slot(place)
        if slot[_STATE] == _TAKEN and slot[_CHUNK] == chunk:  # its taker was killed in here
            self._cells[_NEXT] = chunk + 1
            return None
        if slot[_STATE] == _TAKEN or (slot[_STATE] == _READY and slot[_JOBS]):
            return None
        slot[_STATE] = _EMPTY
        slot[_CHUNK], slot[_WHO], slot[_JOBS] = chunk, self._life, 0
        slot[_STATE] = _TAKEN
        self._cells[_NEXT] = chunk + 1
        return place, chunk

    def stage(self, place: int, chunk: int, length: int, check: int) -> None:
        """Give a chunk that this life has taken to all jobs that want it."""
        with self._changing():
            slot = self._slot(place)
            jobs = sum(1 << job for job in self._jobs() if self._life_cell(job, _WANTS) <= chunk)
            slot[_LENGTH], slot[_CHECK], slot[_JOBS] = length, check, jobs
            slot[_STATE] = _READY
            self._strike(slot, 0)

    def look(self, chunk: int) -> Staged | None:
        """Return a chunk that is ready for this job, None where it is to wait.

        LookupError: this job was put aside, or came too late, and prepares for itself.
        """
        with self._changing():
            slot = self._slot(chunk % self._depth)
            if self._life_at(self._life)[_ASIDE] or (slot[_STATE] and slot[_CHUNK] > chunk):
                raise LookupError(chunk)
            if slot[_STATE] == _EMPTY and self._cells[_NEXT] > chunk:
                raise LookupError(chunk)
            if slot[_STATE] != _READY or slot[_CHUNK] != chunk:
                return None
            if not slot[_JOBS] & (1 << self._life):
                raise LookupError(chunk)
            return Staged(chunk % self._depth, slot[_LENGTH], slot[_CHECK])

    def done(self, chunk: int) -> None:
        """Say that this job has a chunk, and does not want it again."""
        with self._changing():
            self._life_at(self._life)[_WANTS] = chunk + 1
            slot = self._slot(chunk % self._depth)
            if slot[_STATE] == _READY and slot[_CHUNK] == chunk:
                self._strike(slot, 1 << self._life)

    def reap(self) -> None:
        """Strike out those who are dead."""
        with self._changing():
            self._reap()

    def progress(self) -> tuple[int, ...]:
        """Return numbers that change when somebody gets on."""
        return self._cells[_NEXT], *(self._life_cell(job, _WANTS) for job in self._jobs())

    def put_aside(self, chunk: int) -> int:
        """Put aside jobs that have not taken what lies where a chunk should; return how many."""
        with self._changing():
            slot = self._slot(chunk % self._depth)
            if slot[_STATE] != _READY or slot[_CHUNK] >= chunk:
                return 0
            late = [job for job in self._jobs() if slot[_JOBS] & (1 << job) and job != self._life]
            for job in late:
                self._put_life(job, _ASIDE, 1)
                for one in self._slots():
                    self._strike(one, 1 << job)
            return len(late)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if not locked(self._turn):
            raise Stuck(
                f"whoever changes a staging area is done at once, but {self.path} stays locked: "
                "a job is stopped just there; continue or end it"
            )
        try:
            yield
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def _life_at(self, number: int) -> memoryview:
        start = _HEAD + number * _LIFE
        return self._cells[start : start + _LIFE]

    def _life_cell(self, number: int, cell: int) -> int:
        return self._cells[_HEAD + number * _LIFE + cell]

    def _put_life(self, number: int, cell: int, value: int) -> None:
        self._cells[_HEAD + number * _LIFE + cell] = value

    def _slot(self, place: int) -> memoryview:
        start = _HEAD + _MOST_LIVES * _LIFE + place * _SLOT
        return self._cells[start : start + _SLOT]

    def _slots(self) -> list[memoryview]:
        return [self._slot(place) for place in range(self._depth)]

    def _jobs(self) -> list[int]:
        """Return the jobs that share: alive as far as is known, and not aside."""
        return [
            job
            for job in range(MOST_JOBS)
            if self._life_cell(job, _KIND) == JOB and not self._life_cell(job, _ASIDE)
        ]

    def _strike(self, slot: memoryview, jobs: int) -> None:
        """Take jobs off those that want a slot, and free it after the last one."""
        if slot[_STATE] != _READY:
            return
        slot[_JOBS] &= ~jobs
        if not slot[_JOBS]:
            self.file_of(slot[_CHUNK] % self._depth).unlink(missing_ok=True)
            slot[_STATE] = _EMPTY

    def _is_dead(self, number: int) -> bool:
        if number == _NOBODY:
            return True
        cells = self._life_at(number)
        if cells[_TOKEN] == _token():
            return False
        file = os.open(self.path / f"life.{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        else:
            return True
        finally:
            os.close(file)

    def _reap(self) -> None:
        for number in range(_MOST_LIVES):
            if self._life_cell(number, _KIND) != _FREE and self._is_dead(number):
                self._bury(number)

    def _bury(self, number: int) -> None:
        for slot in self._slots():
            if number < MOST_JOBS:
                self._strike(slot, 1 << number)
            if slot[_STATE] == _TAKEN and slot[_WHO] == number:
                slot[_WHO] = _NOBODY
        self._put_life(number, _KIND, _FREE)
