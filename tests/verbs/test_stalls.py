"""The command that analyses a loader: what it says of one, and of users' mistakes."""

import json
import math
import os

import pytest

from shardwright.files.clusterfile import read_cluster
from shardwright.verbs.request import Watch
from shardwright.verbs.stalls import _line, with_loader
from tests.command import shardwright
from tests.kernels import ROOT

pytestmark = pytest.mark.torch
DATA = """
import os
import signal
import time
import torch
from torch.utils.data import DataLoader, get_worker_info

class Numbers:
    def __init__(self, bad=-1):
        self.bad = bad

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError(f"sample {index} is bad")
        return torch.zeros(3)

class Mortal(Numbers):
    def __getitem__(self, index):
        if get_worker_info() and index > 20:
            os.kill(os.getpid(), self.bad)
        return torch.zeros(3)

class Handed(Numbers):
    def __getitem__(self, index):
        time.sleep(0.01 if get_worker_info() else 0)
        return torch.zeros(3)

loader = DataLoader(Numbers(), batch_size=2)
handed = DataLoader(Handed(), batch_size=2, num_workers=1)
bad = DataLoader(Numbers(9), batch_size=2)
bad_ahead = DataLoader(Numbers(9), batch_size=2, num_workers=1)
anew = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="forkserver")
mortal = DataLoader(Mortal(signal.SIGKILL), batch_size=2, num_workers=1)
crowded = DataLoader(Mortal(signal.SIGBUS), batch_size=2, num_workers=1)
few = [1, 2, 3]
text = "cuda"

def crashes():
    raise RuntimeError("no such bucket")

def step(batch):
    time.sleep(0.001)

def wrong(batch):
    raise KeyError("labels")

def of_two(batch, more):
    pass

def ends(batch):
    raise SystemExit(0)

def slowly():
    for _ in range(40):
        time.sleep(0.001)
        yield torch.zeros(1, 3)
"""


def test_a_loader_and_a_step_are_named_and_analysed(tmp_path):
    (tmp_path / "data.py").write_text(DATA)
    words = ("stalls", "data.py:loader", "--step", "data.py:step", "--batches", "8")
    done = shardwright(*words, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["batch_samples"], found["workers"], found["dataset_samples"]) == (2, 0, 40)
    assert found["resident_seconds"] > 0.001
    assert found["binding"] == "computation"


def test_workers_that_start_anew_find_the_users_file(tmp_path):
    (tmp_path / "data.py").write_text(DATA)
    words = ("stalls", "data.py:anew", "--step", "data.py:step", "--batches", "8", "--json")
    done = shardwright(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workers"] == 1


def test_what_workers_take_to_hand_over_is_part_of_what_a_plan_is_made_for(tmp_path):
    """Samples that take 10 ms of a worker, and nothing where one process draws them."""
    (tmp_path / "data.py").write_text(DATA)
    one = read_cluster((ROOT / "examples/two_cores.toml").read_text())
    found = with_loader(one, f"{tmp_path}/data.py:handed", 2, Watch())
    for samples in (1, 2):
        assert samples / found.rank_input_rate + found.rank_batch_seconds >= samples * 0.010
    assert found.host_cores == len(os.sched_getaffinity(0))  # ranks compute on them, too
    # Who cannot be told to read some samples only reads all of them on every rank.
    found = with_loader(one, f"{tmp_path}/data.py:slowly", 2, Watch())
    assert (found.rank_input_rate, found.host_input_rate) == (0.0, 0.0)
    assert 0 < found.input_rate <= 1 / 0.001


def test_a_batch_takes_what_its_samples_do_and_something_besides():
    for each, besides in ((0.001, 0.002), (0.001, 0.0), (0.0, 0.002)):
        speeds = {rows: rows / (each * rows + besides) for rows in (8, 16)}
        rate, seconds = _line(speeds)
        for rows, speed in speeds.items() if each else ():
            assert rows / rate + seconds == pytest.approx(rows / speed)
    assert _line({16: 400.0}) == (400.0, 0.0)
    assert _line({8: 410.0, 16: 400.0}) == (400.0, 0.0)  # measured so: whole batches count
    assert _line({16: math.inf}) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("loader", "step", "says"),
    [
        (
            "bad",
            "step",
            "the loader data.py:bad raised ValueError: sample 9 is bad (at data.py:17)",
        ),
        ("bad_ahead", "step", "raised ValueError: sample 9 is bad (at data.py:17)"),
        ("crashes", "step", "raised RuntimeError: no such bucket (at data.py:42)"),
        ("mortal", "step", "is killed by signal: Killed, as the system does when memory runs out"),
        ("crowded", "step", "Bus error, as it is where shared memory (/dev/shm) is full"),
        ("loader", "wrong", "the step data.py:wrong raised KeyError: 'labels' (at data.py:48)"),
        ("loader", "of_two", "the step data.py:of_two raised TypeError: of_two() missing 1"),
        ("loader", "ends", "raised SystemExit: 0 (at data.py:54)"),
        ("text", "step", "or a function that returns one, not str"),
        ("few", "step", "gives 3 batches"),
        ("nothing", "step", "has no function 'nothing'"),
        ("loader", "few", "is list; name a function of one batch"),
    ],
)
def test_what_a_user_gets_wrong_is_told_in_one_line(loader, step, says, tmp_path):
    (tmp_path / "data.py").write_text(DATA)
    words = ("stalls", f"data.py:{loader}", "--step", f"data.py:{step}", "--batches", "8")
    done = shardwright(*words, folder=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_a_page_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "data.py").write_text(DATA)
    for page, says in ((".", "is a folder"), ("nowhere/x.html", "there is no folder")):
        words = ("stalls", "data.py:loader", "--step", "data.py:wrong", "--html", page)
        done = shardwright(*words, folder=tmp_path)
        assert done.returncode == 2
        assert says in done.stderr
