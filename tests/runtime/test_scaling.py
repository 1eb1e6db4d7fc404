"""Float16 with a scaled loss, compared with ``torch.amp.GradScaler`` and plain PyTorch."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.core.strategy import Strategy
from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from shardwright.runtime.scaling import Scaling, scaler_of
from tests import zoo
from tests.runtime.equivalence import batches

pytestmark = pytest.mark.torch
MODEL = partial(zoo.mlp, batch=12, width=11, depth=2, dtype=torch.float32)


def example() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build it with a batch whose gradients exceed the loss's."""
    module, batch = MODEL()
    return module, {**batch, "x": batch["x"] * 50}


ADAM = partial(torch.optim.AdamW, lr=1e-2)
STEPS = 12
# So large that gradients overflow float32 at first, and again after growths.
LARGE = Scaling(scale=2.0**127, interval=2)
Trail = list[tuple[float, float, int]]  # loss, scale after the step, updates so far


def rehearsed(
    captured: Captured,
    strategy: Strategy,
    example: tuple[nn.Module, dict[str, torch.Tensor]],
    scaling: Scaling | None,
) -> list[tuple[Trail, dict[str, torch.Tensor]]]:
    program = lower(captured.graph, strategy)
    module, batch = example

    def train(world: LocalWorld) -> tuple[Trail, dict[str, torch.Tensor]]:
        mine = copy.deepcopy(module)
        options = RunOptions(world=world, scaling=scaling, max_norm=0.5 if strategy.clips else None)
        executor = Executor(captured, program, mine, optimizer=ADAM, options=options)
        trail: Trail = []
        for number, one in enumerate(batches(batch, STEPS)):
            loss = float(executor.step(one))
            assert executor.scaler
            trail.append((loss, executor.scaler.scale, number + 1 - executor.scaler.skipped))
        executor.to_module(mine)
        return trail, {name: one.detach() for name, one in mine.named_parameters()}

    return run_locally(train, len(strategy.devices))[0]


def by_grad_scaler(clips: bool) -> tuple[Trail, dict[str, torch.Tensor]]:
    module, batch = example()
    optimizer = ADAM(module.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=LARGE.scale, growth_interval=LARGE.interval)
    trail, updates = Trail(), 0
    for one in batches(batch, STEPS):
        before = scaler.get_scale()
        optimizer.zero_grad()
        loss = module(**one)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clips:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        updates += scaler.get_scale() >= before
        trail.append((float(loss.detach()), scaler.get_scale(), updates))
    return trail, {name: one.detach() for name, one in module.named_parameters()}


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    "seed",
    [Seed(), Seed(data=3, zero=3), Seed(data=2, tensor=1, stages=2, num_microbatches=2, zero=1)],
    ids=lambda seed: seed.label,
)
def test_scales_and_updates_are_those_of_torchs_scaler(seed: Seed, clips: bool) -> None:
    module, batch = example()
    captured = capture(module, batch)
    strategy = replace(seed_strategy(captured.graph, seed), clips=clips)
    expected, wanted = by_grad_scaler(clips)
    scales = [scale for _, scale, _ in expected]
    assert min(scales) < LARGE.scale  # a step was skipped
    assert any(b > a for a, b in pairwise(scales))  # and the scale grew
    for trail, parameters in rehearsed(captured, strategy, (module, batch), LARGE):
        assert [step[1:] for step in trail] == [step[1:] for step in expected]
        losses = [step[0] for step in trail]
        torch.testing.assert_close(losses, [step[0] for step in expected], rtol=2e-6, atol=0)
        for name, tensor in wanted.items():
            torch.testing.assert_close(parameters[name], tensor, rtol=1e-4, atol=1e-5)


def in_float16(scale: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train half precision weights with float32 masters by plain PyTorch."""
    module, batch = MODEL()
    masters = {name: nn.Parameter(one.detach().clone()) for name, one in module.named_parameters()}
    module.half()
    optimizer = ADAM(masters.values())
    losses: list[float] = []
    for one in batches(batch, STEPS):
        module.zero_grad()
        logits = one["x"].half()
        for layer in module.get_submodule("layers"):  # type: ignore[union-attr]
            logits = torch.relu(layer(logits))
        logits = module.get_submodule("head")(logits)
        loss = nn.functional.cross_entropy(logits.float(), one["y"])
        (loss * scale).backward()
        losses.append(float(loss.detach()))
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            masters[name].grad = parameter.grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(masters[name])
    return losses, {name: one.detach() for name, one in masters.items()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_float16_trains_as_plain_pytorch_with_float32_masters_does(ranks: int) -> None:
    module, batch = MODEL()
    captured = capture(module, batch, precision="float16")
    seed = Seed(data=ranks, zero=1 if ranks > 1 else 0, precision="float16")
    strategy = seed_strategy(captured.graph, seed)
    program = lower(captured.graph, strategy)
    share = sum(math.ceil(one.numel() / ranks) for one in module.parameters())
    whole = sum(one.numel() for one in module.parameters())
    assert program.base_bytes == (2 * whole + 12 * share,)  # float16, and three in float32
    losses, masters = in_float16(2.0**16)
    for trail, parameters in rehearsed(captured, strategy, (module, batch), None):
        assert trail[-1][1:] == (2.0**16, STEPS)
        torch.testing.assert_close([step[0] for step in trail], losses, rtol=2e-3, atol=0)
        for name, tensor in masters.items():
            torch.testing.assert_close(parameters[name], tensor, rtol=2e-2, atol=2e-3)


def test_small_gradients_vanish_in_float16_unless_the_loss_is_scaled() -> None:
    torch.manual_seed(0)
    factory = partial(nn.Linear, 4, 1)

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = factory()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.line(x) * 1e-3).mean().float() * 1e-6

    module = Small()
    before = module.line.weight.detach().clone()
    captured = capture(module, {"x": torch.ones(2, 4)}, precision="float16")
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(precision="float16")))
    moved: list[bool] = []
    for scale in (1.0, 2.0**16):
        options = RunOptions(scaling=Scaling(scale=scale))
        mine = copy.deepcopy(module)
        sgd = partial(torch.optim.SGD, lr=1e6)
        executor = Executor(captured, program, mine, optimizer=sgd, options=options)
        executor.step({"x": torch.ones(2, 4)})
        executor.to_module(mine)
        moved.append(not torch.equal(mine.line.weight, before))
    assert moved == [False, True]


def test_a_checkpoint_keeps_the_scale(tmp_path: Path) -> None:
    module, batch = example()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed()))
    options = RunOptions(scaling=LARGE)

    def made() -> Executor:
        mine = copy.deepcopy(module)
        return Executor(captured, program, mine, optimizer=ADAM, options=options)

    first, second = made(), made()
    for one in batches(batch, 5):
        first.step(one)
    first.save(tmp_path)
    second.load(tmp_path)
    assert first.scaler
    assert second.scaler
    assert first.scaler.skipped > 0
    assert vars(first.scaler) == vars(second.scaler)
    first.step(batch)
    second.step(batch)
    assert vars(first.scaler) == vars(second.scaler)


def test_meshes_that_share_a_rank_scale_only_where_their_gradients_meet() -> None:
    captured = capture(*MODEL())
    strategy = seed_strategy(captured.graph, Seed(stages=2))
    shared = replace(
        strategy, meshes=tuple(replace(mesh, devices=(0,)) for mesh in strategy.meshes)
    )
    for clips in (False, True):
        program = lower(captured.graph, replace(shared, clips=clips))
        assert scaler_of(program, LARGE, 1)
        assert scaler_of(program, None, 2) is None
        if clips:
            assert scaler_of(program, LARGE, 2)
            continue
        with pytest.raises(InputError, match="2 meshes"):
            scaler_of(program, LARGE, 2)


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"growth": 0.5}, {"interval": 0}])
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="loss scaling needs"):
        Scaling(**wrong)  # type: ignore[arg-type]
