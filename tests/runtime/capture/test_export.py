"""Captured graphs, executed, against the modules they were captured from."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import CaptureError
from shardwright.operators.splitting import find_samples
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.capture.evaluating import bind_tensors, evaluate
from tests import zoo
from tests.runtime.world import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.slow]

# Hugging Face computes these losses in float32 whatever the model's dtype, and our two operators
# round otherwise than log_softmax.
SINGLE = {"llama", "gpt2", "hf_bert", "t5", "mixtral"}
MODELS = (
    "mlp", "gpt", "bert", "cnn", "cnn_groupnorm", "lstm_translation", "llama", "gpt2", "hf_bert",
    "t5", "vit", "resnet", "mixtral", "switching",
)  # fmt: skip


def check(
    module: nn.Module, batch: dict[str, Tensor], tolerance: float = 1e-11, **options: object
) -> Captured:
    """Capture, run the graph, and compare loss, gradients and buffers with the module's own."""
    captured = capture(module, batch, **options)
    one, other = copy.deepcopy(module).train(), copy.deepcopy(module).train()
    output = one(**batch)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    ours = evaluate(captured, bind_tensors(captured, other, batch))
    ours.backward()
    torch.testing.assert_close(ours, loss, rtol=tolerance / 10, atol=1e-12)
    theirs = dict(one.named_parameters())
    for name, parameter in other.named_parameters():
        expected = theirs[name].grad
        if expected is None:
            assert parameter.grad is None or not parameter.grad.any()
        else:  # rounding relative to the largest entry: tiny entries come from cancellation
            error = (parameter.grad - expected).abs().max()
            assert error <= tolerance * expected.abs().max() + 1e-14, name
    for name, buffer in other.named_buffers():
        torch.testing.assert_close(buffer, dict(one.named_buffers())[name], rtol=1e-12, atol=1e-12)
    return captured


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_model_computes_the_loss_gradients_and_buffers_of_the_module(name: str) -> None:
    captured = check(*getattr(zoo, name)(), tolerance=1e-6 if name in SINGLE else 1e-11)
    assert not any(op.kind.startswith("opaque") for op in captured.graph.operators)


@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_synchronised_batch_norm_equals_batch_norm_on_one_device(name: str) -> None:
    module, batch = getattr(zoo, name)()
    captured = check(module, batch, batch_norm="synchronised")
    kinds = {op.kind for op in captured.graph.operators}
    assert "aten.batch_norm.default" not in kinds
    assert "shardwright.update_running" in kinds


def test_tied_parameters_are_one_tensor_with_an_alias() -> None:
    captured = capture(*zoo.gpt(tied=True))
    tied = [t for t in captured.graph.tensors if t.aliases]
    assert [(t.name, t.aliases) for t in tied] == [("embed.weight", ("head.weight",))]


def test_the_module_is_left_as_it_was() -> None:
    module, batch = zoo.cnn()
    module.eval()
    before = copy.deepcopy(module.state_dict())
    capture(module, batch, precision="bfloat16")
    assert not module.training
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_shapes_follow_the_global_batch() -> None:
    module, batch = zoo.gpt()
    graph = capture(module, batch, global_batch=64).graph
    assert [graph.tensors[i].shape[0] for i in graph.inputs] == [64, 64]


def test_a_model_on_the_meta_device_gives_the_same_graph_as_a_live_one() -> None:
    module, batch = zoo.gpt()
    live = capture(module, batch).graph.fingerprint
    assert capture(copy.deepcopy(module).to("meta"), batch).graph.fingerprint == live


def test_precision_converts_parameters_and_activations() -> None:
    graph = capture(*zoo.mlp(), precision="bfloat16").graph
    assert {graph.tensors[i].dtype for i in graph.parameters} == {"bfloat16"}


def test_equal_layers_have_equal_signatures() -> None:
    graph = capture(*zoo.gpt(depth=3)).graph
    signatures = {b.name: b.signature for b in graph.blocks}
    layers = {signatures[f"layers.{i}"] for i in range(3)}
    assert len(layers) == 1
    assert len(set(signatures.values())) == 3  # prelude, layer, loss


def test_layers_numbered_by_name_are_blocks_not_the_lists_inside_them() -> None:
    """As torchvision's transformers have them; the list inside each is one of unlike elements."""
    parts = (
        (f"layer_{n}", nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))) for n in range(3)
    )
    tower = Tower(nn.Sequential(OrderedDict(parts)))
    blocks = capture(tower, {"x": torch.randn(8, 4)}).graph.blocks
    assert [block.name for block in blocks[:3]] == [f"layers.layer_{n}" for n in range(3)]
    assert blocks[1].signature == blocks[2].signature


@pytest.mark.parametrize("holder", [nn.ModuleList, lambda parts: nn.ModuleDict(zip("ab", parts))])
def test_layers_that_are_lists_of_parts_are_blocks_with_the_sums_between_them(holder: Any) -> None:
    """``for attend, feed in self.layers: x = attend(x) + x; x = feed(x) + x``: the list is never called itself."""
    module = Parted(holder)
    blocks = capture(module, {"x": torch.randn(8, 4)}).graph.blocks
    names = [block.name for block in blocks]
    assert names == ["prelude", "layers.0", "layers.1", "layers.2", "loss"]
    assert blocks[1].signature == blocks[2].signature
    assert blocks[1].stop - blocks[1].start == 5  # two maps, an activation, two sums


class Parted(nn.Module):
    """Layers of two parts each, and the mean of their squares."""

    def __init__(self, holder: Any) -> None:
        super().__init__()
        layers = ([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU())] for _ in range(3))
        self.first, self.layers = nn.Linear(4, 4), nn.ModuleList(map(holder, layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            attend, feed = layer.values() if isinstance(layer, nn.ModuleDict) else layer
            x = attend(x) + x
            x = feed(x) + x
        return x.square().mean()


class Tower(nn.Module):
    """Layers, and the mean of their squares."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def fingerprint() -> tuple[int, str]:
    return hash("a process's own"), capture(*zoo.gpt()).graph.fingerprint


@pytest.mark.ranks
def test_fingerprints_agree_between_processes() -> None:
    """What the fork server forks hashes otherwise than this process."""
    ((other, found),) = run_ranks(1, fingerprint)
    own, expected = fingerprint()
    assert found == expected
    assert other != own or "PYTHONHASHSEED" in os.environ


class Odd(nn.Module):
    """Writes through views, into buffers, under no_grad, and uses tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.frozen = nn.Parameter(torch.ones(4).double(), requires_grad=False)
        self.register_buffer("average", torch.zeros(4).double())
        self.offset = torch.arange(4.0).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).clone()
        view = y[:, 1:]
        view[:, 0] *= 2.0
        view.t().add_(1.0)
        y.view(-1)[:2] = 3.0
        with torch.no_grad():
            gate = torch.sigmoid(self.linear(x))
            self.average.mul_(0.9).add_(0.1 * y.mean(0))
        left, _ = y.split(2, dim=1)
        y = y * gate + self.offset * self.frozen + torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
        return (y * self.average.detach() + left.sum() + torch.zeros(4)).pow(2).mean()


def test_writes_through_views_and_into_buffers_become_pure_operators() -> None:
    captured = check(Odd(), {"x": torch.randn(8, 4, dtype=torch.float64)})
    frozen = next(t for t in captured.graph.tensors if t.name == "frozen")
    assert not frozen.needs_gradient
    assert not any(op.kind.startswith("opaque") for op in captured.graph.operators)
    assert {t.name for t in captured.graph.tensors if t.role == "constant"} >= {"offset"}


class Branching(nn.Module):
    """One layer whose control flow depends on data, between two that can be exported."""

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if x.sum() > 0 else -self.linear(x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), self.Middle(), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.middle(torch.relu(self.first(x)))), y)


def test_a_layer_that_cannot_be_exported_becomes_one_opaque_operator() -> None:
    batch = {"x": torch.randn(8, 4, dtype=torch.float64), "y": torch.zeros(8, dtype=torch.long)}
    captured = check(Branching().double(), batch)
    kinds = [op.kind for op in captured.graph.operators]
    assert kinds.count("aten.linear.default") == 2
    assert kinds.count("opaque.Middle") == 1
    assert any("middle" in note for note in captured.graph.notes)


def test_an_opaque_layer_counts_the_products_inside_for_the_global_batch() -> None:
    batch = {"x": torch.randn(8, 4), "y": torch.zeros(8, dtype=torch.long)}
    graph = capture(Branching(), batch, global_batch=32).graph
    (middle,) = [op for op in graph.operators if op.kind.startswith("opaque")]
    assert middle.flops == 2 * 32 * 4 * 4 + 32 * 4
    (whole,) = capture(Whole(), {"x": torch.randn(8, 4)}, global_batch=32).graph.operators
    assert whole.flops == 2 * 32 * 4 * 4 + 1


class Whole(nn.Module):
    """Control flow on data in forward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = -x if x.sum() > 0 else x
        return self.linear(x).pow(2).mean()


def test_a_model_that_cannot_be_exported_at_all_becomes_one_operator() -> None:
    captured = check(Whole().double(), {"x": torch.randn(8, 4, dtype=torch.float64)})
    assert [op.kind for op in captured.graph.operators] == ["opaque.Whole"]


class Straight(torch.autograd.Function):
    """Rounds, and lets the gradient through."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


class Quantised(nn.Module):
    """A custom gradient, which export would lose without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(self.linear(x) * 9).pow(2).mean()


def test_a_custom_gradient_is_kept() -> None:
    check(Quantised().double(), {"x": torch.randn(8, 4, dtype=torch.float64)})


@pytest.mark.parametrize("reduction", ["mse", "spread", "bce", "nll", "smooth", "kl"])
def test_mean_losses_are_taken_apart_exactly(reduction: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4).double()

        def forward(self, x: Tensor, y: Tensor, k: Tensor) -> Tensor:
            out = self.linear(x)
            if reduction == "mse":
                return F.mse_loss(out, y)
            if reduction == "spread":
                return F.l1_loss(*torch.broadcast_tensors(out, y[:, :1]))
            if reduction == "bce":
                return F.binary_cross_entropy_with_logits(out, y)
            if reduction == "nll":
                return F.nll_loss(out.log_softmax(-1), k, ignore_index=2)
            if reduction == "smooth":
                return F.cross_entropy(out, y.softmax(-1), label_smoothing=0.1)
            return F.kl_div(out.log_softmax(-1), y.softmax(-1), reduction="batchmean")

    batch = {
        "x": torch.randn(8, 4, dtype=torch.float64),
        "y": torch.rand(8, 4, dtype=torch.float64),
        "k": torch.arange(8) % 4,
    }
    captured = check(Model(), batch)
    assert find_samples(captured.graph).blocker == ""


class NoLoss(nn.Module):
    """Returns its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_model_without_loss_is_refused_with_the_remedy() -> None:
    with pytest.raises(CaptureError, match=r"loss as a scalar.*\(8, 4\).*compute the loss"):
        capture(NoLoss(), {"x": torch.randn(8, 4)})


def test_a_batch_that_does_not_match_forward_is_refused() -> None:
    with pytest.raises(CaptureError, match="must match the arguments of forward"):
        capture(NoLoss(), {"z": torch.randn(8, 4)})


class Named(nn.Module):
    """Takes its batch by any name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, **batch: Tensor) -> Tensor:
        return sum(
            self.linear(x).pow(2).mean() * place for place, x in enumerate(batch.values(), 1)
        )


@pytest.mark.parametrize(
    "names", [("X",), ("Input_IDs", "input_ids"), ("x_BLD", "batch_0"), ("class", "a.b", "größe")]
)
def test_arguments_of_forward_may_have_any_names(names: tuple[str, ...]) -> None:
    batch = {name: torch.randn(8, 4, dtype=torch.float64) for name in names}
    captured = check(Named(), batch)
    assert [captured.graph.tensors[index].name for index in captured.graph.inputs] == list(names)
    assert not any(op.kind.startswith("opaque") for op in captured.graph.operators)


class SameNames(nn.Module):
    """Its arguments are called what a parameter, a buffer and a plain tensor of its are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.register_buffer("shift", torch.randn(8, dtype=torch.float64))
        self.mask = torch.randn(8, dtype=torch.float64)

    def forward(self, scale: Tensor, shift: Tensor, mask: Tensor) -> Tensor:
        return (scale * self.scale + shift * self.shift + mask * self.mask).square().mean()


def test_arguments_may_be_called_what_something_of_the_module_is() -> None:
    names = ("scale", "shift", "mask")
    check(SameNames(), {name: torch.randn(4, 8, dtype=torch.float64) for name in names})


class ByPosition(nn.Module):
    """Takes its batch by position only."""

    def forward(self, x: Tensor, /) -> Tensor:
        return x.mean()


def test_a_batch_that_cannot_be_given_by_name_is_refused_with_the_remedy() -> None:
    with pytest.raises(CaptureError, match=r"by name, but takes x: .*by position; drop the /"):
        capture(ByPosition(), {"x": torch.randn(8, 4)})
    nested = {"x": {"tokens": torch.randn(8, 4)}}
    with pytest.raises(CaptureError, match=r"it has x \(dict\); pass tensors by name"):
        capture(Named(), nested)


def test_a_batch_of_the_wrong_shape_is_refused() -> None:
    module, batch = zoo.mlp()
    with pytest.raises(CaptureError, match="must run on its example batch"):
        capture(module, batch | {"x": torch.randn(8, 5, dtype=torch.float64)})


def test_a_model_without_trainable_parameters_is_refused() -> None:
    module, batch = zoo.mlp()
    with pytest.raises(CaptureError, match="trainable parameter"):
        capture(module.requires_grad_(False), batch)
