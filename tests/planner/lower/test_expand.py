"""Deep graphs lowered by a few of their equal blocks: the same Program, prices and strategies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Kind, Program
from shardwright.core.strategy import GradientSync, OperatorConfig, Strategy
from shardwright.operators.splitting import find_samples, iterate
from shardwright.planner.cost import ShardPrices, price
from shardwright.planner.cost.price import InstructionCosts, Prices
from shardwright.planner.lower import lower
from shardwright.planner.lower.expand import Irregular, expand
from shardwright.planner.lower.fold import KEPT, Folder
from shardwright.planner.lower.outline import Outline
from shardwright.planner.lower.spread import Spreader
from shardwright.planner.space import Seed, seed_strategy
from shardwright.planner.space.grids import Grid, grid_strategy
from tests.laws.moves import moved, redrawn
from tests.planner.search.models import Sketch, cluster, images, mlp, residual

DEPTH, WHERE = 38, cluster(2, 2)
SEEDS = (
    Seed(data=4),
    Seed(data=2, tensor=2, zero=1, sequence=True),
    Seed(data=4, zero=3, num_microbatches=2),
    Seed(data=2, stages=2, num_microbatches=2, zero=2),
    Seed(tensor=2, stages=2, num_microbatches=4, schedule="gpipe", recompute=True),
)


def encoded(batch: int = 8, width: int = 16) -> OperatorGraph:
    """Layers that all read one activation, one weight and one table, and each a table of its own."""
    sketch = Sketch(batch)
    tokens = sketch.outside("x", (batch, width), "input")
    y = sketch.outside("y", (batch,), "input", "int64")
    shared = sketch.outside("shared.weight", (width, width), "parameter")
    table = sketch.outside("table", (width,), "buffer")
    memory = sketch.linear(tokens, width, "memory")
    sketch.close_block("stem", "")
    x = memory
    for layer in range(DEPTH):
        own = sketch.outside(f"own{layer}", (width,), "buffer")
        turned = sketch.apply("aten.add.Tensor", {"self": own, "other": table}, (width,))
        x = sketch.apply("aten.linear.default", {"input": x, "weight": shared}, (batch, width))
        x = sketch.apply("aten.add.Tensor", {"self": x, "other": memory}, (batch, width))
        x = sketch.apply("aten.mul.Tensor", {"self": x, "other": turned}, (batch, width))
        x = sketch.linear(x, width, f"layer{layer}")
        sketch.close_block(f"layer{layer}", "layer")
    return sketch.finish("encoded", sketch.linear(x, 8, "head"), y)


MODELS = {
    "mlp": lambda: mlp(depth=DEPTH),
    "residual": lambda: residual(depth=DEPTH),
    "images": lambda: images(depth=DEPTH, batch=8),
    "encoded": encoded,
}


def echoed(outline: Outline, strategy: Strategy, random: Random) -> Strategy:
    """Treat the blocks of a few random parts of every stretch as the first one of each is treated."""
    graph = outline.graph
    configs, parameters = list(strategy.configs), list(strategy.parameters)
    number = {tensor: position for position, tensor in enumerate(graph.parameters)}
    again = [
        set(strategy.recompute),
        set(strategy.recompute_operators),
        set(strategy.reshard_again),
        set(strategy.segment_starts),
    ]
    for one in outline.stretches:
        edges = sorted(random.sample(range(one.first + 1, one.stop), random.randrange(2)))
        for first, stop in zip([one.first, *edges], [*edges, one.stop], strict=True):
            for block in range(first, stop):
                columns = (one.operators, one.tensors, one.operators)
                like = [[first], *(c[first - one.first].tolist() for c in columns)]
                own = [[block], *(c[block - one.first].tolist() for c in columns)]
                for chosen, here, there in zip(again, like, own, strict=True):
                    chosen.difference_update(there)
                    chosen.update([o for i, o in zip(here, there, strict=True) if i in chosen])
                for here, there in zip(like[1], own[1], strict=True):
                    mesh = configs[there].mesh
                    configs[there] = OperatorConfig(mesh=mesh, dims=configs[here].dims)
                for here, there in zip(like[2], own[2], strict=True):
                    if here in number:
                        parameters[number[there]] = parameters[number[here]]
    return replace(
        strategy, configs=tuple(configs), parameters=tuple(parameters),
        recompute=tuple(sorted(again[0])), recompute_operators=tuple(sorted(again[1])),
        reshard_again=tuple(sorted(again[2])), segment_starts=tuple(sorted(again[3])),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Lowered:
    """A Program with the graph that its items name, and what every instruction costs."""

    program: Program
    graph: OperatorGraph
    prices: Prices

    @classmethod
    def of(cls, graph: OperatorGraph, strategy: Strategy) -> Lowered | None:
        try:
            program = lower(graph, strategy)
        except ValueError:
            return None
        return cls(program, graph, price(program, graph, WHERE, CostTable()))


def expanded(folder: Folder, strategy: Strategy) -> Lowered | None:
    """Return the same from a few blocks; None where that is refused, or not possible."""
    try:
        folded = folder.fold(strategy)
        found = None if folded is None else expand(folded, strategy)
    except (Irregular, ValueError):
        return None
    if found is None:
        return None
    costs = InstructionCosts(found.graph, ShardPrices(WHERE, CostTable()))
    return Lowered(found.program, found.graph, costs.price(found.program, found.masters))


def outcome(lowered: Lowered) -> list[object]:
    """Return all that does not depend on how things are numbered."""
    program, graph, prices = lowered.program, lowered.graph, lowered.prices
    items: list[object] = []
    for kind, item in zip(program.kind.tolist(), program.item.tolist(), strict=True):
        if kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD):
            segment = program.segments[item]
            kinds = [graph.operators[call.operator].kind for call in segment.calls]
            calls = [(call.dims, call.result_shapes, call.scale) for call in segment.calls]
            items.append((kinds, calls, segment.saved_bytes, segment.temporary_bytes))
        elif kind in (Kind.MESSAGE, Kind.SEND, Kind.RECEIVE):
            one = program.messages[item]
            items.append((one.primitive, one.axes, one.dims, one.bytes, one.purpose))
    names = [program.resource_names[index] for index in program.resource.tolist()]
    columns = (
        program.kind, program.group, program.microbatch, program.offset, program.predecessor,
        program.allocated, program.freed, program.temporary, program.free_offset, prices.seconds,
    )  # fmt: skip
    rest = [names, program.base_bytes, items, prices.by_source()]
    return [*rest, *[column.tolist() for column in columns]]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
def test_what_is_unrolled_is_the_program_and_its_prices(model, seed) -> None:
    graph = MODELS[model]()
    samples, random = find_samples(graph), Random(11)
    iterations = [iterate(graph, index) for index in range(len(graph.operators))]
    folder = Folder(graph, samples)
    assert folder.is_long
    strategy = seed_strategy(graph, seed, samples)
    if seed.zero:  # in another dtype on the wire
        feeds_back = seed.num_microbatches > 1
        sync = replace(strategy.gradient_sync, dtype="bfloat16", error_feedback=feeds_back)
        strategy = replace(strategy, gradient_sync=sync)
    elif seed.num_microbatches > 1:  # in packs
        sync = replace(strategy.gradient_sync, compressor="top-k", density=0.1)
        strategy = replace(strategy, gradient_sync=sync)
    legal = strategy
    same = 0
    for turn in range(5):
        known, found = Lowered.of(graph, strategy), expanded(folder, strategy)
        if known is not None and found is not None:
            assert outcome(found) == outcome(known)
            same += 1
        assert known is not None or found is None
        legal = strategy if known is not None else legal
        strategy = legal
        for _ in range(3):
            strategy = redrawn(graph, samples, iterations, strategy, random)
            strategy = moved(graph, strategy, random) if turn % 2 else strategy
        strategy = replace(strategy, gradient_sync=legal.gradient_sync)
        strategy = echoed(folder.outline, strategy, random)
    assert same >= 1


def test_few_blocks_remain_however_deep_the_model_is() -> None:
    graph = mlp(depth=200)
    samples = find_samples(graph)
    strategy = seed_strategy(graph, Seed(data=4, zero=3), samples)
    folded = Folder(graph, samples).fold(strategy)
    assert folded is not None
    # The first layer reads the batch and the last is read by the head, so these stay.
    assert len(folded.short.graph.blocks) == KEPT + 3
    assert sum(run.dropped for run in folded.runs) == 201 - KEPT - 3


def test_gradients_that_travel_together_across_blocks_keep_these_blocks() -> None:
    graph = mlp(depth=40)
    samples = find_samples(graph)
    strategy = seed_strategy(graph, Seed(data=4), samples)
    folder = Folder(graph, samples)
    pairs = zip(graph.parameters[::4], graph.parameters[2::4], strict=False)
    across = replace(strategy, gradient_sync=GradientSync(buckets=tuple(pairs)))
    assert folder.fold(strategy) is not None
    assert folder.fold(across) is None


def test_blocks_whose_results_are_all_read_at_the_end_are_not_left_out() -> None:
    sketch = Sketch(8)
    x = sketch.outside("x", (8, 16), "input")
    y = sketch.outside("y", (8,), "input", "int64")
    made = []
    for layer in range(DEPTH):
        x = sketch.linear(x, 16, f"layer{layer}")
        made.append(x)
        sketch.close_block(f"layer{layer}", "layer")
    for one in made[:-1]:
        x = sketch.apply("aten.add.Tensor", {"self": x, "other": one}, (8, 16))
    graph = sketch.finish("dense", sketch.linear(x, 8, "head"), y)
    assert not Folder(graph, find_samples(graph)).is_long


@pytest.mark.parametrize("model", MODELS)
def test_strategies_spread_from_a_short_graph_are_those_of_the_whole(model) -> None:
    graph = MODELS[model]()
    samples = find_samples(graph)
    spreader = Spreader(Folder(graph, samples))
    grids = [Grid(name="cube", sizes=(2, 2, 2)), Grid(name="summa", sizes=(2, 2))]
    for seed in (*SEEDS, *grids):
        make = seed_strategy if isinstance(seed, Seed) else grid_strategy

        def made(where, facts, make=make, seed=seed):
            return make(where, seed, facts)

        try:
            known = made(graph, samples)
        except ValueError:
            with pytest.raises(ValueError, match=r"."):
                spreader.spread(made)
        else:
            assert spreader.spread(made) == known
