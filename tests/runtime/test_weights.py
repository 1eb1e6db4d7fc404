"""Weights to and from safetensors: what plain PyTorch takes, from any plan, tied names included."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.errors import CheckpointError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor
from shardwright.runtime.weights import export_checkpoint
from tests import zoo
from tests.runtime.equivalence import Factory
from tests.runtime.world import run_ranks

SGD = partial(torch.optim.SGD, lr=0.1)
TIED = partial(zoo.gpt, tied=True)


class Idle(nn.Module):
    """A perceptron with what a graph does not use: an idle layer, idle and passing buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(16, 8).double()
        self.idle = nn.Linear(3, 3)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.used(x), y)


def idle() -> tuple[nn.Module, dict[str, Tensor]]:
    return Idle(), zoo.mlp()[1]


def _executor(factory: Factory, seed: Seed) -> tuple[Executor, dict[str, Any]]:
    module, batch = factory()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, seed))
    return Executor(captured, program, module, optimizer=SGD), batch


def export_both_ways(factory: Factory, seed: Seed, folder: str) -> dict[str, Tensor]:
    """Train a step; save a checkpoint, export weights, and return the trained state dict."""
    executor, batch = _executor(factory, seed)
    executor.step(batch)
    executor.save(Path(folder, "ck"))
    executor.export(Path(folder, "weights.safetensors"))
    module, _ = factory()
    executor.to_module(module)
    return dict(module.state_dict())


def assert_exported(factory: Factory, folder: Path, expected: dict[str, Tensor]) -> None:
    """Assert that both ways give what a plain module loads strictly."""
    done = CliRunner().invoke(
        app, ["export", str(folder / "ck"), str(folder / "again.safetensors"), "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["weights"] == str(folder / "again.safetensors")
    for name in ("weights", "again"):
        module, _ = factory()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        module.load_state_dict(load_file(folder / f"{name}.safetensors"))
        for key, tensor in module.state_dict().items():
            assert torch.equal(tensor, expected[key]), key


@pytest.mark.ranks
@pytest.mark.parametrize(
    "seed", [Seed(data=2, zero=3), Seed(stages=2, num_microbatches=2)], ids=lambda s: s.label
)
def test_plain_pytorch_loads_what_two_ranks_trained(tmp_path: Path, seed: Seed) -> None:
    first, second = run_ranks(2, export_both_ways, TIED, seed, str(tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert_exported(TIED, tmp_path, first)


@pytest.mark.torch
@pytest.mark.parametrize("factory", [idle, zoo.cnn], ids=["idle", "cnn"])
def test_what_the_graph_does_not_use_is_exported_too(tmp_path: Path, factory: Factory) -> None:
    assert_exported(factory, tmp_path, export_both_ways(factory, Seed(), str(tmp_path)))


def first_loss(seed: Seed, path: str) -> float:
    """Start another model's training from exported weights."""
    module, batch = TIED()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, seed))
    executor = Executor(captured, program, module, optimizer=SGD)
    executor.load_weights(path)
    return float(executor.step(batch))


@pytest.mark.ranks
def test_training_starts_from_safetensors_with_any_plan(tmp_path: Path) -> None:
    module, batch = TIED()
    names = dict(module.state_dict())
    del names["head.weight"]  # tied: one of its names is enough
    halves = sorted(names)[::2], sorted(names)[1::2]
    for number, half in enumerate(halves):
        save_file({name: names[name] for name in half}, tmp_path / f"model-{number}.safetensors")
    expected = float(module(**batch).detach())
    for seed in (Seed(data=2, zero=1), Seed(tensor=2)):
        for found in run_ranks(2, first_loss, seed, str(tmp_path)):
            assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.torch
def test_weights_that_do_not_fit_are_refused_with_all_differences(tmp_path: Path) -> None:
    executor, _ = _executor(zoo.mlp, Seed())
    names = dict(executor.full_parameters())
    names["other"] = names.pop("layers.0.weight")
    names["head.bias"] = torch.zeros(9)
    save_file(names, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError) as caught:
        executor.load_weights(tmp_path / "w.safetensors")
    for line in ("layers.0.weight: the file lacks it", "other: only in the file", "shape (9,)"):
        assert line in str(caught.value)


@pytest.mark.torch
def test_a_file_that_is_no_safetensors_is_one_clear_error(tmp_path: Path) -> None:
    executor, _ = _executor(zoo.mlp, Seed())
    (tmp_path / "w.safetensors").write_bytes(b"not weights")
    with pytest.raises(CheckpointError, match="must be a safetensors file"):
        executor.load_weights(tmp_path / "w.safetensors")


@pytest.mark.torch
@pytest.mark.parametrize("out", [".", "", "/"])
def test_weights_are_not_written_over_a_folder(tmp_path: Path, out: str) -> None:
    executor, _ = _executor(zoo.mlp, Seed())
    executor.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"but [./] is a folder; name a file in it"):
        export_checkpoint(tmp_path, out)
