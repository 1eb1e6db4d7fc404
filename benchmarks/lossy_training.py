"""Training while packets are lost: plain DDP over UDP at several losses, beside DDP over gloo.

``python benchmarks/lossy_training.py --seeds 5``: four ranks on this machine; packets are lost at the
receivers by a seeded dropper. Losses are those of held-out samples at the end.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwright import lossy
from shardwright.lossy import Tolerance, Transport
from shardwright.runtime.launch import launch

RANKS, BATCH, FEATURES, CLASSES = 4, 16, 64, 10
WAYS = {
    "gloo": None,
    "1 % lost, bound 2 %": (0.01, Tolerance(push=0.02)),
    "1 % lost, bound 2 %, forgotten": (0.01, Tolerance(push=0.02, error_feedback=False)),
    "10 % lost, bound 15 %": (0.1, Tolerance(push=0.15)),
}


def teacher(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples that a fixed random network has labelled."""
    fixed = torch.Generator().manual_seed(7)
    first = torch.randn(FEATURES, 32, generator=fixed)
    second = torch.randn(32, CLASSES, generator=fixed)
    x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(seed))
    return x, ((x @ first / 8).tanh() @ second).argmax(1)


def train(seed: int, steps: int, way) -> tuple[float, float]:
    """Return the final loss on held-out samples, and the share of values that was lost."""
    torch.manual_seed(seed)
    widths = (FEATURES, 256, 256)
    layers = [one for a, b in pairwise(widths) for one in (nn.Linear(a, b), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES)))
    network = None
    if way:
        network = lossy.register(
            model, way[1], Transport(packet_bytes=512, timeout=60), host="127.0.0.1",
            dropper=lossy.seeded_dropper(way[0], 100 * seed + dist.get_rank()),
        )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = teacher(BATCH, 10**6 * seed + RANKS * step + dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        x, y = teacher(4096, 10**9)
        loss = float(nn.functional.cross_entropy(model.module(x), y))
    lost = network.lost_share if network else 0.0
    if network:
        network.close()
    return loss, lost


def train_all(seeds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    torch.set_num_threads(1)
    return {name: [train(seed, steps, way) for seed in range(seeds)] for name, way in WAYS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    found = launch(train_all, RANKS, (options.seeds, options.steps), timeout=3600)[0]
    print(f"{RANKS} ranks, {options.steps} steps, {options.seeds} seeds: loss on held-out samples")
    for name, results in found.items():
        losses = [loss for loss, _ in results]
        print(
            f"{name:32} {statistics.mean(losses):.4f} ({' '.join(f'{one:.4f}' for one in losses)}), "
            f"lost {statistics.mean(lost for _, lost in results):.2%}"
        )


if __name__ == "__main__":
    main()
