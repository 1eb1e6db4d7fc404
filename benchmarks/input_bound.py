"""Predicted against measured steps where a loader is slow: ``python benchmarks/input_bound.py [milliseconds ...]``.

A data set that sleeps so long for each sample (storage that is waited for) is read by a DataLoader with one worker. A
plan is made for it on one and on two ranks (``plan --loader``) and trained (``run --loader``).
A step's measured seconds are the median of computing with the mean of waiting; predictions are of rates measured once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BATCH, STEPS = 16, 30
NET = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 8)

    def forward(self, x, y):
        return F.cross_entropy(self.down(torch.relu(self.up(x))), y)

def build():
    return Net()

def example_batch(batch_size=16):
    return {"x": torch.zeros(batch_size, 64), "y": torch.zeros(batch_size, dtype=torch.int64)}
"""
DATA = """
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 2048

    def __getitem__(self, index):
        time.sleep(SECONDS)
        return {"x": torch.ones(64), "y": torch.tensor(1)}

loader = DataLoader(Slow(), batch_size=16, shuffle=True, num_workers=1)
"""


def asked(folder: Path, *words: str) -> dict[str, Any]:
    """Run a command, and return what it says as JSON."""
    command = [sys.executable, "-m", "shardwright", *words, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def main() -> None:
    for milliseconds in map(float, sys.argv[1:] or ["1", "4"]):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "net.py").write_text(NET)
            (folder / "data.py").write_text(DATA.replace("SECONDS", str(milliseconds / 1000)))
            two = (ROOT / "examples/two_cores.toml").read_text()
            for ranks in (1, 2):
                (folder / "cluster.toml").write_text(
                    two.replace("devices = 2", f"devices = {ranks}")
                )
                planned = asked(
                    folder, "plan", "net.py:build", "-c", "cluster.toml", "-b", str(BATCH),
                    "--measure", "never", "--loader", "data.py:loader",
                )  # fmt: skip
                plan = planned["plans"][planned["chosen"]]
                run = asked(
                    folder, "run", "plan.json", "net.py:build", "--loader", "data.py:loader",
                    "-n", str(STEPS),
                )  # fmt: skip
                measured = run["step_seconds"] + run["input_seconds"]
                predicted = plan["step_seconds"]
                print(
                    f"{milliseconds:g} ms a sample, {ranks} ranks, {plan['label']}: predicted "
                    f"{predicted * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms "
                    f"({predicted / measured - 1:+.1%}), waited {run['input_share']:.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
