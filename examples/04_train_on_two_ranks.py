"""Plan a small model for two ranks, train it on both, and compare with plain PyTorch."""

from functools import partial
from pathlib import Path

import torch
from torch import nn

import shardwright
from shardwright.files.clusterfile import load_cluster
from shardwright.runtime.launch import launch

STEPS = 5
BATCH = 64


class Classifier(nn.Module):
    """A plain module that returns its loss; nothing in it knows about ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), label)


def model() -> nn.Module:
    """Return equal weights wherever it is called."""
    torch.manual_seed(0)
    return Classifier().double()


def batch(step: int) -> dict[str, torch.Tensor]:
    """Return the global batch of a step, equal on every rank."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 32, generator=draw, dtype=torch.float64)
    return {"x": x, "label": x.argmax(1) % 10}


make_optimizer = partial(torch.optim.AdamW, lr=3e-3)


def train(plan: shardwright.Plan) -> list[float]:
    """Train as one rank of the world."""
    executor = shardwright.build(plan, model(), optimizer=make_optimizer, batch=batch(0))
    return [executor.step(batch(step)).item() for step in range(STEPS)]


def train_alone() -> list[float]:
    """Train in one process with plain PyTorch."""
    module = model()
    optimizer = make_optimizer(module.parameters())
    losses = []
    for step in range(STEPS):
        loss = module(**batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    cluster = load_cluster(Path(__file__).parent / "two_cores.toml")
    frontier = shardwright.plan(
        model(), cluster, batch=batch(0), global_batch=BATCH, precision="float64", measure="never"
    )
    plans = [plan for plan in frontier.plans if len(plan.strategy.devices) == 2]
    print(f"{len(plans)} plans on the frontier use two ranks")
    ours, *others = launch(train, 2, (plans[0],))
    print("every rank reports the same losses:", all(other == ours for other in others))
    alone = train_alone()
    for step, (mine, theirs) in enumerate(zip(ours, alone, strict=True)):
        print(f"step {step}  two ranks {mine:.6f}  one process {theirs:.6f}")
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, alone, strict=True))
    print("equal to 1e-12:", worst < 1e-12)
