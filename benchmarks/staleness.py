"""What asynchronous pipelines learn, beside synchronous training: ``python benchmarks/staleness.py``.

Four stages predict the next character of the standard library's own text or, with ``--data digits``, read scikit-learn's
digits of 8 x 8 (which has to be installed for that). All train on the same minibatches, from the same weights, with the same optimizer; per mode some seeds. The pipelines run on our executor with its ranks in this
process (its numbers are those of processes: ``tests/runtime/test_asynchronous_ranks.py``), synchronous
training is plain PyTorch. Prints losses along the way, the final loss over a fixed part of the text, or over all
digits, and how far predicted and stale weights were off. Exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import platform
import statistics
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from shardwright.core.program import Program
from shardwright.core.staleness import Staleness
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally

STAGES, CONTEXT, LETTERS, WIDTH, LAYERS, BATCH, TEXT = 4, 12, 64, 64, 7, 32, 200_000
MODES = ("stale", "stash", "spectrain-v1", "spectrain-v2", "pipeoptim")
WINDOWS = 8
OPTIMIZERS = {
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
}
Batch = dict[str, Tensor]


def letters() -> Tensor:
    """Return the beginning of the standard library's modules, in order, as numbers of letters."""
    folder, text = Path(sysconfig.get_paths()["stdlib"]), ""
    for path in sorted(folder.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= TEXT:
            break
    text = text[:TEXT]
    common = [letter for letter, _ in Counter(text).most_common(LETTERS - 1)]
    number = {letter: place for place, letter in enumerate(common)}
    return torch.tensor([number.get(letter, LETTERS - 1) for letter in text])


@dataclass(frozen=True)
class Data:
    """Samples to train on, of which those at the places ``last`` make the final loss."""

    x: Tensor
    y: Tensor
    last: Tensor
    classes: int

    def at(self, places: Tensor) -> Batch:
        """Return the samples at some places."""
        return {"x": self.x[places], "y": self.y[places]}

    def first(self) -> nn.Module:
        """Make what comes ahead of the layers."""
        if self.x.is_floating_point():
            return nn.Linear(self.x.shape[1], WIDTH)
        mix = nn.Embedding(LETTERS, 16), nn.Flatten(1), nn.Linear(16 * CONTEXT, WIDTH)
        return nn.Sequential(*mix)


def text_data() -> Data:
    """Return the letters from every place on, and those that follow."""
    text = letters()
    x, y = text.unfold(0, CONTEXT, 1)[:-1], text[CONTEXT:]
    return Data(x, y, torch.arange(0, 100_000, 23), LETTERS)


def digit_data() -> Data:
    """Return scikit-learn's digits."""
    from sklearn.datasets import load_digits  # type: ignore[import-not-found]

    found: Any = load_digits()
    x = torch.tensor(found.data, dtype=torch.float32) / 16
    y = torch.tensor(found.target)
    return Data(x, y, torch.arange(len(y)), 10)


DATA = {"text": text_data, "digits": digit_data}


class Layer(nn.Module):
    """x + down(tanh(up(norm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add to what comes in."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Samples to their class."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.first = data.first()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, data.classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h), y)


@dataclass(frozen=True)
class Run:
    """The losses of minibatches, the final one, and the squares by which weights
    were off, by steps ahead: (predicted, stale)."""

    losses: list[float]
    final: float
    squares: dict[int, list[tuple[float, float]]]


@dataclass(frozen=True)
class Task:
    """What is trained, and how."""

    data: Data
    optimizer: functools.partial[torch.optim.Optimizer]
    steps: int

    def batches(self, seed: int) -> list[Batch]:
        """Return a seed's minibatches."""
        drawn = torch.Generator().manual_seed(1000 + seed)
        places = torch.randint(len(self.data.y), (self.steps, BATCH), generator=drawn)
        return [self.data.at(one) for one in places]

    def final(self, module: Net) -> float:
        """Return the loss at the end."""
        with torch.no_grad():
            return float(module(**self.data.at(self.data.last)))

    def model(self, seed: int) -> Net:
        """Return a seed's model."""
        torch.manual_seed(seed)
        return Net(self.data)


def synchronous(task: Task, seed: int) -> Run:
    """Train with plain PyTorch."""
    module, losses = task.model(seed), list[float]()
    optimizer = task.optimizer(module.parameters())
    for batch in task.batches(seed):
        loss = module(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Run(losses, task.final(module), {})


def asynchronous(task: Task, seed: int, mode: str, captured: Captured, program: Program) -> Run:
    """Train a pipeline of four stages, its ranks in this process."""
    module = task.model(seed)
    every = (STAGES + 1) if mode in ("spectrain-v1", "spectrain-v2", "pipeoptim") else 0

    def work(world: LocalWorld) -> Run:
        mine = copy.deepcopy(module)
        options = RunOptions(world=world, forecast_every=every)
        executor = Executor(captured, program, mine, optimizer=task.optimizer, options=options)
        losses, squares = dict[int, float](), dict[int, list[tuple[float, float]]]()
        known = None
        for batch in task.batches(seed):
            loss = executor.step(batch)
            if executor.left is not None:
                losses[executor.left] = float(loss)
            if (told := executor.forecast) is not known and told is not None:
                known = told
                for steps, ahead, stale in zip(told.steps, told.predicted, told.stale, strict=True):
                    if steps:
                        squares.setdefault(steps, []).append((ahead**2, stale**2))
        losses |= {left.number: float(left.loss) for left in executor.flush()}
        executor.to_module(mine)
        return Run([losses[one] for one in sorted(losses)], task.final(mine), squares)

    return run_locally(work, STAGES)[0][0]


def curve(runs: list[Run]) -> list[str]:
    """Return the mean losses of equal windows, over all seeds."""
    size = len(runs[0].losses) // WINDOWS
    return [
        f"{statistics.fmean(x for run in runs for x in run.losses[at : at + size]):.3f}"
        for at in range(0, size * WINDOWS, size)
    ]


def errors(runs: list[Run]) -> list[tuple[int, float, float]]:
    """Return by steps ahead the RMSE of predicted and of stale weights, over seeds and time."""
    found = list[tuple[int, float, float]]()
    for steps in sorted({steps for run in runs for steps in run.squares}):
        pairs = [pair for run in runs for pair in run.squares.get(steps, ())]
        ahead, stale = (math.sqrt(statistics.fmean(side)) for side in zip(*pairs, strict=True))
        found.append((steps, ahead, stale))
    return found


def verdicts(found: dict[str, list[Run]]) -> list[tuple[str, bool]]:
    """Return what must hold, and whether it does."""
    finals = {mode: [run.final for run in runs] for mode, runs in found.items()}
    mean = {mode: statistics.fmean(values) for mode, values in finals.items()}
    told = list[tuple[str, bool]]()
    for mode in ("spectrain-v1", "spectrain-v2"):
        within = mean[mode] <= max(finals["synchronous"])
        told.append((f"{mode}: mean final loss within the synchronous seeds' spread", within))
        told.append((f"{mode}: mean final loss below stale", mean[mode] < mean["stale"]))
        for steps, ahead, stale in errors(found[mode]):
            told.append((f"{mode}: RMSE predicted < stale, s = {steps}", ahead < stale))
    return told


def trained(task: Task, seeds: int, keep: Path | None) -> dict[str, list[Run]]:
    """Return all runs, made or read from what was kept."""
    done: dict[str, Any] = json.loads(keep.read_text()) if keep and keep.exists() else {}
    captured = capture(Net(task.data), task.data.at(torch.arange(BATCH)))
    found: dict[Any, list[Run]] = {"synchronous": []} | {mode: [] for mode in MODES}
    for mode, runs in found.items():
        staleness: Staleness = "none" if mode == "synchronous" else mode
        strategy = seed_strategy(captured.graph, Seed(stages=STAGES, staleness=staleness))
        program = lower(captured.graph, strategy)
        for seed in range(seeds):
            key = f"{mode} {seed}"
            if key in done:
                losses, final, squares = done[key]
                runs.append(Run(losses, final, {int(s): pairs for s, pairs in squares.items()}))
                continue
            made = (
                synchronous(task, seed)
                if mode == "synchronous"
                else asynchronous(task, seed, mode, captured, program)
            )
            runs.append(made)
            done[key] = made.losses, made.final, made.squares
            if keep:
                keep.write_text(json.dumps(done))
    return found


def main() -> int:
    """Train, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="text", choices=sorted(DATA))
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--optimizer", default="momentum", choices=sorted(OPTIMIZERS))
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--keep", default="", help="a file of what is done, to go on from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    make = functools.partial(OPTIMIZERS[options.optimizer], lr=options.lr)
    task = Task(DATA[options.data](), make, options.steps)
    found = trained(task, options.seeds, Path(options.keep) if options.keep else None)
    console = Console(width=150)
    title = f"{options.data}, {options.optimizer}, lr {options.lr:g}, {options.steps} minibatches of {BATCH}, {options.seeds} seeds"
    columns = [f"{at + 1}/{WINDOWS}" for at in range(WINDOWS)]
    table = Table(
        "mode", *columns, "final: mean", "seeds", title=f"mean losses along the way; {title}"
    )
    for mode, runs in found.items():
        finals = [run.final for run in runs]
        spread = f"{min(finals):.3f}-{max(finals):.3f}"
        table.add_row(mode, *curve(runs), f"{statistics.fmean(finals):.4f}", spread)
    console.print(table)
    table = Table(
        "mode", "s", "predicted", "stale", "ratio", title="RMSE of weights s updates later"
    )
    for mode, runs in found.items():
        for steps, ahead, stale in errors(runs):
            table.add_row(mode, str(steps), f"{ahead:.3g}", f"{stale:.3g}", f"{ahead / stale:.2f}")
    console.print(table)
    told = verdicts(found)
    for text, holds in told:
        console.print(f"{'holds ' if holds else 'MISSED'} {text}")
    console.print(f"Python {platform.python_version()}, torch {torch.__version__}; one process")
    return 0 if all(holds for _, holds in told) else 1


if __name__ == "__main__":
    sys.exit(main())
