"""A command of the command line, in this process or in one of its own.

``shardwright`` is what most tests want: the entry point with arguments, folder, store and streams
of its own, in a process that imported torch and loaded the kernels long ago. ``fresh`` starts
Python anew, which takes seconds: for what only a process can show.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cli import main

Done = subprocess.CompletedProcess[str]
# A user's file with a small model.
MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x, y):
        return F.cross_entropy(self.down(torch.relu(self.up(x))), y)

def build():
    return Net()

def example_batch(batch_size=8):
    return {"x": torch.zeros(batch_size, 16), "y": torch.zeros(batch_size, dtype=torch.int64)}
"""


def _variables(folder: Path) -> dict[str, str]:
    return {"SHARDWRIGHT_STORE": str(folder / "records.sqlite"), "OMP_NUM_THREADS": "1"}


def shardwright(*words: str, folder: Path) -> Done:
    """Run a command in this process; a warning fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        for name, value in _variables(folder).items():
            patch.setenv(name, value)
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["shardwright", *words])
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit) as end:
            main()
        signal.signal(signal.SIGINT, before)  # a command is the end of its process
    code = end.value.code
    assert isinstance(code, int)
    return Done(words, code, out.getvalue(), err.getvalue())


def start(*words: str, folder: Path, start_new_session: bool = False) -> subprocess.Popen[str]:
    """Start a command in a fresh process, the first of a process group if asked."""
    return subprocess.Popen(
        [sys.executable, "-m", "shardwright", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env=os.environ | _variables(folder), start_new_session=start_new_session,
    )  # fmt: skip


def fresh(*words: str, folder: Path) -> Done:
    """Run a command in a fresh process."""
    process = start(*words, folder=folder)
    out, err = process.communicate(timeout=200)
    return Done(words, process.returncode, out, err)
