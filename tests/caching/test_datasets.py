"""Data sets that read through a cache: the same samples as without, and from storage only what is not cached."""

import io
import os
import random
import tarfile

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shardwright.caching import CachedFiles, CachedShards, CachedTokens, MinIOCache
from shardwright.caching.datasets import _Changed
from shardwright.errors import InputError
from tests.caching.workers import content

pytestmark = pytest.mark.torch

LONG_AGO = (1_000_000_000, 1_000_000_000)


def write(path, data):
    path.write_bytes(data)
    os.utime(path, LONG_AGO)
    return path


def files(folder, count):
    return [write(folder / f"{key}.bin", content(key)) for key in range(count)]


def augmented(data):
    """The key, and a number of this epoch's."""
    return int.from_bytes(data[:8].ljust(8, b"\0"), "little"), torch.rand(()).item()


@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (2, "forkserver")])
def test_every_epoch_is_a_permutation_and_the_second_reads_what_is_not_cached(
    tmp_path, workers, context
):
    paths = [write(tmp_path / f"{key}", key.to_bytes(8, "little") * 100) for key in range(40)]
    with MinIOCache(832 * 25, folder=tmp_path) as cache:  # 800 bytes take 832
        data = CachedFiles(paths, cache, augmented)
        loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers,
                            multiprocessing_context=context, collate_fn=list)  # fmt: skip
        epochs = [[sample for batch in loader for sample in batch] for _ in range(2)]
        assert all(sorted(key for key, _ in epoch) == list(range(40)) for epoch in epochs)
        one, two = map(dict, epochs)
        assert all(one[key] != two[key] for key in range(40)), "an augmentation was used twice"
        assert cache.state().items == 25
        before = cache.misses
        for path in paths:
            data[paths.index(path)]
        assert cache.misses - before == 40 - 25


def test_bytes_equal_those_of_the_files(tmp_path):
    with MinIOCache(1 << 20, folder=tmp_path) as cache:
        data = CachedFiles(files(tmp_path, 30), cache)
        for _ in range(2):
            assert [data[key] for key in range(len(data))] == [content(key) for key in range(30)]
        assert (cache.hits, cache.misses) == (30, 30)


def test_files_may_have_names_that_no_text_has(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.bin")
    with open(path, "wb") as file:
        file.write(b"x")
    os.utime(path, LONG_AGO)
    with MinIOCache(1 << 20, folder=tmp_path) as cache:
        data = CachedFiles([path], cache)
        assert (data[0], data[0]) == (b"x", b"x")
        assert cache.hits == 1


def test_a_file_that_is_written_anew_is_read_anew(tmp_path):
    path = write(tmp_path / "a", b"old")
    with MinIOCache(1 << 20, folder=tmp_path) as cache:
        data = CachedFiles([path], cache)
        assert data[0] == b"old"
        path.write_bytes(b"new")  # of the same size, now
        os.utime(path, (LONG_AGO[0] + 1,) * 2)
        assert data[0] == b"new"


def test_a_file_that_was_just_written_is_not_cached_yet(tmp_path):
    """Its next change could bear the same time."""
    path = tmp_path / "a"
    with MinIOCache(1 << 20, folder=tmp_path) as cache:
        data = CachedFiles([path], cache)
        for turn in range(20):
            path.write_bytes(b"%02d" % turn)
            assert data[0] == b"%02d" % turn


def test_a_file_that_changes_while_it_is_read_is_never_half_of_each(tmp_path):
    """Its size shrinks between asking and reading: here each time it is asked for."""
    path = write(tmp_path / "a", b"12345678")
    with MinIOCache(1 << 20, folder=tmp_path) as cache:
        data = CachedFiles([path], cache)
        about = os.stat(path)
        path.write_bytes(b"other")
        with pytest.raises(_Changed):
            data._bytes(str(path), about)
        assert cache.state().items == 0
        assert data[0] == b"other"


def test_a_missing_file_is_missing_as_without_a_cache(tmp_path):
    with MinIOCache(1 << 20, folder=tmp_path) as cache, pytest.raises(FileNotFoundError):
        CachedFiles([tmp_path / "none"], cache)[0]


def shard(path, samples):
    """Write a tar of WebDataset's layout."""
    with tarfile.open(path, "w") as tar:
        for key, parts in samples:
            for name, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    os.utime(path, LONG_AGO)
    return path


def shards(folder, count=4, each=6):
    """Return paths of shards and their samples, in order."""
    paths, found = [], []
    for number in range(count):
        samples = [
            (
                f"train/{number:02}{place:02}",
                {"jpg": content(number * each + place), "seg.png": b"s", "cls": b"%d" % place},
            )
            for place in range(each)
        ]
        paths.append(shard(folder / f"{number}.tar", samples))
        found += [{"__key__": key, "__url__": str(paths[-1]), **parts} for key, parts in samples]
    return paths, found


def test_shards_give_the_samples_that_were_written(tmp_path):
    paths, expected = shards(tmp_path)
    with MinIOCache(1 << 20, folder=tmp_path) as cache:
        data = CachedShards(paths, cache)
        assert [data[place] for place in range(len(data))] == expected
        assert cache.misses == len(paths), "a shard is read once, whole"
        assert cache.state().items == len(paths)


def test_shards_without_room_are_read_sample_by_sample(tmp_path):
    paths, expected = shards(tmp_path)
    sizes = [-(-path.stat().st_size // 64) * 64 for path in paths]
    with MinIOCache(sizes[0] + sizes[1], folder=tmp_path) as cache:
        data = CachedShards(paths, cache)
        for epoch in range(2):
            before = cache.read_bytes
            assert [data[place] for place in range(len(data))] == expected
            payload = sum(
                len(part) for one in expected[12:] for name, part in one.items() if name[0] != "_"
            )
            cached = sum(path.stat().st_size for path in paths[:2])
            assert cache.read_bytes - before == payload + (cached if epoch == 0 else 0)


def test_what_is_no_tar_file_is_refused(tmp_path):
    path = write(tmp_path / "a.tar", b"x" * 2000)
    with (
        MinIOCache(0, folder=tmp_path) as cache,
        pytest.raises(InputError, match="not compressed"),
    ):
        CachedShards([path], cache)


def test_a_shard_that_changes_is_refused_and_never_mixed(tmp_path):
    paths, _ = shards(tmp_path)
    with MinIOCache(0, folder=tmp_path) as cache:
        data = CachedShards(paths, cache)
        shard(paths[0], [("a", {"txt": b"new"})])
        os.utime(paths[0], (5, 5))
        with pytest.raises(InputError, match="may not change"):
            data[0]


@pytest.mark.parametrize("capacity", [0, 5 << 20, 64 << 20])
def test_windows_of_tokens_are_those_of_the_array(tmp_path, capacity):
    tokens = np.random.default_rng(0).integers(0, 2**16, 5_000_001).astype(np.uint16)
    path = write(tmp_path / "tokens.bin", tokens.tobytes())
    with MinIOCache(capacity, folder=tmp_path) as cache:
        data = CachedTokens(path, cache, window=1023, transform=torch.from_numpy)
        assert len(data) == 5_000_000 // 1023
        order = [*range(len(data))]
        random.Random(0).shuffle(order)
        for index in order[:1000]:
            expected = tokens[index * 1023 : index * 1023 + 1024]
            assert np.array_equal(data[index].numpy(), expected)
        assert torch.equal(data[-1], data[len(data) - 1])
        assert cache.state().items == {0: 0, 5 << 20: 1, 64 << 20: 3}[capacity]
        with pytest.raises(IndexError):
            data[len(data)]


def test_a_file_of_half_tokens_is_refused(tmp_path):
    with MinIOCache(0, folder=tmp_path) as cache, pytest.raises(InputError, match="whole ones"):
        CachedTokens(write(tmp_path / "t", b"abc"), cache, window=1)
