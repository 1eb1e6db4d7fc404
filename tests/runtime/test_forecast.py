"""How far predicted weights were off, against the weights of the slots' emulator."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor

from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.forecast import Forecast
from shardwright.runtime.local_world import LocalWorld, run_locally
from tests.runtime import slots
from tests.runtime.slots import Rule, Stage
from tests.runtime.test_asynchronous import SEED, asynchronous, batches, emulate, row

pytestmark = pytest.mark.torch
COUNT = 22


def forecasts(mode: str, every: int) -> list[Forecast]:
    """Train 4 stages, return every forecast of rank 2."""
    module, batch = row(4)
    captured = capture(module, batch)
    program = lower(captured.graph, asynchronous(captured, 4, mode))

    def work(world: LocalWorld) -> list[Forecast]:
        optimizer = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
        options = RunOptions(seed=SEED, world=world, forecast_every=every)
        executor = Executor(
            captured, program, copy.deepcopy(module), optimizer=optimizer, options=options
        )
        found: list[Forecast] = []
        for batch in batches(COUNT):
            executor.step(batch)
            if executor.forecast is not None and executor.forecast not in found:
                found.append(executor.forecast)
        executor.flush()
        return found

    return run_locally(work, 4)[0][2]


@pytest.mark.parametrize("mode", ["spectrain-v1", "spectrain-v2", "pipeoptim"])
def test_predictions_are_off_by_what_the_slots_say(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[tuple[int, int], tuple[int, int, Tensor, Tensor]] = {}
    after: dict[int, list[Tensor]] = {}

    def flat(weights: dict[str, Tensor]) -> Tensor:
        return torch.cat([weights[name].flatten() for name in sorted(weights)])

    class Watched(slots.Emulator):
        def _forward(self, stage: Stage, k: int, i: int, slot: int, x: Tensor) -> Tensor:
            steps = 3 - k + (k // 2 if self.mode == "spectrain-v1" else 0)
            after.setdefault(k, [flat(stage.weights)])
            ahead = flat(self._ahead(stage, steps, slot))
            made[k, i] = steps, stage.updates, ahead, flat(stage.weights)
            return super()._forward(stage, k, i, slot, x)

        def _backward(self, stage: Stage, k: int, i: int, slot: int, g: Tensor) -> Tensor:
            result = super()._backward(stage, k, i, slot, g)
            after[k].append(flat(stage.weights))
            return result

    monkeypatch.setattr("tests.runtime.test_asynchronous.Emulator", Watched)
    module, batch = row(4)
    captured = capture(module, batch)
    rule = Rule("sgd", lambda _: 0.02)
    emulate(captured, asynchronous(captured, 4, mode), module, rule, batches(COUNT))
    found = forecasts(mode, 1)
    assert [one.number for one in found] == [5, 10, 15]  # no more than one at a time, of 4 stages
    for one in found:
        for k in range(4):
            steps, updates, ahead, before = made[k, one.number - 1]
            assert one.steps[k] == steps
            assert one.weights[k] == (ahead.numel() if steps else 0)
            if not steps:
                continue
            now = after[k][updates + steps]
            for told, wanted in ((one.predicted[k], ahead), (one.stale[k], before)):
                rmse = float((wanted - now).square().mean().sqrt())
                assert told == pytest.approx(rmse, rel=1e-9, abs=1e-15)
        assert one.predicted_rmse < one.stale_rmse


def test_what_predicts_nothing_has_no_forecasts() -> None:
    with pytest.raises(InputError, match="spectrain-v1"):
        forecasts("stash", 5)
