"""Images in pieces: training equals one process, and what travels is what the formula says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.core.program import Program
from shardwright.core.strategy import Strategy
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.proofs import check
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.profile.shards import make_shard
from tests import zoo
from tests.runtime.equivalence import Run, assert_close, batches, captured_of, copied, train_plain
from tests.runtime.rehearsed import train_rehearsed
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.torch

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS = 3
MODELS = {
    "windows": zoo.windows,
    "segmentation": zoo.segmentation,
    "inception": zoo.inception,
    "residual": zoo.cnn,
}


@cache
def captured_model(name: str) -> tuple[nn.Module, dict[str, Tensor], Captured]:
    module, batch = MODELS[name]()
    return module, batch, capture(module, batch, batch_norm="synchronised")


@cache
def plain(name: str) -> Run:
    return train_plain(MODELS[name], SGD)


SEEDS = [
    Seed(height=2), Seed(width=2), Seed(height=4), Seed(height=2, width=2), Seed(data=2, height=2),
    Seed(data=2, height=2, width=2, zero=1),
]  # fmt: skip


CASES = [("windows", seed) for seed in SEEDS]
CASES += [(name, seed) for name in MODELS if name != "windows" for seed in SEEDS[3:5]]


@pytest.mark.parametrize(("name", "seed"), CASES, ids=str)
def test_images_in_pieces_train_as_one_process(name: str, seed: Seed) -> None:
    module, batch, captured = captured_model(name)
    strategy = seed_strategy(captured.graph, seed)
    program = lower(captured.graph, strategy)
    check(program)
    assert any(message.primitive == "halo" for message in program.messages)
    runs, _ = train_rehearsed(captured, strategy, module, batch, SGD)
    for run in runs:
        assert_close(run, plain(name), f"{name} {seed.label}", 1e-9)


def test_microbatches_and_stages_exchange_halos_too() -> None:
    module, batch, captured = captured_model("segmentation")
    for seed in (
        Seed(height=2, num_microbatches=4),
        Seed(height=2, stages=2, num_microbatches=2, recompute=True),
    ):
        strategy = seed_strategy(captured.graph, seed)
        runs, _ = train_rehearsed(captured, strategy, module, batch, SGD)
        for run in runs:
            assert_close(run, plain("segmentation"), seed.label, 1e-9)


class Slider(nn.Module):
    """Two sliding operators of one sort, so that the second has halos that come from neighbours."""

    def __init__(self, slide: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), slide()

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(images))).mean(1), targets)


CONV = partial(nn.Conv2d, 4, 4)
SLIDES: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, int]]] = {
    # what slides, its stride, and how many rows its halo has before and after
    "kernel 3": (partial(CONV, 3, padding=1), 1, (1, 1)),
    "kernel 5": (partial(CONV, 5, padding=2), 1, (2, 2)),
    "kernel 7": (partial(CONV, 7, padding=3), 1, (3, 3)),
    "kernel 3, stride 2": (partial(CONV, 3, 2, padding=1), 2, (1, 0)),
    "kernel 7, stride 2": (partial(CONV, 7, 2, padding=3), 2, (3, 2)),
    "kernel 4, stride 2": (partial(CONV, 4, 2, padding=1), 2, (1, 1)),
    "dilation 2": (partial(CONV, 3, padding=2, dilation=2), 1, (2, 2)),
    "dilation 2, stride 2": (partial(CONV, 3, 2, padding=2, dilation=2), 2, (2, 1)),
    "depthwise": (partial(CONV, 3, padding=1, groups=4), 1, (1, 1)),
    "groups": (partial(CONV, 5, padding=2, groups=2), 1, (2, 2)),
    "maximum": (partial(nn.MaxPool2d, 3, 2, 1), 2, (1, 0)),
    "maximum, dilation 2": (partial(nn.MaxPool2d, 3, 1, 1, 2), 1, (1, 3)),
    "average": (partial(nn.AvgPool2d, 3, 1, 1), 1, (1, 1)),
    "average of what is inside": (
        partial(nn.AvgPool2d, 3, 1, 1, count_include_pad=False), 1, (1, 1),
    ),
    "average by a divisor": (partial(nn.AvgPool2d, 3, 1, 1, divisor_override=4), 1, (1, 1)),
}  # fmt: skip
BATCH, CHANNELS, HEIGHT, WIDTH = 2, 4, 24, 16


def slider(name: str) -> zoo.Example:
    slide, _, _ = SLIDES[name]
    torch.manual_seed(3)
    module = Slider(slide).double()
    images = torch.randn(BATCH, 3, HEIGHT, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        shape = module.second(torch.zeros(BATCH, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64))
    return module, {"images": images, "targets": torch.randn_like(shape[:, 0])}


def sliding(name: str, pieces: int) -> tuple[Captured, Strategy, list[Run], int]:
    """Train in pieces of the height; also return the bytes of all transfers."""
    module, batch, captured = captured_of(slider, name)
    strategy = seed_strategy(captured.graph, Seed(height=pieces))
    runs, traffic = train_rehearsed(captured, strategy, module, batch, SGD)
    sent = sum(sent.bytes for (_, kind, _), sent in traffic.items() if kind == "transfer")
    return captured, strategy, runs, sent


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("name", [name for name in SLIDES if name != "maximum, dilation 2"])
def test_what_slides_sees_its_neighbours_and_sends_no_more_than_their_rows(
    name: str, pieces: int
) -> None:
    captured, strategy, runs, sent = sliding(name, pieces)
    expected = train_plain(partial(slider, name), SGD)
    for run in runs:
        assert_close(run, expected, f"{name} in {pieces}", 1e-9)
    _, _, halo = SLIDES[name]
    row = BATCH * CHANNELS * WIDTH * 8
    # Forward and backward, between neighbours, in every step.
    assert sent == 2 * (pieces - 1) * sum(halo) * row * STEPS
    program = lower(captured.graph, strategy)
    most = max(halo) if pieces == 2 else sum(halo)
    assert [message.bytes for message in halo_messages(program)] == [most * row] * 2


def halo_messages(program: Program) -> Iterator[object]:
    return (m for m in program.messages if m.primitive in ("halo", "halo_sum"))


def test_windows_that_reach_further_than_their_padding_drift_and_stay_whole() -> None:
    captured, strategy, runs, sent = sliding("maximum, dilation 2", 2)
    assert sent == 0
    assert not list(halo_messages(lower(captured.graph, strategy)))
    expected = train_plain(partial(slider, "maximum, dilation 2"), SGD)
    assert_close(runs[0], expected, "whole", 1e-9)


def test_the_batch_is_cut_with_its_halo_without_traffic() -> None:
    module, batch = zoo.segmentation()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(height=2, width=2)))
    (image,) = [v for v in program.values if v.role == "input" and v.halos]
    assert image.shape == (zoo.BATCH, 3, 8 + 2, 12 + 2)
    assert all(program.values[m.sources[0]].role != "input" for m in program.messages)


def test_corners_come_with_the_columns() -> None:
    module, batch = zoo.segmentation()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(height=2, width=2)))
    halos = [program.values[m.results[0]] for m in program.messages if m.primitive == "halo"]
    assert [len(value.halos) for value in halos] == [1, 2] * (len(halos) // 2)
    rows, both = halos[:2]
    assert both.shape[2:] == (rows.shape[2], rows.shape[3] + 2)


def test_the_profiler_runs_a_piece_with_its_halo_unpadded() -> None:
    module, batch = zoo.segmentation()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(height=2)))
    sliding = [
        call
        for segment in program.segments
        for call in segment.calls
        if call.operands and program.values[call.operands[0]].halos
    ]
    assert len(sliding) == 3
    for call in sliding:
        shapes = tuple(program.values[value].shape for value in call.operands)
        shard = make_shard(captured, (call.operator, shapes, call.result_shapes), "cpu", "float64")
        assert shard is not None
        tensors = [torch.zeros(operand.shape, dtype=torch.float64) for operand in shard.operands]
        args = [
            tensors[argument.index] if type(argument).__name__ == "Slot" else argument
            for argument in shard.args
        ]
        result = shard.target.find()(*args, **dict(shard.kwargs))
        assert tuple(result.shape) == call.result_shapes[0]


def train_on_ranks(name: str, seed: Seed) -> Run:
    """Train on this rank of several processes."""
    module, batch, captured = captured_model(name)
    program = lower(captured.graph, seed_strategy(captured.graph, seed))
    executor = Executor(captured, program, module, optimizer=SGD, options=RunOptions(seed=5))
    losses = [float(executor.step(one)) for one in batches(batch)]
    executor.to_module(module)
    return Run(losses, copied(module.named_parameters()), copied(module.named_buffers()))


@pytest.mark.ranks
def test_processes_exchange_halos() -> None:
    runs = run_ranks(4, train_on_ranks, "segmentation", Seed(height=2, width=2))
    for run in runs:
        assert_close(run, plain("segmentation"), "four processes", 1e-9)
