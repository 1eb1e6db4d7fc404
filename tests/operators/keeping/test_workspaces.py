"""What kernels of CPUs need for a moment, and recurrences keep, against PyTorch's allocator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from shardwright.core.vocabulary import LOSS
from shardwright.operators.keeping.memory import SegmentMemory
from shardwright.operators.keeping.workspaces import backward_workspace, forward_workspace
from shardwright.runtime.allocations import allocations
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.vocabulary import whole_cross_entropy_sum
from tests.operators.keeping.test_memory import calls_alone, predicted, values_alone

pytestmark = pytest.mark.torch
Made = Callable[[], nn.Module]


class Behind(nn.Module):
    """A layer behind a scale, so that gradients of what it reads are wanted, too; returns the loss."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x * self.scale)
        return (made if isinstance(made, Tensor) else made[0]).sum()


def most(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """Return the most bytes alive, those at the end, beyond those before, and what came out."""
    held, level, peak = list[Any](), 0, 0
    for _, size in allocations(lambda: held.append(run())):
        level += size
        peak = max(peak, level)
    return peak, level, held


def peaks(layer: nn.Module, x: Tensor) -> tuple[int, int, int]:
    """Return what the allocator saw of a layer: workspace of forward; what forward leaves besides its results; and
    workspace of backward, all gradients being counted."""
    torch.set_num_threads(1)
    needs, weights = x.requires_grad_(), [*layer.parameters()]

    def forward() -> Any:
        return layer(needs)

    for _ in range(2):  # oneDNN keeps what it made first
        made = forward()
        result = made if isinstance(made, Tensor) else made[0]
        torch.autograd.grad(result, [needs, *weights], torch.ones_like(result))
    top, left, held = most(forward)
    result = held[0] if isinstance(held[0], Tensor) else held[0][0]
    ones = torch.ones_like(result)
    behind, _, gradients = most(lambda: torch.autograd.grad(result, [needs, *weights], ones))
    size = result.numel() * result.element_size()
    wanted = sum(one.numel() * one.element_size() for one in gradients[0])
    return top - left, left - size, behind - wanted


CONVOLUTIONS: list[tuple[Made, tuple[int, ...]]] = [
    (partial(nn.Conv2d, 32, 16, 3, padding=1), (4, 32, 32, 32)),
    (partial(nn.Conv2d, 16, 32, 3, stride=2, padding=1, bias=False), (8, 16, 32, 32)),
    (partial(nn.Conv2d, 32, 64, 1), (4, 32, 32, 32)),
    (partial(nn.Conv2d, 32, 32, 3, padding=1, groups=32), (4, 32, 32, 32)),
    (partial(nn.Conv2d, 32, 32, 3, padding=1), (1, 32, 16, 16)),
    (partial(nn.Conv2d, 16, 32, 3, padding=1, dtype=torch.float64), (4, 16, 16, 16)),
    (partial(nn.Conv1d, 32, 64, 3, padding=1), (4, 32, 256)),
    (partial(nn.Conv3d, 16, 16, 3, padding=1), (2, 16, 8, 16, 16)),
    (partial(nn.Conv2d, 32, 64, 1), (32, 32, 24, 24)),
    (partial(nn.Conv1d, 64, 16, 1), (16, 64, 256)),
    (partial(nn.Conv2d, 32, 64, 1, stride=2), (32, 32, 24, 24)),
    (partial(nn.Conv2d, 96, 96, 3, stride=2, padding=1, groups=96), (8, 96, 32, 32)),
    (partial(nn.ConvTranspose2d, 32, 16, 2, stride=2), (4, 32, 32, 32)),
    (partial(nn.ConvTranspose2d, 16, 1, 4, stride=2, padding=1), (128, 16, 14, 14)),
    (partial(nn.Conv2d, 64, 64, 7, padding=3, groups=64), (8, 64, 16, 16)),
    (partial(nn.Conv2d, 64, 64, 3, padding=2, dilation=2, groups=64), (8, 64, 8, 8)),
    (partial(nn.Conv2d, 128, 128, 3, padding=1, groups=128), (1, 128, 2, 2)),
    (partial(nn.Conv2d, 64, 64, 3, padding=1, groups=16), (8, 64, 8, 8)),
    (partial(nn.Conv2d, 64, 64, 1, groups=4), (8, 64, 8, 8)),
    (partial(nn.Conv1d, 64, 64, 4, padding=3, groups=64), (8, 64, 64)),
    (partial(nn.Conv1d, 64, 64, 16, padding=8, groups=4), (8, 64, 50)),
    (partial(nn.Conv2d, 64, 64, 3, padding=1), (8, 64, 2, 2)),
]
# The same where channels lie last.
LAST: list[tuple[Made, tuple[int, ...]]] = [
    (partial(nn.Conv2d, 64, 64, 7, padding=3, groups=64), (8, 64, 16, 16)),
    (partial(nn.Conv2d, 64, 64, 3, padding=1, groups=64), (8, 64, 16, 16)),
    (partial(nn.Conv2d, 128, 128, 3, padding=1, groups=128), (8, 128, 1, 1)),
    (partial(nn.Conv2d, 64, 64, 3, padding=1), (8, 64, 16, 16)),
    (partial(nn.Conv2d, 20, 40, 3, padding=1), (8, 20, 16, 16)),
    (partial(nn.Conv2d, 64, 128, 2, stride=2), (8, 64, 16, 16)),
    (partial(nn.Conv2d, 64, 64, 3, padding=1, groups=8), (8, 64, 8, 8)),
    (partial(nn.Conv2d, 32, 64, 1), (32, 32, 24, 24)),
    (partial(nn.Conv3d, 16, 32, 3, padding=1), (2, 16, 8, 16, 16)),
    (partial(nn.Conv1d, 128, 128, 4, padding=3, groups=128), (8, 128, 32)),
]


@pytest.mark.parametrize(
    ("make", "shape"), CONVOLUTIONS, ids=lambda one: str(one()) if callable(one) else ""
)
def test_convolutions_copy_what_the_allocator_sees(make: Made, shape: tuple[int, ...]) -> None:
    """To a tenth of what goes in and out, and of weights. Channels are whole blocks here, whatever the vectors' width."""
    layer = make()
    x = torch.randn(shape, dtype=next(layer.parameters()).dtype)
    needs_as_seen(layer, Behind(layer).to(x.dtype), x, x.clone())


@pytest.mark.parametrize(
    ("make", "shape"), LAST, ids=lambda one: str(one()) if callable(one) else ""
)
def test_convolutions_whose_channels_lie_last_copy_what_the_allocator_sees(
    make: Made, shape: tuple[int, ...]
) -> None:
    """Of 1d they are put in order first."""
    layer = make()

    class Turned(Behind):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.movedim(-1, 1))

    x = torch.randn(shape[0], *shape[2:], shape[1])
    needs_as_seen(layer, Turned(layer), x, x.movedim(-1, 1).detach())


def needs_as_seen(layer: nn.Module, module: nn.Module, x: Tensor, image: Tensor) -> None:
    """Compare what a model's convolution is told to need with what it needs, given an image."""
    graph = capture(module, {"x": x}).graph
    call = next(one for one in calls_alone(graph) if "conv" in graph.operators[one.operator].kind)
    values = values_alone(graph)
    forward, _, backward = peaks(layer, image)
    ends = sum(values[one].bytes for one in (*call.operands[:2], *call.results))
    assert forward_workspace(graph, call, values) == pytest.approx(forward, abs=0.1 * ends)
    # What happens to the last gradients of parameters is not seen apart from their own size.
    assert backward_workspace(graph, call, values) == pytest.approx(backward, abs=0.1 * ends)


RECURRENCES: list[tuple[Made, tuple[int, ...]]] = [
    (partial(nn.LSTM, 128, 256, 2, batch_first=True), (32, 32, 128)),
    (partial(nn.LSTM, 64, 128), (32, 16, 64)),
    (partial(nn.LSTM, 64, 128, 2, dtype=torch.float64), (16, 16, 64)),
    (partial(nn.GRU, 128, 256, 2, batch_first=True), (32, 32, 128)),
    (partial(nn.RNN, 64, 128), (32, 16, 64)),
]


@pytest.mark.parametrize(
    ("make", "shape"), RECURRENCES, ids=lambda one: str(one()) if callable(one) else ""
)
def test_recurrences_keep_and_need_what_the_allocator_sees(
    make: Made, shape: tuple[int, ...]
) -> None:
    layer = make()
    x = torch.randn(shape, dtype=next(layer.parameters()).dtype)
    graph = capture(Behind(layer).to(x.dtype), {"x": x}).graph
    values, calls = values_alone(graph), calls_alone(graph)
    place, call = next(
        (place, one)
        for place, one in enumerate(calls)
        if graph.operators[one.operator].kind.split(".")[1] in ("lstm", "gru", "rnn_tanh")
    )
    forward, kept, backward = peaks(layer, x.clone())
    made = values[call.results[0]].bytes
    extra = SegmentMemory(graph, calls, values, ()).storages.extra[place]
    assert extra == pytest.approx(kept, rel=0.03, abs=0.1 * made)
    weights = sum(one.numel() * one.element_size() for one in layer.parameters())
    assert forward_workspace(graph, call, values) == pytest.approx(forward, rel=0.1, abs=made / 2)
    assert backward_workspace(graph, call, values) == pytest.approx(
        backward, abs=0.15 * (weights + kept)
    )


class Packed(nn.Module):
    """A recurrence over sequences that are packed, all of the same length; returns the loss where it stands for a model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x * self.scale, lengths.cpu(), True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], True, total_length=x.shape[1])[0].sum()


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_recurrences_over_packed_sequences_keep_what_the_allocator_sees(
    kind: type[nn.RNNBase],
) -> None:
    layer = kind(64, 128, 2, batch_first=True)  # type: ignore[arg-type]
    x, lengths = torch.randn(16, 32, 64), torch.full((16,), 32)
    graph = capture(Packed(layer), {"x": x, "lengths": lengths}).graph
    calls, values = calls_alone(graph), values_alone(graph)
    kinds = [graph.operators[one.operator].kind for one in calls]
    place = kinds.index("shardwright.packed_recurrence")

    def run() -> Tensor:
        packed = pack_padded_sequence(needs, lengths, True, enforce_sorted=False)
        return pad_packed_sequence(layer(packed)[0], batch_first=True)[0]

    torch.set_num_threads(1)
    needs = x.requires_grad_()
    _, left, _ = most(run)
    made = values[calls[place].results[0]].bytes
    extra = SegmentMemory(graph, calls, values, ()).storages.extra[place]
    assert extra == pytest.approx(left - made, rel=0.03, abs=0.1 * made)


def test_a_recurrence_of_which_only_the_last_state_is_read_needs_as_much() -> None:
    layer = nn.GRU(64, 128)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[1].sum()

    whole, last = (
        capture(module, {"x": torch.randn(32, 16, 64)}).graph for module in (Behind(layer), Last())
    )
    found = [
        (forward_workspace(graph, call, values_alone(graph)), backward_workspace(graph, call, values_alone(graph)))
        for graph in (whole, last)
        for call in calls_alone(graph)
        if "gru" in graph.operators[call.operator].kind
    ]  # fmt: skip
    assert found[0] == found[1]


def test_what_a_transposed_convolution_makes_is_not_kept() -> None:
    layer = nn.ConvTranspose2d(16, 16, 2, stride=2)
    graph = capture(Behind(layer), {"x": torch.randn(4, 16, 8, 8)}).graph
    read = 4 * 16 * 8 * 8 * 4
    saved, _ = predicted(graph)
    assert saved == pytest.approx(read, rel=0.05)  # what it reads; the batch is not counted


class NextToken(nn.Module):
    """The loss of all tokens but the last of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.head(x)[:, :-1]
        return nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())


def test_a_loss_of_scores_with_gaps_between_rows_copies_them() -> None:
    batch = {"x": torch.randn(8, 9, 4), "y": torch.zeros(8, 8, dtype=torch.long)}
    graph = capture(NextToken(), batch).graph
    values, place = values_alone(graph), graph.tensors[graph.loss].producer
    call = next(c for c in calls_alone(graph)[:place] if graph.operators[c.operator].kind == LOSS)
    scores = torch.randn(8, 9, 64).requires_grad_()
    made = most(lambda: whole_cross_entropy_sum(scores[:, :-1], batch["y"]))
    wanted = forward_workspace(graph, call, values)
    assert wanted == pytest.approx(made[0], rel=0.02) == 2 * values[call.operands[0]].bytes
    again = most(lambda: torch.autograd.grad(made[2][0], scores))
    padded = (
        9 * values[call.operands[0]].bytes // 8
    )  # the gradient with gaps, when the copy is gone
    assert backward_workspace(graph, call, values) == pytest.approx(again[0] - padded, rel=0.2)
