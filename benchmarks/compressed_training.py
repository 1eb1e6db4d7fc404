"""What plans that compress gradients learn, beside whole gradients: ``python benchmarks/compressed_training.py``.

Four ranks in this process run our executor: a small GPT predicts the next character of the standard library's own
text, a small CNN reads drawn digits (shifted, noisy). All train on the same batches, from the same weights, at the same
rate; momentum is the optimizer's where gradients are whole, and comes before the selection where elements are,
masked where something was sent unless said otherwise.
Prints the loss over fixed held-out samples at the end, mean and by seed, and on the way there.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sysconfig
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.core.strategy import Feedback, GradientSync
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally

RANKS, BATCH, MOMENTUM = 4, 32, 0.9
CONTEXT, LETTERS, WIDTH, HEADS = 16, 64, 64, 4
Batch = dict[str, Tensor]

# Rows of digits, three bits each.
ROWS = ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71122", "75757", "75717")


class Text(nn.Module):
    """A GPT of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(LETTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, LETTERS)
        self.register_buffer("places", torch.arange(CONTEXT))

    def forward(self, letters: Tensor, labels: Tensor) -> Tensor:
        x = self.letter(letters) + self.place(self.places)
        parts = self.mixed(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.behind(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Digits(nn.Module):
    """Two convolutions and two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.three, self.four = nn.Linear(32 * 9, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.one(images)), 2)
        x = F.max_pool2d(F.relu(self.two(x)), 2)
        return F.cross_entropy(self.four(F.relu(self.three(x.flatten(1)))), labels)


@functools.cache
def letters() -> Tensor:
    """Return the beginning of the standard library's modules as numbers."""
    folder, text = Path(sysconfig.get_paths()["stdlib"]), ""
    for path in sorted(folder.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) > 200_000:
            break
    return torch.tensor([min(ord(letter) - 32, LETTERS - 1) % LETTERS for letter in text.lower()])


def text_batch(count: int, source: torch.Generator, *, held_out: bool) -> Batch:
    """Return windows of the text, held-out ones of its last tenth."""
    whole = letters()
    border = len(whole) * 9 // 10
    ends = (border, len(whole)) if held_out else (0, border)
    first = torch.randint(ends[0], ends[1] - CONTEXT - 1, (count, 1), generator=source)
    window = whole[first + torch.arange(CONTEXT + 1)]
    return {"letters": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}


def digit_batch(count: int, source: torch.Generator, *, held_out: bool) -> Batch:
    """Return digits of five rows of three, doubled, anywhere in twelve by twelve, under noise."""
    del held_out  # another generator draws others
    labels = torch.randint(10, (count,), generator=source)
    images = 0.7 * torch.randn(count, 1, 12, 12, generator=source)
    corners = torch.randint(0, 3, (count, 2), generator=source).tolist()
    for image, label, (top, left) in zip(images, labels.tolist(), corners, strict=True):
        bits = [[int(row) >> place & 1 for place in (2, 1, 0)] for row in ROWS[label]]
        glyph = (
            torch.tensor(bits, dtype=torch.float32).repeat_interleave(2, 0).repeat_interleave(2, 1)
        )
        image[0, top : top + 10, left : left + 6] += 2 * glyph
    return {"images": images, "labels": labels}


MODELS: dict[str, Any] = {"text": (Text, text_batch), "digits": (Digits, digit_batch)}


@dataclass(frozen=True)
class Way:
    """How gradients travel."""

    name: str
    compressor: Any = "none"
    feedback: Feedback = field(default=Feedback())

    def sync(self, density: float) -> GradientSync:
        density = density if "top-k" in self.compressor else 1.0
        return GradientSync(compressor=self.compressor, density=density, feedback=self.feedback)


def ways(warm_up: int) -> list[Way]:
    """Return whole gradients, and each rule of residuals beside the others."""
    front = Feedback(momentum=MOMENTUM, warm_up=warm_up)
    plain = Feedback(warm_up=warm_up, residual="none")
    return [
        Way("whole"),
        Way("top-k, conserving", "top-k", front),
        Way("top-k, unmasked", "top-k", replace(front, masked=False)),
        Way("top-k, no residual", "top-k", plain),
        Way("gtop-k, conserving", "gtop-k", front),
        Way("gtop-k, unmasked", "gtop-k", replace(front, masked=False)),
        Way("gtop-k, paper", "gtop-k", replace(front, residual="paper")),
        Way("gtop-k, no residual", "gtop-k", plain),
        Way("powersgd, rank 2", "powersgd", Feedback(rank=2)),
    ]


def train(model: str, way: Way, asked: argparse.Namespace, seed: int) -> list[float]:
    """Return the loss over held-out samples after each so many steps, last at the end."""
    make, batch = MODELS[model]
    torch.manual_seed(seed)
    module, source = make(), torch.Generator().manual_seed(1000 + seed)
    given = [batch(BATCH, source, held_out=False) for _ in range(asked.steps)]
    captured = capture(module, given[0])
    plain = seed_strategy(captured.graph, Seed(data=RANKS))
    program = lower(captured.graph, replace(plain, gradient_sync=way.sync(asked.density)))
    optimizer = functools.partial(torch.optim.SGD, lr=asked.rate, momentum=MOMENTUM)

    unseen = batch(1024, torch.Generator().manual_seed(7), held_out=True)

    def run(world: LocalWorld) -> list[float]:
        mine, losses = copy.deepcopy(module), list[float]()
        options = RunOptions(world=world, lower=lower)
        executor = Executor(captured, program, mine, optimizer=optimizer, options=options)
        slower = [round(share * asked.steps) for share in asked.decay]
        schedule = torch.optim.lr_scheduler.MultiStepLR(executor.optimizer, slower)
        for step, one in enumerate(given, 1):
            executor.step(one)
            schedule.step()
            if step % asked.every == 0 or step == asked.steps:
                executor.to_module(mine)
                with torch.no_grad():
                    losses.append(float(mine(**unseen)))
        return losses

    return run_locally(run, RANKS)[0][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), action="append")
    parser.add_argument("--way", action="append", help="name of a way, such as 'top-k, conserving'")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--warm-up", type=int, default=50, help="steps of each density")
    parser.add_argument("--every", type=int, default=500, help="steps between looks at the loss")
    parser.add_argument(
        "--decay",
        type=float,
        nargs="*",
        default=[],
        help="shares of the steps behind which the rate is a tenth, such as .57 .86 (gTop-k's)",
    )
    asked = parser.parse_args()
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    torch.set_num_threads(1)
    print(
        f"{RANKS} ranks, {asked.steps} steps, seeds {list(seeds)}, density {asked.density:g}, warm-up of "
        f"{asked.warm_up} steps of each of four densities, rate {asked.rate:g}"
        f"{''.join(f', a tenth behind {share:.0%}' for share in asked.decay)}: loss of held-out samples"
    )
    for model in asked.model or MODELS:
        for way in ways(asked.warm_up):
            if asked.way and way.name not in asked.way:
                continue
            began = time.process_time()
            curves = [train(model, way, asked, seed) for seed in seeds]
            losses = [curve[-1] for curve in curves]
            print(
                f"{model:7} {way.name:22} {statistics.mean(losses):.4f} "
                f"({' '.join(f'{one:.4f}' for one in losses)}), "
                f"{time.process_time() - began:.0f} s of a core; means of every {asked.every} steps "
                f"{' '.join(f'{statistics.mean(one):.4f}' for one in zip(*curves, strict=True))}",
                flush=True,
            )


if __name__ == "__main__":
    main()
