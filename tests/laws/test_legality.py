"""Law: what is read of a plan or parts file is refused with a remedy, or trains as one process does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.core.codec import encode
from shardwright.core.costs import CostTable
from shardwright.core.layout import REPLICATE
from shardwright.core.plan import Objective, Plan
from shardwright.core.strategy import OperatorConfig, Pipeline, Strategy
from shardwright.errors import InputError, PlanMismatch
from shardwright.files.planfile import read_plan_file, write_plan
from shardwright.operators.splitting import iterate
from shardwright.operators.splitting.iteration import PLUS
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search.asked import asked_for
from shardwright.planner.space import ModulePart, Placement, Seed, seed_strategy
from shardwright.verbs.legality import check_plan
from tests.laws.damage import damaged, damaged_tree
from tests.laws.models import MAX_NORM, OPTIMIZER, Model, model, plain
from tests.laws.strategies import Shape, random_strategy
from tests.laws.test_placements import examples
from tests.planner.search.models import cluster
from tests.runtime.equivalence import assert_close
from tests.runtime.rehearsed import train_rehearsed

pytestmark = [pytest.mark.torch, pytest.mark.slow]

EXAMPLES = {"mlp": 16, "cnn": 4, "gpt": 3, "lstm_translation": 3}
PARTS = {"mlp": 8, "gpt": 4}
GRIDS = (((2,), 1), ((4,), 1), ((2, 2), 1), ((2,), 2), ((1,), 4))
MOST_RANKS = 8


def plan_of(one: Model, strategy: Strategy) -> Plan:
    return Plan(
        strategy=strategy,
        predicted=Objective(step_seconds=1.0, peak_bytes=1.0),
        model="model",
        graph_fingerprint=one.captured.graph.fingerprint,
        cluster_name="cluster",
        cluster_fingerprint="",
        costs_fingerprint="",
        global_batch=8,
        method="made up",
        seed=0,
        version="1",
    )


def assert_trains(name: str, strategy: Strategy) -> None:
    """Train two ranks and more by a strategy and compare each with plain PyTorch."""
    one = model(name)
    max_norm = MAX_NORM if strategy.clips else None
    runs, _ = train_rehearsed(one.captured, strategy, one.module, one.batch, OPTIMIZER, max_norm)
    for run in runs:
        assert_close(run, plain(name, strategy.clips), strategy.label, one.tolerance)


def drawn(one: Model, random: Random) -> Strategy:
    """Draw a legal strategy on two or four devices."""
    sizes, stages = random.choice(GRIDS)
    shape = Shape(
        sizes=sizes,
        stages=stages,
        num_microbatches=random.choice((1, 2, 4)),
        schedule=random.choice(("1f1b", "gpipe")),
        wildness=random.choice((0.0, 0.1, 1.0)),
        recomputes=random.random() < 0.2,
        drops=random.random() < 0.2,
        cuts_blocks=random.random() < 0.3,
        seed=random.randrange(2**31),
    )
    return random_strategy(one.captured.graph, one.samples, shape)


def tree_of(one: Model, strategy: Strategy, random: Random) -> object:
    """Damage a strategy, or its JSON where that cannot be said otherwise."""
    try:
        return encode(damaged(one.captured.graph, strategy, random))
    except ValueError:
        return damaged_tree(encode(strategy), random)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_damaged_plan_is_refused_or_trains_as_one_process(name: str, tmp_path: Path) -> None:
    path, seen, said = tmp_path / "plan.json", {"refused": 0, "trained": 0}, list[str]()

    @settings(examples(EXAMPLES[name]), suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(seed=st.integers(0, 2**30))
    def law(seed: int) -> None:
        one, random = model(name), Random(seed)
        strategy = drawn(one, random)
        write_plan(path, plan_of(one, strategy))
        body = json.loads(path.read_text())
        if random.random() < 0.3:
            body["content"]["strategy"] = damaged_tree(body["content"]["strategy"], random)
        else:
            body["content"]["strategy"] = tree_of(one, strategy, random)
        path.write_text(json.dumps(body))
        try:
            plan = read_plan_file(path).frontier.best
            check_plan(plan, one.captured.graph)
        except InputError as error:
            seen["refused"] += 1
            said.append(str(error))
            return
        found = plan.strategy
        # Of another precision or other statistics the verbs capture another graph, and refuse.
        as_before = (found.precision, found.batch_norm) == (strategy.precision, strategy.batch_norm)
        if as_before and len(found.devices) <= MOST_RANKS and found != strategy:
            seen["trained"] += 1
            assert_trains(name, found)

    law()
    assert sum(seen.values()) > 0
    assert all(";" in text for text in said), said  # there is a remedy


@pytest.mark.parametrize("name", PARTS)
def test_random_parts_are_refused_or_train_as_one_process(name: str) -> None:
    modules = {"mlp": ("layers.0", "layers.1", "layers.*", "head"), "gpt": ("embed", "layers.0", "layers.1", "head")}  # fmt: skip
    one = model(name)
    context = Context.of(one.captured.graph, cluster(2, 2), CostTable(), Training())
    said = list[str]()

    @examples(PARTS[name])
    @given(seed=st.integers(0, 2**30))
    def law(seed: int) -> None:
        random = Random(seed)
        parts: list[ModulePart] = []
        for chosen in random.sample(modules[name], random.choice((1, 2, 2))):
            width = random.choice((1, 2, 4))
            degrees = {random.choice(("data", "tensor")): width, "zero": random.choice((0, 1, 3))}
            devices = tuple(random.sample(range(4), width))
            parts.append(ModulePart(devices=devices, modules=(chosen,), seed=Seed(**degrees)))
        whole = Seed(
            num_microbatches=random.choice((1, 2, 3, 4, 5, 7, 8, 17, 32)),
            schedule=random.choice(("gpipe", "1f1b")),
        )
        placement = Placement(name="parts.toml", parts=tuple(parts), whole=whole)
        try:
            strategy = asked_for(context, placement).few
        except InputError as error:
            said.append(str(error))
            return
        assert 8 % whole.num_microbatches == 0
        assert_trains(name, replace(strategy, batch_norm="synchronised"))

    law()
    assert said
    assert all(";" in text for text in said), said


# What once was accepted and trained otherwise, or ended in a traceback, with what is said now.


def data_parallel(one: Model, **degrees: int) -> Strategy:
    return seed_strategy(one.captured.graph, Seed(**degrees), one.samples)


def refused(one: Model, strategy: Strategy) -> str:
    with pytest.raises(InputError) as caught:
        lower(one.captured.graph, strategy, one.samples)
    with pytest.raises(PlanMismatch):
        check_plan(plan_of(one, strategy), one.captured.graph)
    return str(caught.value)


def with_dims(strategy: Strategy, index: int, *dims: str) -> Strategy:
    config = OperatorConfig(mesh=strategy.configs[index].mesh, dims=dims)
    configs = (*strategy.configs[:index], config, *strategy.configs[index + 1 :])
    return replace(strategy, configs=configs)


@pytest.mark.parametrize("pieces", [3, 5, 7, 17, 32, 10**18])
def test_microbatches_that_do_not_divide_the_batch_are_refused_with_those_that_do(pieces) -> None:
    one = model("mlp")
    said = refused(
        one, replace(data_parallel(one, data=2), pipeline=Pipeline(num_microbatches=pieces))
    )
    if pieces < 10**18:
        assert f"8 samples do not divide into {pieces}; num_microbatches may be 1, 2, 4, 8" in said
    else:
        assert "at most 4,096 microbatches" in said


def test_a_dim_that_an_operator_has_not_is_refused_with_those_that_it_has() -> None:
    one = model("mlp")
    said = refused(one, with_dims(data_parallel(one, data=2), 0, "z"))
    assert "has no dim 'z' for axis 'data'; its dims are 'b', 'n', 'k', or \"\"" in said


def test_a_dim_in_more_pieces_than_divide_it_is_refused_with_those_that_do() -> None:
    one = model("mlp")
    strategy = with_dims(data_parallel(one, data=16), 0, "b")
    assert "has 8 along 'b', which do not divide into 16; split it into 1, 2, 4, 8" in refused(
        one, strategy
    )


def test_partial_sums_that_nobody_makes_are_refused() -> None:
    one = model("gpt")
    graph, strategy = one.captured.graph, data_parallel(one, data=2)
    index = next(
        index
        for index, operator in enumerate(graph.operators)
        if iterate(graph, index).linear and graph.tensors[operator.inputs[0]].producer >= 0
    )
    said = refused(one, with_dims(strategy, index, PLUS))
    assert f"comes to {graph.operators[index].name} as none over axis data" in said


def test_a_layout_of_another_mesh_is_refused() -> None:
    one = model("mlp")
    strategy = data_parallel(one, data=2)
    first = replace(strategy.parameters[0], rest=(REPLICATE, 0), optimizer=(REPLICATE, 0))
    odd = replace(strategy, parameters=(first, *strategy.parameters[1:]))
    assert "a parameter lies as (-1, 0) and (-1, 0) on meshes of [1] axes" in refused(one, odd)
