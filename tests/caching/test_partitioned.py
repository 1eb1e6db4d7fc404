"""Caches of several hosts as one: storage is read once in the job, and whatever fails, the bytes are right."""

import contextlib
import os
import pickle
import random
import signal
import socket
import threading
import time
import warnings
import zlib
from collections import Counter

import pytest

from shardwright.caching import CachedShards, CacheServer, MinIOCache, PartitionedCache, frames
from shardwright.caching.minio import digest_of
from shardwright.errors import InputError, ShardwrightWarning
from tests.caching.test_datasets import shards
from tests.caching.workers import content, serve, start
from tests.processes import states, wait_until

CAPACITY = 1 << 20
KEY = "of this job"
COUNT = 90


def fail(*_):
    raise AssertionError("storage was read")


class Hosts:
    """Hosts with a server each, in a process of its own, and what a worker on each sees, in this process."""

    def __init__(self, folder, count, capacity):
        self.folder, self.capacity, self.servers, self.members = folder, capacity, {}, []
        for host in range(count):
            self.start(host, "127.0.0.1:0")
        self.local = [MinIOCache(capacity, name=f"h{host}", folder=folder) for host in range(count)]
        self.views = [
            PartitionedCache(cache, self.members, me, key=KEY, patience=0.5, rest=60.0)
            for cache, me in zip(self.local, self.members)
        ]

    def start(self, host, address):
        said = self.folder / f"h{host}.address"
        said.unlink(missing_ok=True)
        process = start(serve, f"h{host}", self.folder, self.capacity, address, KEY)
        while not said.exists():
            assert process.is_alive()
            time.sleep(0.01)
        self.servers[host] = process
        self.members[host : host + 1] = [said.read_text()]

    def epoch(self, seed, alive=None):
        """Read every item once, each on a random host; return how many were read from storage."""
        views = [self.views[host] for host in alive or range(len(self.views))]
        draw, order, reads = random.Random(seed), list(range(COUNT)), []
        draw.shuffle(order)
        for key in order:
            view = draw.choice(views)
            assert view.get(f"{key}", lambda key=key: reads.append(key) or content(key)) == content(
                key
            )
        return len(reads)

    def close(self):
        for process in self.servers.values():
            process.kill()
            process.join()
        for one in (*self.views, *self.local):
            one.close()


@contextlib.contextmanager
def job(folder, count=3, capacity=CAPACITY):
    hosts = Hosts(folder, count, capacity)
    try:
        yield hosts
    finally:
        hosts.close()


def test_each_item_is_cached_once_in_the_job_and_storage_is_read_once(tmp_path):
    with job(tmp_path) as hosts:
        assert hosts.epoch(0) == COUNT
        held = [cache.state().items for cache in hosts.local]
        assert sum(held) == COUNT
        assert min(held) > 0
        assert [hosts.epoch(seed) for seed in (1, 2)] == [0, 0]
        assert all(view.remote_hits and view.local_hits for view in hosts.views)


def test_items_are_shared_out_evenly(tmp_path):
    """By which host is asked first: one that does not answer in time on a busy machine holds fewer."""
    with job(tmp_path) as hosts:
        first = Counter(next(hosts.views[0]._order(digest_of(f"{key}"))) for key in range(3000))
        assert min(first[one] for one in hosts.members) > 800


def test_what_a_full_host_declines_is_cached_by_the_next(tmp_path):
    total = sum(-(-len(content(key)) // 64) * 64 for key in range(COUNT))
    with job(tmp_path, capacity=total // 3 + 20_000) as hosts:  # together just enough
        hosts.epoch(0)
        hosts.epoch(1)
        assert hosts.epoch(2) == 0


def test_what_no_host_has_room_for_is_asked_for_once(tmp_path):
    capacities = [1 << 14] * 3 + [
        1 << 17
    ]  # 16 of an epoch's 90 each; all, and those that move to it
    with contextlib.ExitStack() as opened:
        caches = [opened.enter_context(MinIOCache(one, folder=tmp_path)) for one in capacities]
        servers = [opened.enter_context(CacheServer(one, "127.0.0.1:0", key=KEY)) for one in caches]
        members = [one.address for one in servers]
        views = [
            opened.enter_context(
                contextlib.closing(PartitionedCache(cache, members[:3], me, key=KEY, patience=30.0))
            )
            for cache, me in zip(caches[:3], members)
        ]

        def epoch():
            """Return how many other hosts were asked, for each item that was read from storage."""
            found = []
            for key in range(COUNT):
                view = views[key % 3]
                before = view.misses, view.exchanges
                assert len(view.get(f"{key}", lambda: bytes(1024))) == 1024
                found += [view.exchanges - before[1]] * (view.misses - before[0])
            return found

        epoch()
        epoch()
        asked = epoch()
        assert len(asked) == COUNT - 3 * 16
        assert set(asked) == {0, 1}, "only the host that is first for the item"
        for view in views:
            view.set_members(members)
        epoch()
        assert epoch() == [], "a host that joins has room for them"


def has_ended(process: int) -> bool:
    """Whether all threads of a process are stopped or gone: each may answer once more before a signal reaches
    it."""
    return all(state in "TZX" for state in states(process))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_is_gone_or_stuck_is_done_without_and_its_items_move(tmp_path, end):
    with job(tmp_path) as hosts:
        hosts.epoch(0)
        lost = hosts.local[2].state().items
        os.kill(hosts.servers[2].pid, end)
        assert wait_until(lambda: has_ended(hosts.servers[2].pid), 10)
        with pytest.warns(ShardwrightWarning, match="does not answer"):
            assert hosts.epoch(1, alive=(0, 1)) == lost
        assert hosts.epoch(2, alive=(0, 1)) == 0
        assert sum(view.failures for view in hosts.views) == 2, "each worker tried it once"


def test_a_host_that_was_started_again_is_asked_again(tmp_path):
    with job(tmp_path) as hosts:
        hosts.epoch(0)
        for host in (1, 2):
            hosts.servers[host].kill()
            hosts.servers[host].join()
            hosts.start(host, hosts.members[host])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert hosts.epoch(1) == 0  # this process kept their caches open


def test_only_items_of_a_host_that_leaves_move(tmp_path):
    with MinIOCache(0, folder=tmp_path) as cache:
        members = [f"10.0.0.{host}:5" for host in range(5)]
        view = PartitionedCache(cache, members, members[0], key=KEY)
        digests = [digest_of(f"{key}") for key in range(2000)]
        before = [next(view._order(digest)) for digest in digests]
        view.set_members(members[:4])
        after = [next(view._order(digest)) for digest in digests]
        assert all(new == old for old, new in zip(before, after) if old != members[4])
        shares = [before.count(one) / 2000 for one in members]
        assert max(abs(share - 0.2) for share in shares) < 0.04
        with pytest.raises(InputError, match="all hosts"):
            view.set_members(members[1:])


def test_ranges_of_shards_come_from_other_hosts(tmp_path):
    paths, expected = shards(tmp_path)
    with job(tmp_path, count=2) as hosts:
        found = [CachedShards(paths, view) for view in hosts.views]
        assert [found[0][place] for place in range(len(expected))] == expected
        assert [found[1][place] for place in range(len(expected))] == expected
        assert [view.misses for view in hosts.views] == [len(paths), 0]
        assert sum(cache.state().items for cache in hosts.local) == len(paths)


def test_a_worker_that_is_given_the_view_sees_the_same(tmp_path):
    with job(tmp_path, count=2) as hosts:
        hosts.epoch(0)
        other = pickle.loads(pickle.dumps(hosts.views[0]))
        for key in range(COUNT):
            assert other.get(f"{key}", fail) == content(key)
        other.close()
        other.cache.close()


@contextlib.contextmanager
def pair(folder, address, patience=0.3):
    """A host whose only neighbour is at an address, and keys that are the neighbour's."""
    with MinIOCache(CAPACITY, folder=folder) as cache:
        view = PartitionedCache(cache, ["me:1", address], "me:1", key=KEY, patience=patience)
        keys = [k for k in range(100) if next(view._order(digest_of(f"{k}"))) == address]
        yield view, keys
        view.close()


def falls_back(folder, address, patience=0.3):
    with pair(folder, address, patience) as (view, keys):
        with pytest.warns(ShardwrightWarning, match="does not answer"):
            assert view.get(f"{keys[0]}", lambda: content(1)) == content(1)
        assert view.get(f"{keys[0]}", fail) == content(1)
        assert view.failures == 1


def test_a_port_where_nobody_listens_is_done_without(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    falls_back(tmp_path, address)


def test_who_never_answers_is_done_without(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        falls_back(tmp_path, f"127.0.0.1:{silent.getsockname()[1]}")


def test_another_job_is_turned_away(tmp_path):
    with MinIOCache(CAPACITY, folder=tmp_path) as cache:
        with CacheServer(cache, "127.0.0.1:0", key="of another job") as server:
            falls_back(tmp_path, server.address)
        assert cache.state().items == 0


@contextlib.contextmanager
def impostor(behave):
    """A server that has the key, and then behaves badly."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run():
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                with link, contextlib.suppress(OSError):
                    frames.prove_to_client(link, KEY.encode(), frames.Patience(5))
                    frames.receive(link, frames.ASKED.size, frames.Patience(5))
                    behave(link)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    listener.close()


def dribble(link):
    """A byte now and then: no single wait is long."""
    link.sendall(frames.ANSWERED.pack(frames.HIT, 10_000, 0))
    for _ in range(100):
        link.sendall(b"x")
        time.sleep(0.05)


BAD = {
    "corrupt": lambda link: link.sendall(
        frames.ANSWERED.pack(frames.HIT, 4, zlib.crc32(b"good")) + b"evil"
    ),
    "endless": lambda link: link.sendall(frames.ANSWERED.pack(frames.HIT, 1 << 62, 0)),
    "nonsense": lambda link: link.sendall(b"\xee" * 1000),
    "half": lambda link: link.sendall(frames.ANSWERED.pack(frames.HIT, 100, 0) + b"x"),
    "slow": dribble,
}


@pytest.mark.parametrize("behave", BAD.values(), ids=BAD.keys())
def test_answers_that_are_wrong_or_slow_are_not_used(tmp_path, behave):
    with impostor(behave) as address:
        falls_back(tmp_path, address)


def steadily(link):
    """Give 8 MB within 0.4 s, however long it takes to ask."""
    data = b"x" * 80_000
    link.sendall(frames.ANSWERED.pack(frames.HIT, 100 * len(data), zlib.crc32(100 * data)))
    for _ in range(100):
        link.sendall(data)
        time.sleep(0.004)


def test_an_item_that_is_large_is_not_too_slow(tmp_path):
    with impostor(steadily) as address, pair(tmp_path, address, 0.2) as (view, keys):
        assert len(view.get(f"{keys[0]}", fail)) == 8_000_000
        assert view.failures == 0


def test_a_thread_that_finds_the_connection_taken_reads_storage_and_blames_nobody(tmp_path):
    with impostor(steadily) as address, pair(tmp_path, address, 0.1) as (view, keys):
        other = threading.Thread(target=view.get, args=(f"{keys[0]}", fail))
        other.start()
        while not view._peers[address]._turn.locked():
            time.sleep(0.001)
        assert view.get(f"{keys[1]}", lambda: b"read") == b"read"
        other.join()
        assert (view.failures, view.misses, view.remote_hits) == (0, 1, 1)


def test_a_server_outlives_clients_that_say_nonsense(tmp_path):
    with (
        MinIOCache(CAPACITY, folder=tmp_path) as cache,
        CacheServer(cache, "127.0.0.1:0", key=KEY) as server,
    ):
        host, port = server.address.split(":")
        digest, soon = digest_of("a"), frames.Patience(30)
        said = [
            b"GET / HTTP/1.0\r\n\r\n" * 20,
            frames.ASKED.pack(77, digest, b"", 0, 0),
            frames.ASKED.pack(frames.PUT, digest, b"", 0, 4)
            + frames.ANSWERED.pack(frames.GO, 4, 0)
            + b"evil",
            frames.ASKED.pack(frames.PUT, digest, b"", 0, 4)
            + frames.ANSWERED.pack(frames.GO, 1 << 62, 0),
            b"",
        ]
        for place, words in enumerate(said):
            with socket.create_connection((host, int(port))) as link, contextlib.suppress(OSError):
                if place:
                    frames.prove_to_server(link, KEY.encode(), soon)
                link.sendall(words)
                link.shutdown(socket.SHUT_WR)
                while link.recv(1000):
                    pass
        assert cache.state().items == 0
        with pair(tmp_path, server.address, 30.0) as (view, keys):
            assert view.get(f"{keys[0]}", lambda: b"right") == b"right"
            assert cache.get(f"{keys[0]}", fail) == b"right"


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:99999", "host:-1"])
def test_addresses_are_host_and_port(tmp_path, address):
    with MinIOCache(0, folder=tmp_path) as cache, pytest.raises(InputError, match="host:port"):
        CacheServer(cache, address, key=KEY)


def test_an_empty_key_is_refused(tmp_path):
    with MinIOCache(0, folder=tmp_path) as cache, pytest.raises(InputError, match="key"):
        CacheServer(cache, "127.0.0.1:0", key="")


@pytest.mark.parametrize("given", [{"patience": 0}, {"patience": float("nan")}, {"rest": -1}])
def test_how_long_hosts_are_waited_for_is_checked(tmp_path, given):
    with MinIOCache(0, folder=tmp_path) as cache, pytest.raises(InputError, match="waited for"):
        PartitionedCache(cache, ["a:1"], "a:1", key=KEY, **given)
