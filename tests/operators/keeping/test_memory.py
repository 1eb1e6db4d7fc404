"""Saved bytes per segment against what autograd really keeps, model by model and kind by kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Call, Value
from shardwright.operators.keeping.memory import SegmentMemory
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.vocabulary import FEWEST_CLASSES, whole_cross_entropy_sum
from tests import zoo

pytestmark = pytest.mark.torch


def really_saved(module: nn.Module, batch: dict[str, Tensor]) -> int:
    """Sum the distinct storages autograd holds, without parameters, buffers, batch and loss."""
    held: dict[int, int] = {}
    known = [*module.parameters(), *module.buffers(), *batch.values()]
    outside = {tensor.untyped_storage().data_ptr() for tensor in known}
    keep: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        keep.append(tensor)  # alive, so that no address is used twice
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = module(**batch)
    loss = result if isinstance(result, Tensor) else result.loss
    outside.add(loss.untyped_storage().data_ptr())
    return sum(size for pointer, size in held.items() if pointer not in outside)


@contextlib.contextmanager
def losses_as_captured() -> Iterator[None]:
    """Let models take the loss over a vocabulary with the kernel that a plan runs on one device."""
    plain = F.cross_entropy

    def loss(scores: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        classes = scores.shape[-1]
        if scores.dim() != 2 or classes < FEWEST_CLASSES:
            return plain(scores, target, *args, **kwargs)
        total = whole_cross_entropy_sum(scores, target)
        return total / (target != -100).sum()

    F.cross_entropy = loss
    try:
        yield
    finally:
        F.cross_entropy = plain


def calls_alone(graph: OperatorGraph) -> list[Call]:
    """Return the calls of all operators on one device, every tensor a value of its number."""
    return [
        Call(
            operator=index,
            operands=operator.inputs,
            results=operator.outputs,
            result_shapes=tuple(graph.tensors[out].shape for out in operator.outputs),
            dims=(),
        )
        for index, operator in enumerate(graph.operators)
    ]


def values_alone(graph: OperatorGraph) -> list[Value]:
    """Return a value for every tensor, on one device."""
    return [
        Value(
            tensor=index, mesh=0, layout=(), shape=spec.shape, dtype=spec.dtype,
            scope="step", role="activation",
        )
        for index, spec in enumerate(graph.tensors)
    ]  # fmt: skip


def predicted(graph: OperatorGraph, has_backward: bool = True) -> tuple[int, tuple[int, int]]:
    """Price the whole graph as one segment on one device."""
    values = values_alone(graph)
    calls = calls_alone(graph)
    entries = tuple(i for i, spec in enumerate(graph.tensors) if spec.producer < 0)
    return SegmentMemory(graph, calls, values, entries).bytes((graph.loss,), has_backward)


MODELS = [
    "mlp",
    "gpt",
    "bert",
    "cnn",
    "cnn_groupnorm",
    "gpt2",
    "llama",
    "hf_bert",
    "vit",
    "resnet",
    "mixtral",
]


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_of_a_model_equal_what_autograd_keeps(name: str):
    module, batch = getattr(zoo, name)(dtype=torch.float32)
    saved, _ = predicted(capture(module, batch).graph)
    with losses_as_captured():
        assert saved == pytest.approx(really_saved(module, batch), rel=0.02)


def test_nothing_is_saved_without_a_backward_and_temporaries_remain():
    module, batch = zoo.gpt(dtype=torch.float32)
    graph = capture(module, batch).graph
    saved, (forward, backward) = predicted(graph, has_backward=False)
    largest = max(spec.bytes for spec in graph.tensors if spec.producer >= 0)
    assert (saved, backward) == (0, 0)
    assert forward >= largest


def real_peaks(module: nn.Module, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Return the most bytes the allocator had handed out in forward and in backward."""
    for parameter in module.parameters():
        parameter.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = module(**batch)
        loss = result if isinstance(result, Tensor) else result.loss
        del result  # it may hold the logits
        with record_function("between"):
            pass
        loss.backward()
    assert profiler.profiler is not None
    recorded = profiler.profiler.kineto_results.events()
    events = sorted((e.start_ns(), e.name(), e.nbytes()) for e in recorded)
    peaks, level, phase = [0, 0], 0, 0
    for _, name, size in events:
        if name == "between":
            phase = 1
        elif name == "[memory]":
            level += size
            peaks[phase] = max(peaks[phase], level)
    return peaks[0], peaks[1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt", {"width": 128, "length": 64, "depth": 3}),
        ("gpt", {"width": 32, "length": 256, "depth": 3}),
        ("mlp", {"batch": 4096, "width": 64, "depth": 5}),
        ("llama", {}),
        ("vit", {}),
    ],
)
def test_peaks_of_forward_and_backward_equal_the_allocators(name: str, options: dict[str, int]):
    module, batch = getattr(zoo, name)(dtype=torch.float32, **options)
    saved, (forward, backward) = predicted(capture(module, batch).graph)
    with losses_as_captured():
        real_forward, real_backward = real_peaks(module, batch)
    assert saved + forward == pytest.approx(real_forward, rel=0.01)
    gradients = sum(p.numel() * p.element_size() for p in module.parameters())
    assert saved + gradients + backward == pytest.approx(real_backward, rel=0.01)


class One(nn.Module):
    """One function of a projected input, so that its operand is an activation with gradient."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x) * self.scale).sum()


def merged(heads: Tensor) -> Tensor:
    """Return a function, which keeps what it reads, of what heads attend to, side by side."""
    found = F.scaled_dot_product_attention(heads, 2 * heads, 3 * heads)
    return found.transpose(1, 2).reshape(2, -1).square()


WIDTH = 16
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "noise": lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1),
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "square": lambda x: x * x,
    "divide": lambda x: x / (x + 3),
    "power": lambda x: x.pow(2),
    "rsqrt": lambda x: (x + 9).rsqrt(),
    "exp": torch.exp,
    "mean": lambda x: x.mean(-1),
    "masked": lambda x: x.masked_fill(x > 0, 0.0),
    "where": lambda x: torch.where(x > 0, x, 2 * x),
    "views": lambda x: x.view(2, -1, WIDTH).transpose(0, 1)[:, 0].unsqueeze(0),
    "split": lambda x: torch.cat([a * b for a, b in [x.chunk(2, -1)]], -1),
    "scores": lambda x: x @ x.transpose(-1, -2),
    "maximum": lambda x: torch.maximum(x, -x),
    "attention": lambda x: F.scaled_dot_product_attention(
        *(x.view(2, 2, 2, WIDTH) * k for k in (1, 2, 3)), is_causal=True
    ),
    "attention of dense heads": lambda x: merged(x.view(1, 4, 2, WIDTH)),
    "attention of turned heads": lambda x: merged(x.view(1, 2, 4, WIDTH).transpose(1, 2)),
    "copied rows": lambda x: x.exp().t().reshape(-1).square(),
    "complex numbers": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * 2j),
    "cross_entropy": lambda x: F.cross_entropy(
        x, torch.zeros(8, dtype=torch.int64, device=x.device)
    ),
    "dropout": lambda x: F.dropout(x, 0.5),
    "divergence": lambda x: F.kl_div(x, torch.full_like(x, 0.1), reduction="sum"),
    "divergence of logs": lambda x: F.kl_div(
        x, torch.full_like(x, -1.0), reduction="sum", log_target=True
    ),
    "gather": lambda x: x.gather(1, torch.zeros(8, 2, dtype=torch.int64, device=x.device)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_saved_bytes_of_one_operator_equal_what_autograd_keeps(name: str):
    module = One(CASES[name], WIDTH)
    batch = {"x": torch.rand(8, WIDTH)}
    saved, _ = predicted(capture(module, batch).graph)
    assert saved == pytest.approx(really_saved(module, batch), abs=256)


class Attending(nn.Module):
    """Attention with dropout, and dropout alone."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.maps(x).unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        return F.dropout(mixed, 0.1).square().mean()


def test_a_gpus_kernels_keep_a_seed_and_a_byte_where_a_cpu_keeps_scores() -> None:
    """Counted by hand: 3 samples, 2 heads, 16 positions, float32."""
    graph = capture(Attending(), {"x": torch.randn(3, 16, 8)}).graph
    rows = 3 * 2 * 16
    saved = predicted(graph)[0]
    on_a_gpu = predicted(graph.run_on("cuda"))[0]
    result = rows * 4 * 4  # of attention, which a CPU's unfused kernels do not keep
    masks = rows * 4 * (4 - 1)  # of dropout alone
    copies = 2 * result  # queries, keys and values apart, which are one here
    assert saved - on_a_gpu == 3 * rows * 16 * 4 - rows * 4 - result + masks + copies
    assert graph.run_on("cuda").fingerprint == graph.fingerprint
