"""What a user gets wrong: one clear message, exit code 2 (1 when nothing fits), nothing left."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.command import MODEL, fresh, shardwright

pytestmark = [pytest.mark.torch, pytest.mark.slow]
BAD = """
import torch
from torch import nn

class Mismatched(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(17, 8)

    def forward(self, x, y):
        return self.layer(x).sum()

class Lossless(Mismatched):
    def forward(self, x, y):
        return x

def example_batch(batch_size=8):
    return {"x": torch.zeros(batch_size, 16), "y": torch.zeros(batch_size, dtype=torch.int64)}
"""
PLANNED = ("-c", "1x2xV100", "-b", "8")


def complaint(done: subprocess.CompletedProcess[str], code: int) -> str:
    """Return the one line of the complaint, after checking that it is all that was said."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("factory", "says"),
    [("Mismatched", "shapes cannot be multiplied"), ("Lossless", "must return its loss")],
)
def test_a_model_that_cannot_be_captured_is_one_message(
    factory: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    done = shardwright("plan", f"bad.py:{factory}", *PLANNED, folder=tmp_path)
    assert says in complaint(done, 2)
    assert not (tmp_path / "plan.json").exists()


def test_small_missing_memory_is_told_in_a_unit_that_shows_it(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    done = shardwright("plan", "net.py:build", *PLANNED, "--memory-limit", "1 KiB", folder=tmp_path)
    said = complaint(done, 1)
    assert "must fit 1.00 KiB per device" in said
    assert "KiB too much; any one of these helps" in said
    assert "KiB per device instead of 1.00 KiB (--memory-limit" in said


def test_another_process_with_other_threads_and_another_hash_seed_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of numpy and Numba; a command has as many of torch's as OMP_NUM_THREADS says, here and there."""
    (tmp_path / "net.py").write_text(MODEL)
    words = ("plan", "net.py:build", *PLANNED)
    here = shardwright(*words, "-o", "here", folder=tmp_path)
    threads = str(1 + int(os.environ.get("OMP_NUM_THREADS", "1")))
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    for name in ("NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, threads)
    there = fresh(*words, "-o", "there", folder=tmp_path)
    assert (here.returncode, there.returncode) == (0, 0), here.stderr + there.stderr
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()
