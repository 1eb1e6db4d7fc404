"""Fused projections: recognised, computed to the last bit, split without moving their input."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwright.core.program import Kind
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.evaluating import bind_tensors, evaluate
from shardwright.runtime.checkpoint import load_into_module
from shardwright.runtime.executor import Executor
from tests import zoo
from tests.runtime.equivalence import Run, assert_close, batches, copied, train_plain
from tests.runtime.rehearsed import train_rehearsed
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.torch

SGD = partial(torch.optim.SGD, lr=0.1)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
BLOCKS = "shardwright.linear_blocks"


def kinds(module: nn.Module, batch: dict[str, Tensor]) -> list[str]:
    return [operator.kind for operator in capture(module, batch).graph.operators]


class Cut(nn.Module):
    """A linear layer whose output is handed to ``cut``."""

    def __init__(self, cut: object) -> None:
        super().__init__()
        self.fused = nn.Linear(8, 24).double()
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(self, self.fused(x))  # type: ignore[operator]


def _sum(parts: object) -> Tensor:
    return sum((number + 1) * part.square().mean() for number, part in enumerate(parts))  # type: ignore[arg-type, attr-defined]


@pytest.mark.parametrize(
    "cut",
    [
        lambda _, y: _sum(y.split(8, -1)),
        lambda _, y: _sum(y.split([8, 8, 8], -1)),
        lambda _, y: _sum(y.chunk(2, -1)),
        lambda _, y: _sum((y[..., 12:], y[..., :12])),
        lambda _, y: _sum(y.transpose(1, 2).split(8, 1)),
        lambda _, y: _sum(y.view(-1, 24).split(8, 1)),
    ],
    ids=["split", "sizes", "chunk", "slices", "channels first", "flattened"],
)
def test_equal_blocks_of_features_become_one_operator_with_equal_bits(cut: object) -> None:
    module = Cut(cut)
    batch = {"x": torch.randn(4, 6, 8, dtype=torch.float64)}
    captured = capture(module, batch)
    assert [o.kind for o in captured.graph.operators].count(BLOCKS) == 1
    loss = evaluate(captured, bind_tensors(captured, module, batch))
    expected = module(**batch)
    assert loss.item() == expected.item()
    found = torch.autograd.grad(loss, list(module.parameters()))
    wanted = torch.autograd.grad(expected, list(module.parameters()))
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-14, atol=1e-14)


def test_blocks_of_one_feature_train_as_in_pytorch() -> None:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        module = Cut(lambda _, y: _sum(y.chunk(24, -1)))
        return module, {"x": torch.randn(4, 6, 8, dtype=torch.float64)}

    module, batch = build()
    captured = capture(module, batch)
    assert BLOCKS in [operator.kind for operator in captured.graph.operators]
    strategy = seed_strategy(captured.graph, Seed(data=2))
    runs, _ = train_rehearsed(captured, strategy, module, batch, SGD)
    assert_close(runs[0], train_plain(build, SGD), "blocks of one feature")


@pytest.mark.parametrize(
    "cut",
    [
        lambda _, y: _sum(y.split([16, 8], -1)),
        lambda _, y: _sum((y[..., :8], y[..., 8:16])),
        lambda _, y: _sum((y[..., :12], y[..., 6:18])),
        lambda _, y: _sum(y.split(2, 1)),
        lambda _, y: _sum((*y.chunk(2, -1), y)),
        lambda _, y: y.square().sum((0, 1)).mean(),
        lambda self, y: _sum((*y.chunk(2, -1), self.fused.weight)),
    ],
    ids=[
        "unequal",
        "not all",
        "overlapping",
        "another dim",
        "also whole",
        "not cut",
        "weight read twice",
    ],
)
def test_anything_else_is_left_as_it_is(cut: object) -> None:
    module = Cut(cut)
    assert BLOCKS not in kinds(module, {"x": torch.randn(4, 6, 8, dtype=torch.float64)})


def test_tied_weights_are_left_as_they_are() -> None:
    module = Cut(lambda _, y: _sum(y.chunk(2, -1)))
    module.twin = nn.Linear(8, 24).double()
    module.twin.weight = module.fused.weight
    assert BLOCKS not in kinds(module, {"x": torch.randn(4, 8, dtype=torch.float64)})


# Hugging Face takes the loss in float32.
@pytest.mark.parametrize(("name", "tolerance"), [("fused", 1e-10), ("gpt2", 1e-6)])
def test_tensor_parallelism_splits_them_and_moves_no_activation_between_the_layers(
    name: str, tolerance: float
) -> None:
    module, batch = getattr(zoo, name)()
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(tensor=2))
    program = lower(captured.graph, strategy)
    split = {
        captured.graph.tensors[value.tensor].name
        for value in program.values
        if value.role == "parameter" and max(value.layout) >= 0
    }
    expected = {"fused": ["qkv.weight", "gate", "channels.weight"], "gpt2": ["attn.c_attn.weight"]}
    for part in expected[name]:
        assert any(part in one for one in split), split
    moved = {program.messages[int(i)].primitive for i in program.item[program.kind == Kind.MESSAGE]}
    assert moved <= {"all_reduce", "all_gather", "slice"}  # what linear layers and the loss sum up
    runs, _ = train_rehearsed(captured, strategy, module, batch, SGD)
    plain = copy.deepcopy(module)
    optimizer = SGD(plain.parameters())
    losses: list[float] = []
    for one in batches(batch):
        optimizer.zero_grad()
        loss = plain(**one)
        loss = loss if isinstance(loss, Tensor) else loss.loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    reference = Run(losses, copied(plain.named_parameters()), copied(plain.named_buffers()))
    for run in runs:
        assert_close(run, reference, name, tolerance)


def trained(seed: Seed, folder: str) -> dict[str, Tensor]:
    """Train two steps, with a checkpoint, an export and a fresh start between them."""
    module, batch = zoo.fused()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, seed))
    executor = Executor(captured, program, module, optimizer=ADAMW)
    shapes = {p.dim() for group in executor.optimizer.param_groups for p in group["params"]}
    assert shapes <= {1, 2}  # the optimizer sees matrices and vectors, as in the module
    executor.step(batch)
    executor.save(Path(folder, "ck"))
    executor.export(Path(folder, "weights.safetensors"))
    fresh = zoo.fused()[0]
    for parameter in fresh.parameters():
        parameter.data.zero_()
    again = Executor(captured, program, fresh, optimizer=ADAMW)
    again.load(Path(folder, "ck"))
    again.step(batch)
    again.load_weights(Path(folder, "weights.safetensors"))
    found = again.full_parameters()
    again.load(Path(folder, "ck"))
    again.step(batch)
    return {f"weights {name}": t for name, t in found.items()} | again.full_parameters()


@pytest.mark.parametrize(
    "seed", [Seed(), Seed(tensor=2), Seed(data=2, zero=3)], ids=["whole", "tensor", "ZeRO-3"]
)
def test_checkpoints_and_weights_keep_the_modules_shapes(seed: Seed, tmp_path: Path) -> None:
    found = run_ranks(seed.tensor * seed.data, trained, seed, str(tmp_path))[0]
    module, batch = zoo.fused()
    optimizer = ADAMW(module.parameters())
    for prefix in ("weights ", ""):
        optimizer.zero_grad()
        module(**batch).backward()
        optimizer.step()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(
                found[prefix + name], parameter.detach(), rtol=1e-10, atol=1e-12
            )
        if prefix:
            from safetensors.torch import load_file

            plain = zoo.fused()[0]
            plain.load_state_dict(load_file(tmp_path / "weights.safetensors"))
            loaded = zoo.fused()[0]
            load_into_module(tmp_path / "ck", loaded)
            for one in (plain, loaded):
                for name, parameter in one.named_parameters():
                    torch.testing.assert_close(parameter, found[prefix + name], rtol=0, atol=0)
