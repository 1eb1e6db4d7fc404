"""The cache that never evicts: what comes out is what went in, whoever is killed meanwhile."""

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

from shardwright.caching import MinIOCache
from shardwright.caching.home import open_home
from shardwright.errors import InputError, ShardwrightWarning
from tests.caching.workers import (
    ALONE,
    can_mount,
    content,
    die_filling,
    ended,
    fill,
    hammer,
    start,
    wait_for_ever,
)

CAPACITY = 1 << 20


def fail():
    raise AssertionError("storage was read")


def folders(parent):
    return sorted(parent.glob("shardwright-*"))


def test_an_item_is_read_once_and_then_comes_from_the_cache(tmp_path):
    with MinIOCache(CAPACITY, folder=tmp_path) as cache:
        for key in range(50):
            assert cache.get(f"{key}", lambda key=key: content(key)) == content(key)
        for key in range(50):
            assert cache.get(f"{key}", fail) == content(key)
            assert cache.view(f"{key}", fail) == content(key)
        assert (cache.hits, cache.misses) == (100, 50)
        assert cache.read_bytes == sum(len(content(key)) for key in range(50))


def test_empty_items_and_keys_of_bytes_are_items_like_others(tmp_path):
    with MinIOCache(CAPACITY, folder=tmp_path) as cache:
        assert cache.get(b"\x00\xff", lambda: b"") == b""
        assert cache.get(b"\x00\xff", fail) == b""
        assert cache.get("", lambda: b"x") == b"x"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.5, 0.75, 1.0])
def test_from_the_second_epoch_storage_reads_exactly_what_is_not_cached(tmp_path, share):
    count, size = 20_000, 64
    draw, order = random.Random(0), list(range(count))
    with MinIOCache(int(share * count) * size, folder=tmp_path, items=count) as cache:
        for epoch in range(3):
            draw.shuffle(order)
            before, cached = cache.misses, cache.state().items
            for key in order:
                expected = key.to_bytes(size, "little")
                assert cache.get(f"{key}", lambda expected=expected: expected) == expected
            assert cache.misses - before == count - cached
            # The hit rate of a cache that never evicts is its share.
            if epoch:
                assert cached / count == pytest.approx(share, abs=0.01)


def test_what_has_no_room_is_read_and_smaller_items_still_enter(tmp_path):
    with MinIOCache(1000, folder=tmp_path) as cache:
        assert cache.get("large", lambda: bytes(1001)) == bytes(1001)
        assert cache.state().declined
        assert cache.get("small", lambda: bytes(900)) == bytes(900)
        assert cache.get("small", fail) == bytes(900)
        assert cache.get("large", lambda: b"again") == b"again"


def test_a_full_index_declines_and_finds_what_it_has(tmp_path):
    with MinIOCache(CAPACITY, folder=tmp_path, items=5) as cache:
        for key in range(100):
            assert cache.get(f"{key}", lambda key=key: b"%d" % key) == b"%d" % key
        held = cache.state().items
        assert 5 <= held < 16
        for key in range(held):
            assert cache.get(f"{key}", fail) == b"%d" % key


def test_processes_share_a_cache_by_name_or_by_being_given_it(tmp_path):
    with MinIOCache(CAPACITY, name="mine", folder=tmp_path) as cache:
        assert ended(start(fill, "mine", tmp_path, CAPACITY, range(9))) == 0
        assert all(cache.get(f"{key}", fail) == content(key) for key in range(9))
        with pickle.loads(pickle.dumps(cache)) as other:
            assert other.get("3", fail) == content(3)
            assert other.place == cache.place
    assert folders(tmp_path) == []


def test_a_cache_without_a_name_is_nobody_elses(tmp_path):
    with MinIOCache(CAPACITY, folder=tmp_path) as one, MinIOCache(CAPACITY, folder=tmp_path) as two:
        one.get("a", lambda: b"one")
        assert two.get("a", lambda: b"two") == b"two"


def test_one_name_has_one_capacity(tmp_path):
    with MinIOCache(CAPACITY, name="a", folder=tmp_path):
        with pytest.raises(InputError, match="one capacity"):
            MinIOCache(CAPACITY + 1, name="a", folder=tmp_path)
        MinIOCache(CAPACITY, name="a", folder=tmp_path).close()
    MinIOCache(CAPACITY + 1, name="a", folder=tmp_path).close()


@pytest.mark.parametrize(
    "damage",
    [b"", b"SWMINIO1", b"SWMINIO1" + bytes(6000), b"SWMINIO1" + b"\xff" * 16 + bytes(6000), None],
)
def test_a_cache_that_is_not_whole_is_refused(tmp_path, damage):
    with MinIOCache(CAPACITY, name="a", folder=tmp_path):
        arena = folders(tmp_path)[0] / "arena"
        arena.rename(tmp_path / "kept")  # the one that is open stays good
        if damage is not None:
            arena.write_bytes(damage)
        with pytest.raises(InputError, match=r"arena is not \(.*\); .*another name"):
            MinIOCache(CAPACITY, name="a", folder=tmp_path)


def test_a_cache_whose_lock_is_no_file_is_refused(tmp_path):
    with MinIOCache(CAPACITY, name="a", folder=tmp_path):
        (folders(tmp_path)[0] / "lock").unlink()
        (folders(tmp_path)[0] / "lock").mkdir()
        with pytest.raises(InputError, match=r"lock is not \(.*\); .*another name"):
            MinIOCache(CAPACITY, name="a", folder=tmp_path)


def test_counts_that_no_process_wrote_lead_nowhere(tmp_path):
    """A slot of a killed process that is not there, and an index that looks full and is not."""
    with MinIOCache(CAPACITY, items=100, folder=tmp_path) as cache, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache.get("1", lambda: content(1))
        with (folders(tmp_path)[0] / "arena").open("r+b") as file:
            for at, raw in ((64 + 24, b"\xff" * 8), (4096, b"\x07" * 64 * 256)):
                file.seek(at)
                file.write(raw)
        assert cache.get("1", lambda: content(1)) == content(1)
        assert cache.get("2", lambda: content(2)) == content(2)


@pytest.mark.parametrize("always", [False, True])
def test_a_flipped_bit_of_where_the_next_item_goes_changes_no_item(tmp_path, always):
    with MinIOCache(CAPACITY, items=100, folder=tmp_path, always=always) as cache:
        for key in range(8):
            cache.get(f"{key}", lambda key=key: content(key))
        arena = folders(tmp_path)[0] / "arena"
        end = arena.read_bytes()[64:72]
        for bit in range(64):
            with arena.open("r+b") as file:
                file.seek(64)
                file.write((int.from_bytes(end, "little") ^ 1 << bit).to_bytes(8, "little"))
            cache.get(f"after {bit}", lambda bit=bit: content(bit + 8))
            assert all(cache.get(f"{key}", fail) == content(key) for key in range(8)), bit


def test_bytes_may_be_written_as_50e6_and_are_whole(tmp_path):
    with MinIOCache(50e3, items=1e2, folder=tmp_path) as cache:  # type: ignore[arg-type]
        assert cache.capacity == 50_000
        assert cache.get("a", lambda: b"x") == b"x"
    for capacity in (1.5, -1, float("nan"), float("inf"), 1 << 47, "1 GiB", None):
        with pytest.raises(InputError, match="a whole number"):
            MinIOCache(capacity, folder=tmp_path)  # type: ignore[arg-type]
    for items in (-1, 2.5):
        with pytest.raises(InputError, match="change items"):
            MinIOCache(1, items=items, folder=tmp_path)  # type: ignore[arg-type]
    assert folders(tmp_path) == []


def test_keys_and_items_are_bytes_and_a_folder_can_be_written(tmp_path):
    with MinIOCache(CAPACITY, folder=tmp_path) as cache:
        for data in (None, "text", np.zeros(3)):
            with pytest.raises(InputError, match=f"bytes .* gave {type(data).__name__}; return"):
                cache.get("a", lambda data=data: data)  # type: ignore[arg-type,return-value]
        with pytest.raises(InputError, match="text or bytes, not int"):
            cache.get(5, lambda: b"five")  # type: ignore[arg-type]
        assert cache.get("a", lambda: b"good") == b"good"
    with pytest.raises(InputError, match=r"written, but /proc may not \("):
        MinIOCache(CAPACITY, folder="/proc")


def test_a_cache_that_was_not_made_leaves_nothing(tmp_path):
    def make(at):
        (at / "part").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_home("a", 1, make, kind="cache", folder=tmp_path)
    assert folders(tmp_path) == []


@pytest.mark.parametrize("name", ["a/b", "..\n", "a" * 101, "\u4e2d" * 60])
def test_names_are_those_of_one_folder(tmp_path, name):
    with pytest.raises(InputError, match="name"):
        MinIOCache(CAPACITY, name=name, folder=tmp_path)


def test_a_forked_child_fills_the_same_cache_and_leaves_it_to_its_parent(tmp_path):
    script = f"""
import os, sys
from shardwright.caching import MinIOCache
from shardwright.caching.home import open_home
cache = MinIOCache({CAPACITY}, folder={str(tmp_path)!r})
child = os.fork()
if not child:
    cache.get("a", lambda: b"of the child")
    sys.exit()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert cache.get("a", lambda: b"") == b"of the child"
assert os.path.exists(cache._home.path)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert folders(tmp_path) == []


def test_a_forked_child_that_outlives_the_cache_reads_on(tmp_path):
    script = f"""
import os, sys, time
from shardwright.caching import MinIOCache
from shardwright.caching.home import open_home
cache = MinIOCache({CAPACITY}, folder={str(tmp_path)!r})
cache.get("a", lambda: b"kept")
ours, theirs = os.pipe()
child = os.fork()
if not child:
    os.read(ours, 1)
    assert cache.get("a", lambda: b"") == b"kept"
    assert cache.get("b", lambda: b"read") == b"read"
    os._exit(0)
cache.close()
os.write(theirs, b"x")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert folders(tmp_path) == []


def test_views_outlive_the_cache(tmp_path):
    cache = MinIOCache(CAPACITY, folder=tmp_path)
    cache.get("a", lambda: b"stays")
    view = cache.view("a", fail)
    cache.close()
    assert bytes(view) == b"stays"
    assert cache.get("b", lambda: b"not kept") == b"not kept"
    with pytest.raises(TypeError):
        view[0] = 0


@pytest.mark.parametrize("always", [False, True])
def test_an_item_that_is_not_what_was_put_in_is_read_again(tmp_path, always):
    with MinIOCache(CAPACITY, folder=tmp_path, always=always) as cache:
        for key in range(1, 6):
            cache.get(f"{key}", lambda key=key: content(key))
        if always:
            assert cache.get("3", fail) == content(3)
        arena = folders(tmp_path)[0] / "arena"
        raw = bytearray(arena.read_bytes())
        at = raw.rindex(content(3))
        with arena.open("r+b") as file:
            file.seek(at + 5)
            file.write(bytes([raw[at + 5] ^ 1]))
        with pytest.warns(ShardwrightWarning, match="not what was put in"):
            assert cache.get("3", lambda: content(3)) == content(3)
        assert cache.state().corrupt == 1
        assert all(cache.get(f"{key}", fail) == content(key) for key in range(1, 6))


def test_where_shared_memory_is_too_small_a_file_is_mapped_and_says_so(tmp_path):
    size = shutil.disk_usage("/dev/shm").free + (1 << 30)
    script = (
        f"from shardwright.caching import MinIOCache; cache = MinIOCache({size}, items=10);"
        "assert cache.get('a', lambda: b'a') == b'a'; print(cache.place, cache._home.path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert "memory-mapped files" in done.stdout
    assert "/dev/shm has" in done.stdout
    assert f"{tmp_path}/shardwright-cache" in done.stdout
    assert folders(tmp_path) == []


@pytest.mark.skipif(not can_mount(), reason="mounting needs rights")
def test_where_memory_becomes_full_the_cache_stops_there(tmp_path):
    """Writing into a map of memory that is not there would end the process."""
    script = """
import os, warnings
from shardwright.caching import MinIOCache
from shardwright.caching.home import open_home
cache = MinIOCache(64 << 20, folder=os.getcwd())
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(2):
        for key in range(40):
            item = bytes([key]) * (1 << 20)
            assert cache.get(str(key), lambda: item) == item
assert len(told) == 1, told
assert 16 <= cache.state().items < 20, cache.state()
assert cache.hits == cache.state().items
print(told[0].message)
try:
    MinIOCache(1 << 20, folder=os.getcwd(), items=1_000_000)
except ValueError as error:
    print(error)
"""
    mount = f'mount -t tmpfs -o size=20m tmpfs {tmp_path} && cd {tmp_path} && exec "$@"'
    done = subprocess.run(
        [*ALONE, "sh", "-c", mount, "sh", sys.executable, "-c", script],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no more room" in done.stdout
    assert "a cache needs room" in done.stdout


@pytest.mark.parametrize("line", range(12))
def test_who_is_killed_while_it_fills_leaves_a_whole_cache(tmp_path, line):
    with MinIOCache(CAPACITY, name="k", folder=tmp_path, always=True) as cache:
        cache.get("7", lambda: content(7))
        assert ended(start(die_filling, "k", tmp_path, CAPACITY, 9, line)) == -signal.SIGKILL
        assert cache.get("8", lambda: content(8)) == content(8)
        assert cache.get("9", lambda: content(9)) == content(9)
        assert all(cache.get(f"{key}", fail) == content(key) for key in (7, 8, 9))
        state = cache.state()
        assert (state.items, state.corrupt) == (3, 0)
        assert state.bytes == sum(-(-len(content(key)) // 64) * 64 for key in (7, 8, 9))


@pytest.mark.slow
def test_sixteen_hammer_one_cache_while_one_after_the_other_is_killed(tmp_path):
    keys, capacity = 2500, 15 << 20  # rather more than half of the items have room
    draw, ends = random.Random(0), []
    with MinIOCache(capacity, name="h", folder=tmp_path, items=4 * keys, always=True) as cache:
        arguments = (hammer, "h", tmp_path, capacity)
        running = [start(*arguments, seed, keys) for seed in range(16)]
        for kill in range(12):
            time.sleep(0.1)
            place = draw.randrange(len(running))
            running[place].kill()
            ends.append(ended(running[place]))
            running[place] = start(*arguments, 100 + kill, keys)
        (tmp_path / "stop").touch()
        assert [ended(process) for process in running] == [0] * 16
        assert set(ends) == {-signal.SIGKILL}
        for key in range(keys):
            assert cache.get(f"{key}", lambda key=key: content(key)) == content(key)
        state = cache.state()
        assert state.corrupt == 0
        lengths = [len(cache.get(f"{key}", lambda: b"")) for key in range(keys)]
        assert all(length in (0, len(content(key))) for key, length in enumerate(lengths))
        assert sum(length > 0 for length in lengths) == state.items > keys // 2
        assert sum(-(-length // 64) * 64 for length in lengths) == state.bytes <= capacity
    assert folders(tmp_path) == []


def test_what_killed_processes_leave_is_swept_by_the_next_start(tmp_path):
    ready = tmp_path / "ready"
    process = start(wait_for_ever, "left", tmp_path, CAPACITY, ready)
    while not ready.exists():
        assert process.is_alive()
        time.sleep(0.01)
    with MinIOCache(CAPACITY, folder=tmp_path):
        assert len(folders(tmp_path)) == 2, "one in use is left alone"
    process.kill()
    ended(process)
    assert len(folders(tmp_path)) == 1
    with MinIOCache(CAPACITY, folder=tmp_path) as cache:
        assert folders(tmp_path) == [cache._home.path]
    assert folders(tmp_path) == []


def test_who_stops_while_it_fills_holds_nobody_up(tmp_path):
    """Others read for themselves, and do not wait for its lock for ever."""
    import fcntl

    with (
        MinIOCache(CAPACITY, folder=tmp_path) as cache,
        (folders(tmp_path)[0] / "lock").open() as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cache.get("a", lambda: b"a") == b"a"
        assert cache.state().items == 0
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert cache.get("a", lambda: b"a") == b"a"
        assert cache.get("a", fail) == b"a"


def test_no_warning_where_all_fits(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill("w", tmp_path, CAPACITY, range(20))
