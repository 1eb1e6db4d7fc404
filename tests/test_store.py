"""The record store: round trips, concurrent writers, damaged, foreign and full files."""

from __future__ import annotations

import math
import multiprocessing
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from shardwright.core.costs import Record
from shardwright.errors import ShardwrightWarning, StoreError
from shardwright.store import BUSY_SECONDS, MOST_SECONDS, Store, default_path


def record(key: str, seconds: float = 1.0, environment: str = "here") -> Record:
    return Record(
        key=key, seconds=seconds, spread=0.1, count=3, environment=environment, measured_at="t"
    )


def write_many(path: str, writer: int) -> None:
    for turn in range(20):
        with Store(path) as store:
            store.put([record(f"{writer}-{turn}-{i}") for i in range(5)])


def test_records_come_back_equal_and_in_order(tmp_path: Path):
    records = [record(f"k{i % 700}", i / 3) for i in range(1500)] + [
        record("x", environment="there")
    ]
    with Store(tmp_path / "s.sqlite") as store:
        store.put(records)
    with Store(tmp_path / "s.sqlite") as store:
        assert store.find(None, "here") == records[:-1]
        assert store.find([f"k{i}" for i in range(700)], "here") == records[:-1]
        assert store.find(["x"], "there") == records[-1:]
        assert store.find(["x"], "here") == []


def test_reading_a_store_that_is_not_there_creates_nothing(tmp_path: Path):
    with Store(tmp_path / "deep" / "s.sqlite") as store:
        assert store.find(None, "here") == []
    assert list(tmp_path.iterdir()) == []


def test_several_processes_write_at_once_and_nothing_is_lost(tmp_path: Path):
    path = str(tmp_path / "s.sqlite")
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(path, n)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    with Store(path) as store:
        assert len({r.key for r in store.find(None, "here")}) == 4 * 20 * 5


@pytest.mark.parametrize(
    "content", [b"not a database at all, but long enough to look at" * 100, b"\0" * 5000]
)
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path, content: bytes):
    path = tmp_path / "s.sqlite"
    path.write_bytes(content)
    with pytest.raises(StoreError, match="name another path"), Store(path) as store:
        store.find(None, "here")
    assert path.read_bytes() == content


def test_a_damaged_store_is_refused(tmp_path: Path):
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.put([record(f"k{i}") for i in range(2000)])
    whole = bytearray(path.read_bytes())
    whole[4096:] = os.urandom(len(whole) - 4096)
    path.write_bytes(whole)
    with pytest.raises(StoreError, match="damaged"), Store(path) as store:
        store.find(None, "here")
    assert path.read_bytes() == whole


def test_no_record_of_a_damaged_store_is_read_with_the_seconds_of_another(tmp_path: Path):
    path, draw, refused = tmp_path / "s.sqlite", Random(0), 0
    seconds = {f"k{i}": math.sqrt(i + 2) for i in range(200)}
    with Store(path) as store:
        store.put([record(key, of) for key, of in seconds.items()])
    whole, known = path.read_bytes(), set(seconds.values())
    for turn in range(150):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 2, 10, 100))):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            with Store(path) as store:
                found = store.find(None, "here")
        except StoreError as error:
            refused += ";" in str(error).splitlines()[0]
            continue
        # A number that was hurt itself is none of these.
        assert not [r for r in found if r.seconds in known and seconds.get(r.key) != r.seconds], (
            turn
        )
    assert refused > 20


def test_a_truncated_store_is_refused(tmp_path: Path):
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.put([record(f"k{i}") for i in range(2000)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError), Store(path) as store:
        store.find(None, "here")


def test_another_version_is_refused_with_both_numbers(tmp_path: Path):
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.put([record("k")])
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(StoreError, match=r"version 7.*reads 1"), Store(path):
        pass


def test_another_programs_database_is_refused(tmp_path: Path):
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program"), Store(path):
        pass
    assert path.read_bytes() == before


def test_wrong_types_in_a_store_are_refused(tmp_path: Path):
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.put([record("k")])
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE record SET spread = 'wide'")
    connection.close()
    with pytest.raises(StoreError, match="not a number"), Store(path) as store:
        store.find(None, "here")


def test_a_name_that_is_no_text_is_refused(tmp_path: Path):
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.put([record("k")])
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE record SET key = zeroblob(20000000)")
    connection.close()
    with pytest.raises(StoreError, match="a name in it is no text") as caught, Store(path) as store:
        store.find(None, "here")
    assert len(str(caught.value)) < 500 + len(str(path))


def test_a_directory_in_place_of_the_store_is_refused(tmp_path: Path):
    with pytest.raises(StoreError, match="writable"), Store(tmp_path):
        pass
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(StoreError, match="SHARDWRIGHT_STORE"),
        Store(tmp_path / "file" / "s") as store,
    ):
        store.put([record("k")])


def test_a_read_only_store_refuses_to_write(tmp_path: Path):
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.put([record("k")])
    script = (
        "import os, sys\n"
        "from shardwright.core.costs import Record\n"
        "from shardwright.errors import StoreError\n"
        "from shardwright.store import Store\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "r = Record(key='k', seconds=1, spread=0, count=1, environment='e')\n"
        "try:\n"
        "    with Store(sys.argv[1]) as store: store.put([r])\n"
        "except StoreError as error: print(error); sys.exit(3)\n"
    )
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    tmp_path.chmod(0o755)
    assert (done.returncode, "SHARDWRIGHT_STORE" in done.stdout) == (3, True), (
        done.stdout + done.stderr
    )


def test_a_full_disk_is_reported_and_loses_nothing_written_before(tmp_path: Path):
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.put([record("k")])
        assert store._connection is not None
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreError, match="free space"):
            store.put([record("x" * 1000) for _ in range(100)])
    with Store(path) as store:
        assert store.find(None, "here") == [record("k")]


def test_the_default_path_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SHARDWRIGHT_STORE", str(tmp_path / "mine"))
    assert default_path() == tmp_path / "mine"
    monkeypatch.delenv("SHARDWRIGHT_STORE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "shardwright" / "records.sqlite"


@pytest.mark.parametrize(
    ("seconds", "spread", "count"),
    [
        (float("inf"), 0.0, 1), (1.0, float("nan"), 1), (1.0, float("inf"), 1), (1.0, -1.0, 1),
        (1.0, 0.0, 2**63), (1.0, 0.0, 10**400),
    ],
)  # fmt: skip
def test_numbers_that_the_file_cannot_hold_are_refused_and_nothing_is_written(
    tmp_path: Path, seconds: float, spread: float, count: int
):
    bad = Record(key="k", seconds=seconds, spread=spread, count=count, environment="here")
    with Store(tmp_path / "s") as store, pytest.raises(StoreError, match=r"'k' has .*again"):
        store.put([record("good"), bad])
    assert not (tmp_path / "s").exists()


def spoiled(path: Path, script: str) -> Path:
    with Store(path) as store:
        store.put([record("k")])
    with sqlite3.connect(path) as connection:
        connection.executescript(script)
    connection.close()
    return path


ENDLESS = """
ALTER TABLE record RENAME TO away;
CREATE VIEW record AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
SELECT i AS id, 'k' AS key, 'here' AS environment, 1.0 AS seconds, 0.0 AS spread, 1 AS count,
'' AS measured_at FROM n;
"""
SHOUTING = """
CREATE TRIGGER shout BEFORE INSERT ON record BEGIN
SELECT RAISE(ABORT, '\x1b]0;owned\x07\x1b[31mred'); END;
"""


@pytest.mark.parametrize("script", [ENDLESS, SHOUTING])
def test_views_and_triggers_are_refused_when_a_store_is_opened(tmp_path: Path, script: str):
    path = spoiled(tmp_path / "s", script)
    with pytest.raises(StoreError, match=r"tables and their indices only.*another path"):
        Store(path).__enter__()


def test_an_operation_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch):
    assert MOST_SECONDS + BUSY_SECONDS <= 10
    monkeypatch.setattr("shardwright.store.MOST_SECONDS", 0.2)
    path = tmp_path / "s"
    with Store(path) as store:
        store.put([record("k")])
        assert store._connection is not None
        connection = store._connection
        with pytest.raises(StoreError, match=r"more than 0\.2 s"), store._explained("read"):
            connection.execute(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
                "SELECT COUNT(*) FROM n"
            ).fetchone()


def found_and_put(path: Path, one: Record) -> list[Record]:
    with Store(path) as store:
        found = store.find(None, "here")
        store.put([one])
    return found


def test_a_locked_store_is_done_without_and_that_is_said_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("shardwright.store.BUSY_SECONDS", 0.1)
    path = spoiled(tmp_path / "s", "")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.warns(ShardwrightWarning, match="going on without it") as said:
        found = found_and_put(path, record("lost"))
    assert found == found_and_put(path, record("lost")) == []
    assert len(said) == 1
    holder.close()
    monkeypatch.setattr("shardwright.store._LOCKED", set())
    with Store(path) as store:
        assert store.find(None, "here") == [record("k")]


def test_text_of_files_reaches_no_terminal_as_it_is():
    text = str(StoreError("a\x1b[31mb\x07\u202ec\ud800\x9b\nd"))
    assert text == "a\\x1b[31mb\\x07\\u202ec\\ud800\\x9b\nd"
