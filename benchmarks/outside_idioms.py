"""More ways of writing PyTorch, for ``outside.py``: closures, autocast, writes without gradients, nested
results, transforms, sparse products, teachers and regularisers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from outside_models import Example, floats, tokens
from torch import Tensor, nn

WIDTH = 16


class Regression(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(8, WIDTH), body, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(self.last(self.body(self.first(x))).to(y.dtype), y)


def _rows(batch_size: int) -> dict[str, Tensor]:
    return {"x": floats(batch_size, 8), "y": floats(batch_size, 4).flip(0)}


def _layers(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def injected_adapters(batch_size: int = 4) -> Example:
    """Adapters that a loop puts around the forward of every layer it finds."""
    model = Regression(_layers(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)))
    for layer in [one for one in model.modules() if isinstance(one, nn.Linear)]:
        layer.requires_grad_(False)
        low, high = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features)
        layer.low, layer.high = low, high

        def forward(x: Tensor, plain: Any = layer.forward, a: Any = low, b: Any = high) -> Tensor:
            return plain(x) + b(a(x))

        layer.forward = forward  # type: ignore[method-assign]
    return model, _rows(batch_size)


def activation_table(batch_size: int = 4) -> Example:
    """Activations by name, one of which has a parameter of the model."""
    model = Regression(nn.Linear(WIDTH, WIDTH))
    model.slope = nn.Parameter(torch.full((WIDTH,), 0.3))
    table = {"relu": F.relu, "leaky": lambda h: torch.where(h > 0, h, h * model.slope)}
    model.body.register_forward_hook(lambda _m, _given, result: table["leaky"](result))
    return model, _rows(batch_size)


def probe_losses(batch_size: int = 4) -> Example:
    """Hooks that leave features in a dict of the model, for a loss of their own."""

    class Probed(Regression):
        def __init__(self) -> None:
            super().__init__(_layers(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
            self.features: dict[str, Tensor] = {}
            for name, layer in self.body.named_children():
                layer.register_forward_hook(self.keeper(name))

        def keeper(self, name: str) -> Any:
            def keep(_module: nn.Module, _given: Any, result: Tensor) -> None:
                self.features[name] = result

            return keep

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = super().forward(x, y)
            return loss + 0.01 * sum(one.pow(2).mean() for one in self.features.values())

    return Probed(), _rows(batch_size)


def half_trunk(batch_size: int = 4) -> Example:
    """A trunk in bfloat16 with an island in full precision and a statistic without gradient."""

    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            with torch.autocast(h.device.type, dtype=torch.bfloat16):
                h = self.layer(h[:, None])[:, 0]
                with torch.no_grad():
                    size = h.norm(dim=-1, keepdim=True) + 1
                with torch.autocast(h.device.type, enabled=False):
                    h = self.norm(h.to(self.norm.weight.dtype))
                return h / size

    return Regression(Trunk()), _rows(batch_size)


def clamped_activations(batch_size: int = 4) -> Example:
    """Values clamped through ``.data``, and rows masked without gradients."""

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            h = self.inner(h)
            h.data.clamp_(-0.5, 0.5)
            with torch.no_grad():
                h[:, :2] = 0
            return h

    return Regression(Clamped()), _rows(batch_size)


def frozen_targets(batch_size: int = 4) -> Example:
    """Targets reshaped without gradients (a view that shows the same)."""

    class Predicts(Regression):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.body(self.first(x))
            with torch.no_grad():
                aim = F.normalize(h.view(len(h), -1), dim=-1).view(h.shape)
                same = h.reshape(h.shape)
            return super().forward(x, y) + F.mse_loss(h.tanh(), aim) + (h.sin() * same).mean()

    return Predicts(nn.Linear(WIDTH, WIDTH)), _rows(batch_size)


@dataclass
class Parts:
    loss: Tensor
    logs: dict[str, Any]


def nested_results(batch_size: int = 4) -> Example:
    class Nested(Regression):
        def forward(self, x: Tensor, y: Tensor) -> Parts:
            h = self.body(self.first(x))
            one, two = F.mse_loss(self.last(h), y), h.abs().mean()
            return Parts(one + 0.1 * two, {"terms": (one.detach(), [two.detach()])})

    return Nested(nn.Linear(WIDTH, WIDTH)), _rows(batch_size)


def vmapped_ensemble(batch_size: int = 4) -> Example:
    """Members of an ensemble as stacked parameters, run by ``torch.func.vmap``."""

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = nn.Parameter(torch.randn(3, 8, WIDTH) * 0.3)
            self.w2 = nn.Parameter(torch.randn(3, WIDTH, 4) * 0.3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            def member(one: Tensor, two: Tensor) -> Tensor:
                return torch.tanh(x @ one) @ two

            return F.mse_loss(torch.func.vmap(member)(self.w1, self.w2).mean(0), y)

    return Ensemble(), _rows(batch_size)


def compiled_block(batch_size: int = 4) -> Example:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        @torch.compile(backend="eager")
        def act(self, h: Tensor) -> Tensor:
            return h * torch.sigmoid(self.inner(h))

        def forward(self, h: Tensor) -> Tensor:
            return self.act(h)

    return Regression(Block()), _rows(batch_size)


def spline_network(batch_size: int = 4) -> Example:
    """A Kolmogorov-Arnold layer: B-splines of every input by the recursion, weights per edge."""

    class Spline(nn.Module):
        def __init__(self, order: int = 3, pieces: int = 4) -> None:
            super().__init__()
            knots = torch.arange(-order, pieces + order + 1) * (2 / pieces) - 1
            self.register_buffer("knots", knots.expand(WIDTH, -1).contiguous())
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, pieces + order) * 0.1)
            self.base, self.order = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1), order

        def forward(self, h: Tensor) -> Tensor:
            x, g = h.unsqueeze(-1), self.knots
            bases = ((x >= g[:, :-1]) & (x < g[:, 1:])).to(h.dtype)
            for k in range(1, self.order + 1):
                left = (x - g[:, : -(k + 1)]) / (g[:, k:-1] - g[:, : -(k + 1)])
                right = (g[:, k + 1 :] - x) / (g[:, k + 1 :] - g[:, 1:-k])
                bases = left * bases[..., :-1] + right * bases[..., 1:]
            return F.linear(F.silu(h), self.base) + F.linear(
                bases.flatten(1), self.weight.flatten(1)
            )

    return Regression(Spline()), _rows(batch_size)


def runge_kutta(batch_size: int = 4) -> Example:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH + 1, 24), nn.Softplus(), nn.Linear(24, WIDTH))

        def slope(self, t: Tensor, h: Tensor) -> Tensor:
            return self.net(torch.cat([h, t.expand(len(h), 1)], -1))

        def forward(self, h: Tensor) -> Tensor:
            times = torch.linspace(0, 1, 4, dtype=h.dtype)
            for t, after in pairwise(times):
                d = after - t
                a = self.slope(t, h)
                b = self.slope(t + d / 2, h + d / 2 * a)
                c = self.slope(t + d / 2, h + d / 2 * b)
                h = h + d / 6 * (a + 2 * b + 2 * c + self.slope(after, h + d * c))
            return h

    return Regression(Field()), _rows(batch_size)


def many_tasks(batch_size: int = 4) -> Example:
    """Heads in a dict, losses weighed by learned uncertainties, labels missing here and there."""

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU())
            self.heads = nn.ModuleDict({"size": nn.Linear(WIDTH, 1), "kind": nn.Linear(WIDTH, 3)})
            self.noise = nn.ParameterDict(
                {name: nn.Parameter(torch.zeros(())) for name in self.heads}
            )

        def forward(self, x: Tensor, size: Tensor, kind: Tensor) -> dict[str, Any]:
            h = self.trunk(x)
            found = {name: head(h) for name, head in self.heads.items()}
            losses = {
                "size": F.smooth_l1_loss(found["size"].squeeze(-1), size),
                "kind": F.cross_entropy(found["kind"], kind, ignore_index=2, label_smoothing=0.1),
            }
            total = sum(
                losses[name] * torch.exp(-self.noise[name]) + self.noise[name] for name in losses
            )
            return {"loss": total, "losses": losses}

    return Tasks(), {
        "x": floats(batch_size, 8),
        "size": floats(batch_size),
        "kind": tokens(3, batch_size),
    }


def proximal_policy(batch_size: int = 4) -> Example:
    """Clipped ratios with normalised advantages, a value loss and entropy by distributions."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.log_std = nn.Linear(8, 5), nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor, y: Tensor, old: Tensor, gain: Tensor) -> Tensor:
            mean, value = self.net(x).split([4, 1], -1)
            chosen = torch.distributions.Independent(
                torch.distributions.Normal(mean, self.log_std.exp()), 1
            )
            ratio = (chosen.log_prob(y) - old).exp()
            adv = (gain - gain.mean()) / (gain.std() + 1e-8)
            policy = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            return (
                policy
                + 0.5 * (value.squeeze(-1) - gain).pow(2).mean()
                - 0.01 * chosen.entropy().mean()
            )

    return Policy(), {
        **_rows(batch_size),
        "old": floats(batch_size) - 4,
        "gain": floats(batch_size),
    }


def message_passing(batch_size: int = 4) -> Example:
    """Dense graphs with masks: attention over neighbours, pooled by a gate."""

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
            self.scores, self.gate = nn.Parameter(torch.randn(2, WIDTH) * 0.3), nn.Linear(WIDTH, 1)
            self.cell = nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x: Tensor, near: Tensor, y: Tensor) -> Tensor:
            h = self.into(x)
            for _ in range(2):
                a, b = h @ self.scores[0], h @ self.scores[1]
                e = F.leaky_relu(a[:, :, None] + b[:, None], 0.2).masked_fill(~near, float("-inf"))
                sent = torch.nan_to_num(e.softmax(-1)) @ h
                h = self.cell(sent.flatten(0, 1), h.flatten(0, 1)).view_as(h)
            pooled = (self.gate(h).sigmoid() * h).sum(1) / h.shape[1]
            return F.mse_loss(self.out(pooled), y)

    near = (tokens(2, batch_size, 6, 6) > 0) | torch.eye(6, dtype=torch.bool)
    return Graphs(), {"x": floats(batch_size, 6, 8), "near": near, "y": floats(batch_size, 4)}


def radiance(batch_size: int = 4) -> Example:
    """Rays marched through a field of encoded places, with transmittance by a running product."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3 * 8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
            self.register_buffer("bands", 2.0 ** torch.arange(4))

        def forward(self, start: Tensor, way: Tensor, y: Tensor) -> Tensor:
            depth = torch.linspace(0.1, 2, 6, dtype=start.dtype)
            places = start[:, None] + depth[:, None] * F.normalize(way, dim=-1)[:, None]
            turned = (places[..., None] * self.bands).flatten(-2)
            found = self.net(torch.cat([turned.sin(), turned.cos()], -1))
            alpha = 1 - torch.exp(-F.relu(found[..., 3]) * 0.3)
            passed = torch.cumprod(
                torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1
            )[:, :-1]
            return F.mse_loss(((alpha * passed)[..., None] * found[..., :3].sigmoid()).sum(1), y)

    made = floats(batch_size, 9)
    return Field(), {"start": made[:, :3], "way": made[:, 3:6], "y": made[:, 6:].sigmoid()}
