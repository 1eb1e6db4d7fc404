"""The memory: measurements in one SQLite file, safe under concurrent writers.

Records are only ever added. Nothing is executed on reading: a file with views or triggers is
refused, and every operation has a time limit. A file that is damaged, as far as SQLite can tell, is refused when it is opened. A file that cannot be read ends in a StoreError with a
remedy, and is left as it is. One that somebody holds locked is done without, and that is said once.
"""

from __future__ import annotations

import datetime
import math
import os
import sqlite3
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwright.core.costs import Record
from shardwright.errors import ShardwrightWarning, StoreError, cleaned

SCHEMA_VERSION = 1
OLD_SECONDS = 600.0  # after which it is worth looking whether what was measured still holds
# Written into the SQLite header, so that another program's database is not taken for a store.
APPLICATION_ID = 0x5368_7264
BUSY_SECONDS = 4.0  # to wait for another writer, whose turns are milliseconds
MOST_SECONDS = 6.0  # that one operation may compute; a million records take about 5
_LOOK_EVERY = 100_000  # instructions of SQLite's machine between two looks at the clock
_CHUNK = 500

_SCHEMA = """
CREATE TABLE IF NOT EXISTS record (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    environment TEXT NOT NULL CHECK (environment <> ''),
    seconds REAL NOT NULL CHECK (seconds >= 0),
    spread REAL NOT NULL,
    count INTEGER NOT NULL CHECK (count >= 1),
    measured_at TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS record_by_name ON record (environment, key);
"""
# A view may run for ever, a trigger says what it likes.
_FOREIGN = """
SELECT type, name FROM sqlite_master
WHERE type NOT IN ('table', 'index') OR (name = 'record' AND rootpage = 0)
"""
_COLUMNS = "key, seconds, spread, count, environment, measured_at"


def default_path() -> Path:
    """Return ``$SHARDWRIGHT_STORE``, else ``records.sqlite`` in the user's cache directory."""
    named = os.environ.get("SHARDWRIGHT_STORE")
    if named:
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "shardwright" / "records.sqlite"


_LOCKED: set[Path] = set()  # the files that this process goes on without


class Store:
    """A record store, used as a context manager. The file is made when it is first written to."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path).expanduser() if path is not None else default_path()
        self._connection: sqlite3.Connection | None = None
        self._deadline = math.inf

    def __enter__(self) -> Self:
        with self._explained("opened"):
            if self._is_there():
                self._connect()
        return self

    def _is_there(self) -> bool:
        """Whether there is a file to read; the null device is for having none."""
        return self.path.exists() and not self.path.is_char_device() and self.path not in _LOCKED

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def put(self, records: Iterable[Record]) -> None:
        """Add records: all of them or, when something fails, none."""
        rows = [_row(record, self.path) for record in records]
        if not rows or self.path in _LOCKED:
            return
        with self._explained("written"):
            connection = self._connection or self._create()
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(
                    f"INSERT INTO record ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", rows
                )

    def find(self, keys: Sequence[str] | None, environment: str) -> list[Record]:
        """Return all records of an environment with these keys (None: any), oldest first."""
        with self._explained("read"):
            if self._connection is None and self._is_there():
                self._connect()
            if self._connection is None:
                return []
            if keys is None:
                query = f"SELECT {_COLUMNS} FROM record WHERE environment = ? ORDER BY id"
                return [_record(row) for row in self._connection.execute(query, (environment,))]
            found: list[tuple[int, Record]] = []
            wanted = list(dict.fromkeys(keys))
            for start in range(0, len(wanted), _CHUNK):
                chunk = wanted[start : start + _CHUNK]
                marks = ", ".join("?" * len(chunk))
                query = (
                    f"SELECT id, {_COLUMNS} FROM record WHERE environment = ? AND key IN ({marks})"
                )
                rows = self._connection.execute(query, (environment, *chunk))
                found += [(row[0], _record(row[1:])) for row in rows]
            return [record for _, record in sorted(found, key=lambda pair: pair[0])]
        return []

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
        connection.set_progress_handler(lambda: time.thread_time() > self._deadline, _LOOK_EVERY)
        try:
            self._check(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _create(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self._connect()

    def _check(self, connection: sqlite3.Connection) -> None:
        """Set up an empty file, accept a store of our version, refuse everything else."""
        # One snapshot: another process may be setting the file up between two reads.
        connection.execute("BEGIN")
        tables = int(connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0])
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        owner = int(connection.execute("PRAGMA application_id").fetchone()[0])
        connection.execute("COMMIT")
        if tables == 0 and version == 0:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA application_id = {APPLICATION_ID};"
                f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
        elif owner != APPLICATION_ID:
            raise StoreError(
                f"{self.path}: this SQLite file belongs to another program; name another path in "
                "SHARDWRIGHT_STORE"
            )
        elif version != SCHEMA_VERSION:
            raise StoreError(
                f"{self.path}: the record store has version {version}, this Shardwright reads "
                f"{SCHEMA_VERSION}; name another path in SHARDWRIGHT_STORE, or update Shardwright"
            )
        foreign = connection.execute(_FOREIGN).fetchone()
        if foreign is not None:
            kind, name = (str(part)[:80] for part in foreign)
            raise StoreError(
                f"{self.path}: a record store has tables and their indices only, but this one has "
                f"the {kind} {name!r}, which somebody else put there; move the file away to measure "
                "anew, or name another path in SHARDWRIGHT_STORE"
            )
        # An index that is damaged gives records the numbers of others. Takes a quarter of reading them.
        found = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
        if found != "ok":
            raise sqlite3.DatabaseError(found.splitlines()[-1])
        connection.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        self._deadline = time.thread_time() + MOST_SECONDS
        try:
            yield
        except (
            sqlite3.Error,
            OSError,
            UnicodeError,
            ArithmeticError,
            ValueError,
            TypeError,
        ) as error:
            if isinstance(error, StoreError):
                raise
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                self._go_without()
                return
            reason = cleaned(str(error))[:200] or type(error).__name__
            raise StoreError(
                f"{self.path}: the record store cannot be {verb}: {reason}; {_remedy(error)}"
            ) from None

    def _go_without(self) -> None:
        if self.path not in _LOCKED:
            _LOCKED.add(self.path)
            warnings.warn(
                f"{self.path}: another program has held the record store for {BUSY_SECONDS:g} s; "
                "going on without it: what was measured is not known, and what is now is not kept. "
                "End that program, or name another path in SHARDWRIGHT_STORE",
                ShardwrightWarning,
                stacklevel=4,
            )


def _remedy(error: Exception) -> str:
    text = str(error)
    if "interrupted" in text:
        return f"it took more than {MOST_SECONDS:g} s: name another path in SHARDWRIGHT_STORE"
    if "full" in text or "No space" in text or "disk I/O" in text:
        return "free space on its disk, or name another path in SHARDWRIGHT_STORE"
    if "readonly" in text or "unable to open" in text or isinstance(error, OSError):
        return "make file and directory writable, or name another path in SHARDWRIGHT_STORE"
    return (
        "the file is damaged or is none of ours: move it away to measure anew, or name another path"
    )


def _row(record: Record, path: Path) -> tuple[object, ...]:
    """Return a record as the file has it. Raises StoreError for numbers that it cannot hold."""
    numbers = record.seconds, record.spread
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or not (
        1 <= record.count < 2**63
    ):
        count = record.count if abs(record.count) < 2**63 else "2^63 or more"
        raise StoreError(
            f"{path}: a record has finite seconds and spread of 0 or more and a count of 64 bits, "
            f"but {record.key[:80]!r} has {record.seconds}, {record.spread} and "
            f"{count}; measure it again"
        )
    key, place, when = record.key, record.environment, record.measured_at
    return key, *numbers, record.count, place, when


def _record(row: tuple[object, ...]) -> Record:
    key, seconds, spread, count, environment, measured_at = row
    if not all(isinstance(text, str) for text in (key, environment, measured_at)):
        raise TypeError("a name in it is no text")
    if not (isinstance(seconds, int | float) and isinstance(spread, int | float)):
        raise TypeError("a duration in it is not a number")
    if not (math.isfinite(seconds) and math.isfinite(spread)):
        raise ValueError("a duration in it is not finite")
    return Record(
        key=str(key),
        seconds=float(seconds),
        spread=float(spread),
        count=int(str(count)),
        environment=str(environment),
        measured_at=str(measured_at),
    )


def is_old(records: Iterable[Record]) -> bool:
    """Whether all of some records are so old that it is worth looking whether they still hold."""
    latest = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=OLD_SECONDS)
    return max(_when(record.measured_at) for record in records) < latest


def are_apart(one: str, other: str) -> bool:
    """Whether between two times of measuring so much passed that the machine may be another."""
    return abs(_when(one) - _when(other)) > datetime.timedelta(seconds=OLD_SECONDS)


def _when(measured_at: str) -> datetime.datetime:
    """Return when something was measured; what does not say so is as old as can be."""
    try:
        found = datetime.datetime.fromisoformat(measured_at)
    except ValueError:
        return datetime.datetime.min.replace(tzinfo=datetime.UTC)
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
