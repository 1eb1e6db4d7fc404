"""Tensor parallelism in 1, 2, 2.5 and 3 dimensions against the formulas of the papers.

Megatron-LM (arXiv 1909.08053, 2205.05198), Optimus (2104.05343), Tesseract (2105.14500) and 3-D
(2105.14450). Volumes are elements sent per rank by ring algorithms, counted over the messages of a
lowered Program.
"""

from __future__ import annotations

import copy
import itertools
import math
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import layout_text, local_bytes
from shardwright.core.program import Message, Program
from shardwright.core.strategy import Strategy
from shardwright.operators.splitting import iterate
from shardwright.planner.lower import lower
from shardwright.planner.space.configs import placements
from shardwright.planner.space.grids import Grid, grid_strategy
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor
from shardwright.runtime.loss import NUM_RIDING
from tests import zoo
from tests.runtime.equivalence import StrategyBuilder, assert_equivalent
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.torch

# Section 5.6 of the notes: one formula for every grid p_i x p_j x p_l.
GRIDS = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (2, 1, 4), (1, 2, 2)]
LAYER_GRIDS = [
    (1, 2, 2),
    (2, 2, 1),
    (4, 1, 1),
    (1, 4, 1),
    (1, 1, 4),
    (2, 2, 2),
    (2, 1, 4),
    (4, 4, 4),
]
B, S, H = 16, 64, 256


class Chain(nn.Module):
    """Linear layers without bias between a gain, so that the first input is trained, and a sum."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(widths[0]))
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(one, two, bias=False) for one, two in pairs)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for layer in self.layers:
            x = layer(x)
        return (x * x).sum()


class RootMeanSquare(nn.Module):
    """Two gated linears around a norm in elementary operators, as Llama writes its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.into, self.up = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.gate, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        x = x + self.down(nn.functional.silu(self.gate(normal)) * self.up(normal))
        return x.pow(2).mean()


def root_mean_square() -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return RootMeanSquare(16).double(), {"x": torch.randn(8, 4, 16).double()}


@cache
def chain_graph(rows: int, *widths: int) -> OperatorGraph:
    return capture(Chain(widths).double(), {"x": torch.zeros(rows, widths[0]).double()}).graph


@cache
def gpt_graph(depth: int) -> OperatorGraph:
    return capture(*zoo.gpt(batch=B, length=S, width=H, depth=depth)).graph


def sent(program: Program, message: Message, value: int) -> float:
    """Elements that each rank sends of one item, by the ring conventions of section 1."""
    mesh = program.meshes[message.mesh]
    size = math.prod(mesh.sizes[axis] for axis in message.axes)
    elements = math.prod(program.values[value].shape)
    factor = {"all_reduce": 2 * (size - 1) / size, "all_gather": size - 1, "slice": 0, "copy": 0}
    return factor.get(message.primitive, (size - 1) / size) * elements


def volume(graph: OperatorGraph, strategy: Strategy) -> float:
    """Elements per rank and step; vectors, which section 5.3 keeps replicated, are left aside."""
    program = lower(graph, strategy)
    return sum(
        sent(program, message, value)
        for message in program.messages
        for value in message.sources
        if len(graph.tensors[program.values[value].tensor].shape) > 1
    )


def layer_volume(build: object) -> float:
    """What one more transformer layer adds."""
    return volume(gpt_graph(3), build(gpt_graph(3))) - volume(gpt_graph(2), build(gpt_graph(2)))


@pytest.mark.parametrize("sizes", GRIDS)
def test_a_linear_layer_sends_what_section_5_6_says(sizes: tuple[int, int, int]) -> None:
    m, k, n = 32, 16, 64
    p_i, p_j, p_l = sizes
    strategy = grid_strategy(chain_graph(m, k, n), Grid(name="cube", sizes=sizes, keeps=True))
    expected = 2 * ((p_j - 1) * m * k + (p_i - 1) * k * n + (p_l - 1) * m * n) / math.prod(sizes)
    assert volume(chain_graph(m, k, n), strategy) == expected


@pytest.mark.parametrize("sizes", GRIDS)
def test_gathering_weights_again_sends_them_once_more(sizes: tuple[int, int, int]) -> None:
    graph = chain_graph(32, 16, 64)
    kept, again = (
        volume(graph, grid_strategy(graph, Grid(name="cube", sizes=sizes, keeps=keeps)))
        for keeps in (True, False)
    )
    assert again - kept == (sizes[0] - 1) * 16 * 64 / math.prod(sizes)


@pytest.mark.parametrize("sizes", LAYER_GRIDS)
def test_a_transformer_layer_in_a_cube(sizes: tuple[int, int, int]) -> None:
    p_i, p_j, p_l = sizes
    tokens = B * S * H
    linears = 4 * (p_j - 1) * tokens + 12 * (p_l - 1) * tokens + 12 * (p_i - 1) * H * H
    # Two layer norms, each to whole rows and back, forward and backward.
    norms = 8 * (p_l - 1) / p_l * tokens
    found = layer_volume(lambda g: grid_strategy(g, Grid(name="cube", sizes=sizes, keeps=True)))
    assert found == (2 * linears + norms) / math.prod(sizes)


@pytest.mark.parametrize("q", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_transformer_layer_on_a_plane(q: int, depth: int) -> None:
    tokens, weights = B * S * H, 12 * H * H
    forward = 7 * (q - 1) * tokens / depth + (q - 1) * weights
    # Backward scatters both gradients and gathers the weights again, not the inputs.
    backward = 7 * (q - 1) * tokens / depth + 2 * (q - 1) * weights
    # Two layer norms to whole rows and back, but to the linear layer the gather does that.
    norms = 4 * (q - 1) / q * tokens / depth
    # Gradients are summed over the depth; nothing else is sent there.
    summed = 2 * (depth - 1) / depth * weights
    found = layer_volume(lambda g: grid_strategy(g, Grid(name="tesseract", sizes=(depth, q, q))))
    assert found == pytest.approx((forward + backward + norms + summed) / q**2, rel=1e-12)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("p", [2, 4])
def test_a_megatron_layer_sends_four_activations_each_way(p: int, sequence: bool) -> None:
    found = layer_volume(lambda g: seed_strategy(g, Seed(tensor=p, sequence=sequence)))
    assert found == 8 * (p - 1) / p * B * S * H


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_two_chained_linears_return_to_the_first_layout(number: int) -> None:
    graph = chain_graph(32, *([16] * (number + 1)))
    strategy = grid_strategy(graph, Grid(name="cube", sizes=(2, 2, 2)))

    def stream(kind: str, which: int) -> str:
        index = [i for i, op in enumerate(graph.operators) if op.kind == kind][which]
        placed = placements(iterate(graph, index), strategy.configs[index].dims)
        return layout_text(placed.inputs[0].value)

    end = stream("aten.mul.Tensor", 1)
    assert stream("aten.mul.Tensor", 0) == "S0·S0·S1"
    assert end == ("S0·S0·S1" if number % 2 == 0 else "S0·S1·S0")


@pytest.mark.parametrize("grid", ["summa 2x2", "tesseract 2x2x2", "cube 2x2x2", "cube 4x4x4"])
def test_memory_of_a_rank_falls_as_the_papers_say(grid: str) -> None:
    name, _, text = grid.partition(" ")
    sizes = tuple(map(int, text.split("x")))
    graph, ranks = gpt_graph(2), math.prod(sizes)
    strategy = grid_strategy(graph, Grid(name=name, sizes=sizes))
    program = lower(graph, strategy)
    copies = sizes[0] if name == "tesseract" else 1
    kept = 0.0
    for index, config in zip(graph.parameters, strategy.parameters, strict=True):
        spec = graph.tensors[index]
        mine = local_bytes(spec.shape, spec.dtype, config.rest, sizes)
        if len(spec.shape) == 2:
            assert mine * ranks == copies * 8 * math.prod(spec.shape)
        kept += mine
    # Parameters and two Adam states each; no buffers.
    assert program.base_bytes[0] == 3 * kept
    for call in (
        call for segment in program.segments if segment.block > 0 for call in segment.calls
    ):
        shapes = [graph.tensors[t].shape for t in graph.operators[call.operator].outputs]
        for whole, local in zip(shapes, call.result_shapes, strict=True):
            is_product = graph.operators[call.operator].kind == "aten.linear.default"
            partial_sums = math.prod(sizes[axis] for axis in call.partial_axes) if is_product else 1
            if len(whole) > 2:
                assert math.prod(local) * ranks == partial_sums * math.prod(whole)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 4, 1), "the global batch into 32 equal pieces, but its size is 16; choose a multiple"),
        (
            (1, 8, 1),
            "dim 'd2' of view .* into 8 equal pieces, but its size is 4; choose a smaller grid",
        ),
    ],
)
def test_a_grid_that_does_not_divide_is_refused(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid_strategy(gpt_graph(2), Grid(name="cube", sizes=sizes))


def _build(grid: Grid, graph: OperatorGraph) -> Strategy:
    return grid_strategy(graph, grid)


def builders(*grids: Grid) -> dict[str, StrategyBuilder]:
    """Return builders which can be sent to another process, by label."""
    return {grid.label: partial(_build, grid) for grid in grids}


FOUR = [
    Grid(name="summa", sizes=(2, 2)),
    Grid(name="tesseract", sizes=(1, 2, 2)),
    Grid(name="tesseract", sizes=(2, 1, 2), recompute=True),
    Grid(name="cube", sizes=(1, 2, 2), keeps=True),
    Grid(name="cube", sizes=(2, 2, 1), num_microbatches=2, keeps=True),
    Grid(name="cube", sizes=(2, 1, 2), recompute=True),
    Grid(name="cube", sizes=(4, 1, 1)),
]
EIGHT = [
    Grid(name="cube", sizes=(2, 2, 2), keeps=True),
    Grid(name="cube", sizes=(2, 2, 2), recompute=True),
    Grid(name="cube", sizes=(2, 1, 4)),
    Grid(name="tesseract", sizes=(2, 2, 2)),
]


class Wire(TorchDispatchMode):
    """Counts, by ring conventions, the elements that torch.distributed is asked to send."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        name = func.name()
        if name == "c10d::broadcast_":
            tensors, group, root = args[0], dist.ProcessGroup.unbox(args[1]), args[2]
            mine = group.rank() == root
            self.elements += tensors[0].numel() * (group.size() - 1) if mine else 0
        elif name == "c10d::send":  # a piece of an exchange
            self.elements += args[0][0].numel()
        elif name == "c10d::allreduce_":
            size = dist.ProcessGroup.unbox(args[1]).size()
            self.elements += args[0][0].numel() * 2 * (size - 1) / size
        else:
            assert name == "c10d::recv_" or not name.startswith("c10d::"), name
        return func(*args, **(kwargs or {}))


def count_on_the_wire(*shapes: tuple[int, int, int]) -> list[float]:
    """Train one step in each cube on this rank and count."""
    module, batch = Chain((16, 64, 16)).double(), {"x": torch.ones(32, 16).double()}
    captured, found = capture(module, batch), list[float]()
    for sizes in shapes:
        strategy = grid_strategy(captured.graph, Grid(name="cube", sizes=sizes, keeps=True))
        optimizer = partial(torch.optim.SGD, lr=1e-3)
        program = lower(captured.graph, strategy)
        executor = Executor(captured, program, copy.deepcopy(module), optimizer=optimizer)
        with Wire() as wire:
            executor.step(batch)
        found.append(wire.elements)
        executor.close()
    return found


def predicted(sizes: tuple[int, int, int]) -> float:
    """The volume of section 5.6, and what else is sent: the gain's gradient and the loss."""
    m, k, n = 32, 16, 64
    p_i, p_j, p_l = sizes
    total = math.prod(sizes)
    up = (p_j - 1) * m * k + (p_i - 1) * k * n + (p_l - 1) * m * n
    down = (p_l - 1) * m * n + (p_i - 1) * k * n + (p_j - 1) * m * k
    gain = 2 * (p_i * p_j - 1) / (p_i * p_j) * k / p_l
    # They ride with the gain's gradient, in so many numbers, where that goes to all ranks.
    loss_and_flag = 2 * (total - 1) / total * (NUM_RIDING if p_l == 1 else 2)
    return 2 * (up + down) / total + gain + loss_and_flag


@pytest.mark.ranks
@pytest.mark.parametrize("shapes", [((1, 2, 2), (2, 2, 1), (1, 4, 1), (4, 1, 1)), ((2, 2, 2),)])
def test_what_ranks_really_send_is_the_formula(shapes: tuple[tuple[int, int, int], ...]) -> None:
    expected = [predicted(sizes) for sizes in shapes]
    for found in run_ranks(math.prod(shapes[0]), count_on_the_wire, *shapes):
        assert found == pytest.approx(expected)


def test_grids_of_four_ranks_train_as_one_process() -> None:
    adam = partial(torch.optim.AdamW, lr=1e-2)
    assert_equivalent(4, zoo.gpt, builders(*FOUR))
    assert_equivalent(4, zoo.mlp, builders(*FOUR[::2]), adam)


def test_a_norm_in_elementary_operators_stays_split_and_trains_as_one_process() -> None:
    graph = capture(*root_mean_square()).graph
    program = lower(graph, grid_strategy(graph, Grid(name="cube", sizes=(2, 2, 2))))
    assert all(message.primitive != "all_to_all" for message in program.messages)
    assert_equivalent(4, root_mean_square, builders(*FOUR[1::2]))


def test_grids_of_eight_ranks_train_as_one_process() -> None:
    assert_equivalent(8, zoo.gpt, builders(*EIGHT))
