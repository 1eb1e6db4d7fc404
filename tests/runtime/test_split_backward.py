"""Backward in two halves: what trains is what one process trains, W is really later, and nothing runs twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from shardwright.core.costs import CostTable
from shardwright.core.deferral import DEFERRED
from shardwright.core.program import Kind
from shardwright.core.strategy import Pipeline
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.schedule import pipeline_order
from shardwright.planner.search.asked import asked_for
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.proofs import check
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.operators import linear_blocks
from shardwright.runtime.deferral import Aside, Product, run_split
from shardwright.runtime.offsets import embed_rows
from tests import zoo
from tests.planner.search.models import cluster
from tests.runtime.equivalence import Factory, assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch
SGD = partial(torch.optim.SGD, lr=1.0)
TIED = partial(zoo.gpt, tied=True)
EXACT = 1e-9
MIXED = (
    "0F0 0F1 0F2 0I0 0B1 0F3 0I2 0W2 0I3 0W0 0W3",
    "1F0 1I0 1F1 1W0 1B1 1F2 1I2 1F3 1B3 1W2",
)


@pytest.mark.parametrize(
    ("factory", "seed"),
    [
        (partial(zoo.mlp, batch=24, depth=7), Seed(stages=4, num_microbatches=6, schedule="zb-h2")),
        (TIED, Seed(stages=4, num_microbatches=8, schedule="zb-h1", recompute=True)),
        (TIED, Seed(stages=2, tensor=2, num_microbatches=4, schedule="zb-h2", sequence=True)),
        (TIED, Seed(stages=2, data=2, zero=2, num_microbatches=4, schedule="zb-h1")),
        (TIED, Seed(stages=2, chunks=2, data=2, zero=3, num_microbatches=4, schedule="zb-v")),
        (TIED, Seed(stages=2, chunks=2, num_microbatches=8, schedule="v-half", recompute=True)),
        (TIED, Seed(stages=2, chunks=2, num_microbatches=1, schedule="v-min")),
        (partial(zoo.mlp, batch=12, depth=5), Seed(stages=2, chunks=3, num_microbatches=3, schedule="zb-interleaved")),
        (zoo.cnn_groupnorm, Seed(stages=2, num_microbatches=2, schedule="zb-h1")),
    ],
    ids=lambda one: one.label if isinstance(one, Seed) else "",
)  # fmt: skip
def test_every_rank_of_a_split_schedule_trains_as_plain_pytorch_does(
    factory: Factory, seed: Seed
) -> None:
    trains_as_plain(
        factory, seed, Pipeline(schedule=seed.schedule, num_microbatches=seed.num_microbatches)
    )


def trains_as_plain(factory: Factory, seed: Seed, pipeline: Pipeline) -> None:
    module, batch = factory()
    captured = capture(module, batch)
    strategy = replace(seed_strategy(captured.graph, seed), pipeline=pipeline)
    check(lower(captured.graph, strategy))
    runs, _ = train_rehearsed(captured, strategy, module, batch, SGD)
    assert len(runs) == seed.stages * seed.data * seed.tensor
    for run in runs:
        assert_close(run, train_plain(factory, SGD), seed.label, EXACT)


def test_released_weights_of_convolutions_wait_for_their_gradients() -> None:
    """torch takes a view of them, where a convolution has one channel."""
    module, batch = zoo.windows()
    captured = capture(module, batch, batch_norm="synchronised")
    seed = Seed(stages=2, data=2, zero=3, keeps=False, schedule="zb-h1")
    runs, _ = train_rehearsed(captured, seed_strategy(captured.graph, seed), module, batch, SGD)
    for run in runs:
        assert_close(run, train_plain(zoo.windows, SGD), seed.label, EXACT)


def test_an_order_of_ones_own_may_split_some_backwards() -> None:
    seed = Seed(stages=2, num_microbatches=4)
    trains_as_plain(TIED, seed, Pipeline(schedule="custom", num_microbatches=4, order=MIXED))


def test_an_order_that_is_searched_for_predicted_times_trains() -> None:
    factory = partial(zoo.mlp, batch=8, depth=3)
    module, batch = factory()
    captured = capture(module, batch)
    context = Context.of(captured.graph, cluster(2, 1), CostTable(), Training())
    strategy = asked_for(context, "zb-2p:2x4").few
    check(lower(captured.graph, strategy))
    runs, _ = train_rehearsed(captured, strategy, module, batch, SGD)
    for run in runs:
        assert_close(run, train_plain(factory, SGD), strategy.label, EXACT)


def test_a_split_order_written_out_is_the_named_schedule() -> None:
    module, batch = zoo.mlp(batch=24, depth=7)
    graph = capture(module, batch).graph
    named = seed_strategy(graph, Seed(stages=3, num_microbatches=4, schedule="zb-h1"))
    order = tuple(" ".join(map(str, line)) for line in pipeline_order("zb-h1", 3, 4))
    written = replace(named, pipeline=Pipeline(schedule="custom", num_microbatches=4, order=order))
    programs = [lower(graph, one) for one in (named, written)]
    assert programs[0].segments == programs[1].segments
    for column in ("kind", "item", "microbatch", "predecessor", "allocated", "freed", "temporary"):
        first, second = (getattr(program, column).tolist() for program in programs)
        assert first == second


def test_parameters_have_no_gradient_before_w() -> None:
    """Of a stage with parameters only W writes their gradients, and every I has its W."""
    module, batch = TIED()
    graph = capture(module, batch).graph
    program = lower(
        graph, seed_strategy(graph, Seed(stages=2, num_microbatches=4, schedule="zb-h1"))
    )
    halves = {
        kind: {(int(program.item[i]), int(program.microbatch[i]))
               for i in range(program.num_instructions) if program.kind[i] == kind}
        for kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    }  # fmt: skip
    assert Kind.BACKWARD not in program.kind
    trained = {
        number
        for number, segment in enumerate(program.segments)
        if segment.has_backward
        and any(program.values[v].role == "parameter" for v in segment.inputs)
    }
    assert trained
    assert halves[Kind.WEIGHT_GRADIENT] == {
        one for one in halves[Kind.INPUT_GRADIENT] if one[0] in trained
    }


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


ROWS = torch.tensor([[1, 4, 0], [3, 3, 6]])
# By bare name: data, parameters, and the call on both.
CALLS: dict[str, tuple[list[Tensor], list[Tensor], Callable[..., Any]]] = {
    "linear": ([drawn(2, 3, 4)], [drawn(5, 4), drawn(5)], F.linear),
    "linear_blocks": ([drawn(2, 3, 4)], [drawn(2, 5, 4), drawn(2, 5)], linear_blocks),
    "addmm": ([drawn(3, 4)], [drawn(4, 5), drawn(5)], lambda x, w, b: torch.addmm(b, x, w)),
    "mm": ([drawn(3, 4)], [drawn(4, 5)], torch.mm),
    "matmul": ([drawn(2, 3, 4)], [drawn(4, 5)], torch.matmul),
    "bmm": ([drawn(2, 3, 4)], [drawn(2, 4, 5)], torch.bmm),
    "baddbmm": (
        [drawn(2, 3, 4)], [drawn(2, 4, 5), drawn(2, 1, 5)], lambda x, w, b: torch.baddbmm(b, x, w)
    ),
    "einsum": ([drawn(2, 3, 4)], [drawn(4, 5)], partial(torch.einsum, "bij,jk->bik")),
    "conv1d": ([drawn(2, 3, 8)], [drawn(4, 3, 3), drawn(4)], F.conv1d),
    "conv2d": ([drawn(2, 3, 6, 6)], [drawn(4, 3, 3, 3), drawn(4)], F.conv2d),
    "conv3d": ([drawn(1, 2, 4, 4, 4)], [drawn(3, 2, 2, 2, 2)], F.conv3d),
    "conv_transpose1d": ([drawn(2, 3, 8)], [drawn(3, 4, 3)], F.conv_transpose1d),
    "conv_transpose2d": ([drawn(2, 3, 5, 5)], [drawn(3, 4, 3, 3)], F.conv_transpose2d),
    "conv_transpose3d": ([drawn(1, 2, 3, 3, 3)], [drawn(2, 3, 2, 2, 2)], F.conv_transpose3d),
    "embedding": ([], [drawn(7, 4)], lambda w: F.embedding(ROWS, w)),
    "embedding of a shard": ([], [drawn(4, 4)], lambda w: embed_rows(w, ROWS, offset=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_halves_of_a_product_make_its_gradients_without_doing_anything_twice(name: str) -> None:
    data, parameters, call = CALLS[name]
    leaves = [one.clone().requires_grad_() for one in (*data, *parameters)]
    places = {position: position for position in range(len(data), len(leaves))}
    aside = Aside()
    product = Product(lambda given: call(*given), places, aside)
    results = run_split(product, *leaves)
    plain = call(*leaves)
    parts = results if isinstance(results, tuple) else (results,)
    wanted = plain if isinstance(plain, tuple) else (plain,)
    incoming = [torch.randn_like(one) for one in parts]
    with FlopCounterMode(display=False) as whole:
        expected = torch.autograd.grad(wanted, leaves, incoming)
    with FlopCounterMode(display=False) as halves:
        inner = torch.autograd.grad(parts, leaves, incoming, allow_unused=True)
        first = halves.get_total_flops()
        assert all(inner[place] is None for place in places)
        found = dict(pair for later in aside.take() for pair in later.run())
    for place, gradient in enumerate(expected):
        made = found[place] if place in places else inner[place]
        assert made is not None
        torch.testing.assert_close(made, gradient, rtol=1e-12, atol=1e-12)
    assert halves.get_total_flops() == whole.get_total_flops()
    assert halves.get_total_flops() == 0 or first == whole.get_total_flops() // 2


def test_every_product_that_may_wait_is_tried_above() -> None:
    assert {name.split(" ")[0] for name in CALLS} == DEFERRED
