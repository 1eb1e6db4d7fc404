"""Ranks that die: wherever it happens nobody hangs, no checkpoint suffers, and resuming is exact."""

from __future__ import annotations

import os
import resource
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.core.program import Kind
from shardwright.errors import RunError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor
from shardwright.runtime.launch import launch
from tests import zoo
from tests.runtime.equivalence import batches, captured_of

pytestmark = pytest.mark.ranks
STEPS, FATAL = 4, 2
PLAN = Seed(data=2, zero=3, num_microbatches=2)


class Dropping(nn.Module):
    """A perceptron with dropout, so that resuming must restore the random numbers too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.dropout(torch.relu(self.up(x)), 0.3, self.training)
        return F.cross_entropy(self.down(hidden), y)


def dropping() -> tuple[nn.Module, dict[str, Tensor]]:
    return Dropping(), zoo.mlp(dtype=torch.float32)[1]


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(executor: Executor, kind: Kind) -> None:
    """Let this rank die at the first instruction of a kind."""
    compiled = executor._training
    actions = tuple(
        (index, die if executor.program.kind[index] == kind else action)
        for index, action in compiled.actions
    )
    object.__setattr__(compiled, "actions", actions)


def arm_disk(place: int) -> None:
    """Let this rank die when it has written so many files or folders of a checkpoint."""
    written = iter(range(100))

    def sync(_: int) -> None:
        if next(written) == place:
            die()

    os.fsync = sync


def train(folder: str, victim: int, moment: Kind | int | None) -> list[float]:
    """Train, saving after every step. ``victim`` dies in step FATAL, at an instruction kind, or in
    the checkpoint after it (see ``arm_disk``)."""
    module, batch, captured = captured_of(dropping)
    program = lower(captured.graph, seed_strategy(captured.graph, PLAN))
    executor = Executor(captured, program, module, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(executor.optimizer, 1, gamma=0.7)
    if (Path(folder) / "latest").exists():
        scheduler.load_state_dict(executor.load(folder)["scheduler"])
    losses: list[float] = []
    for one in batches(batch, STEPS)[executor.steps :]:
        doomed = executor.steps == FATAL and executor.rank == victim
        if doomed and isinstance(moment, Kind):
            arm(executor, moment)
        losses.append(float(executor.step(one)))
        scheduler.step()
        if doomed and isinstance(moment, int):
            arm_disk(moment)
        executor.save(folder, extra={"scheduler": scheduler.state_dict()})
    return losses


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing interrupts."""
    return launch(train, 2, (str(tmp_path_factory.mktemp("whole")), -1, None), timeout=60)[0]


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        pytest.param(0, Kind.FORWARD, id="rank 0 forward"),
        pytest.param(1, Kind.BACKWARD, id="rank 1 backward"),
        pytest.param(0, Kind.MESSAGE, id="rank 0 collective"),
        pytest.param(1, Kind.UPDATE, id="rank 1 update"),
        pytest.param(1, 0, id="rank 1 its tensors"),
        pytest.param(0, 1, id="rank 0 the manifest"),
        pytest.param(0, 4, id="rank 0 after naming"),
    ],
)
def test_a_rank_that_is_killed_costs_no_more_than_its_step(
    tmp_path: Path, expected: list[float], victim: int, moment: Kind | int
) -> None:
    with pytest.raises(RunError, match=rf"rank {victim} \(.*was killed by SIGKILL") as caught:
        launch(train, 2, (str(tmp_path), victim, moment), timeout=30)
    if isinstance(moment, Kind):
        assert (moment.name.lower() if moment != Kind.MESSAGE else "(") in caught.value.instruction
    for losses in launch(train, 2, (str(tmp_path), -1, None), timeout=60):
        assert len(losses) in {STEPS - FATAL, STEPS - FATAL - 1}
        assert losses == expected[-len(losses) :]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest", f"step-{STEPS - 1:08d}", f"step-{STEPS:08d}",
    ]  # fmt: skip


def exhaust(victim: int) -> None:
    """Train with a rank that may allocate almost nothing more."""
    module, batch = zoo.mlp(batch=4096, width=256)
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(data=2)))
    executor = Executor(captured, program, module, optimizer=partial(torch.optim.SGD, lr=0.1))
    if dist.get_rank() == victim:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (2 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    executor.step(batch)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_without_memory_is_one_message_that_says_so(victim: int) -> None:
    with pytest.raises(RunError) as caught:
        launch(exhaust, 2, (victim,), timeout=30)
    text = str(caught.value)
    assert text.startswith(f"rank {victim} is out of memory in step 0, stage 0 ")
    assert "--memory-limit" in text
    assert "\n" not in text
