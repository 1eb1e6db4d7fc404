"""How ranks end under torchrun: each cause is one line, within the time that was stated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import is_alive, wait_until
from tests.runtime.world import ROOT

pytestmark = pytest.mark.ranks
SECONDS = 4  # that a message may take


@contextmanager
def training(
    folder: Path, what: str = "train"
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start two ranks that train for ever, or do something else; give torchrun and them."""
    agent = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "tests.runtime.endless", str(SECONDS), str(folder), what],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    files = [folder / "0", folder / "1"]
    try:
        assert wait_until(lambda: all(f.exists() for f in files) or agent.poll() is not None, 90)
        assert agent.poll() is None, agent.communicate()[0]
        yield agent, [int(file.read_text()) for file in files]
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
        agent.communicate()


def lines_of_ranks(text: str) -> list[str]:
    """Return what ranks said: torchrun's own log and its traceback at the end are its business."""
    said = text.partition('Traceback (most recent call last):\n  File "<frozen runpy>"')[0]
    return [line for line in said.splitlines() if line[:1] not in "WEI" or line[1:5].isalpha()]


def test_a_stopped_rank_is_noticed_in_time_and_everything_ends(tmp_path: Path) -> None:
    with training(tmp_path) as (agent, ranks):
        os.kill(ranks[1], signal.SIGSTOP)
        text, _ = agent.communicate(timeout=60)
    assert "forcefully exiting" not in text  # it ended without torchrun's half minute of patience
    (line, *_) = lines_of_ranks(text)
    assert line.startswith("error: rank 0 waited for other ranks longer than a message may take")
    assert f"process {ranks[1]} on this host is stopped" in line
    assert "[rank" not in text
    assert wait_until(lambda: not any(map(is_alive, ranks)), 10)


def test_a_rank_that_is_stopped_after_its_last_message_is_noticed_too(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        "import os, signal\n"
        "from shardwright.runtime.launch import join_world, meet\n"
        f"rank, _ = join_world(timeout={SECONDS})\n"
        "os.kill(os.getpid(), signal.SIGSTOP) if rank else None\n"
        "meet('at the end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    (line, *_) = lines_of_ranks(done.stdout)
    assert line.startswith("error: rank 0 waited for other ranks longer than a message may take")
    assert "is stopped" in line


def test_ranks_that_cannot_meet_say_so_in_a_line() -> None:
    script = "from shardwright.runtime.launch import join_world\njoin_world(timeout=1)"
    world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9",
             "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=os.environ | world, stderr=subprocess.PIPE,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: rank 1 could not join the 2 ranks: " in done.stderr
    assert "Traceback" not in done.stderr


# An agent that is gone before its rank has begun: it starts ranks in sessions of their own.
AGENT = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], start_new_session=True)
"""
RANK = """
import os, runpy, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.01)
sys.argv[1:] = ["profile", "--cluster", "none.toml"]
"""


@pytest.mark.parametrize(
    "begins", ['runpy.run_module("shardwright", run_name="__main__")', "import shardwright"]
)
def test_a_rank_whose_agent_is_gone_before_it_begins_ends_at_once(begins: str) -> None:
    """Also in a script of one's own, which would make its model and read its data first."""
    done = subprocess.run(
        [sys.executable, "-c", AGENT, RANK + begins], cwd=ROOT,
        env=os.environ | {"TORCHELASTIC_RUN_ID": "none"}, stderr=subprocess.PIPE, text=True,
        timeout=30, check=True,
    )  # fmt: skip
    assert done.stderr.startswith("error: a rank ends with the agent of torchrun that started it")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    with training(tmp_path, "sum") as (agent, ranks):
        os.killpg(agent.pid, signal.SIGINT)
        text, _ = agent.communicate(timeout=60)
    assert lines_of_ranks(text) == ["error: interrupted; the last checkpoint is unharmed"]
    assert wait_until(lambda: not any(map(is_alive, ranks)), 10)


def test_ranks_die_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    with training(tmp_path, "sum") as (agent, ranks):
        os.kill(ranks[1], signal.SIGSTOP)
        agent.kill()
        agent.wait()
        assert wait_until(lambda: not any(map(is_alive, ranks)), 10)
