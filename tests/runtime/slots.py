"""A pipeline that is never flushed, in one process: written from the arithmetic of slots, knowing no Program.

In every slot each stage k of N runs one forward, of the microbatch that entered ceil(k / 2) slots ago, and one backward, of
the one that entered N - 1 - floor(k / 2) slots ago, and behind the last of a minibatch's m its own optimizer. The model is a row of residual layers,
each two linear maps with tanh and dropout between, and a linear head under a mean squared error: its backward
is written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]  # of a stage, by name
# Of a layer, a minibatch and one of its microbatches.
Mask = Callable[[int, int, int, tuple[int, ...]], Tensor]


class Layer(nn.Module):
    """x + down(dropout(tanh(up(x))))."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(torch.tanh(self.up(x)), self.rate, self.training)
        return x + self.down(h)


class Row(nn.Module):
    """Layers that are alike, and a head."""

    def __init__(self, width: int, depth: int, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, rate) for _ in range(depth))
        self.head = nn.Linear(width, 3)
        self.rate = rate

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.head(x), y)


@dataclass(frozen=True)
class Rule:
    """An optimizer, by its formulas. ``rate`` is that of a period; ``annealing``: of PipeMare, its K."""

    kind: str
    rate: Callable[[int], float]
    decay: float = 0.0
    momentum: float = 0.9
    dampening: float = 0.0
    max_norm: float = math.inf  # of the gradients of a stage
    course: str = "last"
    limit: float = math.inf
    annealing: int = 0

    def step(
        self, weight: Tensor, gradient: Tensor, kept: dict[str, Tensor], slot: int, share: float
    ) -> None:
        """Take a step; ``kept`` is what the optimizer remembers of a weight, ``share`` of the learning rate."""
        rate = self.rate(slot) * share
        if self.kind in ("sgd", "nesterov"):
            gradient = gradient + self.decay * weight
            before = kept.get("b")
            damped = (1 - self.dampening) * gradient
            kept["b"] = gradient.clone() if before is None else self.momentum * before + damped
            own = gradient + self.momentum * kept["b"] if self.kind == "nesterov" else kept["b"]
            weight -= rate * own
            return
        if self.kind == "adamw":
            weight *= 1 - rate * self.decay
        else:
            gradient = gradient + self.decay * weight
        kept["t"] = kept.get("t", torch.zeros(())) + 1
        kept["m"] = 0.9 * kept.get("m", 0.0) + 0.1 * gradient
        kept["v"] = 0.999 * kept.get("v", 0.0) + 0.001 * gradient**2
        weight -= rate * self.direction(kept)

    def direction(self, kept: dict[str, Tensor]) -> Tensor:
        """Return D: what the last step went along."""
        if "b" in kept:
            return kept["b"]
        t = int(kept["t"])
        return kept["m"] / (1 - 0.9**t) / ((kept["v"] / (1 - 0.999**t)).sqrt() + 1e-8)

    def predicted(self, weight: Tensor, kept: dict[str, Tensor], steps: int, slot: int) -> Tensor:
        """Return a weight some steps on."""
        if not kept or steps == 0:
            return weight.clone()
        rate, moved, left = self.rate(slot), weight.clone(), 1.0
        for _ in range(steps):  # one after another: the closed forms are what is tested
            if self.course == "difference":
                moved += (weight - kept["before"]).clamp(-rate * self.limit, rate * self.limit)
                continue
            if self.course == "decaying":
                left *= 0.9  # momentum, and Adam's first beta
            if self.kind == "adamw":
                moved = moved * (1 - rate * self.decay)
            moved = moved - rate * left * self.direction(kept).clamp(-self.limit, self.limit)
        return moved


@dataclass
class Stage:
    """A stage: its layers (and whether the head is among them), weights, and what is under way."""

    layers: list[int]
    has_head: bool
    weights: Weights
    kept: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    saved: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    forward: dict[int, Weights] = field(default_factory=dict)
    updates: int = 0
    lags: list[int] = field(default_factory=list)
    begun: dict[int, int] = field(default_factory=dict)
    history: list[Weights] = field(default_factory=list)  # after so many updates
    sums: Weights = field(default_factory=dict)  # of gradients
    ahead: dict[str, Weights] = field(default_factory=dict)  # by half, what microbatches share
    average: Weights = field(default_factory=dict)  # of updates, of PipeMare


class Emulator:
    """The pipeline. ``mode`` is a staleness, ``again``: layers whose insides are computed again; minibatches have
    ``pieces`` microbatches."""

    def __init__(
        self,
        stages: list[Stage],
        mode: str,
        rule: Rule,
        mask: Mask,
        again: set[int],
        pieces: int = 1,
    ) -> None:
        self.stages, self.mode, self.rule, self.mask, self.again = stages, mode, rule, mask, again
        self.pieces = pieces

    def run(self, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
        """Train on minibatches, fill and drain included; return their losses."""
        count, losses = len(self.stages), [0.0] * len(batches)
        between: dict[tuple[str, int, int], Tensor] = {}
        cut = [x for batch in batches for x in batch[0].tensor_split(self.pieces)]
        wanted = [y for batch in batches for y in batch[1].tensor_split(self.pieces)]
        whole = batches[0][1].numel()
        for slot in range(len(cut) + count - 1):
            for k, stage in enumerate(self.stages):
                i = slot - math.ceil(k / 2)
                if 0 <= i < len(cut):
                    x = cut[i] if k == 0 else between.pop(("x", k, i))
                    out = self._forward(stage, k, i, slot // self.pieces, x)
                    between["x", k + 1, i] = out
                    if stage.has_head:
                        losses[i // self.pieces] += float(((out - wanted[i]) ** 2).sum()) / whole
            for k in reversed(range(count)):
                i = slot - (count - 1 - k // 2)
                if 0 <= i < len(cut):
                    if self.stages[k].has_head:
                        gradient = 2 * (between.pop(("x", k + 1, i)) - wanted[i]) / whole
                    else:
                        gradient = between.pop(("g", k, i))
                    between["g", k - 1, i] = self._backward(
                        self.stages[k], k, i, slot // self.pieces, gradient
                    )
        return losses

    def _ahead(self, stage: Stage, steps: int, slot: int) -> Weights:
        return {
            name: self.rule.predicted(weight, stage.kept.get(name, {}), steps, slot)
            for name, weight in stage.weights.items()
        }

    def _steps(self, k: int, minibatch: int) -> tuple[int, int]:
        """Return how many updates ahead weights are predicted for forward, and for backward."""
        count, m = len(self.stages), self.pieces
        lag = min(minibatch, count - 1 - k)
        if self.mode == "spectrain-v1":
            return k // 2 + lag, k // 2
        if self.mode == "xpipe":  # slots until the minibatch has left, in minibatches
            forward = math.floor((count + m - 2 - math.ceil(k / 2)) / m + 0.5)
            backward = math.floor((m + k // 2 - 1) / m + 0.5)
            ends = m - 1 + count - 1 - k // 2  # of a minibatch, where the next begins every m slots
            missing = sum(d * m + math.ceil(k / 2) <= ends for d in range(minibatch + 1, count + 1))
            return forward - missing, backward
        return (lag if self.mode in ("spectrain-v2", "pipeoptim") else 0), 0

    def _forward(self, stage: Stage, k: int, i: int, slot: int, x: Tensor) -> Tensor:
        minibatch, piece = divmod(i, self.pieces)
        if piece == 0:
            steps = self._steps(k, minibatch)[0]
            stage.ahead["forward"] = self._ahead(stage, steps, slot)
        weights = stage.ahead["forward"] if self.mode == "xpipe" else stage.weights
        weights = {name: one.clone() for name, one in weights.items()}
        if self.mode in ("spectrain-v1", "spectrain-v2", "pipeoptim"):
            weights = stage.ahead["forward"]
        # After as many updates as the first stage had when it entered, or as one minibatch less.
        late = {"stash-vertical": len(self.stages) - 1, "2bw": 1}.get(self.mode)
        if late is not None:
            weights = [*stage.history, weights][max(0, minibatch - late)]
        if self.mode in ("stash", "stash-vertical", "spectrain-v2", "2bw"):
            stage.forward[i] = weights
        saved = stage.saved[i] = {}
        stage.begun[i] = stage.updates
        return self._through(stage, weights, i, x, saved)

    def _through(
        self, stage: Stage, weights: Weights, i: int, x: Tensor, saved: dict[str, Tensor]
    ) -> Tensor:
        for layer in stage.layers:
            saved[f"in{layer}"] = x
            down = f"layers.{layer}.down"
            self._within(layer, weights, i, saved)
            x = x + saved[f"d{layer}"] @ weights[f"{down}.weight"].T + weights[f"{down}.bias"]
        if stage.has_head:
            saved["head"] = x
            x = x @ weights["head.weight"].T + weights["head.bias"]
        return x

    def _within(self, layer: int, weights: Weights, i: int, saved: dict[str, Tensor]) -> None:
        """Make what lies within a layer of what comes into it."""
        up = f"layers.{layer}.up"
        h = torch.tanh(saved[f"in{layer}"] @ weights[f"{up}.weight"].T + weights[f"{up}.bias"])
        saved[f"h{layer}"], saved[f"d{layer}"] = h, h * self._mask(layer, i, h)

    def _mask(self, layer: int, i: int, h: Tensor) -> Tensor:
        return self.mask(layer, *divmod(i, self.pieces), tuple(h.shape))

    def _backward(self, stage: Stage, k: int, i: int, slot: int, g: Tensor) -> Tensor:
        stage.lags.append(stage.updates - stage.begun.pop(i))
        minibatch, piece = divmod(i, self.pieces)
        if piece == 0:
            steps = self._steps(k, minibatch)[1]
            stage.ahead["backward"] = self._ahead(stage, steps, slot)
        weights = stage.forward.pop(i, stage.ahead["backward"])
        if self.mode == "pipemare" and stage.average:
            lag = min(i, len(self.stages) - 1 - k)
            weights = {n: w - lag * stage.average[n] for n, w in stage.weights.items()}
        saved = stage.saved.pop(i)
        found: Weights = {}
        if stage.has_head:
            found["head.weight"], found["head.bias"] = g.T @ saved["head"], g.sum(0)
            g = g @ weights["head.weight"]
        for layer in reversed(stage.layers):
            if layer in self.again:  # of what comes into it, on the weights of backward
                self._within(layer, weights, i, saved)
            h, up, down = saved[f"h{layer}"], f"layers.{layer}.up", f"layers.{layer}.down"
            found[f"{down}.weight"], found[f"{down}.bias"] = g.T @ saved[f"d{layer}"], g.sum(0)
            inner = g @ weights[f"{down}.weight"]
            inner = inner * self._mask(layer, i, h) * (1 - h**2)
            found[f"{up}.weight"], found[f"{up}.bias"] = inner.T @ saved[f"in{layer}"], inner.sum(0)
            g = g + inner @ weights[f"{up}.weight"]
        for name, one in found.items():
            stage.sums[name] = stage.sums.get(name, 0.0) + one
        if piece == self.pieces - 1:
            self._update(stage, k, minibatch, slot)
        return g

    def _update(self, stage: Stage, k: int, minibatch: int, slot: int) -> None:
        before = {name: one.clone() for name, one in stage.weights.items()}
        stage.history.append(before)
        norm = math.sqrt(sum(float((one**2).sum()) for one in stage.sums.values()))
        lag, share = len(self.stages) - 1 - k, 1.0
        if self.rule.annealing:
            share = 1 / max(lag, 1) ** (1 - min(minibatch / self.rule.annealing, 1))
        for name, gradient in stage.sums.items():
            gradient = gradient * min(1.0, self.rule.max_norm / (norm + 1e-6))
            kept = stage.kept.setdefault(name, {})
            kept["before"] = before[name]
            self.rule.step(stage.weights[name], gradient, kept, slot, share)
            if self.mode == "pipemare" and lag:
                remains = math.exp(-2 / lag)
                average = stage.average.get(name, torch.zeros_like(before[name]))
                step = stage.weights[name] - before[name]
                stage.average[name] = remains * average + (1 - remains) * step
        stage.sums.clear()
        stage.updates += 1
