"""Files that are read, and their pages."""

import os

import pytest

from shardwright.runtime.stalls import pages


@pytest.fixture
def files(tmp_path):
    made = []
    for index in range(4):
        path = tmp_path / f"{index}.bin"
        path.write_bytes(os.urandom(64 * 1024))
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        made.append(str(path))
    return made


def test_evicted_pages_are_gone_until_they_are_read(files):
    for path in files:
        with open(path, "rb") as file:
            file.read()
    assert pages.resident_share(files) == 1.0
    pages.evict(files)
    if pages.resident_share(files) == 1.0:
        pytest.skip("this file system keeps its pages, or does not tell of them")
    assert pages.resident_share(files) < 0.1
    with open(files[0], "rb") as file:
        file.read()
    assert pages.resident_share(files) == pytest.approx(0.25, abs=0.05)


def test_listening_hears_what_is_read_and_nothing_else(files, tmp_path):
    with pages.listening() as heard:
        with open(files[0], "rb") as file:
            file.read(1)
        (tmp_path / "written").write_text("x")
    with open(files[1], "rb") as file:
        file.read(1)
    assert pages.data_files(heard) == (files[0],)


def test_data_files_are_regular_and_not_code(files, tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "code.py").write_text("pass")
    everything = [*files, str(tmp_path), "/dev/null", "/proc/cpuinfo", str(tmp_path / "none")]
    everything += [str(tmp_path / "empty"), str(tmp_path / "code.py")]
    assert pages.data_files(everything) == tuple(sorted(files))
    assert pages.files_under([str(tmp_path)]) == tuple(sorted(files))
    assert pages.files_under(files[:1]) == tuple(files[:1])


def test_what_cannot_be_looked_at_has_no_pages(tmp_path):
    assert pages.resident_share([str(tmp_path / "none")]) == 0.0
    pages.evict([str(tmp_path / "none")])
