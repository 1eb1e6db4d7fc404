"""What cannot be captured is refused for its own reason, with the line of the model."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from shardwright.errors import CaptureError, InputError
from shardwright.runtime.capture import capture, load_model
from shardwright.verbs.subject import capture as captured_by_name
from tests.runtime.capture.test_export import check

pytestmark = pytest.mark.torch

FILE = """
import torch
from torch import nn

class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("width", torch.tensor(2))
    def forward(self, x):
        return self.linear(x).reshape(-1, int(self.width)).sum(1).pow(2).mean()

def pooled():
    return Pooled(), {"x": torch.zeros(8, 4)}

def nested():
    return Pooled(), {"x": {"tokens": torch.zeros(8, 4)}, "scale": 3}

def alone():
    return Pooled()

def no_module():
    return [Pooled()], {"x": torch.zeros(8, 4)}

def failing():
    return Pooled(width=3)

def listed():
    return nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))), {"input": torch.zeros(8, 4)}
"""


def line_of(function: object, text: str) -> str:
    """Return file and line where a text stands in a function."""
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    return (
        f"{Path(__file__).name}:{first + next(n for n, line in enumerate(lines) if text in line)}"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pooled.py").write_text(FILE, encoding="utf-8")
    return tmp_path


def test_a_model_built_without_values_is_run_with_those_it_is_built_with(folder: Path) -> None:
    source = load_model(f"{folder}/pooled.py:pooled")
    module = source.build()
    assert module.get_buffer("width").is_meta
    graph = capture(module, source.example(8)).graph
    assert [one.kind for one in graph.operators] == ["aten.linear.default", "opaque.Pooled"]


@pytest.mark.parametrize(
    ("name", "message", "text"),
    [
        ("nested", r"tensors only, but it has x \(dict\), scale \(int\); give", "def nested"),
        ("alone", "no example batch; return", "def alone"),
        ("no_module", "but this one returned list; return the model", "def no_module"),
        ("failing", r"failing\(\) failed with TypeError at .*: Pooled", "width=3"),
        ("listed", r"but 1 is compiled by TorchScript \(Linear\); use the", "def listed"),
    ],
)
def test_a_factory_is_refused_with_its_line(
    folder: Path, name: str, message: str, text: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        captured_by_name(f"{folder}/pooled.py:{name}")
    lines = FILE.splitlines()
    assert f"at pooled.py:{next(n for n, line in enumerate(lines, 1) if text in line)}" in str(
        caught.value
    )


@pytest.mark.parametrize("wrong", ["import nothing_of_the_kind", "def ("])
def test_a_file_that_cannot_be_imported_is_refused_with_its_line(
    tmp_path: Path, wrong: str
) -> None:
    (tmp_path / "wrong.py").write_text(f"import torch\n{wrong}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"Error at wrong\.py:2: .*; fix the file"):
        load_model(f"{tmp_path}/wrong.py:build")


class Branch(nn.Module):
    """Asks for the value of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.is_large(y):
            y = y / 2
        return y.square().mean()

    def is_large(self, y: Tensor) -> bool:
        return bool(y.square().sum() > 1)


class Wrong(Branch):
    """Does not run."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(3, -1))


def test_why_export_failed_is_said_with_the_line_of_the_model() -> None:
    notes = capture(Branch(), {"x": torch.randn(8, 4)}).graph.notes
    place = line_of(Branch.is_large, "return")
    assert any("export failed" in note and note.endswith(f"at {place})") for note in notes)


def test_a_model_that_does_not_run_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match="must run on its example batch") as caught:
        capture(Wrong(), {"x": torch.randn(8, 4)})
    assert "failed with RuntimeError: shape" in str(caught.value)
    assert str(caught.value).endswith(f"(at {line_of(Wrong.forward, 'return')})")


class Packed(nn.Module):
    """A recurrent layer on a packed sequence, which holds real tensors only."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        y, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        return self.last(y).square().mean()


def test_packed_sequences_are_captured_in_the_module_around_them() -> None:
    batch = {"x": torch.randn(4, 6, 4).double(), "lengths": torch.tensor([6, 5, 4, 2])}
    captured = check(Packed().double(), batch)
    assert [operator.kind for operator in captured.graph.operators] == ["opaque.Packed"]


class Cached(nn.Module):
    """Makes a table at the first call, and looks up more than there is."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(4, 4), None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.places is None:
            self.places = torch.arange(4.0)
        return (self.table(tokens) + self.places).square().mean()


def test_a_model_that_cannot_be_watched_is_captured_with_a_note() -> None:
    graph = capture(Cached(), {"tokens": torch.full((8, 2), 9)}).graph
    assert any("forward changes places" in note and "IndexError" in note for note in graph.notes)
    assert not any(operator.kind.startswith("opaque") for operator in graph.operators)


class Held(nn.Module):
    """Holds something that cannot be captured."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.net, self.edges = nn.Linear(4, 4), torch.eye(8)
        if what == "lazy":
            self.lazy = nn.Sequential(nn.LazyLinear(4))
        if what == "sparse":
            self.register_buffer("sparse", torch.eye(8).to_sparse_coo())
        if what == "scripted":
            self.scripted = nn.ModuleList([torch.jit.script(nn.Linear(4, 4))])
        if what == "lock":
            self.lock = threading.Lock()
        if what == "hooked":
            self.hooked = nn.Linear(4, 4)
            self.hooked.bias.register_hook(lambda gradient: gradient / 2)
        if what == "whole":
            self.register_buffer("whole", torch.zeros(1, dtype=torch.uint16))
        self.what = what

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        made = self.net(x)
        if self.what == "whole":
            made = made + self.whole.to(x.dtype)
        if self.what == "off":
            self.net.bias.requires_grad_(False)
        if self.what == "rows":
            return made.square().mean(1)
        if self.what == "counted":
            return (made > 0).sum()
        if self.what == "apart":
            return x.square().mean()
        return made.square().mean()


@pytest.mark.parametrize(
    ("what", "message", "text"),
    [
        ("lazy", r"'lazy\.0\.weight' takes its own .* call the module once", "self.lazy ="),
        ("sparse", "'sparse' is sparse_coo; keep its indices", '"sparse", torch'),
        ("scripted", r"scripted\.0 is compiled by TorchScript \(Linear\)", "self.scripted ="),
        ("lock", r"copying lock failed: TypeError: .*; remove locks", "self.lock ="),
        ("hooked", r"1 have some \(hooked\.bias\); remove them", "self.hooked ="),
        ("whole", "'whole' has dtype uint16; use one of", '"whole", torch'),
        ("off", r"switched off, but it does so with 'net\.bias'", "requires_grad_(False)"),
        ("rows", r"forward returned \(8,\); compute the loss", "def forward"),
        ("counted", r"forward returned \(\) of torch\.int64; compute the loss", "def forward"),
        ("apart", "no gradient reaches this one; check", "def forward"),
    ],
)
def test_what_a_model_holds_or_does_is_refused_with_its_line(
    what: str, message: str, text: str
) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        capture(Held(what), {"x": torch.randn(8, 4)})
    assert str(caught.value).endswith(f"(at {line_of(Held, text)})")


def test_a_model_that_is_compiled_by_torchscript_as_a_whole_is_refused() -> None:
    module = torch.jit.script(nn.Linear(4, 1))
    with pytest.raises(CaptureError, match=r"compiled by TorchScript \(Linear\); use the module"):
        capture(module, {"input": torch.randn(8, 4)})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"z": torch.randn(8, 4)}, "must match the arguments of forward"),
        ({"x": [torch.randn(8, 4)]}, r"at least one tensor .* it has x \(list\)"),
        ({"x": torch.eye(8).to_sparse_coo()}, "'x' is sparse_coo; keep its indices"),
    ],
)
def test_a_batch_that_forward_does_not_take_is_refused_with_its_line(
    batch: dict[str, Any], message: str
) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        capture(Held(""), batch)
    assert str(caught.value).endswith(f"(at {line_of(Held, 'def forward')})")


class Reversed(torch.autograd.Function):
    """Runs a module in backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(again), grads[0])
        return again.grad, None


class Reversible(nn.Module):
    """Gives a custom gradient the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(self.first(x), self.second).square().mean()


def test_a_custom_gradient_that_is_given_a_module_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"Reversed is given a module \(Linear\)") as caught:
        capture(Reversible(), {"x": torch.randn(8, 4)})
    assert f"(at {line_of(Reversible.forward, 'return')})" in str(caught.value)


def test_a_loss_that_forward_differentiates_itself_is_refused_with_its_line() -> None:
    class Backward(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            loss = super().forward(input).square().mean()
            loss.backward(retain_graph=True)
            return loss

    with pytest.raises(CaptureError, match="calls backward") as caught:
        capture(Backward(4, 4), {"input": torch.randn(8, 4)})
    assert f"(at {line_of(Backward.forward, 'retain_graph')})" in str(caught.value)
