"""What a rank keeps between forward and backward, counted in real tensors: the table of the papers, and
what was predicted."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.core.program import Program
from shardwright.core.schedules import SCHEDULES, NamedSchedule
from shardwright.planner.lower import lower
from shardwright.planner.schedule import folded, most_bytes, pipeline_order
from shardwright.planner.simulate import simulate
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally

pytestmark = pytest.mark.torch
STAGES, MICROBATCHES = 4, 8
WIDTH, ROWS = 32, 512
TENSOR = (
    WIDTH * ROWS * 8
)  # bytes of a saved tensor; those that travel have a 32nd, of a microbatch two
# Of a stage: its two wide layers keep the product, GELU's result and SiLU's until I. W needs what a
# product read and the gradient of what it made: of three products two wide tensors each.
KEPT, LEFT = 6, 4
NARROW = 1 + 2 / (KEPT * WIDTH)
Table = Callable[[int], int]


class Stage(nn.Sequential):
    """Three products, elementwise functions between them; what comes and goes is narrow."""

    def __init__(self) -> None:
        acts = [nn.GELU(), nn.SiLU()]
        super().__init__(
            nn.Linear(1, WIDTH), *acts, nn.Linear(WIDTH, WIDTH), *acts, nn.Linear(WIDTH, 1)
        )


class Model(nn.Module):
    """Stages one after another."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.sum()


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that this thread makes, from the call that makes them until they go: the most
    of them, and the most between instructions, when no operator is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.bytes = self.most = self.kept = 0

    def behind(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return an action behind which what is there counts as kept."""

        def run() -> None:
            action()
            self.kept = max(self.kept, self.bytes)

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(s) for s in _storages((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        # Only the rehearsal's world clones: what is under way between ranks.
        for storage in _storages(made) if func is not torch.ops.aten.clone.default else ():
            key, size = id(storage), storage.nbytes()
            if key not in given and key not in self.known:
                self.known.add(key)
                self.bytes += size
                weakref.finalize(storage, self._gone, key, size)
        self.most = max(self.most, self.bytes)
        return made

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.bytes -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [one.untyped_storage() for one in tree_leaves(tree) if isinstance(one, Tensor)]


def most_kept(
    schedule: Any, chunks: int = 1, *, recompute: bool = False
) -> tuple[list[float], list[float], list[float]]:
    """Return the most that every rank kept between instructions of a step, the most that was alive, and what was
    predicted of that, in saved tensors."""
    module = Model(STAGES * chunks).double()
    batch = {"x": torch.randn(ROWS * MICROBATCHES, 1, dtype=torch.float64)}
    captured = capture(module, batch)
    seed = Seed(stages=STAGES, chunks=chunks, num_microbatches=MICROBATCHES, schedule=schedule)
    strategy = seed_strategy(captured.graph, seed)
    if recompute:
        strategy = replace(strategy, recompute=tuple(range(STAGES * chunks)))
    program = lower(captured.graph, strategy)
    counted, _ = run_locally(partial(_count, captured, program, module, batch), STAGES)
    timeline = simulate(program, np.ones(program.num_instructions))
    owned = sum(one.nbytes for one in module.parameters()) / STAGES
    expected = [(timeline.peak_bytes[k] - owned) / TENSOR for k in range(STAGES)]
    kept, most = ([one / TENSOR for one in column] for column in zip(*counted, strict=True))
    return kept, most, expected


def _count(
    captured: Captured,
    program: Program,
    module: nn.Module,
    batch: dict[str, Tensor],
    world: LocalWorld,
) -> tuple[int, int]:
    executor = Executor(
        captured, program, copy.deepcopy(module), optimizer=partial(torch.optim.SGD, lr=0.1),
        options=RunOptions(world=world),
    )  # fmt: skip
    executor.step(batch)
    alive, compiled = Alive(), executor._training
    actions = tuple((index, alive.behind(action)) for index, action in compiled.actions)
    executor._training = replace(compiled, actions=actions)
    with alive:
        executor.step(batch)
    # Of all that was counted the loss, and what another rank has yet to receive: a step ends on each by itself.
    assert alive.bytes < TENSOR / WIDTH + TENSOR / 100
    return alive.kept, alive.most


@pytest.mark.parametrize(
    ("schedule", "chunks", "table"),
    [
        ("gpipe", 1, lambda k: MICROBATCHES * KEPT),
        ("1f1b", 1, lambda k: (STAGES - k) * KEPT),
        ("1f1b-so", 1, lambda k: min(MICROBATCHES, 2 * (STAGES - 1 - k) + 1) * KEPT),
        ("interleaved", 2, lambda k: (STAGES + 2 * (STAGES - 1 - k) + 1) * KEPT),
        ("looped-bfs", 2, lambda k: 2 * MICROBATCHES * KEPT),
        ("zb-h1", 1, lambda k: (STAGES - k) * KEPT + k * LEFT),
        ("zb-h2", 1, lambda k: (2 * STAGES - 2 * k - 1) * KEPT + 2 * k * LEFT),
        ("zb-v", 2, lambda k: STAGES * 2 * KEPT),
    ],
)  # fmt: skip
def test_ranks_keep_what_the_paper_says(schedule: str, chunks: int, table: Table) -> None:
    """M_B from F to I and M_W from I to W (Qi et al., 2024, table 2; doubled warm-ups of BaPipe; interleaved
    chunks of Narayanan et al.), to one tensor: what travels is narrow. The operator at work reads and makes
    two or three more."""
    kept, most, expected = most_kept(schedule, chunks)
    for k, one in enumerate(kept):
        assert table(k) < one < NARROW * table(k) + 1
        assert one <= most[k] < one + 3
    assert most == pytest.approx(expected, abs=0.6)


def test_with_recomputation_ranks_keep_inputs_and_one_stage() -> None:
    kept, most, expected = most_kept("gpipe", recompute=True)
    inputs = MICROBATCHES / WIDTH
    for one in kept:
        assert inputs + KEPT < one < 2 * inputs + KEPT + 1
    assert most == pytest.approx(expected, abs=0.6)


@pytest.mark.parametrize("schedule", ["zb-interleaved", "v-half", "v-min"])
def test_where_times_place_w_ranks_keep_what_the_order_says(schedule: NamedSchedule) -> None:
    """The order's own count of F, I and W, M_B and M_W being those of the real layer."""
    kept, most, expected = most_kept(schedule, 2)
    count = 2 * STAGES
    crews = tuple((k, k + STAGES) for k in range(STAGES))
    crews = folded(count) if SCHEDULES[schedule].folds else crews
    lines = pipeline_order(schedule, count, MICROBATCHES, crews)
    table = most_bytes(lines, [KEPT] * count, [LEFT] * count)
    for wanted, one in zip(table, kept, strict=True):
        assert wanted < one < NARROW * wanted + 1
    assert most == pytest.approx(expected, abs=0.6)
    if SCHEDULES[schedule].folds:
        assert max(most) < STAGES * 2 * KEPT  # of 1F1B and ZB-V
