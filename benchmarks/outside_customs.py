"""Customs of training code, for ``outside.py``: two players in one loss, adaptive weights by gradients, operators and
gradients of one's own, states that forward keeps, arguments of many forms, views written in place, mixed dtypes.

Written before any of them was run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import typing
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from outside_models import ROW_WIDTH as WIDTH
from outside_models import Example, floats, row_batch, tokens, two_layers
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def _labelled(batch_size: int, classes: int = 4) -> dict[str, Tensor]:
    return {"x": floats(batch_size, WIDTH), "labels": tokens(classes, batch_size)}


# -- losses that look at gradients and at each other ------------------------------------------------------


def adaptive_adversary(batch_size: int = 4) -> Example:
    """VQGAN: an adversarial weight that is the ratio of two gradients' norms at the last layer, hinge losses for a
    discriminator beside it, whose weights the generator's loss must not move."""

    class GAN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Conv2d(3, 8, 3, 2, 1)
            self.body = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Upsample(scale_factor=2))
            self.last = nn.Conv2d(8, 3, 3, padding=1)
            self.critic = nn.Sequential(
                nn.Conv2d(3, 6, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 3, padding=1)
            )

        def forward(self, x: Tensor) -> Tensor:
            out = self.last(self.body(self.encoder(x)))
            nll = (x - out).abs().mean()
            frozen = {name: p.detach() for name, p in self.critic.named_parameters()}
            g = -torch.func.functional_call(self.critic, frozen, (out,)).mean()
            if torch.is_grad_enabled():
                nll_grad = torch.autograd.grad(nll, self.last.weight, retain_graph=True)[0]
                g_grad = torch.autograd.grad(g, self.last.weight, retain_graph=True)[0]
                weight = (nll_grad.norm() / (g_grad.norm() + 1e-4)).clamp(0.0, 1e4).detach()
            else:
                weight = torch.zeros(())
            real, fake = self.critic(x.detach()), self.critic(out.detach())
            d = 0.5 * (F.relu(1.0 - real).mean() + F.relu(1.0 + fake).mean())
            return nll + weight * g + d

    return GAN(), {"x": floats(batch_size, 3, 6, 6)}


def gradient_penalty(batch_size: int = 4) -> Example:
    """WGAN-GP and R1 in one step: interpolates by given coins, two penalties by double backward, an averaged path
    length in a buffer."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = (
                two_layers(4, WIDTH),
                nn.Sequential(nn.Linear(WIDTH, 16), nn.Softplus(), nn.Linear(16, 1)),
            )
            self.register_buffer("mean_path", torch.zeros(()))

        def forward(self, real: Tensor, z: Tensor, alpha: Tensor) -> Tensor:
            z = z.detach().requires_grad_()
            fake = self.generator(z)
            mixed = (alpha * real + (1 - alpha) * fake.detach()).requires_grad_(True)
            score = self.critic(mixed)
            grads = torch.autograd.grad(
                outputs=score, inputs=mixed, grad_outputs=torch.ones_like(score), create_graph=True
            )[0]
            gp = ((grads.view(len(grads), -1).norm(2, dim=1) - 1) ** 2).mean()
            real = real.detach().requires_grad_()
            r1 = (
                torch.autograd.grad(self.critic(real).sum(), real, create_graph=True)[0]
                .pow(2)
                .sum(1)
                .mean()
            )
            noise = torch.ones_like(fake) / math.sqrt(WIDTH)
            path = (
                torch.autograd.grad((fake * noise).sum(), z, create_graph=True)[0]
                .pow(2)
                .sum(1)
                .sqrt()
            )
            mean = self.mean_path + 0.1 * (path.mean().detach() - self.mean_path)
            self.mean_path.copy_(mean)
            return (
                self.critic(fake.detach()).mean()
                - self.critic(real).mean()
                + 10 * gp
                + r1
                + (path - mean).pow(2).mean()
            )

    return Pair(), {
        "real": floats(batch_size, WIDTH),
        "z": floats(batch_size, 4),
        "alpha": floats(batch_size, 1).sigmoid(),
    }


def virtual_adversary(batch_size: int = 4) -> Example:
    """VAT: a direction by power iteration through a divergence, then the divergence along it."""

    class VAT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = two_layers(WIDTH, 4)

        def forward(self, x: Tensor, labels: Tensor, d: Tensor) -> Tensor:
            logits = self.net(x)
            with torch.no_grad():
                p = logits.softmax(-1)
            d = F.normalize(d, dim=1)
            d = d.detach().requires_grad_()
            with torch.enable_grad():
                q = self.net(x.detach() + 0.1 * d).log_softmax(-1)
                d = torch.autograd.grad(F.kl_div(q, p, reduction="batchmean"), d)[0]
            far = self.net(x + 0.5 * F.normalize(d.detach(), dim=1)).log_softmax(-1)
            return F.cross_entropy(logits, labels) + F.kl_div(far, p, reduction="batchmean")

    return VAT(), {**_labelled(batch_size), "d": floats(batch_size, WIDTH).flip(0)}


def confused_domains(batch_size: int = 4) -> Example:
    """DANN: gradients turned round by a function of one's own whose strength follows a step count in a buffer,
    and features of two domains from one batch."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, strength: Tensor) -> Tensor:
            ctx.save_for_backward(strength)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad.neg() * ctx.saved_tensors[0], None

    class Dann(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.label, self.domain = (
                two_layers(),
                nn.Linear(WIDTH, 4),
                two_layers(WIDTH, 2),
            )
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor, labels: Tensor, domain: Tensor) -> Tensor:
            with torch.no_grad():
                self.steps.add_(1)
                strength = 2 / (1 + torch.exp(-self.steps)) - 1
            h = self.body(x)
            known = domain == 0
            each = F.cross_entropy(self.label(h), labels, reduction="none")
            task = (each * known).sum() / known.sum().clamp(min=1)
            return task + F.cross_entropy(self.domain(Reverse.apply(h, strength)), domain)

    return Dann(), {**_labelled(batch_size), "domain": torch.arange(batch_size) % 2}


def normalised_gradients(batch_size: int = 4) -> Example:
    """GradNorm in its forward: each task's weight is moved by how its gradient at the shared layer compares with the
    mean of all."""

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.heads = (
                nn.Linear(WIDTH, WIDTH),
                nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(3)),
            )
            self.weights = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = torch.tanh(self.shared(x))
            losses = torch.stack(
                [F.mse_loss(head(h)[:, 0], y[:, i]) for i, head in enumerate(self.heads)]
            )
            norms = torch.stack([
                torch.autograd.grad(w * one, self.shared.weight, retain_graph=True, create_graph=True)[0].norm()
                for w, one in zip(self.weights, losses, strict=True)
            ])  # fmt: skip
            target = norms.mean().detach()
            return (self.weights.detach() * losses).sum() + 0.1 * (norms - target).abs().sum()

    return Tasks(), row_batch(batch_size)


def matched_scores(batch_size: int = 4) -> Example:
    """A denoising score with its divergence by forward mode and by Hutchinson, per row through vmap of jacrev."""

    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

        def forward(self, x: Tensor, v: Tensor) -> Tensor:
            jacobian = torch.func.vmap(torch.func.jacrev(self.net))(x)
            exact = jacobian.diagonal(dim1=-2, dim2=-1).sum(-1)
            s, jv = torch.func.jvp(self.net, (x,), (v,))
            probed = (jv * v).sum(-1)
            return (0.5 * s.square().sum(-1) + 0.5 * (exact + probed)).mean()

    return Score(), {"x": floats(batch_size, 4), "v": floats(batch_size, 4).flip(0).sign()}


# -- gradients and operators of one's own -----------------------------------------------------------------


def functions_in_new_style(batch_size: int = 4) -> Example:
    """Functions with setup_context, a result that has no gradient, needs_input_grad, once_differentiable, keyword
    values and a generated vmap rule."""

    class SortWithPlaces(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            values, places = x.sort(-1)
            return values, places

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(output[1])
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            return torch.zeros_like(grad).scatter(-1, ctx.saved_tensors[0], grad)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, power: int, flag: bool) -> Tensor:
            ctx.save_for_backward(x, w)
            ctx.power, ctx.flag = power, flag
            return (x @ w.t()) / (2.0**power if flag else 1.0)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            x, w = ctx.saved_tensors
            grad = grad / (2.0**ctx.power if ctx.flag else 1.0)
            gx = grad @ w if ctx.needs_input_grad[0] else None
            gw = grad.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
            return gx, gw, None, None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = (
                nn.Parameter(floats(12, WIDTH) * 0.3),
                nn.Parameter(floats(WIDTH, 12) * 0.3),
            )
            self.bias = nn.Embedding(12, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = Scaled.apply(x, self.w1, 1, True)
            values, places = SortWithPlaces.apply(h)
            values = values + self.bias(places).squeeze(-1)
            return F.mse_loss(Scaled.apply(torch.relu(values), self.w2, 2, False), y)

    return Net(), row_batch(batch_size, 3)


@functools.cache
def _swish_operator() -> Any:
    @torch.library.custom_op("outside_customs::scaled_swish", mutates_args=())
    def scaled_swish(x: Tensor, beta: Tensor) -> Tensor:
        return x * torch.sigmoid(beta * x)

    @scaled_swish.register_fake
    def _(x: Tensor, beta: Tensor) -> Tensor:
        return torch.empty_like(x)

    def setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, beta = ctx.saved_tensors
        s = torch.sigmoid(beta * x)
        return grad * (s + beta * x * s * (1 - s)), (grad * x * x * s * (1 - s)).sum_to_size(
            beta.shape
        )

    scaled_swish.register_autograd(backward, setup_context=setup)
    return scaled_swish


def registered_operator(batch_size: int = 4) -> Example:
    """An operator registered with torch.library, with its fake and its gradient."""
    swish = _swish_operator()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.beta = (
                nn.Linear(WIDTH, 12),
                nn.Linear(12, WIDTH),
                nn.Parameter(torch.ones(12)),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.two(swish(self.one(x), self.beta)), y)

    return Net(), row_batch(batch_size)


def reversible(batch_size: int = 4) -> Example:
    """RevNet: one function for all blocks that keeps its last output only, makes inputs again in backward, and gives
    gradients to parameters it is handed."""

    class RevBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = (
                two_layers(WIDTH // 2, WIDTH // 2, 8),
                two_layers(WIDTH // 2, WIDTH // 2, 8),
            )

    class Rev(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, blocks: list[RevBlock], *parameters: Tensor) -> Tensor:
            with torch.no_grad():
                x1, x2 = x.chunk(2, -1)
                for block in blocks:
                    x1 = x1 + block.f(x2)
                    x2 = x2 + block.g(x1)
            ctx.blocks, ctx.y = blocks, torch.cat((x1, x2), -1).detach()
            return ctx.y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            y1, y2 = ctx.y.chunk(2, -1)
            d1, d2 = grad.chunk(2, -1)
            found: list[Tensor] = []
            for block in reversed(ctx.blocks):
                with torch.enable_grad():
                    y1 = y1.detach().requires_grad_()
                    gy1 = block.g(y1)
                    ps = list(block.g.parameters())
                    d1_more, *g_grads = torch.autograd.grad(gy1, [y1, *ps], d2)
                with torch.no_grad():
                    x2 = y2 - gy1
                    d1 = d1 + d1_more
                with torch.enable_grad():
                    x2 = x2.detach().requires_grad_()
                    fx2 = block.f(x2)
                    ps = list(block.f.parameters())
                    d2_more, *f_grads = torch.autograd.grad(fx2, [x2, *ps], d1)
                with torch.no_grad():
                    x1 = y1 - fx2
                    d2 = d2 + d2_more
                y1, y2 = x1.detach(), x2.detach()
                found = [*f_grads, *g_grads, *found]
            return torch.cat((d1, d2), -1), None, *found

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(RevBlock() for _ in range(2))
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            parameters = [p for block in self.blocks for p in block.parameters()]
            return F.mse_loss(self.head(Rev.apply(x, list(self.blocks), *parameters)), y)

    return Net(), row_batch(batch_size)


def checkpoints_of_all_kinds(batch_size: int = 4) -> Example:
    """Reentrant and not, with keyword arguments, of sequential parts, nested, over a function that closes over
    parameters, with dropout kept."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Sequential(
                *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))
            )
            self.inner, self.drop, self.scale = (
                two_layers(),
                nn.Dropout(0.1),
                nn.Parameter(torch.ones(WIDTH)),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            def scaled(h: Tensor, *, power: float) -> Tensor:
                return h * self.scale**power

            def outer(h: Tensor) -> Tensor:
                return h + checkpoint(self.inner, h, use_reentrant=False)

            x = checkpoint_sequential(self.stack, 2, x, use_reentrant=False)
            x = checkpoint(outer, x, use_reentrant=False)
            x = checkpoint(scaled, x, power=2.0, use_reentrant=False)
            x = checkpoint(self.drop, x, use_reentrant=False, preserve_rng_state=True)
            x = checkpoint(self.inner, x, use_reentrant=True)
            return F.mse_loss(x, y)

    return Net(), row_batch(batch_size)


def quantised_by_hand(batch_size: int = 4) -> Example:
    """PACT, DoReFa and LSQ by detaches instead of functions, activations clipped at a learned bound, an observer that
    averages extremes in buffers, off for the first steps."""

    class Observed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("low", torch.zeros(()))
            self.register_buffer("high", torch.zeros(()))
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            low, high = torch.aminmax(x.detach())
            first = self.seen == 0
            self.low.copy_(torch.where(first, low, self.low + 0.1 * (low - self.low)))
            self.high.copy_(torch.where(first, high, self.high + 0.1 * (high - self.high)))
            self.seen += 1
            scale = ((self.high - self.low) / 255).clamp(min=1e-8)
            zero = (-self.low / scale).round().clamp(0, 255)
            q = ((x / scale + zero).round().clamp(0, 255) - zero) * scale
            return torch.where(self.seen > 1, x + (q - x).detach(), x)

    class Quantised(nn.Linear):
        def __init__(self, into: int, out: int) -> None:
            super().__init__(into, out)
            self.step = nn.Parameter(self.weight.detach().abs().mean(1, keepdim=True) / 4)
            self.alpha = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            x = 0.5 * (x.abs() - (x - self.alpha).abs() + self.alpha)
            x = x + ((x / self.alpha * 15).round() / 15 * self.alpha - x).detach()
            g = 1.0 / math.sqrt(self.weight.numel() * 7)
            step = (self.step - self.step * g).detach() + self.step * g
            w = (self.weight / step).clamp(-8, 7)
            w = ((w.round() - w).detach() + w) * step
            return F.linear(x, w, self.bias)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.observe, self.one, self.two = Observed(), Quantised(WIDTH, 12), Quantised(12, 4)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.two(F.relu(self.one(self.observe(x)))), labels)

    return Net(), _labelled(batch_size)


# -- states and hooks ---------------------------------------------------------------------------------


def averaged_in_forward(batch_size: int = 4) -> Example:
    """A copy of the model in an attribute that is no module (EMA as in a list), updated by forward before use, with
    a decay that warms up by a count."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = two_layers()
            self.teacher = copy.deepcopy(self.student)
            for p in self.teacher.parameters():
                p.detach_()
            self.register_buffer("updates", torch.zeros((), dtype=torch.long))

        @torch.no_grad()
        def follow(self) -> None:
            self.updates += 1
            decay = 0.9 * (1 - torch.exp(-self.updates / 2.0))
            for mine, theirs in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                mine.copy_(decay * mine + (1 - decay) * theirs)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if self.training:
                self.follow()
            with torch.no_grad():
                target = self.teacher(y)
            return F.mse_loss(self.student(x), target) + F.mse_loss(self.student(y), y)

    return Net(), row_batch(batch_size)


def queue_by_pointer(batch_size: int = 4) -> Example:
    """A queue of keys written at a pointer that wraps by modulo in a buffer, by index_copy_, with keys of a
    frozen encoder, read as negatives before it is written."""

    class Queue(nn.Module):
        def __init__(self, size: int = 24) -> None:
            super().__init__()
            self.size = size
            self.encoder, self.key_encoder = two_layers(), two_layers().requires_grad_(False)
            self.register_buffer("queue", F.normalize(floats(size, WIDTH), dim=1))
            self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            q = F.normalize(self.encoder(x), dim=1)
            with torch.no_grad():
                k = F.normalize(self.key_encoder(y), dim=1)
            pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
            neg = torch.einsum("nc,kc->nk", [q, self.queue.clone().detach()])
            logits = torch.cat([pos, neg], dim=1) / 0.2
            with torch.no_grad():
                places = (self.ptr + torch.arange(k.shape[0])) % self.size
                self.queue.index_copy_(0, places, k)
                self.ptr.add_(k.shape[0]).remainder_(self.size)
            return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))

    return Queue(), row_batch(batch_size)


def hooks_on_submodules(batch_size: int = 4) -> Example:
    """Forward pre-hooks with keyword arguments, a hook that returns another result, one that only counts, is
    always called, and handles removed within forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.Bilinear(WIDTH, WIDTH, WIDTH),
            )
            self.gain = nn.Parameter(torch.ones(WIDTH))
            self.calls = 0
            self.one.register_forward_pre_hook(lambda _, args: (args[0] * self.gain,))
            self.two.register_forward_hook(lambda _, args, out: out + args[0])
            self.three.register_forward_pre_hook(self._swap, with_kwargs=True)
            self.three.register_forward_hook(self._count, always_call=True)

        @staticmethod
        def _swap(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
            return args, {**kwargs, "input2": kwargs["input2"].tanh()}

        def _count(self, _: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            self.calls += 1

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            kept: list[Tensor] = []
            handle = self.two.register_forward_hook(
                lambda *things: kept.append(things[-1].square().mean())
            )
            try:
                h = F.relu(self.two(F.relu(self.one(x))))
            finally:
                handle.remove()
            return F.mse_loss(self.three(input1=h, input2=x), y) + 0.1 * kept[0]

    return Net(), row_batch(batch_size)


def features_of_an_extractor(batch_size: int = 2) -> Example:
    """A perceptual loss by a frozen backbone in evaluation mode under hooks that a wrapper owns, Gram matrices, a
    backbone that the wrapper keeps out of its parameters."""

    class Extractor:
        def __init__(self, net: nn.Sequential, wanted: tuple[int, ...]) -> None:
            self.net, self.found = net.eval(), OrderedDict[int, Tensor]()
            for index in wanted:
                net[index].register_forward_hook(functools.partial(self._keep, index))

        def _keep(self, index: int, module: nn.Module, args: Any, out: Tensor) -> None:
            self.found[index] = out

        def __call__(self, x: Tensor) -> dict[int, Tensor]:
            self.found.clear()
            self.net(x)
            return dict(self.found)

    class Style(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.ReflectionPad2d(1),
                nn.Conv2d(3, 8, 3),
                nn.InstanceNorm2d(8, affine=True),
                nn.ReLU(),
                nn.Conv2d(8, 3, 1),
            )
            backbone = nn.Sequential(
                nn.Conv2d(3, 6, 3),
                nn.BatchNorm2d(6),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(6, 6, 1),
                nn.ReLU(),
            )
            self.backbone = backbone.requires_grad_(False)
            self.extract = Extractor(self.backbone, (2, 5))

        def train(self, mode: bool = True) -> Style:
            super().train(mode)
            self.backbone.eval()
            return self

        def forward(self, x: Tensor, style: Tensor) -> Tensor:
            out = self.net(x)
            mine, theirs, content = self.extract(out), self.extract(style), self.extract(x)
            loss = F.mse_loss(mine[5], content[5])
            for index in mine:
                a, b = mine[index].flatten(2), theirs[index].flatten(2)
                loss = loss + F.mse_loss(a @ a.mT / a[0].numel(), b @ b.mT / b[0].numel())
            return loss + 1e-3 * (out[..., 1:] - out[..., :-1]).abs().sum() / len(out)

    return Style(), {
        "x": floats(batch_size, 3, 8, 8),
        "style": floats(batch_size, 3, 8, 8).flip(-1),
    }


def running_balance(batch_size: int = 4) -> Example:
    """Experts whose bias is moved in forward by the loads of the batch (auxiliary-loss-free), counts by bincount in a
    buffer, sorted dispatch by argsort and split sizes padded to a capacity."""

    class Balanced(nn.Module):
        def __init__(self, experts: int = 4, k: int = 2) -> None:
            super().__init__()
            self.e, self.k = experts, k
            self.gate = nn.Linear(WIDTH, experts, bias=False)
            self.w1, self.w2 = (
                nn.Parameter(floats(experts, WIDTH, 12) * 0.3),
                nn.Parameter(floats(experts, 12, WIDTH) * 0.3),
            )
            self.register_buffer("bias", torch.zeros(experts))
            self.register_buffer("load", torch.zeros(experts))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            d = x.shape[-1]
            flat = x.reshape(-1, d)
            scores = self.gate(flat).sigmoid()
            chosen = (scores + self.bias).topk(self.k, -1).indices
            weights = scores.gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True)
            expert = chosen.flatten()
            order = expert.argsort(stable=True)
            token = order // self.k
            counts = torch.bincount(expert, minlength=self.e)
            starts = counts.cumsum(0) - counts
            place = torch.arange(len(order)) - starts[expert[order]]
            capacity = len(order)
            slots = flat.new_zeros(self.e * capacity, d)
            slots[expert[order] * capacity + place] = flat[token]
            h = F.silu(torch.bmm(slots.view(self.e, capacity, d), self.w1))
            h = torch.bmm(h, self.w2).view(-1, d)[expert[order] * capacity + place]
            out = torch.zeros_like(flat).index_add(0, token, h * weights.flatten()[order, None])
            if self.training:
                with torch.no_grad():
                    self.load.copy_(counts)
                    self.bias += 0.01 * torch.sign(counts.to(self.bias.dtype).mean() - counts)
            return F.mse_loss(flat + out, y.reshape(-1, d))

    return Balanced(), row_batch(batch_size, 3)


def codebook_by_means(batch_size: int = 4) -> Example:
    """VQ-VAE 2: two levels whose codebooks are running means by one-hot products, with Laplace smoothing and a
    straight gradient; the upper conditions the lower."""

    class Quantiser(nn.Module):
        def __init__(self, dim: int, codes: int, decay: float = 0.9) -> None:
            super().__init__()
            self.codes, self.decay = codes, decay
            embed = floats(dim, codes)
            self.register_buffer("embed", embed)
            self.register_buffer("cluster_size", torch.zeros(codes))
            self.register_buffer("embed_avg", embed.clone())

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            flat = x.reshape(-1, x.shape[-1])
            dist = (
                flat.pow(2).sum(1, keepdim=True)
                - 2 * flat @ self.embed
                + self.embed.pow(2).sum(0, keepdim=True)
            )
            _, ind = (-dist).max(1)
            one = F.one_hot(ind, self.codes).type(flat.dtype)
            quantize = F.embedding(ind.view(*x.shape[:-1]), self.embed.transpose(0, 1))
            if self.training:
                size, total = one.sum(0), flat.transpose(0, 1) @ one
                self.cluster_size.data.mul_(self.decay).add_(size, alpha=1 - self.decay)
                self.embed_avg.data.mul_(self.decay).add_(total.detach(), alpha=1 - self.decay)
                n = self.cluster_size.sum()
                smooth = (self.cluster_size + 1e-5) / (n + self.codes * 1e-5) * n
                self.embed.data.copy_(self.embed_avg / smooth.unsqueeze(0))
            diff = (quantize.detach() - x).pow(2).mean()
            return x + (quantize - x).detach(), diff

    class VQVAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bottom, self.top = nn.Conv2d(3, 6, 4, 2, 1), nn.Conv2d(6, 6, 4, 2, 1)
            self.q_top, self.q_bottom = Quantiser(6, 5), Quantiser(6, 7)
            self.up, self.mix = nn.ConvTranspose2d(6, 6, 4, 2, 1), nn.Conv2d(12, 6, 1)
            self.out = nn.ConvTranspose2d(12, 3, 4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            b = F.relu(self.bottom(x))
            top, d1 = self.q_top(self.top(b).permute(0, 2, 3, 1))
            up = self.up(top.permute(0, 3, 1, 2))
            low, d2 = self.q_bottom(self.mix(torch.cat((up, b), 1)).permute(0, 2, 3, 1))
            out = self.out(torch.cat((up, low.permute(0, 3, 1, 2)), 1))
            return F.mse_loss(out, x) + 0.25 * (d1 + d2)

    return VQVAE(), {"x": floats(batch_size, 3, 8, 8)}


# -- forms of arguments and results ----------------------------------------------------------------------


def keywords_only(batch_size: int = 4) -> Example:
    """A forward that takes keywords only, optional ones left out, flags with defaults, and returns an output class
    with None entries and a list."""

    @dataclasses.dataclass
    class Output:
        loss: Tensor | None = None
        logits: Tensor | None = None
        hidden: list[Tensor] | None = None
        cache: None = None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers, self.head = (
                nn.Embedding(9, WIDTH),
                nn.ModuleList(two_layers() for _ in range(2)),
                nn.Linear(WIDTH, 9),
            )

        def forward(
            self, *, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None,
            token_weights: Tensor | None = None, output_hidden: bool = True, return_dict: bool = True,
        ) -> Output | tuple[Tensor, ...]:  # fmt: skip
            h = self.embed(input_ids)
            kept = []
            for layer in self.layers:
                kept.append(h)
                if attention_mask is not None:
                    h = h * attention_mask[..., None]
                h = h + layer(h)
            logits = self.head(h)
            loss = None
            if labels is not None:
                loss = F.cross_entropy(
                    logits.transpose(1, 2), labels, reduction="none", ignore_index=-100
                )
                if token_weights is not None:
                    loss = loss * token_weights
                loss = loss.sum() / (labels != -100).sum()
            return (
                Output(loss, logits, kept if output_hidden else None)
                if return_dict
                else (loss, logits)
            )

    labels = tokens(9, batch_size, 5)
    labels[::2, 3:] = -100
    mask = torch.ones(batch_size, 5, dtype=torch.bool)
    mask[::2, 3:] = False
    return Net(), {"input_ids": tokens(9, batch_size, 5), "labels": labels, "attention_mask": mask}


def tensors_of_all_dtypes(batch_size: int = 4) -> Example:
    """uint8 pictures, int16 waves, int32 indices, bool masks, float16 weights of samples, complex buffers, a float64
    island in a model, an integer regression target."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.wave, self.embed = (
                nn.Conv2d(3, 4, 3),
                nn.Linear(6, 4),
                nn.Embedding(10, 4),
            )
            self.head = nn.Linear(12, 1)
            self.register_buffer("phase", torch.polar(torch.ones(4), torch.arange(4.0)))

        def forward(
            self,
            image: Tensor,
            wave: Tensor,
            index: Tensor,
            mask: Tensor,
            weight: Tensor,
            target: Tensor,
        ) -> Tensor:
            dtype = self.head.weight.dtype
            a = self.conv(image.to(dtype) / 127.5 - 1).amax((2, 3))
            b = self.wave(wave.to(dtype) / 32768)
            c = (self.embed(index.long()) * mask[..., None]).sum(1) / mask.sum(
                1, keepdim=True
            ).clamp(min=1)
            c = (
                c * self.phase.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
            ).real
            out = self.head(torch.cat((a, b, c), 1)).squeeze(1)
            island = torch.log1p(out.double().square()).to(dtype)
            return (weight.to(dtype) * (island - target.to(dtype) / 10).abs()).sum() / weight.to(
                dtype
            ).sum()

    return Net(), {
        "image": tokens(256, batch_size, 3, 5, 5).to(torch.uint8), "wave": tokens(30000, batch_size, 6).to(torch.int16),
        "index": tokens(10, batch_size, 4).to(torch.int32), "mask": tokens(2, batch_size, 4).bool(),
        "weight": floats(batch_size).abs() + 0.5, "target": tokens(50, batch_size),
    }  # fmt: skip


def tuples_and_named_ones(batch_size: int = 4) -> Example:
    """Modules that hand on named tuples, dicts with defaults, generators and sets of losses, unpacked by stars."""

    class State(NamedTuple):
        h: Tensor
        c: Tensor
        losses: tuple[Tensor, ...] = ()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(WIDTH, WIDTH)

        def forward(self, x: Tensor, state: State) -> State:
            h, c = self.cell(x, state[:2])
            return state._replace(h=h, c=c, losses=(*state.losses, h.square().mean()))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = (
                Layer(),
                nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)}),
            )

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            zero = x.new_zeros(len(x), WIDTH)
            state = State(zero, zero)
            for step in x.unbind(1):
                state = self.layer(step, state)
            found: dict[str, list[Tensor]] = defaultdict(list)
            for name, head in self.out.items():
                found[name].append(F.mse_loss(head(state.h), y[:, -1]))
            losses = {name: sum(ones) for name, ones in found.items()}
            return {
                "loss": sum(losses.values()) + 0.01 * torch.stack(state.losses).mean(),
                "parts": losses,
                "state": state,
            }

    return Net(), row_batch(batch_size, 3)


def shared_in_odd_places(batch_size: int = 4) -> Example:
    """One parameter under three names, a linear layer used as an embedding, a conv that reads a linear's weight, a
    module registered twice, a bias that is a norm's weight."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Linear(WIDTH, 11)
            self.norm = nn.LayerNorm(WIDTH)
            self.mix = nn.Linear(WIDTH, WIDTH)
            self.mix.bias = self.norm.weight
            self.again = self.mix
            self.alias = self.table.weight
            self.conv = nn.Conv1d(WIDTH, WIDTH, 1)
            self.branches = nn.ModuleList([self.mix, self.norm, self.mix])

        def forward(self, ids: Tensor) -> Tensor:
            h = F.embedding(ids, self.table.weight)
            for branch in self.branches:
                h = branch(h)
            h = h + self.again(h).tanh()
            h = h + F.conv1d(
                h.transpose(1, 2), self.mix.weight.unsqueeze(-1), self.conv.bias
            ).transpose(1, 2)
            h = h + self.conv(h.mT).mT
            logits = self.table(h) + F.linear(h, self.alias)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return Net(), {"ids": tokens(11, batch_size, 5)}


def used_by_turns(batch_size: int = 4) -> Example:
    """Parameters that the batch decides over (per-sample heads by where), some never used, one used only for its
    shape, one in evaluation only, one that gets a zero gradient."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(3))
            self.unused, self.shape_only = nn.Linear(5, 5), nn.Parameter(torch.zeros(WIDTH, 2))
            self.eval_only, self.body = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.cancelled = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            h = self.body(x) + self.cancelled - self.cancelled
            if not self.training:
                h = self.eval_only(h)
            h = h[:, : self.shape_only.shape[0]] + 0.0 * self.cancelled
            outs = torch.stack([head(h).squeeze(-1) for head in self.heads], 1)
            picked = torch.where(
                labels == 0, outs[:, 0], torch.where(labels == 1, outs[:, 1], outs[:, 2])
            )
            return F.huber_loss(picked, labels.to(x.dtype), delta=0.5)

    return Net(), _labelled(batch_size, 3)


# -- ways of writing ------------------------------------------------------------------------------------


def written_in_place(batch_size: int = 4) -> Example:
    """Results filled slice by slice with steps, through narrow, select, diagonal, unbind, expand_as, chunk and
    masked_scatter_, activations in place on views, += on slices of slices."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.one(x)
            out = torch.empty_like(h)
            out[:, ::2] = h[:, 1::2].tanh()
            out[:, 1::2] = h[:, ::2]
            out.narrow(2, 1, 3).mul_(0.5)
            out.select(1, -1).add_(x[:, 0])
            out[..., 2:6][:, :2] += h[:, :2, :4]
            out[:, 1, :4].neg_()
            left, right = out[..., :4], out[..., 4:]
            left.sub_(right.detach())
            square = torch.zeros(len(x), 4, 4, dtype=x.dtype)
            square.diagonal(dim1=1, dim2=2).copy_(h[:, 0, :4])
            square.view(len(x), 16)[:, 3::5] += 1
            mask = x > 0.3
            out = out.masked_scatter(mask, h.flip(1)[mask])
            out[mask & (out > 1)] = 1.0
            rows = torch.arange(len(x))
            out[rows, rows % x.shape[1]] = self.two(x[rows, 0])
            for i in range(out.shape[1]):
                out[:, i].mul_(1.0 + 0.1 * i)
            return F.mse_loss(out, y) + (square @ square.mT).mean()

    return Net(), row_batch(batch_size, 4)


def strided_windows(batch_size: int = 4) -> Example:
    """as_strided windows, unfold in two dims, rolled and flipped axes, a Toeplitz product by gather, pixel shuffle,
    repeat_interleave, movedim, tensordot, kron of rows."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.t, self.head = (
                nn.Parameter(floats(3, 3, 5)),
                nn.Parameter(floats(15)),
                nn.Linear(13, 4),
            )

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            b, n = x.shape
            windows = x.unfold(1, 3, 1)
            picture = x.reshape(b, 2, 4).repeat_interleave(2, dim=1)
            patches = picture.unfold(1, 3, 1).unfold(2, 3, 1)
            a = torch.tensordot(patches, self.w, dims=([3, 4], [0, 1])).amax((1, 2))
            index = torch.arange(n)[:, None] - torch.arange(n) + n - 1
            toeplitz = x @ self.t[index]
            k = (
                torch.einsum("bi,bj->bij", windows[:, 0], windows[:, -1])
                .flatten(1)[:, :5]
                .roll(1, 1)
                .rot90(2, (0, 1))
                .flip(0)
            )
            up = (
                F.pixel_shuffle(picture.reshape(b, 4, 2, 2), 2)
                .movedim(1, -1)
                .squeeze(-1)
                .amax(1)[:, :3]
            )
            mixed = torch.cat((a, toeplitz[:, :5] + k, up), 1)
            return F.cross_entropy(self.head(mixed), labels)

    return Net(), _labelled(batch_size)


def reductions_of_all_kinds(batch_size: int = 4) -> Example:
    """Medians, kth values, quantiles, modes of integers, logsumexp, norms of odd orders, variances with corrections,
    cumulated extremes, renorm, histograms that carry no gradient, nan-aware means."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = nn.Linear(WIDTH, 9), nn.Linear(16, 4)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            h = self.net(x)
            parts = [
                h.median(1).values, h.kthvalue(3, dim=1).values, h.quantile(0.3, dim=1), h.nanmedian(1).values,
                h.logsumexp(1), h.norm(p=3, dim=1), h.norm(p=1, dim=1), h.var(1, correction=0), h.std(1),
                h.cummax(1).values[:, 4], h.cummin(1).values.mean(1), h.tanh().cumprod(1)[:, 3],
                torch.where(h > 1, torch.nan, h).nanmean(1), h.aminmax(dim=1).max, h.softmax(1).amax(1),
                torch.special.logsumexp(h[:, :3], 1) - torch.logaddexp(h[:, 0], h[:, 1]),
            ]  # fmt: skip
            z = torch.stack(parts, 1)
            z = torch.renorm(z, 2, 0, 5.0)
            with torch.no_grad():
                spread = torch.histc(z.detach(), 4, -5, 5).max() / z.numel()
            return F.cross_entropy(self.head(z), labels) * (1 + 0 * spread)

    return Net(), _labelled(batch_size)


def losses_of_pairs(batch_size: int = 6) -> Example:
    """Margin ranking, cosine embedding, hinge embedding, triplets with distances, multi-label margins, Poisson and
    Gaussian likelihoods, CTC with lengths, soft margins, weighted by learned uncertainties."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scalar, self.many = (
                two_layers(),
                nn.Linear(WIDTH, 1),
                nn.Linear(WIDTH, 5),
            )
            self.frames = nn.Linear(WIDTH, 6 * 7)
            self.log_vars = nn.Parameter(torch.zeros(9))

        def forward(
            self,
            a: Tensor,
            b: Tensor,
            c: Tensor,
            sign: Tensor,
            multi: Tensor,
            text: Tensor,
            lengths: Tensor,
        ) -> Tensor:
            ha, hb, hc = self.body(torch.cat((a, b, c))).chunk(3)
            sa, sb = self.scalar(ha).squeeze(1), self.scalar(hb).squeeze(1)
            logits = self.many(ha)
            frames = self.frames(ha).view(len(a), 6, 7).log_softmax(-1).transpose(0, 1)
            full = torch.full((len(a),), 6, dtype=torch.long)
            losses = torch.stack([
                F.margin_ranking_loss(sa, sb, sign, margin=0.1),
                F.cosine_embedding_loss(ha, hb, sign, margin=0.2),
                F.hinge_embedding_loss((ha - hb).abs().sum(1), sign, margin=2.0),
                F.triplet_margin_with_distance_loss(ha, hb, hc, distance_function=lambda x, y: 1 - F.cosine_similarity(x, y), swap=True),
                F.multilabel_soft_margin_loss(logits, multi),
                F.poisson_nll_loss(sa, sign.abs() + 1, full=True),
                F.gaussian_nll_loss(sa, sign, F.softplus(sb) + 0.1),
                F.soft_margin_loss(sb, sign),
                F.ctc_loss(frames, text, full, lengths, blank=0, zero_infinity=True),
            ])  # fmt: skip
            return (torch.exp(-self.log_vars) * losses + 0.5 * self.log_vars).sum()

    a = floats(batch_size, WIDTH)
    return Net(), {
        "a": a, "b": a.flip(0), "c": a.roll(1, 0), "sign": (tokens(2, batch_size) * 2 - 1).float(),
        "multi": tokens(2, batch_size, 5).float(), "text": tokens(7, batch_size, 3, low=1), "lengths": tokens(4, batch_size, low=1),
    }  # fmt: skip


def means_over_what_is_there(batch_size: int = 4) -> Example:
    """Losses over selected entries: masked_select, boolean indexing, nonzero with as_tuple, a top share of hard
    pixels, per-class means (dice over the batch and per sample), a balanced focal term with counts."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1))

        def forward(self, x: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
            logits = self.net(x)
            each = F.cross_entropy(logits, labels, reduction="none")
            chosen = torch.masked_select(each, valid)
            hard = each.flatten(1).topk(5, dim=1).values.mean()
            p = logits.softmax(1)
            one = F.one_hot(labels, 3).permute(0, 3, 1, 2).to(p.dtype)
            dice_sample = 1 - (2 * (p * one).sum((2, 3)) + 1) / (
                p.sum((2, 3)) + one.sum((2, 3)) + 1
            )
            dice_batch = 1 - (2 * (p * one).sum((0, 2, 3)) + 1) / (
                p.sum((0, 2, 3)) + one.sum((0, 2, 3)) + 1
            )
            b, h, w = torch.nonzero(valid & (labels == 1), as_tuple=True)
            focal = -((1 - p[b, 1, h, w]) ** 2 * p[b, 1, h, w].clamp(min=1e-6).log()).sum() / max(
                len(x), 1
            )
            return chosen.mean() + hard + dice_sample.mean() + dice_batch.mean() + 0.1 * focal

    return Net(), {
        "x": floats(batch_size, 2, 5, 5),
        "labels": tokens(3, batch_size, 5, 5),
        "valid": tokens(4, batch_size, 5, 5) > 0,
    }


def sizes_in_python(batch_size: int = 4) -> Example:
    """Sizes of the batch used as numbers: divisions by len, logs of it, weights 1/n, ranges over it as labels, eye and
    off-diagonals by views, halves, unbiased corrections, expand by -1."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = two_layers(), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            n = x.shape[0]
            z = self.net(x)
            c = (z - z.mean(0)) / (z.std(0) + 1e-4)
            corr = c.t() @ c / n
            off = corr.flatten()[:-1].view(WIDTH - 1, WIDTH + 1)[:, 1:].flatten()
            cov = (z - z.mean(0)).t() @ (z - z.mean(0)) / (n - 1)
            a, b = z[: n // 2], z[n // 2 :]
            mmd = torch.cdist(a, b).mean() * 2 - torch.cdist(a, a).sum() / (len(a) * (len(a) - 1))
            same = labels.view(-1, 1).eq(labels.view(1, -1)).to(z.dtype)
            mask = torch.ones_like(same) - torch.eye(n, dtype=z.dtype)
            logits = F.normalize(z, dim=1) @ F.normalize(z, dim=1).t() / 0.5
            log_prob = logits - torch.log((torch.exp(logits) * mask).sum(1, keepdim=True))
            supervised = -(
                (same * mask * log_prob).sum(1) / (same * mask).sum(1).clamp(min=1)
            ).mean()
            weights = torch.full((n,), 1.0 / n, dtype=z.dtype)
            ce = (F.cross_entropy(self.head(z), labels, reduction="none") * weights).sum()
            return (
                off.pow(2).sum()
                + (cov + torch.eye(WIDTH, dtype=z.dtype)).logdet() / math.log(n + 1) * 0.01
                + mmd
                + supervised
                + ce
            )

    return Net(), _labelled(batch_size)


def ragged_lists(batch_size: int = 4) -> Example:
    """Rows of many lengths cut into lists by Python, padded again by pad_sequence, split by sections, stacked with
    where they came from."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.rnn = (
                nn.Linear(WIDTH, WIDTH),
                nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True),
            )
            self.head = nn.Linear(2 * WIDTH, 3)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            pieces = [self.net(x[i, : 3 + i % 2]) for i in range(len(x))]
            padded = nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=0.0)
            packed = nn.utils.rnn.pack_sequence(pieces, enforce_sorted=False)
            out, hidden = self.rnn(packed)
            out, lengths = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
            pooled = out.sum(1) / lengths.unsqueeze(1) + hidden.transpose(0, 1).flatten(1)
            return F.cross_entropy(self.head(pooled), labels) + 0.01 * padded.square().mean()

    return Net(), {"x": floats(batch_size, 4, WIDTH), "labels": tokens(3, batch_size)}


def beams(batch_size: int = 3) -> Example:
    """Minimum risk over beams found without gradients: top-k over beams times words, states reordered by gather,
    log-probabilities of what was found made again with gradients, rewards of overlap."""

    class Beams(nn.Module):
        def __init__(self, words: int = 7, width: int = 3, length: int = 3) -> None:
            super().__init__()
            self.words, self.width, self.length = words, width, length
            self.embed, self.cell, self.out = (
                nn.Embedding(words, WIDTH),
                nn.GRUCell(WIDTH, WIDTH),
                nn.Linear(WIDTH, words),
            )

        @torch.no_grad()
        def search(self, state: Tensor) -> Tensor:
            b = len(state)
            state = state.repeat_interleave(self.width, 0)
            scores = state.new_full((b, self.width), -1e9)
            scores[:, 0] = 0
            found = torch.zeros(b, self.width, 1, dtype=torch.long)
            for _ in range(self.length):
                state = self.cell(self.embed(found[..., -1].reshape(-1)), state)
                total = scores.unsqueeze(-1) + self.out(state).log_softmax(-1).view(
                    b, self.width, -1
                )
                scores, index = total.view(b, -1).topk(self.width, dim=1)
                beam, word = torch.div(index, self.words, rounding_mode="floor"), index % self.words
                state = (
                    state.view(b, self.width, -1)
                    .gather(1, beam.unsqueeze(-1).expand(-1, -1, WIDTH))
                    .flatten(0, 1)
                )
                found = torch.cat(
                    (
                        found.gather(1, beam.unsqueeze(-1).expand(-1, -1, found.shape[-1])),
                        word.unsqueeze(-1),
                    ),
                    -1,
                )
            return found

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            found = self.search(x)
            b, k, t = found.shape
            state, logp = x.repeat_interleave(k, 0), x.new_zeros(b * k)
            flat = found.view(b * k, t)
            for i in range(t - 1):
                state = self.cell(self.embed(flat[:, i]), state)
                logp = logp + self.out(state).log_softmax(-1).gather(
                    1, flat[:, i + 1 : i + 2]
                ).squeeze(1)
            match = (found[..., 1:] == target.unsqueeze(1)).to(x.dtype).mean(-1)
            return -(logp.view(b, k).softmax(1) * match).sum(1).mean() - 0.01 * logp.mean()

    return Beams(), {"x": floats(batch_size, WIDTH), "target": tokens(7, batch_size, 3)}


def members_by_vmap(batch_size: int = 4) -> Example:
    """Members by torch.func.stack_module_state held as parameters, run by vmap over members and samples, BatchEnsemble's
    fast weights beside them."""

    class Ensemble(nn.Module):
        def __init__(self, members: int = 3) -> None:
            super().__init__()
            nets = [two_layers(WIDTH, 4) for _ in range(members)]
            parameters, _ = torch.func.stack_module_state(nets)
            self.names = list(parameters)
            self.stacked = nn.ParameterList(nn.Parameter(p.detach()) for p in parameters.values())
            self.skeleton = [copy.deepcopy(nets[0]).to("meta")]
            self.r, self.s = (
                nn.Parameter(1 + 0.1 * floats(members, WIDTH)),
                nn.Parameter(1 + 0.1 * floats(members, 4)),
            )
            self.slow = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            def one(parameters: dict[str, Tensor], data: Tensor) -> Tensor:
                return torch.func.functional_call(self.skeleton[0], parameters, (data,))

            stacked = dict(zip(self.names, self.stacked, strict=True))
            outs = torch.func.vmap(one, in_dims=(0, None))(stacked, x)
            fast = self.slow((x.unsqueeze(0) * self.r.unsqueeze(1)).flatten(0, 1)).view(
                len(self.r), len(x), 4
            ) * self.s.unsqueeze(1)
            logits = outs + fast
            ce = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(self.r)))
            mean = logits.log_softmax(-1).logsumexp(0) - math.log(len(self.r))
            return ce + F.nll_loss(mean, labels)

    return Ensemble(), _labelled(batch_size)


class Tagged(Tensor):
    """A tensor with a name that operators hand on."""

    tag: str = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and keep the first argument's name."""
        out = super().__torch_function__(func, types, args, kwargs or {})
        tags = [one.tag for one in args if isinstance(one, Tagged) and hasattr(one, "tag")]
        if isinstance(out, Tagged) and tags:
            out.tag = tags[0]
        return out


def subclassed(batch_size: int = 4) -> Example:
    """A tensor subclass that carries a name through the layers, unwrapped before the loss."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = two_layers()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = x.as_subclass(Tagged)
            h.tag = "features"
            h = self.net(h)
            return F.mse_loss(h.as_subclass(Tensor), y)

    return Net(), row_batch(batch_size)


def mixed_parameters(batch_size: int = 4) -> Example:
    """Weights in two precisions beside each other, a scale kept in float32 on purpose, an integer weight that is
    looked up, casts at every border."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
            self.codes = nn.Parameter(tokens(16, 12, 12).to(torch.uint8), requires_grad=False)
            self.levels = nn.Parameter(torch.linspace(-1, 1, 16))
            self.scale = nn.Parameter(torch.ones(12, 1))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = F.relu(self.one(x))
            weight = self.levels[self.codes.long()] * self.scale
            h = F.relu(h + F.linear(h, weight.to(h.dtype)))
            return F.mse_loss(self.two(h), y)

    return Net(), row_batch(batch_size)


def parametrised_twice(batch_size: int = 4) -> Example:
    """A weight under two parametrisations in a row, one with state that is updated in forward, spectral norm with its
    vectors, cached for a part that reads it twice."""

    class Masked(nn.Module):
        def __init__(self, shape: torch.Size) -> None:
            super().__init__()
            self.register_buffer("mask", (torch.arange(shape.numel()).view(shape) % 3 > 0).float())

        def forward(self, w: Tensor) -> Tensor:
            return w * self.mask

    class Skew(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu(1) - w.triu(1).transpose(-1, -2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.rotate = (
                nn.Linear(WIDTH, 12),
                nn.Linear(12, WIDTH),
                nn.Linear(12, 12, bias=False),
            )
            nn.utils.parametrizations.weight_norm(self.one)
            parametrize.register_parametrization(self.one, "weight", Masked(self.one.weight.shape))
            nn.utils.parametrizations.spectral_norm(self.two)
            parametrize.register_parametrization(self.rotate, "weight", Skew())

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with parametrize.cached():
                h = torch.tanh(self.one(x))
                turn = torch.matrix_exp(self.rotate.weight)
                return (
                    F.mse_loss(self.two(h @ turn), y)
                    + 0.01 * self.two.weight.square().sum()
                    + 0.01 * self.one.weight.abs().mean()
                )

    return Net(), row_batch(batch_size)


def contexts_and_decorators(batch_size: int = 4) -> Example:
    """Forwards behind decorators, context managers of one's own, try and finally, torch.set_grad_enabled, local
    imports, match statements, walrus, cached properties, staticmethods, __call__ overridden."""

    def logged(fn: Any) -> Any:
        @functools.wraps(fn)
        def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return fn(self, *args, **kwargs)
            finally:
                self.depth -= 1

        return inner

    class Block(nn.Module):
        depth: int = 0

        def __init__(self, kind: typing.Literal["wide", "deep"]) -> None:
            super().__init__()
            self.kind = kind
            match kind:
                case "wide":
                    self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
                case "deep":
                    self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH), nn.Mish()] * 2)

        @functools.cached_property
        def scale(self) -> float:
            return 1 / math.sqrt(sum(p.numel() for p in self.parameters()))

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().__call__(*args, **kwargs) * 1.0

        @logged
        def forward(self, x: Tensor, *, skip: bool = True) -> Tensor:
            out = self.net(x) * (1 + self.scale)
            return x + out if skip else out

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block("wide"), Block("deep")])
            self.quiet = False

        @contextlib.contextmanager
        def silent(self) -> Any:
            before, self.quiet = self.quiet, True
            try:
                yield self
            finally:
                self.quiet = before

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with self.silent() as me, torch.set_grad_enabled(True):
                for i, block in enumerate(me.blocks):
                    x = block(x, skip=i == 0)
            with torch.set_grad_enabled(False):
                weight = (y.square().mean(1) > 0.1).to(x.dtype)
            if (total := (x - y).square().mean(1)).dim() == 1:
                total = total * weight
            return total.mean()

    return Net(), row_batch(batch_size)


def scripted_pieces(batch_size: int = 4) -> Example:
    """Functions under torch.jit.script with loops over ranges and optional arguments, jit.ignore and jit.export on
    methods, a forward annotated for TorchScript but not compiled."""

    @torch.jit.script
    def gelu_bias(x: Tensor, bias: Tensor, times: int = 2) -> Tensor:
        for _ in range(times):
            x = x + bias
        return x * 0.5 * (1.0 + torch.erf(x / 1.41421))

    class Net(nn.Module):
        __constants__: typing.ClassVar = ["width"]

        def __init__(self) -> None:
            super().__init__()
            self.width = WIDTH
            self.one, self.two = nn.Linear(WIDTH, 12, bias=False), nn.Linear(12, WIDTH)
            self.bias = nn.Parameter(torch.zeros(12))

        @torch.jit.export
        def encode(self, x: Tensor) -> Tensor:
            return gelu_bias(self.one(x), self.bias)

        @torch.jit.ignore
        def no_weight_decay(self) -> set[str]:
            return {"bias"}

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if torch.jit.is_scripting() or torch.jit.is_tracing():
                raise RuntimeError("not here")
            h = self.encode(x)
            torch._assert(h.shape[-1] == 12, "wrong width")
            return F.mse_loss(self.two(h), y)

    return Net(), row_batch(batch_size)


def biases_of_the_batch(batch_size: int = 4) -> Example:
    """Samples that meet by sorting, ranks, cumulated sums, previous neighbours and first of the batch; then means."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.mix = two_layers(), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.net(x)
            before = torch.cat((h[:1] * 0, h[:-1]), 0)
            order = h[:, 0].argsort()
            ranks = torch.empty_like(order).scatter_(0, order, torch.arange(len(x)))
            summed = h.cumsum(0) / (torch.arange(len(x), dtype=h.dtype) + 1)[:, None]
            best = h.max(0, keepdim=True).values
            out = self.mix(torch.cat((h + before + summed, best.expand_as(h)), 1))
            return F.mse_loss(out * (1 + 0.1 * ranks.to(h.dtype)[:, None]), y + y[0] - y[-1])

    return Net(), row_batch(batch_size)


def last_step_only(batch_size: int = 4) -> Example:
    """Parameters of no dims, of one element, of size zero, odd widths that no device count divides, a batch that is
    longer in its second dim."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.net = nn.Sequential(
                nn.Linear(7, 13),
                nn.PReLU(),
                nn.Linear(13, 5, bias=False),
                nn.Softsign(),
                nn.Linear(5, 1),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            extra = torch.cat((self.empty, x.new_ones(1, 3))).sum()
            out = self.net(x).squeeze(-1) * self.scale + self.one * extra
            return F.l1_loss(out, y) + out.std() * 0.1

    return Net(), {"x": floats(batch_size, 17, 7), "y": floats(batch_size, 17)}


def one_sample(batch_size: int = 4) -> Example:
    """A batch norm whose input is one row per sample and one place, instance statistics over a single place, a group
    of one channel, softmax over one word."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = (
                nn.Conv1d(WIDTH, 6, 1),
                nn.BatchNorm1d(6, affine=False, momentum=None),
            )
            self.group, self.head = nn.GroupNorm(6, 6), nn.Linear(6, 1)
            self.attend = nn.MultiheadAttention(6, 1, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.norm(self.conv(x.unsqueeze(-1)))
            h = self.group(h.repeat(1, 1, 2) + torch.arange(2, dtype=h.dtype)).amax(-1).unsqueeze(1)
            h, _ = self.attend(h, h, h, need_weights=False)
            return F.binary_cross_entropy(self.head(h).squeeze(1).sigmoid(), y[:, :1].sigmoid())

    return Net(), row_batch(batch_size)
