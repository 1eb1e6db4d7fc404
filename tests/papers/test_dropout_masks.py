"""Dropout masks of tensor parallel layers: shards draw different ones, replicas the same.

Test 8 of the notes on 1-D, 2-D, 2.5-D and 3-D tensor parallelism: masks must differ between ranks
that hold different elements, and be equal where values are replicated. Every rank's masks are taken
where its kernels run, and laid beside the documented seed rule, which is written out here again.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import shard_offsets
from shardwright.core.strategy import Strategy
from shardwright.operators.splitting import iterate
from shardwright.planner.lower import lower
from shardwright.planner.space.configs import placements
from shardwright.planner.space.grids import Grid, grid_strategy
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally

pytestmark = pytest.mark.torch

SEED, WIDTH = 5, 32
SGD = partial(torch.optim.SGD, lr=0.1)


class Dropping(nn.Module):
    """Two gated blocks: dropout of the hidden activation, which column parallelism splits, and of
    what is added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.ModuleList(nn.Linear(*pair) for _ in range(2))
            for pair in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            hidden = F.dropout(F.gelu(up(x)), 0.5, self.training)
            x = x + F.dropout(down(hidden), 0.5, self.training)
        return x.square().mean()


@cache
def dropping() -> tuple[nn.Module, dict[str, Tensor], Captured]:
    torch.manual_seed(0)
    module, batch = Dropping().double(), {"x": torch.randn(8, 8, WIDTH).double()}
    return module, batch, capture(module, batch)


class Masks(TorchDispatchMode):
    """Keeps the masks that a rank's kernels draw, forward only, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_dropout.default:
            self.drawn.append(result[1].clone())
        elif func in (torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p):
            self.drawn.append(result.bool().clone())
        return result


def train(captured: Captured, strategy: Strategy, steps: int) -> list[list[Tensor]]:
    """Return every rank's masks of all steps, in the order of its operators."""
    module, batch, _ = dropping()
    program = lower(captured.graph, strategy)

    def rank(world: LocalWorld) -> list[Tensor]:
        options = RunOptions(seed=SEED, world=world)
        mine = copy.deepcopy(module)
        executor = Executor(captured, program, mine, optimizer=SGD, options=options)
        with Masks() as masks:
            for _ in range(steps):
                executor.step(batch)
        return masks.drawn

    return run_locally(rank, len(strategy.devices))[0]


PLANS: dict[str, Seed | Grid] = {
    "data": Seed(data=2),
    "megatron": Seed(tensor=4),
    "megatron and data": Seed(data=2, tensor=2),
    "megatron, sequence": Seed(tensor=2, sequence=True),
    "summa": Grid(name="summa", sizes=(2, 2)),
    "tesseract": Grid(name="tesseract", sizes=(2, 2, 2)),
    "cube": Grid(name="cube", sizes=(2, 2, 2)),
}


def strategy_of(graph: OperatorGraph, plan: Seed | Grid) -> Strategy:
    return seed_strategy(graph, plan) if isinstance(plan, Seed) else grid_strategy(graph, plan)


def mixed(state: int) -> int:
    """Splitmix64's finaliser, to 63 bits."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return (state ^ state >> 31) >> 1


def by_the_rule(
    operator: int, coordinate: tuple[int, ...], step: int, shape: tuple[int, ...]
) -> Tensor:
    """Draw the mask that the seed rule of ``runtime/randomness.py`` gives a shard."""
    text = repr((operator, coordinate)).encode()
    place = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    generator = torch.Generator().manual_seed(mixed(place + mixed(SEED) + step * 2**20 + 1))
    return torch.empty(shape, dtype=torch.float64).bernoulli_(0.5, generator=generator).bool()


@pytest.mark.parametrize("plan", PLANS)
def test_masks_differ_between_shards_and_are_equal_on_replicas(plan: str) -> None:
    _, _, captured = dropping()
    graph = captured.graph
    strategy = strategy_of(graph, PLANS[plan])
    steps = 2
    ranks = train(captured, strategy, steps)
    (mesh,) = strategy.meshes
    coordinates = list(itertools.product(*map(range, mesh.sizes)))
    draws = [at for at, one in enumerate(graph.operators) if one.kind == "aten.dropout.default"]
    assert len(draws) == 4
    for step, (number, operator) in itertools.product(range(steps), enumerate(draws)):
        iteration = iterate(graph, operator)
        dims = strategy.configs[operator].dims
        layout = placements(iteration, dims).outputs[0].value
        shape = graph.tensors[graph.operators[operator].outputs[0]].shape
        masks: dict[tuple[int, ...], Tensor] = {}
        for coordinate, drawn in zip(coordinates, ranks, strict=True):
            mask = drawn[step * len(draws) + number]
            local = tuple(mask.shape)
            where = shard_offsets(shape, layout, mesh.sizes, coordinate)
            assert torch.equal(masks.setdefault(where, mask), mask)  # replicas
            place = tuple(p for p, name in zip(coordinate, dims, strict=True) if name)
            assert torch.equal(mask, by_the_rule(operator, place, step, local))
        assert len(masks) * math.prod(local) == math.prod(shape)
        for one, other in itertools.combinations(masks.values(), 2):
            assert 0.2 < float((one != other).double().mean()) < 0.8


def test_steps_and_operators_draw_different_masks() -> None:
    _, _, captured = dropping()
    (drawn,) = train(captured, seed_strategy(captured.graph, Seed()), 2)
    assert len(drawn) == 8
    for one, other in itertools.combinations(drawn, 2):
        assert one.shape != other.shape or not torch.equal(one, other)
