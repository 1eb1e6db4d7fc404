"""Whoever is ended, and however: no rank trains on unwatched, and nothing is left behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.checkpoint import tidied
from shardwright.runtime.executor import Executor
from shardwright.runtime.launch import launch
from shardwright.runtime.scratch import claim, scratch, sweep
from shardwright.runtime.stopped import LOOK_SECONDS, Patience, Stopped, Stops
from tests import zoo
from tests.processes import is_alive, wait_until
from tests.runtime.lingering import linger
from tests.runtime.world import ROOT

# The fork server of a launcher whose ranks capture nothing need not import for that: six seconds each.
LIGHT = """
import os, sys
from shardwright.runtime import launch
launch.PRELOADED, launch.CAPTURING = launch.PRELOADED[:3], ()
"""
LAUNCHER = f"""
{LIGHT}
from tests.runtime import lingering
launch.launch(lingering.linger, 2, (sys.argv[1],))
"""
STOPPED = f"""
{LIGHT}
from shardwright.errors import RunError
from tests.runtime.lingering import linger
try:
    launch.launch(linger, 2, (sys.argv[1],), collective_timeout=float(sys.argv[2]))
except RunError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
"""


def server_of(rank: int) -> int:
    """The process that a rank was forked from."""
    return int(Path(f"/proc/{rank}/stat").read_text().rpartition(") ")[2].split()[1])


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with so short a name that sockets fit into it: pytest's own may be too long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def start_launcher(folder: Path, *more: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a launcher with a temporary folder of its own; return it and its ranks."""
    (folder / "tmp").mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), *more],
        cwd=ROOT, env=os.environ | {"TMPDIR": str(folder / "tmp")},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    files = [folder / "0", folder / "1"]
    assert wait_until(lambda: all(file.exists() for file in files) or launcher.poll() is not None)
    assert launcher.poll() is None, launcher.communicate()[1]
    return launcher, [int(file.read_text()) for file in files]


@pytest.mark.ranks
def test_ranks_die_with_a_launcher_that_is_killed_and_the_next_start_sweeps(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, ranks = start_launcher(short)
    server = server_of(ranks[0])
    os.kill(ranks[1], signal.SIGSTOP)
    os.kill(server, signal.SIGSTOP)  # it cannot see its launcher's end
    launcher.kill()
    launcher.wait()
    assert wait_until(lambda: not any(map(is_alive, [*ranks, server])), 10)
    launcher.communicate()
    monkeypatch.setattr(tempfile, "tempdir", str(short / "tmp"))
    left = {path.name.partition("-")[0] for path in (short / "tmp").iterdir()}
    assert left >= {"shardwright", "pymp"}
    with scratch() as mine:
        assert [path for path in (short / "tmp").iterdir() if path.is_dir()] == [mine]
    assert list((short / "tmp").iterdir()) == []


@pytest.mark.ranks
def test_a_rank_that_stops_as_it_is_born_dies_with_its_launcher(tmp_path: Path) -> None:
    script = "from tests.runtime.stopping import nothing\n"
    script += f"{LIGHT}launch.launch(nothing, 1)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT, env=os.environ | {"STOPPING_FOLDER": str(tmp_path)}, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert wait_until(lambda: list(tmp_path.iterdir()))
    rank = int(next(tmp_path.iterdir()).name)
    launcher.kill()
    try:
        assert wait_until(lambda: not is_alive(rank), 10)
    finally:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
        launcher.communicate(timeout=10)  # the fork server, which holds the pipe too, is gone


def test_a_measuring_process_dies_with_its_parent_before_it_has_imported_anything(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(1000)")
    (tmp_path / "job-0").write_bytes(pickle.dumps(("torch:cuda", None)))
    script = "import os, sys; from pathlib import Path\n"
    script += "from shardwright.runtime import workers\n"
    script += "sys.path.insert(0, sys.argv[1])\n"
    script += "started = workers._start(Path(sys.argv[1]), 0, 1); print(started.pid, flush=True); os._exit(0)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, check=True
    )
    try:
        assert wait_until(lambda: not is_alive(int(done.stdout)), 10)
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(done.stdout), signal.SIGKILL)


def assert_ended(launcher: subprocess.Popen[str], ranks: list[int], number: int) -> None:
    """A launcher that got a signal says nothing, and leaves neither ranks nor files."""
    _, err = launcher.communicate(timeout=30)
    assert (launcher.returncode, err) == (128 + number, "")
    assert wait_until(lambda: not any(map(is_alive, ranks)), 10)


@pytest.mark.ranks
def test_a_launcher_whose_terminal_closes_ends_its_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    """Also where the temporary folder has too long a name for sockets."""
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    launcher, ranks = start_launcher(deep)
    launcher.send_signal(signal.SIGHUP)
    assert_ended(launcher, ranks, signal.SIGHUP)
    assert list((deep / "tmp").iterdir()) == []


@pytest.mark.ranks
def test_ranks_are_told_of_an_interruption_that_their_launcher_alone_gets(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heeding = LAUNCHER.replace(".linger", ".heed")
    monkeypatch.setattr("tests.runtime.test_termination.LAUNCHER", heeding)
    launcher, ranks = start_launcher(short)
    launcher.send_signal(signal.SIGINT)
    try:
        _, err = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
    assert (launcher.returncode, err) == (0, "")
    assert wait_until(lambda: not any(map(is_alive, ranks)), 10)
    assert list((short / "tmp").iterdir()) == []


@pytest.mark.ranks
def test_ranks_ignore_a_closed_terminal_where_their_launcher_does_and_end_when_it_is_terminated(
    short: Path,
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        launcher, ranks = start_launcher(short)
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        for rank in ranks:
            os.kill(rank, signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(2)
        assert all(map(is_alive, ranks))
    finally:
        launcher.terminate()
        assert_ended(launcher, ranks, signal.SIGTERM)
    assert list((short / "tmp").iterdir()) == []


@pytest.mark.ranks
def test_ranks_end_once_the_launcher_is_asked_to_stop(tmp_path: Path) -> None:
    files = [tmp_path / "0", tmp_path / "1"]
    with pytest.raises(Stopped):
        launch(linger, 2, (str(tmp_path),), stops=Stops(lambda: all(one.exists() for one in files)))
    assert wait_until(lambda: not any(is_alive(int(one.read_text())) for one in files), 10)


def test_a_fork_server_that_is_killed_as_it_starts_a_rank_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if any('forkserver' in word for word in sys.orig_argv):\n"
        "    os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    script = f"{LIGHT}from shardwright.errors import RunError\n"
    script += "try:\n    launch.launch(os.getpid, 1)\nexcept RunError as error:\n    print(error)"
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": paths}, cwd=ROOT,
        stdout=subprocess.PIPE, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("ranks are started by a process")


def test_only_folders_whose_owner_is_gone_are_swept(tmp_path: Path) -> None:
    for name in ("shardwright-gone", "shardwright-foreign", "shardwright-alive", "other-gone"):
        (tmp_path / name).mkdir()
    script = "import os, sys; from pathlib import Path\n"
    script += "from shardwright.runtime.scratch import claim\n"
    script += "[claim(Path(name)) for name in sys.argv[1:]]; os._exit(0)"
    gone = [str(tmp_path / "shardwright-gone"), str(tmp_path / "other-gone")]
    subprocess.run([sys.executable, "-c", script, *gone], check=True)
    (tmp_path / "shardwright-link").symlink_to(tmp_path / "other-gone")
    lock = claim(tmp_path / "shardwright-alive")
    sweep(tmp_path, "shardwright-*")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "other-gone", "shardwright-alive", "shardwright-foreign", "shardwright-link",
    ]  # fmt: skip
    os.close(lock)
    sweep(tmp_path, "shardwright-*")
    assert not (tmp_path / "shardwright-alive").exists()


def test_a_command_that_needs_no_folder_but_multiprocessings_sweeps_too(short: Path) -> None:
    script = "import os; from shardwright.runtime.scratch import claim_multiprocessing\n"
    script += (
        "claim_multiprocessing(); print(os.listdir(os.environ['TMPDIR']), flush=True); os._exit(9)"
    )
    said = list[str]()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"TMPDIR": str(short)}, cwd=ROOT,
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        said.append(done.stdout)
    assert [one.count("pymp-") for one in said] == [1, 1]
    assert said[0] != said[1]


def test_what_was_killed_while_it_claimed_a_folder_is_swept_after_some_seconds(
    tmp_path: Path,
) -> None:
    for name in ("shardwright-new", "shardwright-old", "shardwright-full", "shardwright-foreign"):
        (tmp_path / name).mkdir()
    # What a process has made that was killed before its claim got its name.
    for name in ("new", "old", "full"):
        (tmp_path / f"shardwright-{name}" / ".shardwright-owner.11994").touch()
    (tmp_path / "shardwright-full" / "data").touch()
    for name in ("old", "full", "foreign"):
        os.utime(tmp_path / f"shardwright-{name}", (0, 0))
    sweep(tmp_path, "shardwright-*")
    left = {path.name.removeprefix("shardwright-") for path in tmp_path.iterdir()}
    assert left == {"new", "full", "foreign"}


@pytest.mark.torch
def test_a_save_that_is_interrupted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed()))
    executor = Executor(captured, program, module, optimizer=partial(torch.optim.SGD, lr=0.1))
    executor.save(tmp_path)
    executor.step(batch)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            executor.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000000"]
    assert not list((tmp_path / "step-00000000").glob(".*"))


def test_what_a_killed_save_left_goes_at_the_next_start(tmp_path: Path) -> None:
    partial_save = tmp_path / "step-00000003.tmp-0123abcd"
    partial_save.mkdir()
    os.close(claim(partial_save))
    under_way = tmp_path / "step-00000004.tmp-0123abcd"
    under_way.mkdir()
    lock = claim(under_way)
    with tidied(str(tmp_path)):
        assert list(tmp_path.iterdir()) == [under_way]
        os.close(lock)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_a_fork_server_that_is_stopped_alone_is_told_of_and_ended(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.runtime.test_termination.LAUNCHER", STOPPED)
    launcher, ranks = start_launcher(short, "5")
    server = server_of(ranks[0])
    os.kill(server, signal.SIGSTOP)
    try:
        _, err = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
    assert launcher.returncode == 1
    who = f"the process that ranks are started from (process {server})"
    assert err.startswith(f"all processes of a run must go on, but {who} was stopped")
    assert err.count("\n") == 1
    assert wait_until(lambda: not any(map(is_alive, [*ranks, server])), 10)
    assert list((short / "tmp").iterdir()) == []


def test_a_process_that_is_stopped_is_waited_for_so_long_and_no_longer() -> None:
    with subprocess.Popen(["sleep", "1000"]) as one, subprocess.Popen(["sleep", "1000"]) as other:
        try:
            with Patience(1.5 * LOOK_SECONDS) as patience:
                patience.watch(one.pid, os.getpid(), "rank 7")
                patience.watch(other.pid, os.getpid() + 1, "somebody else's")
                one.send_signal(signal.SIGSTOP)
                other.send_signal(signal.SIGSTOP)
                assert patience.error() is None
                assert one.wait(10) == -signal.SIGKILL
                assert str(patience.error()).startswith(
                    f"all processes of a run must go on, but rank 7 (process {one.pid}) was stopped"
                )
                assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.parametrize("others", [0, 1])
def test_who_is_asked_to_stop_ends_the_ranks_or_who_would_start_them(others: int) -> None:
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(1 + others)]
    try:
        asked = threading.Event()
        with Patience(60, asked.is_set) as patience:
            for process in processes:
                patience.watch(process.pid, os.getpid(), "one")
            asked.set()
            assert processes[-1].wait(10) == -signal.SIGKILL
            assert isinstance(patience.error(), Stopped)
        assert [one.poll() for one in processes[:others]] == [None] * others
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_launcher_that_is_interrupted_while_the_fork_server_imports_leaves_nobody_and_no_traceback(
    tmp_path: Path,
) -> None:
    """It is sent to all, as a terminal does, and the fork server would import for ever."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        f"            Path({str(tmp_path)!r}, 'server').write_text(str(os.getpid()))\n"
        "            time.sleep(1000)\n"
        "if any('forkserver' in word for word in sys.orig_argv):\n"
        "    sys.meta_path.insert(0, Slow())\n"
    )
    script = "from shardwright.runtime.launch import launch\nimport os\nlaunch(os.getpid, 1)"
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    launcher = subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": paths}, cwd=ROOT,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert wait_until((tmp_path / "server").exists)
    server = int((tmp_path / "server").read_text())
    os.killpg(launcher.pid, signal.SIGHUP)
    _, err = launcher.communicate(timeout=20)
    assert (launcher.returncode, err) == (128 + signal.SIGHUP, "")
    assert wait_until(lambda: not is_alive(server), 5)
