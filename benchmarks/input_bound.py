"""Predicted against measured steps where a loader is slow: ``python benchmarks/input_bound.py [milliseconds ...]``.

A data set that sleeps so long for each sample (storage that is waited for) is read by a DataLoader with one worker. A
plan is made for it (``plan --loader``) for one rank, as described, and for this machine, as measured, where one without the loader is made, too; both
are trained (``run --loader``), three times for some seconds each. A step's measured seconds are the median of computing with the mean of waiting, and of the runs the
median; predictions are of rates measured once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BATCH, RUNS, SECONDS = 16, 3, 4.0  # seconds of a run: a machine may be slow for some
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
        return 100_000  # no epoch ends, whose workers start anew

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


def planned(folder: Path, cluster: str, *more: str) -> dict[str, Any]:
    """Return the plan that is chosen for a cluster."""
    words = ("plan", "net.py:build", "-c", cluster, "-b", str(BATCH), "-o", "plan.json", *more)
    found = asked(folder, *words)
    return found["plans"][found["chosen"]]


def trained(folder: Path, steps: int) -> tuple[float, float]:
    """Return a step's seconds, and which share of them waited."""
    words = ("run", "plan.json", "net.py:build", "--loader", "data.py:loader", "-n", str(steps))
    run = asked(folder, *words)
    return run["step_seconds"] + run["input_seconds"], run["input_share"]


def main() -> None:
    for milliseconds in map(float, sys.argv[1:] or ["1", "4"]):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "net.py").write_text(NET)
            (folder / "data.py").write_text(DATA.replace("SECONDS", str(milliseconds / 1000)))
            two = (ROOT / "examples/two_cores.toml").read_text()
            (folder / "one.toml").write_text(two.replace("devices = 2", "devices = 1"))
            for cluster in ("one.toml", "local"):
                free = planned(folder, cluster)
                plan = planned(folder, cluster, "--loader", "data.py:loader")
                predicted = plan["step_seconds"]
                runs = sorted(trained(folder, round(SECONDS / predicted)) for _ in range(RUNS))
                measured = runs[RUNS // 2][0]
                print(
                    f"{milliseconds:g} ms a sample, {plan['label']} (without the loader {free['label']}, "
                    f"{free['step_seconds'] * 1e3:.1f} ms): predicted {predicted * 1e3:.1f} ms, measured "
                    f"{measured * 1e3:.1f} ms ({predicted / measured - 1:+.1%}), of "
                    + ", ".join(
                        f"{seconds * 1e3:.1f} (waited {share:.0%})" for seconds, share in runs
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
