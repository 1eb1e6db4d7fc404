"""Sizes that a batch says in numbers: known while a model is traced, refused where another batch says others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.core.graph import OperatorGraph
from shardwright.errors import ShardwrightError
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.known import says_sizes
from shardwright.runtime.verify import gaps, train_here, train_plainly


class Tower(nn.Module):
    """Patches of images of any size, one behind the other, as towers of newer models take them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.heads = nn.Linear(8, 24)
        self.places = nn.Embedding(16, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, pixels: Tensor, grid: Tensor, target: Tensor) -> Tensor:
        order: list[Tensor] = []
        begin = 0
        for height, width in grid.tolist():
            numbers = F.pad(torch.arange(height * width).reshape(height, width), (0, 1), value=-1)
            order.append(numbers[numbers >= 0].flip(0) + begin)  # what is padded falls out
            begin += height * width
        lengths = (grid[:, 0] * grid[:, 1]).tolist()
        inside = torch.repeat_interleave(grid[:, 1], grid[:, 0] * grid[:, 1])
        places = torch.arange(int(grid.prod(-1).sum())) % inside
        hidden = self.embed(pixels[torch.cat(order)]) + self.places(places)
        found: list[Tensor] = []
        for part in self.heads(hidden).split(lengths):
            query, key, value = part.unsqueeze(0).chunk(3, -1)
            found.append(F.scaled_dot_product_attention(query, key, value).mean(1))
        return F.mse_loss(self.last(torch.cat(found)), target)


def batch_of(count: int, seed: int = 0, grid: tuple[int, int] = (2, 3)) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "pixels": torch.randn(count * 6, 6, dtype=torch.float64, generator=draw),
        "grid": torch.tensor(grid).repeat(count, 1),
        "target": torch.randn(count, 3, dtype=torch.float64, generator=draw),
    }


def tower() -> Tower:
    torch.manual_seed(1)
    return Tower().double()


def opaque(graph: OperatorGraph) -> list[str]:
    return [one.kind for one in graph.operators if one.kind.startswith("opaque.")]


def test_a_tower_that_counts_by_a_grid_is_captured_whole_and_trains_as_it_would() -> None:
    net, batches = tower(), [batch_of(4), batch_of(4, 1)]
    captured = capture(net, batches[0])
    assert opaque(captured.graph) == []
    assert captured.fixed == {"grid": (2, 3)}
    plain = train_plainly(net, batches, clips=False, tell=lambda _: None)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(data=2)))
    found = gaps(train_here(captured, program, net, batches, lambda _: None), plain, captured)
    assert found[0].difference < 1e-12


def test_a_batch_that_says_other_sizes_is_refused() -> None:
    net, batch = tower(), batch_of(2)
    captured = capture(net, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(data=1)))
    with pytest.raises(ShardwrightError, match=r"'grid' must say \(2, 3\).*a row says \(3, 2\)"):
        train_here(captured, program, net, [batch_of(2, grid=(3, 2))], lambda _: None)


def test_of_a_batch_whose_rows_say_different_sizes_the_tower_runs_whole() -> None:
    net, batch = tower(), {**batch_of(2), "grid": torch.tensor([[2, 3], [3, 2]])}
    captured = capture(net, batch)
    assert opaque(captured.graph) == ["opaque.Tower"]
    assert captured.fixed == {}
    other = {**batch, "grid": torch.tensor([[1, 6], [3, 2]])}
    plain = train_plainly(net, [other], clips=False, tell=lambda _: None)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(data=1)))
    found = gaps(train_here(captured, program, net, [other], lambda _: None), plain, captured)
    assert found[0].difference < 1e-12


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.tensor([[1, 4, 4], [1, 4, 4]]), True),
        (torch.tensor([[4, 4]], dtype=torch.int32), True),
        (torch.tensor([[4, 4], [4, 5]]), False),
        (torch.tensor([[4, 0], [4, 0]]), False),
        (torch.tensor([3, 3]), False),
        (torch.zeros(2, 16, dtype=torch.int64), False),
        (torch.tensor([[4.0, 4.0]]), False),
        (torch.tensor([[True, True]]), False),
        (torch.zeros(2, 3, dtype=torch.int64, device="meta"), False),
    ],
)
def test_only_few_whole_numbers_that_are_the_same_in_each_row_say_sizes(
    tensor: Tensor, says: bool
) -> None:
    assert says_sizes(tensor) is says


class Written(nn.Module):
    """Marks made by numbers of the batch, into which the model writes what no trace knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        marks = torch.zeros(3, dtype=x.dtype)
        marks[: int(sizes[0, 0])] = 1
        kept = marks * 2
        marks[int(sizes[0, 1]) :] = x[0, 0]
        numbers = sizes[0] * 2
        numbers += 1
        return (self.layer(x) * (marks + kept)).square().mean() * numbers.prod()


def test_sizes_are_known_at_the_global_batch_too() -> None:
    batch = {"x": torch.randn(2, 4), "sizes": torch.tensor([[1, 2]] * 2)}
    captured = capture(Written(), batch, global_batch=6)
    assert opaque(captured.graph) == []
    assert captured.fixed == {"sizes": (1, 2)}
    shapes = {one.name: one.shape for one in captured.graph.tensors if one.role == "input"}
    assert shapes == {"x": (6, 4), "sizes": (6, 2)}


def test_what_the_model_writes_beside_its_sizes_stays_what_it_is() -> None:
    torch.manual_seed(2)
    net = Written().double()
    batches = [
        {"x": torch.randn(2, 4, dtype=torch.float64), "sizes": torch.tensor([[1, 2]] * 2)}
        for _ in range(2)
    ]
    captured = capture(net, batches[0])
    assert opaque(captured.graph) == []
    assert captured.fixed == {"sizes": (1, 2)}
    plain = train_plainly(net, batches, clips=False, tell=lambda _: None)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(data=1)))
    found = gaps(train_here(captured, program, net, batches, lambda _: None), plain, captured)
    assert found[0].difference < 1e-12


class Sized(nn.Module):
    """A size that is made of constants alone, and asked of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        sizes = torch.tensor([[2, 2], [1, 3]])
        marks = torch.arange(6) % 2
        rows = int(sizes.prod(-1).max()) - int(marks.nonzero().numel())
        return self.layer(x)[:, :rows].square().mean()


def test_sizes_made_of_constants_are_known() -> None:
    torch.manual_seed(3)
    net, batch = Sized().double(), {"x": torch.randn(2, 4, dtype=torch.float64)}
    captured = capture(net, batch)
    assert opaque(captured.graph) == []
    assert captured.fixed == {}
    assert not any("counts by" in note for note in captured.graph.notes)
    plain = train_plainly(net, [batch], clips=False, tell=lambda _: None)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(data=1)))
    found = gaps(train_here(captured, program, net, [batch], lambda _: None), plain, captured)
    assert found[0].difference < 1e-12
