"""Modules whose loops depend on data are split over rows where, and only where, rows stay apart."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.rowwise import are_twins, given_call, rows_of
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch
WIDTH, ROWS = 6, 12


class Experts(nn.Module):
    """Three experts, each given the rows that chose it, as Hugging Face's loops give them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Any:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        mask = F.one_hot(chosen, num_classes=3).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for index in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            place, row = torch.where(mask[index[0]])
            made = self.experts[int(index[0])](x[row])
            out.index_add_(0, row, made * weights[row, place, None])
        return out

    def first(self, x: Tensor) -> Tensor:
        """Choose one expert for each row."""
        return self.gate(x).argmax(-1)


class Asking(Experts):
    """Looks first whether an expert has rows."""

    def forward(self, x: Tensor) -> Any:
        out = x.clone()
        for index, expert in enumerate(self.experts):
            mine = self.first(x) == index
            if mine.any():
                out[mine] = out[mine] + expert(x[mine])
        return out, self.gate(x)


class Skipping(Experts):
    """Goes on where an expert has none."""

    def forward(self, x: Tensor) -> Any:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = self.first(x) == index
            if mine.sum() == 0:
                continue
            (row,) = torch.where(mine)
            if row.numel() == 0:
                continue
            out[row] += expert(x[row])
        return out


class Full(Experts):
    """Takes no more rows than an expert has room for."""

    def forward(self, x: Tensor) -> Any:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (row,) = torch.where(self.first(x) == index)
            row = row[: len(x) - 1]
            out.index_add_(0, row, expert(x[row]))
        return out


class FullSeldom(Experts):
    """Asks for the room only where there is none left."""

    def forward(self, x: Tensor) -> Any:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (row,) = torch.where(self.first(x) == index)
            if len(row) > len(x) - 1:
                row = row[:-1]
            out.index_add_(0, row, expert(x[row]))
        return out


class Counting(Experts):
    """Divides by how many there are."""

    def forward(self, x: Tensor) -> Any:
        (row,) = torch.where(self.first(x) == 0)
        return x.index_add(0, row, self.experts[0](x[row]) / max(len(row), 1))


class Numbering(Experts):
    """Tells rows by where they stand among those picked."""

    def forward(self, x: Tensor) -> Any:
        (row,) = torch.where(self.first(x) == 0)
        return x.index_add(0, row, x[row] * torch.arange(len(row))[:, None])


class Fronting(Experts):
    """Puts what was picked in front."""

    def forward(self, x: Tensor) -> Any:
        out, mine = torch.zeros_like(x), self.first(x) == 0
        out[: int(mine.count_nonzero())] = x[mine]
        return out


class Centred(Experts):
    """Takes the mean of the rows picked away."""

    def forward(self, x: Tensor) -> Any:
        mine, out = self.first(x) == 0, x.clone()
        out[mine] = x[mine] - x[mine].mean(0)
        return out


class Balanced(Experts):
    """Also says how the experts are used."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.gate(x).softmax(-1).mean(0).expand(len(x), 3)


class Guarded(Experts):
    """Gives up on all rows where one is no number."""

    def forward(self, x: Tensor) -> Any:
        if torch.isnan(x).any():
            x = torch.zeros_like(x)
        return super().forward(x)


class Bounded(Experts):
    """Scales all rows where one is large."""

    def forward(self, x: Tensor) -> Any:
        if x.max() > 1000:
            x = x / 2
        return super().forward(x)


class Listed(Experts):
    """Sorts rows by expert and cuts them by counts that Python is told."""

    def forward(self, x: Tensor) -> Any:
        chosen = self.first(x)
        order, at, made = chosen.argsort(), 0, []
        for expert, count in zip(
            self.experts, torch.bincount(chosen, minlength=3).tolist(), strict=True
        ):
            made.append(expert(x[order[at : at + count]]))
            at += count
        return torch.empty_like(x).index_copy(0, order, torch.cat(made))


class Repeated(Experts):
    """Goes on until all rows stand still."""

    def forward(self, x: Tensor) -> Any:
        for _ in range(20):
            after = 0.3 * torch.tanh(self.gate(x) @ self.gate.weight)
            if bool((after - x).abs().max() < 1e-3):
                break
            x = after
        return x


class Remembering(Experts):
    """Counts what it has seen in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.seen += (self.first(x) == 0).sum()
        return super().forward(x)


class Drawing(Experts):
    """Draws random numbers."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + torch.rand_like(x))


class Otherwise(Experts):
    """Centres rows where it is evaluated."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x if self.training else x - x.mean(0))


APART = (Experts, Asking, Skipping)
MIXING = (
    Full, FullSeldom, Counting, Numbering, Fronting, Centred, Balanced, Guarded, Bounded, Listed,
    Repeated, Remembering, Drawing, Otherwise,
)  # fmt: skip


def test_rows_are_split_where_they_are_computed_each_by_itself_and_nowhere_else() -> None:
    for kind in (*APART, *MIXING):
        torch.manual_seed(1)
        call = given_call(kind(), (torch.randn(ROWS, WIDTH),), {})
        assert rows_of(call) == ((0,) if kind in APART else ()), kind.__name__


def changed(change: Any) -> nn.Module:
    module = Experts()
    change(module)
    return module


OTHERWISE: dict[str, nn.Module] = {
    "class": Asking(),
    "submodule": changed(lambda one: one.experts.__setitem__(0, nn.Identity())),
    "width": changed(lambda one: one.experts.append(one.experts[0])),
    "attribute": changed(lambda one: setattr(one, "layer", 3)),
    "setting": changed(lambda one: setattr(one.experts[1][1], "p", 0.2)),
    "hook": changed(lambda one: one.experts[1].register_forward_hook(lambda *_: None)),
    "forward": changed(lambda one: setattr(one, "forward", lambda x: x - x.mean(0))),
    "mode": changed(lambda one: one.experts[1].eval()),
    "type": changed(lambda one: one.double()),
    "buffer": changed(lambda one: one.register_buffer("count", torch.zeros(()))),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_modules_are_twins_where_nothing_but_values_differs(what: str) -> None:
    rows = torch.randn(ROWS, WIDTH)
    one, other = Experts(), OTHERWISE[what]
    assert are_twins(
        given_call(one, (rows,), {}), given_call(Experts(), (torch.rand(ROWS, WIDTH),), {})
    )
    assert not are_twins(given_call(one, (rows,), {}), given_call(other, (rows,), {}))
    assert not are_twins(given_call(one, (rows,), {}), given_call(one, (rows[:4],), {}))
    assert not are_twins(given_call(one, (rows, 1), {}), given_call(one, (rows, 2), {}))
    assert not are_twins(given_call(one, (rows, 1), {}), given_call(one, (rows, True), {}))


def test_arguments_that_do_not_compare_are_of_twins_only_where_they_are_the_same() -> None:
    rows, table = torch.randn(ROWS, WIDTH), np.arange(3)
    one, other, third = (
        given_call(Experts(), (rows, each), {}) for each in (table, table, table.copy())
    )
    assert are_twins(one, other)
    assert not are_twins(one, third)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.experts, self.after = nn.Linear(4, WIDTH), Experts(), nn.Linear(WIDTH, 2)
        for one in self.experts.modules():
            if isinstance(one, nn.Dropout):
                one.p = 0.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.before(x)
        h = h + self.experts(h.view(-1, WIDTH)).view_as(h)
        return F.cross_entropy(self.after(h).flatten(0, 1), y.flatten())


def test_a_loop_over_experts_trains_in_microbatches_and_on_several_ranks_as_plainly() -> None:
    def factory() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        x = torch.randn(8, 3, 4, dtype=torch.float64)
        return Model().double(), {"x": x, "y": torch.randint(2, (8, 3))}

    optimizer = partial(torch.optim.SGD, lr=0.5)
    module, batch = factory()
    captured = capture(module, batch)
    (kind,) = {op.kind for op in captured.graph.operators if op.module == "experts"}
    assert kind == "rowwise.Experts"
    assert any("split over rows only" in note for note in captured.graph.notes)
    expected = train_plain(factory, optimizer)
    for seed in (Seed(data=2, num_microbatches=2), Seed(data=2, zero=3)):
        strategy = seed_strategy(captured.graph, seed)
        at = next(i for i, op in enumerate(captured.graph.operators) if op.kind == kind)
        assert any(strategy.configs[at].dims)
        for run in train_rehearsed(captured, strategy, module, batch, optimizer)[0]:
            assert_close(run, expected, seed.label, 1e-12)
