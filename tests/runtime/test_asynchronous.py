"""Pipelines that are never flushed train as the arithmetic of their slots says."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwright.core.program import Kind, Program
from shardwright.core.staleness import Extrapolation, versions
from shardwright.core.strategy import ParameterConfig, Strategy
from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.lower.flushless import unrolled
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from shardwright.runtime.prediction import Oracle
from shardwright.runtime.randomness import Clock, place_seed, splitmix64
from tests import zoo
from tests.runtime.equivalence import captured_of
from tests.runtime.slots import Emulator, Row, Rule, Stage

pytestmark = pytest.mark.torch

SEED, SAMPLES, WIDTH, RATE = 5, 6, 8, 0.25
MODES = (
    "stale",
    "stash",
    "stash-vertical",
    "spectrain-v1",
    "spectrain-v2",
    "pipeoptim",
    "pipemare",
)
ACCUMULATING = ("2bw", "xpipe")
# By name: the emulator's rule, and torch's optimizer.
RULES: dict[str, tuple[Callable[..., Rule], Callable[..., Any]]] = {
    "momentum": (
        partial(Rule, "sgd", decay=0.01),
        partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01),
    ),
    "dampened": (
        partial(Rule, "sgd", dampening=0.9),
        partial(torch.optim.SGD, momentum=0.9, dampening=0.9),
    ),
    "nesterov": (
        partial(Rule, "nesterov"),
        partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    ),
    "adam": (partial(Rule, "adam", decay=0.01), partial(torch.optim.Adam, weight_decay=0.01)),
    "adamw": (partial(Rule, "adamw", decay=0.1), partial(torch.optim.AdamW, weight_decay=0.1)),
}


def row(depth: int, rate: float = RATE) -> tuple[Row, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = Row(WIDTH, depth, rate).double()
    return module, batches(1)[0]


def batches(count: int) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(2)

    def draw(width: int) -> Tensor:
        return torch.randn(SAMPLES, width, generator=drawn, dtype=torch.float64)

    return [{"x": draw(WIDTH), "y": draw(3)} for _ in range(count)]


def asynchronous(captured: Captured, stages: int, staleness: str, **seed: Any) -> Strategy:
    strategy = seed_strategy(captured.graph, Seed(stages=stages, **seed))
    pipeline = replace(strategy.pipeline, staleness=staleness)
    return replace(strategy, pipeline=pipeline)


def train(
    captured: Captured,
    strategy: Strategy,
    module: Row,
    optimizer: Callable[..., Any],
    data: list[dict[str, Tensor]],
    decay: float = 1.0,
    how: Extrapolation = Extrapolation(),  # noqa: B008
    annealing: int = 0,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train with all ranks in this process; return the losses by batch, and the parameters."""
    program = lower(captured.graph, strategy)

    def work(world: LocalWorld) -> tuple[list[float], dict[str, Tensor]]:
        mine = copy.deepcopy(module)
        options = RunOptions(seed=SEED, world=world, extrapolation=how, rate_annealing=annealing)
        executor = Executor(captured, program, mine, optimizer=optimizer, options=options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(executor.optimizer, decay)
        losses: dict[int, float] = {}
        for batch in data:
            loss = executor.step(batch)
            schedule.step()
            if executor.left is not None:
                losses[executor.left] = float(loss)
        losses |= {left.number: float(left.loss) for left in executor.flush()}
        assert sorted(losses) == list(range(1, len(data) + 1))
        executor.to_module(mine)
        return [losses[number] for number in sorted(losses)], dict(mine.named_parameters())

    return run_locally(work, len(strategy.devices))[0][0]


def emulate(
    captured: Captured, strategy: Strategy, module: Row, rule: Rule, data: list[dict[str, Tensor]]
) -> tuple[list[float], dict[str, Tensor], list[Stage]]:
    graph, program = captured.graph, lower(captured.graph, strategy)
    home = {
        graph.tensors[value.tensor].name: value.mesh
        for value in program.values
        if value.role == "parameter"
    }
    weights = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    stages = [
        Stage(
            layers=[
                layer
                for layer in range(len(module.layers))
                if home[f"layers.{layer}.up.weight"] == mesh
            ],
            has_head=home["head.weight"] == mesh,
            weights={name: weights[name] for name in weights if home[name] == mesh},
        )
        for mesh in range(len(program.meshes))
    ]
    assert all(stage.weights for stage in stages)
    draws = [n for n, one in enumerate(graph.operators) if "dropout" in one.kind]

    def mask(layer: int, minibatch: int, piece: int, shape: tuple[int, ...]) -> Tensor:
        if not module.rate:
            return torch.ones(shape, dtype=torch.float64)
        moment = splitmix64(SEED) + (minibatch << 20) + piece + 1
        config, whole = strategy.configs[draws[layer]], torch.empty(shape, dtype=torch.float64)
        split = [(size, name) for size, name in zip(strategy.meshes[0].sizes, config.dims) if name]
        # Each shard of samples, or of features, draws for itself; no test splits both of one tensor.
        along = (
            int(strategy.meshes[0].axes[config.dims.index(split[0][1])] != "data") if split else 0
        )
        shards = whole.tensor_split(split[0][0] if split else 1, dim=along)
        with torch.random.fork_rng():
            for at, shard in enumerate(shards):
                place = place_seed(draws[layer], (at,) if split else ())
                torch.manual_seed(splitmix64(place + moment))
                ones = torch.ones(shard.shape, dtype=torch.float64)
                shard.copy_(torch.dropout(ones, module.rate, True))
        return whole

    again = {
        layer
        for layer, operator in enumerate(draws)
        for block in strategy.recompute
        if graph.blocks[block].start <= operator < graph.blocks[block].stop
    }
    pipeline = strategy.pipeline
    pieces = pipeline.num_microbatches
    emulator = Emulator(stages, pipeline.staleness, rule, mask, again, pieces)
    losses = emulator.run([(batch["x"], batch["y"]) for batch in data])
    return losses, weights, stages


def assert_equal(
    found: tuple[list[float], dict[str, Tensor]], wanted: tuple[list[float], dict[str, Tensor]]
) -> None:
    torch.testing.assert_close(
        torch.tensor(found[0], dtype=torch.float64),
        torch.tensor(wanted[0], dtype=torch.float64),
        rtol=1e-12,
        atol=1e-12,
    )
    for name, tensor in wanted[1].items():
        torch.testing.assert_close(found[1][name].detach(), tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_minibatches_with_fill_and_drain_are_those_of_the_slots(stages: int, mode: str) -> None:
    """With dropout, weight decay, a learning rate that falls, and activations computed again or not."""
    module, _batch, captured = captured_of(row, 4)
    names = list(RULES)
    kind = names[(stages + MODES.index(mode)) % len(names)]
    rule, optimizer = RULES[kind]
    data, decay = batches(50 if stages == 4 else 20), 0.97

    def rate(slot: int) -> float:
        return 0.02 * decay ** min(slot, len(data))

    again = (stages // 2 + MODES.index(mode)) % 2 == 0
    strategy = asynchronous(captured, stages, mode, recompute=again)
    found = train(captured, strategy, module, partial(optimizer, lr=0.02), data, decay)
    losses, weights, _ = emulate(captured, strategy, module, rule(rate=rate), data)
    assert_equal(found, (losses, weights))


@pytest.mark.parametrize(
    ("mode", "kind", "clips", "seed"),
    [
        ("stale", "adam", False, {"data": 3}),
        ("stash", "momentum", True, {"tensor": 2}),
        ("spectrain-v1", "adamw", True, {"data": 1}),
        ("spectrain-v2", "nesterov", True, {"data": 2, "recompute": True}),
        ("pipeoptim", "dampened", False, {"tensor": 2}),
    ],
)
def test_stages_of_several_devices_and_clipping_are_those_of_the_slots(
    mode: str, kind: str, clips: bool, seed: dict[str, Any]
) -> None:
    """A stage clips its own gradients, by the norm over its devices."""
    module, _batch, captured = captured_of(row, 4)
    rule, optimizer = RULES[kind]
    strategy, data = asynchronous(captured, 3, mode, **seed), batches(20)
    strategy = replace(strategy, clips=clips, max_norm=0.1 * clips)
    bound = 0.1 if clips else math.inf
    rated = rule(rate=lambda slot: 0.02 * 0.97 ** min(slot, len(data)), max_norm=bound)
    found = train(captured, strategy, module, partial(optimizer, lr=0.02), data, 0.97)
    losses, weights, _ = emulate(captured, strategy, module, rated, data)
    assert_equal(found, (losses, weights))


@pytest.mark.parametrize(
    ("mode", "kind", "how"),
    [
        ("spectrain-v1", "adamw", Extrapolation(course="decaying")),
        ("spectrain-v2", "momentum", Extrapolation(course="decaying", limit=0.02)),
        ("spectrain-v1", "adam", Extrapolation(course="difference", limit=0.5)),
        ("pipeoptim", "nesterov", Extrapolation(course="difference")),
        ("spectrain-v2", "adamw", Extrapolation(limit=0.5)),
    ],
)
def test_weights_are_predicted_along_other_courses_as_the_slots_do(
    mode: str, kind: str, how: Extrapolation
) -> None:
    module, _batch, captured = captured_of(row, 4)
    rule, optimizer = RULES[kind]
    strategy, data = asynchronous(captured, 4, mode), batches(16)
    rated = rule(rate=lambda _: 0.02, course=how.course, limit=how.limit or math.inf)
    found = train(captured, strategy, module, partial(optimizer, lr=0.02), data, how=how)
    losses, weights, _ = emulate(captured, strategy, module, rated, data)
    assert_equal(found, (losses, weights))
    other = emulate(captured, strategy, module, rule(rate=lambda _: 0.02), data)[0]
    assert abs(other[-1] - losses[-1]) > 1e-6  # than without


@pytest.mark.parametrize(
    ("mode", "kind", "stages", "pieces", "more"),
    [
        ("2bw", "momentum", 2, 2, {}),
        ("2bw", "adamw", 4, 6, {"recompute": True}),
        ("2bw", "nesterov", 3, 3, {"data": 2}),
        ("xpipe", "adam", 2, 3, {}),
        ("xpipe", "adamw", 4, 6, {"recompute": True}),
        ("xpipe", "dampened", 3, 3, {"tensor": 2}),
    ],
)
def test_minibatches_of_microbatches_are_those_of_the_slots(
    mode: str, kind: str, stages: int, pieces: int, more: dict[str, Any]
) -> None:
    module, _batch, captured = captured_of(row, 4)
    rule, optimizer = RULES[kind]
    strategy = asynchronous(captured, stages, mode, num_microbatches=pieces, **more)
    data = batches(50 if stages == 2 else 8)
    rated = rule(rate=lambda period: 0.02 * 0.97 ** min(period, len(data)))
    found = train(captured, strategy, module, partial(optimizer, lr=0.02), data, 0.97)
    losses, weights, made = emulate(captured, strategy, module, rated, data)
    assert_equal(found, (losses, weights))
    assert all(stage.updates == len(data) for stage in made)


def test_stages_whose_gradients_are_late_begin_with_smaller_learning_rates() -> None:
    module, _batch, captured = captured_of(row, 4)
    rule, optimizer = RULES["momentum"]
    strategy, data = asynchronous(captured, 4, "pipemare"), batches(12)
    rated = rule(rate=lambda _: 0.02, annealing=8)
    found = train(captured, strategy, module, partial(optimizer, lr=0.02), data, annealing=8)
    assert_equal(found, emulate(captured, strategy, module, rated, data)[:2])


def watched(
    captured: Captured, strategy: Strategy, module: Row, see: Callable[[Executor, int, int], None]
) -> None:
    """Train 12 batches; after every instruction of a rank ``see`` is told the executor, the instruction
    and the minibatch that it worked for."""
    program = lower(captured.graph, strategy)

    def work(world: LocalWorld) -> None:
        optimizer = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
        options = RunOptions(seed=SEED, world=world)
        executor = Executor(
            captured, program, copy.deepcopy(module), optimizer=optimizer, options=options
        )
        act = executor._act

        def watching(index: int, action: Callable[[], None]) -> None:
            act(index, action)
            see(executor, index, executor.steps - program.shift_of(index))

        executor._act = watching
        for batch in batches(12):
            executor.step(batch)
        executor.flush()

    run_locally(work, len(strategy.devices))


def test_between_a_forward_and_its_backward_a_stage_is_updated_as_often_as_stages_follow() -> None:
    module, _batch, captured = captured_of(row, 4)
    strategy = asynchronous(captured, 4, "stash")
    begun: dict[tuple[int, int], int] = {}
    lags: dict[int, list[int]] = {stage: [] for stage in range(4)}
    updated: dict[int, set[int]] = {stage: set() for stage in range(4)}
    ended: set[tuple[int, int]] = set()

    def see(executor: Executor, index: int, minibatch: int) -> None:
        kind, stage = Kind(int(executor.program.kind[index])), executor.stage
        if kind == Kind.FORWARD:
            begun.setdefault((stage, minibatch), len(updated[stage]))
        if kind == Kind.BACKWARD and (stage, minibatch) not in ended:
            ended.add((stage, minibatch))
            lags[stage].append(len(updated[stage]) - begun[stage, minibatch])
        if kind == Kind.UPDATE:
            updated[stage].add(minibatch)

    watched(captured, strategy, module, see)
    for stage in range(4):
        assert lags[stage] == [min(minibatch, 3 - stage) for minibatch in range(12)]


# Of 4 stages: s of forward and of backward, as the papers' formulas give them.
AHEAD = {
    "spectrain-v1": ([3, 2, 2, 1], [0, 0, 1, 1]),
    "spectrain-v2": ([3, 2, 1, 0], None),
    "pipeoptim": ([3, 2, 1, 0], [0, 0, 0, 0]),
}


@pytest.mark.parametrize("mode", AHEAD)
def test_weights_are_predicted_so_many_steps_ahead_as_the_papers_say(mode: str) -> None:
    """Measured: how many times the last update they lie away from the weights as they are."""
    module, _batch, captured = captured_of(row, 4)
    found: dict[tuple[str, int], set[int]] = {}

    def see(executor: Executor, index: int, minibatch: int) -> None:
        program = executor.program
        if program.kind[index] != Kind.TRANSFORM or not 6 <= minibatch < 9:
            return
        transform = program.transforms[int(program.item[index])]
        parameters, store = executor.machine.parameters, executor.machine.store
        version = store.data[store.slot(transform.writes[0], minibatch % 4)]
        tensor = program.values[transform.reads[0]].tensor
        master = next(m for m in parameters.masters if program.values[m.value].tensor == tensor)
        buffer = executor.optimizer.state[master.parameter]["momentum_buffer"]
        assert version is not None
        steps = (master.parameter.detach() - version).norm() / (0.02 * buffer.norm())
        half = "backward" if program.shift_of(index) != (executor.stage + 1) // 2 else "forward"
        key = half, executor.stage
        if key in found or half == "forward":
            found.setdefault(key, set()).add(round(float(steps), 6))
        else:
            found[key] = {round(float(steps), 6)}

    watched(captured, asynchronous(captured, 4, mode), module, see)
    forward, backward = AHEAD[mode]
    for stage in range(4):
        plain = mode != "spectrain-v1" and stage == 3  # runs on the parameters themselves
        assert found.get(("forward", stage)) == (None if plain else {float(forward[stage])})
        if backward is not None and stage < 3:
            assert found["backward", stage] == {float(backward[stage])}


@pytest.mark.parametrize("mode", [*MODES, *ACCUMULATING])
def test_versions_held_are_those_whose_memory_is_predicted(mode: str) -> None:
    module, batch = row(4)
    captured, pieces = capture(module, batch), 6 if mode in ACCUMULATING else 1
    strategy = asynchronous(captured, 4, mode, num_microbatches=pieces)
    program = lower(captured.graph, strategy)
    most = dict.fromkeys(range(4), 0)

    def see(executor: Executor, index: int, minibatch: int) -> None:
        del index, minibatch
        own = {raw.data_ptr() for raw in executor.machine.parameters.raw.values()}
        store, oracle, found = executor.machine.store, executor._oracle, list[Tensor | None]()
        for number, value in enumerate(program.values):
            if value.role == "version" and value.mesh == executor.stage:
                found += [store.data[store.slot(number, one)] for one in range(program.ring)]
        found += [t for one in (*oracle.past, *oracle.shared.values()) for t in one]
        found += [*oracle.kept, *oracle._average.values(), *oracle._before.values()]
        held = {t.data_ptr(): t.nbytes for t in found if t is not None and t.data_ptr() not in own}
        most[executor.stage] = max(most[executor.stage], sum(held.values()))

    watched(captured, strategy, module, see)
    flushed = replace(strategy, pipeline=replace(strategy.pipeline, staleness="none"))
    plain, many = lower(captured.graph, flushed), unrolled(program, 12)
    is_own, less = program.kind != Kind.TRANSFORM, program.freed.copy()
    more = np.where(is_own, 0, program.allocated)
    less[is_own] -= plain.freed
    for stage in range(4):
        base = program.base_bytes[stage] - plain.base_bytes[stage]
        mine = many[1][many[0].group == stage]
        alive = base + np.cumsum(more[mine]) - np.concatenate([[0], np.cumsum(less[mine])[:-1]])
        weights = {
            value.tensor: value.bytes
            for value in program.values
            if value.role == "parameter" and value.mesh == stage
        }
        copies = versions(mode, stage, 4, pieces)
        assert most[stage] == alive.max() == copies * sum(weights.values())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", [*MODES, *ACCUMULATING])
def test_one_stage_is_the_plain_optimizer_to_the_last_bit(mode: str, fused: bool) -> None:
    module, _batch, captured = captured_of(row, 2, 0.0)
    optimizer = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=fused)
    data = batches(5)
    _, weights = train(captured, asynchronous(captured, 1, mode), module, optimizer, data)
    plain = copy.deepcopy(module)
    stepping = optimizer(plain.parameters())
    for one in data:
        stepping.zero_grad()
        plain(**one).backward()
        stepping.step()
    for name, tensor in plain.named_parameters():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("kind", RULES)
def test_of_a_constant_gradient_the_future_is_known(kind: str) -> None:
    """With the momentum at its fixed point; s = 1, 2, 3 at once and one after another."""
    torch.manual_seed(0)
    gradient = torch.randn(20, dtype=torch.float64)
    parameter = torch.nn.Parameter(torch.randn(20, dtype=torch.float64))
    optimizer = RULES[kind][1]([parameter], lr=0.05)
    optimizer.param_groups[0]["weight_decay"] *= kind == "adamw"  # else gradients are not constant
    parameter.grad = gradient
    optimizer.step()
    state = optimizer.state[parameter]
    if "momentum_buffer" in state:
        group = optimizer.param_groups[0]
        share = (1 - group["dampening"]) / (1 - group["momentum"])
        state["momentum_buffer"] = gradient * share
    oracle = Oracle(Clock(), Extrapolation())
    ahead = [oracle.expected(optimizer, [parameter], steps)[0] for steps in (1, 2, 3)]
    for one in ahead:
        optimizer.step()
        assert float((one - parameter.detach()).square().mean().sqrt()) < 1e-15


def test_what_an_asynchronous_pipeline_cannot_do_is_refused_in_a_sentence() -> None:
    module, batch, captured = captured_of(row, 2)
    strategy = asynchronous(captured, 2, "spectrain-v2")
    overlapping = replace(strategy, meshes=(strategy.meshes[0], strategy.meshes[0]))
    split_otherwise = asynchronous(captured, 2, "stash", tensor=2)
    whole = ParameterConfig(rest=(-1, -1), optimizer=(-1, -1))
    parameters = (*split_otherwise.parameters[:-2], whole, split_otherwise.parameters[-1])
    split_otherwise = replace(split_otherwise, parameters=parameters)
    for changed, words in (
        (replace(strategy, precision="float16"), "trains in float64"),
        (replace(strategy, updates="ready"), "updates a stage behind each"),
        (replace(strategy, pipeline=replace(strategy.pipeline, schedule="gpipe")), "in turn"),
        (asynchronous(captured, 2, "stash", data=2, zero=1), "leave out ZeRO"),
        (overlapping, "devices of its own"),
        (asynchronous(captured, 2, "stash", num_microbatches=2), "minibatches whole"),
        (asynchronous(captured, 3, "2bw", num_microbatches=2), "2 microbatches for 3 stages"),
        (split_otherwise, r"head.weight rests as \(-1, -1\)"),
    ):
        with pytest.raises(InputError, match=words):
            lower(captured.graph, changed)
    tied, tokens = zoo.gpt(tied=True)
    other = capture(tied, tokens)
    with pytest.raises(InputError, match="untie it"):
        lower(other.graph, asynchronous(other, 2, "stash"))
    short = {name: tensor[:-1] for name, tensor in batch.items()}
    along = Extrapolation(course="difference")
    for optimizer, staleness, how, words in (
        (torch.optim.SGD, "spectrain-v2", Extrapolation(), "momentum is 0"),
        (torch.optim.RMSprop, "spectrain-v2", Extrapolation(), "RMSprop"),
        (torch.optim.RMSprop, "spectrain-v2", along, "this one has .*; leave it out"),
        (torch.optim.RMSprop, "stash", along, "leave out the extrapolation"),
        (torch.optim.Adam, "stash", replace(along, limit=-1.0), "the limit -1.0"),
    ):
        program = lower(captured.graph, asynchronous(captured, 2, staleness))

        def work(
            world: LocalWorld,
            program: Program = program,
            optimizer: Any = optimizer,
            how: Extrapolation = how,
        ) -> None:
            made, options = partial(optimizer, lr=0.1), RunOptions(world=world, extrapolation=how)
            mine = copy.deepcopy(module)
            Executor(captured, program, mine, optimizer=made, options=options).step(short)

        with pytest.raises(InputError, match=words):
            run_locally(work, 2)
