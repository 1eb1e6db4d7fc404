"""Deep models are captured from a few of their layers: as the whole would be, or whole."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.core.codec import dumps, encode
from shardwright.errors import ShardwrightError
from shardwright.runtime.capture import Captured, capture, layers, streams

pytestmark = pytest.mark.torch

DEPTH, WIDTH = 9, 4
Forward = Callable[[Any, int, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, index: int, forward: Forward | None = None) -> None:
        super().__init__()
        self.index, self.inner = index, forward
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            return self.inner(self, self.index, x)
        return x + F.dropout(self.linear(self.norm(x)).relu(), 0.1, self.training)


class Deep(nn.Module):
    """Equal layers between others of the same operators, with what ``between`` does after each."""

    def __init__(self, forward: Forward | None = None, between: Forward | None = None) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer(index, forward) for index in range(DEPTH))
        self.norm, self.between = nn.LayerNorm(WIDTH), between

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.5, self.training)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.between is not None:
                x = self.between(self, index, x)
        return F.mse_loss(self.head(F.dropout(self.norm(x), 0.5, self.training)), y)


def linear(layer: Any, _: int, x: Tensor) -> Tensor:
    return x + layer.linear(x)


def of(module: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    return module, {"x": torch.ones(2, WIDTH), "y": torch.ones(2, 1)}


def changed(change: Callable[[Any], None], forward: Forward | None = None) -> Deep:
    """Make a deep model in which one of the layers in the middle is changed."""
    model = Deep(forward)
    change(model.layers[5])
    return model


@pytest.fixture(autouse=True)
def _shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "DEEP", DEPTH - 1)


def said(captured: Captured) -> str:
    calls = [(call.target, call.args, call.kwargs) for call in captured.calls]
    return dumps(encode(captured.graph)) + repr(calls)


def whole(make: Callable[[], nn.Module], **options: Any) -> str:
    """Return what a capture of the whole model says, or why it is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "DEEP", 10**9)
        return captured(make, **options)


def captured(make: Callable[[], nn.Module], **options: Any) -> str:
    module, batch = of(make())
    try:
        return said(capture(module, batch, **options))
    except ShardwrightError as error:
        return str(error)


def is_repeated(make: Callable[[], nn.Module]) -> bool:
    module, batch = of(make())
    return streams.equal_layers(module, lambda given: module(**given), batch) != ()


# -- models of equal layers --------------------------------------------------------------------------


class Chain(nn.Sequential):
    """A model that is the list itself."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(super().forward(x), y.expand(-1, WIDTH))


def children(*makers: Callable[[], nn.Module]) -> list[nn.Module]:
    """Return the children of layers in a row."""
    return [make() for _ in range(DEPTH) for make in makers]


def straight() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def norm() -> nn.Module:
    return nn.LayerNorm(WIDTH)


def attention(layer: Any, _: int, x: Tensor) -> Tensor:
    query = layer.linear(x).view(1, 2, 2, 2).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    return x + mixed.transpose(1, 2).reshape(2, WIDTH)


def of_first(model: Any, _: int, x: Tensor) -> Tensor:
    return x + model.first.weight.sum()


class Doubled(torch.autograd.Function):
    """The identity, whose gradient is doubled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Plain(Doubled):
    """The identity."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def bent(layer: Any, index: int, x: Tensor) -> Tensor:
    return (Doubled if index == 5 else Plain).apply(layer.linear(x))  # type: ignore[no-untyped-call]


def bent_alike(layer: Any, _: int, x: Tensor) -> Tensor:
    return Doubled.apply(layer.linear(x))  # type: ignore[no-untyped-call]


@lru_cache
def scale(size: int) -> Tensor:
    return torch.ones(size) * 2


def remembered(layer: Any, _: int, x: Tensor) -> Tensor:
    return layer.linear(x) * scale(WIDTH)


def placed(layer: Any, _: int, x: Tensor) -> Tensor:
    if x.is_meta or not x.is_cpu or x.device != layer.linear.weight.device:
        return x
    ramp = torch.arange(WIDTH, device=x.device) + torch.arange(WIDTH) + torch.ones(WIDTH).to("cpu")
    return layer.linear(x) + ramp.to(x.device, x.dtype)


def tied() -> Deep:
    model = Deep()
    layer: Any
    for layer in model.layers:
        layer.linear.weight = model.first.weight
    return model


def frozen() -> Deep:
    model = Deep()
    layer: Any
    for layer in model.layers:
        layer.norm.requires_grad_(False)
    return model


class Mixed(nn.Module):
    """Adds up experts, each weighed by what its number picks."""

    def __init__(self, pick: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.gate, self.pick = nn.Linear(WIDTH, DEPTH), pick
        self.experts = nn.ModuleList(nn.Sequential(straight(), nn.GELU()) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        gate, found = self.gate(x).softmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            found = found + self.pick(gate, number) * expert(x)
        return x + found


class Behind(Mixed):
    """The same with weights that are picked when the expert has run."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).softmax(-1)
        for number, expert in enumerate(self.experts):
            x = x + expert(x) * self.pick(gate, number)
        return x[:, 0:3].sum(-1, keepdim=True) + x


def column(gate: Tensor, number: int) -> Tensor:
    return gate[..., number : number + 1]


def picked(gate: Tensor, number: int) -> Tensor:
    return gate[:, number].unsqueeze(-1)


def selected(gate: Tensor, number: int) -> Tensor:
    return gate.select(1, number)[:, None]


def from_behind(gate: Tensor, number: int) -> Tensor:
    return gate[:, -number - 1, None]


def downwards(gate: Tensor, number: int) -> Tensor:
    return gate[:, DEPTH - 1 - number, None]


class Late(nn.Module):
    """Two lists of layers, of which the second runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Sequential(*children(straight, nn.GELU))
        self.early = nn.Sequential(*children(norm, straight))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.late(self.early(x) * 2) + 1, y.expand(-1, WIDTH))


class Nested(Late):
    """A list of layers, each of which has a list as long in itself, behind another list."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Sequential(*[nn.Sequential(*children(straight)) for _ in range(DEPTH)])


def half_equal() -> nn.Module:
    """Make a model of two lists of layers, in the shorter of which one layer differs."""
    model = Late()
    model.early = nn.Sequential(*children(straight, straight))
    late: Any = [*model.late]
    late[10].bias.requires_grad_(False)
    return model


EQUAL: dict[str, Callable[[], nn.Module]] = {
    "experts that a slice weighs": lambda: Chain(*[Mixed(column) for _ in range(3)]),
    "experts that an index weighs": lambda: Chain(Mixed(picked), straight(), Mixed(column)),
    "experts that a selection weighs": lambda: Chain(Mixed(selected)),
    "weights picked behind experts": lambda: Chain(Behind(picked), Behind(column)),
    "weights from behind": lambda: Chain(Behind(from_behind)),
    "a number behind the last": lambda: Chain(Tailed(column)),
    "weights downwards": lambda: Chain(Behind(downwards), Mixed(downwards)),
    "two lists": Late,
    "lists in lists": Nested,
    "two lists of which one is equal": half_equal,
    "layers": Deep,
    "operators between": lambda: Deep(linear, lambda _, __, x: F.gelu(x)),
    "attention": lambda: Deep(attention),
    "a parameter of all": lambda: Deep(None, of_first),
    "tied": tied,
    "frozen parts": frozen,
    "asks where it is": lambda: Deep(placed),
    "gradients of its own": lambda: Deep(bent_alike),
    "a list alone": lambda: Chain(*[Layer(0) for _ in range(DEPTH)]),
    "layers of two children": lambda: Chain(*children(straight, nn.ReLU), straight()),
    "layers of three between others": lambda: Chain(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.Tanh(),
        nn.Linear(2 * WIDTH, WIDTH),
        *children(norm, straight, nn.GELU),
        nn.Tanh(),
        straight(),
    ),
    "layers that begin with nothing": lambda: Chain(*children(nn.Identity, straight, nn.GELU)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_a_deep_model_is_captured_as_a_whole_one_from_a_few_of_its_layers(name: str) -> None:
    make, calls = EQUAL[name], Counter[str]()
    assert is_repeated(make)
    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: calls.update([type(module).__name__])
    )
    found = captured(make)
    hook.remove()
    assert found == whole(make)
    count = sum(isinstance(module, nn.Linear) for module in make().modules())
    # All layers are compared, the few twice: to be compared and to be exported, and then not all.
    assert calls["Linear"] < 3 * count


@pytest.mark.parametrize("precision", ["bfloat16", "float64"])
def test_it_is_so_in_another_precision_and_at_another_batch_size(precision: str) -> None:
    options: dict[str, Any] = {"precision": precision, "global_batch": 64}
    assert captured(Deep, **options) == whole(Deep, **options)


CALLED: list[int] = []


def noted(layer: Any, index: int, x: Tensor) -> Tensor:
    CALLED.append(index)
    return linear(layer, index, x)


def test_all_layers_but_a_few_stay_away_from_export() -> None:
    CALLED.clear()
    module, batch = of(Deep(noted))
    assert len(capture(module, batch).graph.operators) > 2 * DEPTH
    # Once all, for what they call; then those that stay, for that again, and for export.
    assert [*range(DEPTH), *[0, 1, 2, DEPTH - 1] * 2] == CALLED


# -- and models that only look so ----------------------------------------------------------------------

COUNT = itertools.count()


def counted(layer: Any, _: int, x: Tensor) -> Tensor:
    return layer.linear(x) * next(COUNT)


def without_gradient(layer: Any, index: int, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(index != 5):
        return x + layer.linear(x)


def with_constant(layer: Any, index: int, x: Tensor) -> Tensor:
    return layer.linear(x) * torch.tensor(float(index))


def halved(_: Any, index: int, x: Tensor) -> Tensor:
    return x.repeat(1, 2)[:, ::2] if index == 5 else x.repeat(1, 1)


def swapped(model: Any, index: int, x: Tensor) -> Tensor:
    return x + model.layers[index - 1].linear.bias


def switched_off(layer: Any, index: int, x: Tensor) -> Tensor:
    layer.linear.weight.requires_grad = index != 5
    return layer.linear(x)


def switched(layer: Any, index: int, x: Tensor) -> Tensor:
    layer.linear.requires_grad_(index != 5)
    x = layer.linear(x)
    layer.linear.requires_grad_(True)
    return x


class Counting(Deep):
    """Scales by the number of its layers, which is another where some are left out."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x / len(self.layers), y)


class Going(nn.Module):
    """Experts of two lists, numbered through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mixed(column).experts, Mixed(column).experts
        self.gate = nn.Linear(WIDTH, 2 * DEPTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gate = self.gate(x)
        for number, expert in enumerate((*self.first, *self.second)):
            x = x + expert(x) * gate[:, number, None]
        return F.mse_loss(x, y.expand(-1, WIDTH))


def jumping(gate: Tensor, number: int) -> Tensor:
    return gate[:, (5 * number) % DEPTH, None]


def swerving(gate: Tensor, number: int) -> Tensor:
    return gate[:, number if number != 5 else 6, None]


def narrowed(gate: Tensor, number: int) -> Tensor:
    return gate.narrow(1, number, 1)


def shifted(gate: Tensor, number: int) -> Tensor:
    return gate.roll(number, 1)[:, :1]


class Tailed(Mixed):
    """Reads a column behind the last expert as if there were another."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).repeat(1, 2)
        found = gate[:, 0, None] * x
        for number, expert in enumerate(self.experts):
            found = found + expert(x)
            found = found + gate[:, number + 1, None]
        return found


class Summed(Deep):
    """Uses the results of all layers."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(found[-1]))
        return F.mse_loss(self.head(torch.stack(found).sum(0)), y)


class Kept(Deep):
    """Uses what its layers have kept."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.kept = layer(x)
        return F.mse_loss(self.head(x), y) + sum(layer.kept.mean() for layer in self.layers)


class Backwards(Deep):
    """Calls its layers in the other order."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return F.mse_loss(self.head(x), y)


class Skipping(Deep):
    """Adds the result of its second layer behind the last."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        second = x
        for index, layer in enumerate(self.layers):
            x = layer(x)
            second = x if index == 1 else second
        return F.mse_loss(self.head(x + second), y)


@dataclass
class Output:
    """What a model returns besides its loss."""

    loss: Tensor
    middle: Tensor
    all: list[Tensor] = field(default_factory=list)


class Reporting(Deep):
    """Reports a result of a layer in the middle."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return Output(F.mse_loss(self.head(x), y), found[5])


def shared_twice() -> Deep:
    model = Deep()
    layers: Any = model.layers
    layers[5].linear.weight = layers[4].linear.weight
    return model


def with_buffers(forward: Forward) -> Deep:
    model = Deep(forward)
    for index, layer in enumerate(model.layers):
        layer.register_buffer("scale", torch.ones(1 + WIDTH * (index % 2) - index % 2))
    return model


DIFFERENT: dict[str, Callable[[], nn.Module]] = {
    "numbers that jump": lambda: Chain(Mixed(jumping)),
    "numbers of which one differs": lambda: Chain(Behind(swerving)),
    "numbers that no pick is made by": lambda: Chain(Behind(narrowed)),
    "numbers that shift": lambda: Chain(Mixed(shifted)),
    "numbers through two lists": Going,
    "a number of each layer": lambda: Deep(lambda one, index, x: one.linear(x) * (1 + index)),
    "0.0 and -0.0": lambda: Deep(lambda one, i, x: one.linear(x) + (0.0 if i == 5 else -0.0)),
    "1 and True": lambda: Deep(lambda one, i, x: one.linear(x) * (True if i == 5 else 1)),
    "another operator in one": lambda: changed(
        lambda one: setattr(one, "inner", lambda one, _, x: one.linear(x).tanh())
    ),
    "another between two": lambda: Deep(linear, lambda _, i, x: x.tanh() if i == 5 else x.relu()),
    "a child of one in another way": lambda: Chain(
        *children(straight, nn.GELU)[:9], nn.GELU("tanh"), *children(straight, nn.GELU)
    ),
    "one frozen": lambda: changed(lambda one: one.requires_grad_(False)),
    "one bias frozen": lambda: changed(lambda one: one.linear.bias.requires_grad_(False)),
    "one evaluated": lambda: changed(lambda one: one.eval()),
    "one in double": lambda: changed(
        lambda one: one.linear.double(), lambda one, _, x: one.linear(x.to(one.linear.weight.dtype)).float()
    ),
    "one transposed": lambda: changed(
        lambda one: setattr(one.linear, "weight", nn.Parameter(torch.ones(WIDTH, WIDTH).t()))
    ),
    "counted outside": lambda: Deep(counted),
    "drawn by Python": lambda: Deep(lambda one, _, x: one.linear(x) * random.random()),
    "another gradient in one": lambda: Deep(bent),
    "one without gradient": lambda: Deep(without_gradient),
    "constants": lambda: Deep(with_constant),
    "shapes": lambda: Deep(None, halved),
    "buffers of two shapes": lambda: with_buffers(lambda one, _, x: one.linear(x) * one.scale),
    "written buffers": lambda: with_buffers(
        lambda one, _, x: one.linear(x) * one.scale.mul_(2).sum()
    ),
    "writes in place": lambda: Deep(lambda one, _, x: one.linear(x).mul_(2)),
    "a parameter of a neighbour": lambda: Deep(None, swapped),
    "two tied": shared_twice,
    "where it is": lambda: Deep(lambda one, i, x: one.linear(x) * (2 + (x.is_cpu and i == 5))),
    "their number": Counting,
    "all results": Summed,
    "kept results": Kept,
    "the other order": Backwards,
    "a skip": Skipping,
    "hooks": lambda: Deep(lambda one, i, x: _hooked(one.linear(x), i)),
    "one switched off": lambda: Deep(switched_off),
    "one switched off and on": lambda: Deep(switched),
    "one called twice": lambda: Deep(None, lambda model, i, x: model.layers[5](x) if i == 7 else x),
}  # fmt: skip


def _hooked(x: Tensor, index: int) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * index)
    return x


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ_in_anything_are_all_captured(name: str) -> None:
    make = DIFFERENT[name]
    assert not is_repeated(make)
    if "Python" in name or "outside" in name:
        return  # whole or not, every capture draws and counts anew
    assert captured(make) == whole(make)


def test_what_a_function_remembers_of_one_run_is_made_again_in_the_next() -> None:
    assert captured(lambda: Deep(remembered)) == whole(lambda: Deep(remembered))
    scale.cache_clear()
    assert type(scale(WIDTH)) is Tensor


def test_an_output_of_a_layer_in_the_middle_is_reported() -> None:
    assert captured(Reporting, outputs=("middle",)) == whole(Reporting, outputs=("middle",))
