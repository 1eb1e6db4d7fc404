"""``as_strided`` as a choice of elements by number: what memory holds there, whatever a tensor's order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.strides import picked
from shardwright.runtime.verify import gaps, train_here, train_plainly

pytestmark = pytest.mark.torch


def drawn(seed: int) -> tuple[Tensor, list[int], list[int], list[int]]:
    """Return a tensor, an order of its dims, and sizes and strides that stay within its memory."""
    draw = random.Random(seed)
    shape = [draw.choice((1, 2, 3, 4)) for _ in range(4)]
    order = draw.sample(range(4), 4)
    source = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    own = list(zip(source.permute(order).shape, source.permute(order).stride(), strict=True))
    while True:
        dims = [
            draw.choice(own) if draw.random() < 0.7 else (draw.choice((1, 2, 3)), draw.choice((1, 2, 4, 6)))
            for _ in range(draw.choice((2, 3, 4)))
        ]  # fmt: skip
        if sum((count - 1) * step for count, step in dims) < source.numel():
            return source, order, [count for count, _ in dims], [step for _, step in dims]


def read_by_number(seed: int) -> tuple[Tensor, Any, Tensor]:
    source, order, size, stride = drawn(seed)

    def read(x: Tensor) -> Tensor:
        return x.permute(order).as_strided(size, stride)

    graph = picked(make_fx(read, tracing_mode="fake")(source))
    return source, graph, read(source)


@pytest.mark.parametrize("seed", range(60))
def test_elements_are_those_that_memory_holds(seed: int) -> None:
    source, graph, expected = read_by_number(seed)
    assert not any("as_strided" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(graph(source), expected)


class Chunks(nn.Module):
    """Positions first, then samples, cut in chunks that overlap, as Longformer cuts them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x.transpose(0, 1)).transpose(0, 1)
        chunks = hidden.reshape(len(x), 2, 4, 4)
        step = chunks.stride()
        overlapping = chunks.as_strided((len(x), 3, 4, 4), (step[0], step[1] // 2, *step[2:]))
        return (overlapping.square() * torch.arange(1, 4)[:, None, None]).mean()


def test_chunks_that_overlap_are_read_sample_by_sample() -> None:
    torch.manual_seed(1)
    net, batch = Chunks().double(), {"x": torch.randn(4, 8, 3, dtype=torch.float64)}
    captured = capture(net, batch)
    assert not any(one.kind.startswith("opaque") for one in captured.graph.operators)
    plain = train_plainly(net, [batch], clips=False, tell=lambda _: None)
    strategy = seed_strategy(captured.graph, Seed(data=2))
    read = [
        config
        for operator, config in zip(captured.graph.operators, strategy.configs, strict=True)
        if operator.kind == "aten.index_select.default"
    ]
    assert len(read) == 1
    assert any(read[0].dims)
    found = gaps(
        train_here(captured, lower(captured.graph, strategy), net, [batch], lambda _: None),
        plain,
        captured,
    )
    assert found[0].difference < 1e-12
