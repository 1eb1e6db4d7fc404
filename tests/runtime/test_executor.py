"""One rank: against plain PyTorch, clipping, dropout, evaluation, bad input, measuring."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwright.core.program import Kind
from shardwright.errors import InputError, RunError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from tests import zoo
from tests.runtime.equivalence import assert_equivalent
from tests.runtime.strategies import named

pytestmark = pytest.mark.torch
ONE = Seed()
SGD = partial(torch.optim.SGD, lr=1.0)


class Noisy(nn.Module):
    """A linear layer behind dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16).double()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.relu(self.linear(x)), 0.5, self.training).square().sum()


def noisy() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Noisy(), {"x": torch.randn(8, 16, dtype=torch.float64)}


def build(
    factory: Any = zoo.mlp, plan: Seed = ONE, clips: bool = False, **options: Any
) -> tuple[Executor, nn.Module, dict[str, Tensor]]:
    module, batch = factory()
    captured = capture(module, batch)
    strategy = replace(seed_strategy(captured.graph, plan), clips=clips)
    if plan.recompute:
        strategy = replace(strategy, recompute=tuple(range(len(captured.graph.blocks))))
    program = lower(captured.graph, strategy)
    executor = Executor(captured, program, module, optimizer=SGD, options=RunOptions(**options))
    return executor, module, batch


@pytest.mark.parametrize("factory", [zoo.mlp, zoo.gpt, zoo.bert, zoo.cnn], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "optimizer", [SGD, partial(torch.optim.AdamW, lr=1e-2)], ids=["sgd", "adamw"]
)
def test_one_rank_trains_as_plain_pytorch(factory: Any, optimizer: Any) -> None:
    assert_equivalent(1, factory, named(Seed()), optimizer)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_microbatches_and_recomputation_change_nothing(schedule: Any) -> None:
    seed = Seed(num_microbatches=4, recompute=True, schedule=schedule)
    assert_equivalent(1, zoo.gpt, named(seed))


def test_clipping_is_that_of_torch() -> None:
    executor, module, batch = build(clips=True, max_norm=0.01)
    plain, _ = zoo.mlp()
    plain(**batch).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    SGD(plain.parameters()).step()
    executor.step(batch)
    for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_max_norm_without_a_plan_that_clips_is_refused() -> None:
    with pytest.raises(InputError, match="max_norm and the plan must agree"):
        build(max_norm=1.0)


def test_recomputed_dropout_draws_the_same_mask() -> None:
    plain, _, batch = build(noisy, seed=4)
    again, _, _ = build(noisy, Seed(recompute=True), seed=4)
    assert (again.program.kind == Kind.RECOMPUTE).any()
    plain_losses = [float(plain.step(batch)) for _ in range(3)]
    assert [float(again.step(batch)) for _ in range(3)] == plain_losses
    assert len(set(plain_losses)) == 3


def test_dropout_leaves_the_users_random_numbers_alone() -> None:
    executor, _, batch = build(noisy)
    torch.manual_seed(1)
    executor.step(batch)
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3))


def test_evaluation_is_the_module_in_evaluation_mode() -> None:
    executor, module, batch = build(noisy)
    module.eval()
    torch.testing.assert_close(executor.evaluate(batch), module(**batch).detach())
    assert executor.steps == 0


def test_evaluation_leaves_batch_statistics_alone() -> None:
    executor, module, batch = build(zoo.cnn)
    executor.step(batch)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    executor.evaluate(batch)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_a_batch_of_another_size_is_refused() -> None:
    executor, _, batch = build()
    with pytest.raises(InputError, match="global shape"):
        executor.step({name: tensor[:4] for name, tensor in batch.items()})


def test_a_batch_without_an_entry_is_refused() -> None:
    executor, _, batch = build()
    with pytest.raises(InputError, match="'y' is missing"):
        executor.step({"x": batch["x"]})


def test_an_optimizer_that_runs_the_model_itself_is_refused() -> None:
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, ONE))
    factory = lambda named: torch.optim.LBFGS([parameter for _, parameter in named])  # noqa: E731
    with pytest.raises(InputError, match="LBFGS calls the model again"):
        Executor(captured, program, module, optimizer=factory)


def test_a_loss_that_is_not_a_number_stops_before_the_update() -> None:
    executor, module, batch = build(check_finite=True)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(RunError, match=r"finite.*step 0"):
        executor.step({**batch, "x": batch["x"] * torch.nan})
    for parameter, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_an_error_inside_a_step_names_the_instruction() -> None:
    executor, _, batch = build()
    with pytest.raises(RunError, match="rank 0 failed in step 0, stage 0 forward segment"):
        executor.step({**batch, "y": batch["y"] + 100})


def test_a_measured_timeline_covers_every_instruction_and_bounds_memory() -> None:
    executor, _, batch = build(zoo.gpt, Seed(num_microbatches=2))
    executor.step(batch)
    timeline = executor.profile_step(batch)
    assert timeline.source == "measured"
    assert not np.isnan(timeline.start).any()
    assert (timeline.end >= timeline.start).all()
    compute = executor.program.kind != Kind.MESSAGE
    assert (np.diff(timeline.start[compute]) >= 0).all()
    parameters = sum(p.numel() * 8 for p in executor.full_parameters().values())
    assert 2 * parameters <= timeline.worst_peak_bytes <= 20 * parameters


def test_masks_are_those_of_the_minibatch_in_whichever_step_it_is_worked_for() -> None:
    executor, _, batch = build(noisy)
    losses = [float(executor.step(batch)) for _ in range(2)]
    module, _ = noisy()
    program, captured = executor.program, executor.captured
    lagging = replace(program, shift=np.ones(program.num_instructions, dtype=np.int32))
    later = Executor(captured, lagging, module, optimizer=SGD)
    later.machine.clock.step = 1  # minibatch 0 is worked for in step 1
    assert [float(later.step(batch)) for _ in range(2)] == losses
