"""Jobs that share what they prepare: each gets every sample once an epoch, whoever is killed meanwhile."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright.caching import MinIOCache, SharedLoader, Sharing
from shardwright.caching.parcels import packed, unpacked
from shardwright.errors import InputError, ShardwrightWarning
from tests.caching.jobs import SAMPLES, Told, die_on_line, prepared, sharing, train
from tests.caching.workers import ALONE, can_mount, ended, start
from tests.processes import is_alive, states

pytestmark = pytest.mark.torch


def read(path):
    """Return the epochs that a job wrote, and its counts."""
    *epochs, counts = map(json.loads, path.read_text().splitlines())
    return epochs, counts


def indices(epoch):
    return [one[0] for one in epoch]


def drawn(epoch):
    return {one[0]: tuple(one[1:]) for one in epoch}


def wait_until(reached, seconds=60.0):
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_at(out, count):
    at = out.with_suffix(".at")
    return at.exists() and int(at.read_text() or 0) >= count


def folders(parent):
    return sorted(parent.glob("shardwright-*"))


def test_each_sample_is_prepared_once_for_jobs_of_unlike_speed_and_batches(tmp_path):
    how = sharing(tmp_path, jobs=3)
    outs = [tmp_path / f"out{job}" for job in range(3)]
    jobs = [
        start_job(how, out, batch, seconds, workers)
        for out, batch, seconds, workers in zip(outs, (3, 5, 7), (0, 0.002, 0.02), (0, 1, 0))
    ]
    most = 0
    while any(job.poll() is None for job in jobs):
        with suppress(FileNotFoundError):  # the last job to end removes the folder
            most = max(most, len(list(tmp_path.glob("shardwright-*/chunk.?"))))
        time.sleep(0.005)
    assert [job.wait() for job in jobs] == [0, 0, 0]
    assert 0 < most <= how.depth
    assert folders(tmp_path) == []
    found = [read(out) for out in outs]
    first = found[0][0]
    for epochs, counts in found:
        assert epochs == first, "all jobs see the same samples"
        assert counts["alone"] == 0
    assert all(sorted(indices(epoch)) == list(range(SAMPLES)) for epoch in first)
    assert indices(first[0]) != indices(first[1])
    one, two = map(drawn, first)
    assert all(one[key] != two[key] for key in one), "an augmentation was used twice"
    assert len(set(one.values())) == SAMPLES
    calls = prepared(tmp_path / "log")
    assert len(set(calls)) == len(calls), "something was prepared twice"
    assert {(one[0], one[1]) for epoch in first for one in epoch} <= set(calls)
    # Workers begin the epoch that nobody wants any more.
    assert len(calls) <= 2 * SAMPLES + how.depth * how.chunk


@pytest.mark.parametrize("after", [1, 14, 30])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_job_that_is_killed_stalls_nobody(tmp_path, after, workers):
    how = sharing(tmp_path, jobs=3)
    outs = [tmp_path / f"out{job}" for job in range(3)]
    if workers:
        jobs = [start_job(how, out, 4, 0.005, workers) for out in outs]
    else:
        jobs = [start(train, how, out, 4, 2, 0.005, 0, 0.001) for out in outs]
    wait_until(lambda: is_at(outs[0], after))
    jobs[0].kill()
    assert [job.wait(60) if workers else ended(job) for job in jobs] == [-signal.SIGKILL, 0, 0]
    found = [read(out) for out in outs[1:]]
    assert found[0][0] == found[1][0]
    for epochs, counts in found:
        assert all(sorted(indices(epoch)) == list(range(SAMPLES)) for epoch in epochs)
        assert counts["alone"] == 0, "nobody waited for the dead until patience was over"
    calls = prepared(tmp_path / "log")
    assert len(calls) - len(set(calls)) <= (1 + workers) * how.chunk, "more than what was lost"
    wait_until(lambda: is_swept(tmp_path))  # workers of the dead job may have been the last


def is_swept(folder):
    """Start something, and say whether nothing is left after it."""
    MinIOCache(0, folder=folder).close()
    return not folders(folder)


def start_job(how, out, batch, seconds, workers):
    """Start a job that may have children of its own, all in one session: two epochs, whose batches take it so many
    seconds."""
    script = out.with_suffix(".py")
    arguments = f"Path({str(out)!r}), {batch}, 2, {seconds}, {workers}, 0.001"
    script.write_text(
        "from pathlib import Path\n"
        "from tests.caching.jobs import sharing, train\n"
        "if __name__ == '__main__':\n"
        f"    train(sharing(Path({str(how.folder)!r}), jobs={how.jobs}), {arguments})\n"
    )
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": path}, start_new_session=True
    )


def of_session(session):
    """Return the processes of a session: also those that have not done anything yet."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(") ")[2].split()[3]) == session:
                yield int(stat.parent.name)


def test_workers_of_a_killed_job_end_too_and_the_next_start_sweeps(tmp_path):
    how = sharing(tmp_path)
    out = tmp_path / "out"
    job = start_job(how, out, 4, 0.2, 2)  # for seconds: to be killed on the way
    wait_until(lambda: is_at(out, 8))
    workers = {int(line.split()[1]) for line in (tmp_path / "log").read_text().splitlines()}
    assert workers
    assert job.pid not in workers, "who has workers does not prepare"
    job.kill()
    job.wait(60)
    wait_until(lambda: not any(map(is_alive, of_session(job.pid))))
    assert len(folders(tmp_path)) == 1
    with SharedLoader(Told(tmp_path / "log"), how, batch_size=4) as loader:
        assert sorted(one["index"] for batch in loader for one in batch) == list(range(SAMPLES))
    assert folders(tmp_path) == []


@pytest.mark.slow
def test_whoever_is_killed_before_any_line_leaves_the_others_a_whole_epoch(tmp_path):
    how = sharing(tmp_path, chunk=15, depth=2)
    with SharedLoader(Told(tmp_path / "log"), how, batch_size=4) as loader:
        line, end = 0, -signal.SIGKILL
        while end == -signal.SIGKILL and line < 200:
            victim = start(die_on_line, how, line)
            lives = True
            while lives:
                lives = victim.is_alive()
                found = [one["index"] for batch in loader for one in batch]
                assert sorted(found) == list(range(SAMPLES)), line
            end = ended(victim)
            assert end in (-signal.SIGKILL, 3)
            line += 5
        assert line > 60
        assert loader.alone == 0
    assert folders(tmp_path) == []


def is_stopped_without(process, path):
    """Stop a process and say whether it holds no lock; it goes on where it does."""
    os.kill(process, signal.SIGSTOP)
    wait_until(lambda: set(states(process)) == {"T"})
    with path.open() as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    os.kill(process, signal.SIGCONT)
    return False


def test_a_job_that_is_stopped_is_put_aside_and_comes_back(tmp_path):
    how = sharing(tmp_path, jobs=2, patience=0.4)
    out = tmp_path / "out"
    other = start(train, how, out, 4, 3, 0.01, 0, 0.0)
    with SharedLoader(Told(tmp_path / "log"), how, batch_size=6) as loader:
        epoch = iter(loader)
        found = next(epoch)
        wait_until(lambda: is_at(out, 1))
        (turn,) = tmp_path.glob("shardwright-*/turn")
        wait_until(lambda: is_stopped_without(other.pid, turn))
        with pytest.warns(ShardwrightWarning, match="prepare for themselves"):
            found += [one for batch in epoch for one in batch]
        assert sorted(one["index"] for one in found) == list(range(SAMPLES))
        os.kill(other.pid, signal.SIGCONT)
        assert ended(other) == 0
    epochs, counts = read(out)
    assert all(sorted(indices(epoch)) == list(range(SAMPLES)) for epoch in epochs)
    assert counts["alone"] > 0
    assert counts["taken"] > 0
    assert drawn(epochs[0]) == {one["index"]: tuple(one["drawn"]) for one in found}


def test_a_job_that_is_stopped_while_it_changes_what_all_share_holds_nobody_up(tmp_path):
    """Here its lock is held for it."""
    with SharedLoader(Told(tmp_path / "log"), sharing(tmp_path), batch_size=4) as loader:
        epoch = iter(loader)
        found = [next(epoch)]
        (lock,) = tmp_path.glob("shardwright-*/turn")
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.warns(ShardwrightWarning, match="each prepares for itself"):
                found += epoch
            assert loader.alone > 0
        epochs = [found, list(loader), list(loader)]
        one, two, three = (
            {sample["index"]: sample["drawn"] for batch in epoch for sample in batch}
            for epoch in epochs
        )
        assert sorted(one) == sorted(two) == sorted(three) == list(range(SAMPLES))
        assert all(one[key] != two[key] != three[key] for key in one)


def test_who_comes_late_joins_at_the_next_epoch(tmp_path):
    how, log = sharing(tmp_path), tmp_path / "log"
    with SharedLoader(Told(log), how, batch_size=4) as loader:
        epoch = iter(loader)
        next(epoch)
        other = start(train, how, tmp_path / "out", 5, 1, 0.0, 0, 0.0)
        wait_until(lambda: len(list(tmp_path.glob("shardwright-*/life.*"))) == 2)
        list(epoch)
        list(loader)
        assert ended(other) == 0
        assert loader.alone == 0
    epochs, counts = read(tmp_path / "out")
    assert counts["alone"] == 0
    assert sorted(indices(epochs[0])) == list(range(SAMPLES))
    calls = prepared(log)
    assert len(set(calls)) == len(calls)


def test_an_epoch_that_is_left_early_holds_nobody_up(tmp_path):
    with SharedLoader(Told(tmp_path / "log"), sharing(tmp_path), batch_size=4) as loader:
        for _ in range(3):
            next(iter(loader))
        assert sorted(one["index"] for batch in loader for one in batch) == list(range(SAMPLES))
        assert loader.alone == 0


def test_a_forked_child_that_ends_takes_nothing_from_its_parent(tmp_path):
    script = tmp_path / "fork.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from shardwright.caching import SharedLoader\n"
        "from tests.caching.jobs import Told, sharing\n"
        "if __name__ == '__main__':\n"
        f"    folder = Path({str(tmp_path)!r})\n"
        "    loader = SharedLoader(Told(folder / 'log'), sharing(folder), batch_size=4)\n"
        "    epoch = iter(loader)\n"
        "    found = [next(epoch)]\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        sys.exit()\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "    found += epoch\n"
        "    assert sum(map(len, found)) == len(loader._work.dataset)\n"
        "    assert loader.alone == 0\n"
    )
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, script], env=environment, timeout=60, check=False)
    assert done.returncode == 0
    assert is_swept(tmp_path)


class Interrupted(Told):
    """Ctrl-C comes while sample 7 is prepared for the first time."""

    def __init__(self, log):
        super().__init__(log)
        self.left = 1

    def __getitem__(self, index):
        if index == 7 and self.left:
            self.left -= 1
            raise KeyboardInterrupt
        return super().__getitem__(index)


def test_a_chunk_whose_preparing_was_interrupted_is_taken_up_again(tmp_path):
    with SharedLoader(Interrupted(tmp_path / "log"), sharing(tmp_path), batch_size=4) as loader:
        with pytest.raises(KeyboardInterrupt):
            list(loader)
        assert sorted(one["index"] for batch in loader for one in batch) == list(range(SAMPLES))
        assert loader.alone == 0


class Broken(Told):
    """Sample 7 cannot be prepared."""

    def __getitem__(self, index):
        if index == 7:
            raise ValueError("sample 7 is broken")
        return super().__getitem__(index)


def test_what_fails_in_preparing_is_raised_where_the_sample_is_wanted(tmp_path):
    how = sharing(tmp_path, depth=30)  # one job can be an epoch ahead of the other
    data = Broken(tmp_path / "log")
    with (
        SharedLoader(data, how, batch_size=4) as one,
        SharedLoader(data, how, batch_size=4) as two,
    ):
        epochs = iter(one), iter(two)
        seen = [next(epoch) for epoch in epochs]
        for epoch in epochs:
            with pytest.raises(ValueError, match="sample 7 is broken"):
                seen += epoch
        assert all(sample["index"] != 7 for batch in seen for sample in batch)


def test_jobs_that_do_not_agree_are_refused(tmp_path):
    how = sharing(tmp_path)
    with SharedLoader(Told(tmp_path / "log"), how, batch_size=4):
        with pytest.raises(InputError, match="agree"):
            SharedLoader(Told(tmp_path / "log"), sharing(tmp_path, seed=4), batch_size=4)
        with pytest.raises(InputError, match="agree"):
            SharedLoader(Told(tmp_path / "log", SAMPLES + 1), how, batch_size=4)
        board = next(tmp_path.rglob("board"))
        board.rename(tmp_path / "kept")
        board.write_bytes(b"no")
        with pytest.raises(InputError, match=r"agree .* these are \(\) there"):
            SharedLoader(Told(tmp_path / "log"), how, batch_size=4)


@pytest.mark.parametrize(
    "changed",
    [{"name": ""}, {"chunk": 0}, {"depth": 0}, {"seed": -1}, {"patience": float("nan")}],
)
def test_sharing_is_checked(tmp_path, changed):
    with pytest.raises(InputError, match="share by a name"):
        sharing(tmp_path, **changed)


@pytest.mark.parametrize(
    ("data", "given"), [([], {}), ([1], {"batch_size": 0}), ([1], {"workers": -1})]
)
def test_what_jobs_share_is_checked(tmp_path, data, given):
    with pytest.raises(InputError, match="jobs share batches"):
        SharedLoader(data, sharing(tmp_path), **{"batch_size": 1, **given})


def test_random_numbers_of_the_job_itself_stay_its_own(tmp_path):
    def draws():
        return random.random(), np.random.rand(), torch.rand(()).item()

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = draws()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    with SharedLoader(Told(tmp_path / "log"), sharing(tmp_path), batch_size=4) as loader:
        assert len(list(loader)) == len(loader) == 15
        assert draws() == expected


@pytest.mark.skipif(not can_mount(), reason="mounting needs rights")
def test_where_memory_is_full_a_job_prepares_for_itself(tmp_path):
    script = """
import os, warnings
from pathlib import Path
import numpy as np
from shardwright.caching import MinIOCache, SharedLoader, Sharing
class Large:
    def __len__(self): return 40
    def __getitem__(self, index): return np.full(1 << 18, index, np.uint8)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with SharedLoader(Large(), Sharing(name="a", chunk=8, depth=4, folder=Path.cwd()), batch_size=5) as loader:
        found = [one for batch in loader for one in batch]
    assert sorted(int(one[0]) for one in found) == list(range(40))
    assert all((one == one[0]).all() and len(one) == 1 << 18 for one in found)
    assert loader.alone == 5, loader.alone
print(told[0].message, os.listdir())
"""
    mount = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && cd {tmp_path} && exec "$@"'
    done = subprocess.run(
        [*ALONE, "sh", "-c", mount, "sh", sys.executable, "-c", script],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no room for prepared samples" in done.stdout
    assert done.stdout.endswith(" []\n")


def test_samples_come_out_as_they_went_in():
    draw = np.random.default_rng(0)
    sample = {
        "float": draw.random((3, 4)).astype(np.float32),
        "order": np.asfortranarray(draw.random((3, 4))),
        "empty": np.empty((0, 3), np.int64),
        "scalar": np.float32(2.5),
        "text": "ä",
        "bytes": b"\x00\xff",
        "many": [1, 2.5, None, True, (float("inf"), -1)],
        "tensor": torch.arange(6).reshape(2, 3).t(),
        "words": np.array(["a", "bcd"]),
    }
    (found,) = unpacked(bytearray(b"".join(packed([sample]))))
    assert list(found) == list(sample)
    for name in ("float", "order", "empty", "words"):
        assert found[name].dtype == sample[name].dtype
        assert np.array_equal(found[name], sample[name])
    for name in ("text", "bytes", "many", "scalar"):
        assert found[name] == sample[name]
    assert torch.equal(found["tensor"], sample["tensor"])
    found["float"] += 1  # may be written
    assert np.allclose(found["float"], sample["float"] + 1)


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, np.array([None]), torch.zeros(2, dtype=torch.bfloat16), {2}]
)
def test_what_would_need_pickle_is_refused(value):
    with pytest.raises(InputError, match="made of arrays"):
        packed([{"a": value}])


def test_a_torch_data_set_and_collate_work_unchanged(tmp_path):
    data = torch.utils.data.TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    how = Sharing(name="t", chunk=3, folder=tmp_path)
    collate = torch.utils.data.default_collate
    with SharedLoader(data, how, batch_size=4, collate=collate, drop_last=True) as loader:
        batches = list(loader)
    assert len(batches) == len(loader) == 2
    for rows, keys in batches:
        assert torch.equal(rows, data.tensors[0][keys])
