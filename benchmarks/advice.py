"""Whether advice is good here: what it takes, beside its neighbours measured afterwards.

    python benchmarks/advice.py [--turns 8]

Of a small GPT and a convolution net: the settings that `advise settings` takes, beside all others measured anew; and the
batch that `advise batch` takes of three measured ones and those that it says to measure too, beside half and twice as many samples, by the seconds to the target
that a noise scale of 16 samples means. Advised points should take at most 5 % longer than the best.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

NOISE = 16.0
WORDS = """
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.maps, self.out = nn.LayerNorm(128), nn.Linear(128, 384), nn.Linear(128, 128)
        self.after, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (4, 32)).transpose(1, 2) for one in self.maps(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.blocks, self.head = nn.Embedding(500, 128), nn.ModuleList([Block() for _ in range(3)]), nn.Linear(128, 500)

    def forward(self, x):
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten())

def build():
    return Net()

def example_batch(batch_size=8):
    return {"x": torch.randint(0, 500, (batch_size, 64))}
"""
PICTURES = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (3, 16, 32, 64)
        self.layers = nn.ModuleList([nn.Conv2d(a, b, 3, 2, 1) for a, b in zip(sizes, sizes[1:])])
        self.head = nn.Linear(64, 10)

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)

def build():
    return Net()

def example_batch(batch_size=8):
    return {"x": torch.randn(batch_size, 3, 64, 64), "y": torch.zeros(batch_size, dtype=torch.int64)}
"""


def asked(folder: Path, *words: str) -> dict:
    """Ask for advice, and return it as JSON."""
    command = [sys.executable, "-m", "shardwright", "advise", *words, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def settings(folder: Path, turns: int) -> str:
    words = ("settings", "net.py:build", "-b", "16", "--turns", str(turns))
    first, again = asked(folder, *words), asked(folder, *words)
    answer = first["answers"][0]
    taken = "plain" if answer.startswith("Leave") else first["settings"][0]["name"]
    found = {one["name"]: one["seconds"] for one in again["settings"]}
    best = min(found, key=lambda name: found[name])
    others = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in found.items())
    return f"takes {taken}, {found[taken] / found[best] - 1:+.1%} of the best of {others}"


def steps(folder: Path, batches: list[int], turns: int) -> dict[int, float]:
    """Return the least seconds of a training step by its batch, measured in turns."""
    made: dict[str, object] = {}
    exec((folder / "net.py").read_text(), made)
    module = made["build"]()  # type: ignore[operator]
    update = torch.optim.SGD(module.parameters(), lr=1e-3)
    data = {size: made["example_batch"](size) for size in batches}  # type: ignore[operator]
    best = dict.fromkeys(batches, float("inf"))
    for _ in range(turns + 1):
        for size in batches:
            begin = time.perf_counter()
            module(**data[size]).backward()
            update.step()
            update.zero_grad()
            best[size] = min(best[size], time.perf_counter() - begin)
    return best


def batch(folder: Path, turns: int) -> str:
    sizes = [4, 16, 64]
    for _ in range(3):  # what is worth measuring too is measured, and asked about again
        measured = steps(folder, sizes, turns)
        points = ",".join(f"{size}:{seconds:.6f}s" for size, seconds in measured.items())
        answer = asked(folder, "batch", "--noise-scale", str(NOISE), "--measured", points)
        if not answer["between"] or answer["between"]["batch"] in sizes:
            break
        sizes = sorted({*sizes, answer["between"]["batch"]})
    soonest = min(answer["options"], key=lambda one: one["seconds"])
    taken = soonest["batch"]
    around = sorted({*measured, taken // 2, taken * 2})
    whole = {
        size: (1 + NOISE / size) * seconds for size, seconds in steps(folder, around, turns).items()
    }
    best = min(whole, key=lambda size: whole[size])
    others = ", ".join(f"{size}: {seconds / whole[taken]:.2f}" for size, seconds in whole.items())
    return f"takes {taken}, {whole[taken] / whole[best] - 1:+.1%} of the best; time to target by batch: {others}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=8)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    for name, text in (("words", WORDS), ("pictures", PICTURES)):
        with tempfile.TemporaryDirectory() as where:
            folder = Path(where)
            (folder / "net.py").write_text(text)
            for what, run in (("settings", settings), ("batch", batch)):
                print(f"{name}, {what}: {run(folder, turns)}", flush=True)


if __name__ == "__main__":
    main()
